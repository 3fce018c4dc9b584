"""Rules that choose the K experts of the largest logits."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, TypedDict, Unpack

from moe.errors import UserError
from moe.layers.routers.token_choice import KChoices, Slots, TokenChoice
from moe.routing import RoutingPlan
from moe.routing.checks import check_choice
from moe.routing.group_limit import GroupScore
from moe.routing.top1 import top1
from moe.routing.top_k import Gates, top_k


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top1(TokenChoice):
    """Switch Transformer's gate; see `moe.routing.top1`. The paper trains with `jitter=0.01`."""

    kind: Literal["top1"] = "top1"

    num_choices: ClassVar[int] = 1

    def route(self, logits_GSE, *, key, **slots: Unpack[Slots]) -> RoutingPlan:
        """`top1`."""
        return top1(logits_GSE, **slots)


class Choosing(TypedDict):
    """The keyword arguments by which a pure function chooses K experts, maybe from few groups."""

    num_choices: int
    num_expert_groups: int
    num_kept_groups: int
    group_score: GroupScore


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLimited(KChoices):
    """What the rules share that choose K experts, from few groups of experts if wanted."""

    num_expert_groups: int = 1
    """Groups that the experts form, in order, for example one for each device; 1 is no limit."""
    num_kept_groups: int = 1
    """Groups that the experts of one token may come from."""
    group_score: GroupScore = "max"
    """What a group is worth: its best expert, or the sum of its two best."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_expert_groups", "num_kept_groups"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1: got {getattr(self, name)}. Raise it.")
        check_choice("group_score", self.group_score, GroupScore)

    @property
    def choosing(self) -> Choosing:
        """K and the groups, as the pure function wants them."""
        return {
            "num_choices": self.num_choices,
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

    def route(self, logits_GSE, *, key, **slots: Unpack[Slots]) -> RoutingPlan:
        """`top_k`."""
        return top_k(logits_GSE, gates=self.gates, **self.choosing, **slots)
