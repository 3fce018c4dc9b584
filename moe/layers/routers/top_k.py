"""Rules that choose the K experts of the largest logits."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypedDict

import jax

from moe.errors import UserError
from moe.layers.routers.token_choice import TokenChoice, check_num_choices
from moe.routing import RoutingPlan
from moe.routing.checks import check_choice
from moe.routing.group_limit import GroupScore
from moe.routing.top1 import top1
from moe.routing.top_k import Gates, top_k


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top1(TokenChoice):
    """Switch Transformer's gate; see `moe.routing.top1`. The paper trains with `jitter=0.01`."""

    kind: Literal["top1"] = "top1"

    def __call__(
        self,
        logits_GSE: jax.Array,
        *,
        token_mask_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan for `logits_GSE`; a key means training: limited capacity."""
        _, group_size, num_experts = logits_GSE.shape
        return top1(
            logits_GSE,
            capacity=self.capacity(group_size, num_experts, 1, training=key is not None),
            token_mask_GS=token_mask_GS,
            **self.queueing,
        )


class Choosing(TypedDict):
    """The keyword arguments by which a pure function chooses K experts, maybe from few groups."""

    num_choices: int
    capacity: int
    num_expert_groups: int
    num_kept_groups: int
    group_score: GroupScore


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLimited(TokenChoice):
    """What the rules share that choose K experts, from few groups of experts if wanted."""

    num_choices: int = 2
    """K, experts of a token."""
    num_expert_groups: int = 1
    """Groups that the experts form, in order, for example one for each device; 1 is no limit."""
    num_kept_groups: int = 1
    """Groups that the experts of one token may come from."""
    group_score: GroupScore = "max"
    """What a group is worth: its best expert, or the sum of its two best."""

    def __post_init__(self):
        super().__post_init__()
        check_num_choices(self.num_choices)
        for name in ("num_expert_groups", "num_kept_groups"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1: got {getattr(self, name)}. Raise it.")
        check_choice("group_score", self.group_score, GroupScore)

    def choosing(self, logits_GSE: jax.Array, *, training: bool) -> Choosing:
        """K, the capacity and the groups, as the pure function wants them."""
        _, group_size, num_experts = logits_GSE.shape
        return {
            "num_choices": self.num_choices,
            "capacity": self.capacity(group_size, num_experts, self.num_choices, training),
            "num_expert_groups": self.num_expert_groups,
            "num_kept_groups": self.num_kept_groups,
            "group_score": self.group_score,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(GroupLimited):
    """The K most probable experts; see `moe.routing.top_k`."""

    gates: Gates = "renormalized"
    """Weights of the experts: probabilities, the same over their sum, or a softmax of the chosen."""
    kind: Literal["top_k"] = "top_k"

    def __post_init__(self):
        super().__post_init__()
        check_choice("gates", self.gates, Gates)

    def __call__(
        self,
        logits_GSE: jax.Array,
        *,
        token_mask_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan for `logits_GSE`; a key means training: limited capacity."""
        return top_k(
            logits_GSE,
            gates=self.gates,
            token_mask_GS=token_mask_GS,
            **self.choosing(logits_GSE, training=key is not None),
            **self.queueing,
        )
