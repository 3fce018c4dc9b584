"""Rules in which every token chooses its experts."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Unpack

import jax
from flax import nnx

from moe.errors import UserError
from moe.layers.routers.linear import Router
from moe.routing import (
    BalanceChoices,
    BalanceScope,
    RoutingPlan,
    SecondPolicy,
    SlotRule,
    expert_capacity,
    top2,
)
from moe.routing.checks import check_choice
from moe.routing.token_choice import Queueing
from moe.routing.top1 import check_jitter


class Slots(Queueing):
    """What every pure function of this kind takes beside what its method reads."""

    capacity: int
    token_mask_GS: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenChoice:
    """What the rules share in which every token chooses its experts; a rule says `route`."""

    capacity_factor: float | None = 1.0
    """Room of an expert in training, in units of a balanced load; None is dropless."""
    eval_capacity_factor: float | None = None
    """The same in evaluation; dropless by default, so that no token depends on its neighbours."""
    min_capacity: int = 4
    """Slots an expert has at least."""
    slot_rule: SlotRule = "code"
    """How slots are counted: as in the authors' code or as in the paper."""
    renormalize_after_drop: bool = False
    """Divide the gates by the sum of those kept (NLLB) instead of before any drop (GShard)."""
    batch_priority: bool = False
    """Hand out slots to the most certain tokens first."""
    jitter: float = 0.0
    """In training each number the router sees is multiplied by a draw from 1 - jitter to 1 + jitter."""
    balance: BalanceChoices = "first"
    """Choices that the load-balance loss counts: first or all."""
    balance_over: BalanceScope = "group"
    """What it balances: each group, each sequence (row of the batch) or all tokens of the call."""

    causal_safe: ClassVar[bool] = True
    """Whether a decoder may use it: in evaluation no token depends on a later one."""
    ids: ClassVar[Literal["token", "task"] | None] = None
    """What the router reads beside the tokens, if anything."""

    def __post_init__(self):
        for name in ("capacity_factor", "eval_capacity_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(
                    f"{name} must be positive: got {value}. 1.0 is room for a balanced load."
                )
        if self.min_capacity < 1:
            raise UserError(f"min_capacity must be at least 1: got {self.min_capacity}. Raise it.")
        check_jitter(self.jitter)
        check_choice("slot_rule", self.slot_rule, SlotRule)
        check_choice("balance", self.balance, BalanceChoices)
        check_choice("balance_over", self.balance_over, BalanceScope)
        for field in dataclasses.fields(self):
            kind = getattr(self, field.name)
            if field.name == "kind" and kind != field.default:
                raise UserError(
                    f"kind must be {field.default!r} for {type(self).__name__}: got {kind!r}. "
                    "Leave it out, or use the rule of that kind."
                )

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> nnx.Module:
        """The router of this rule."""
        return Router(d_model, num_experts, rule=self, rngs=rngs)

    @property
    def num_choices(self) -> int:
        """K, experts of a token."""
        raise NotImplementedError

    def __call__(
        self,
        logits_GSE: jax.Array,
        *others: jax.Array,
        token_mask_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan for the logits.

        Args:
          logits_GSE: of the router.
          others: what the method reads beside them (the size of noise, a bias).
          token_mask_GS: False for padding.
          key: randomness of training, and limited capacity; None is deterministic evaluation.
        """
        _, group_size, num_experts = logits_GSE.shape
        slots = self.slots(group_size, num_experts, token_mask_GS, training=key is not None)
        return self.route(logits_GSE, *others, key=key, **slots)

    def route(self, *read: Any, **given: Any) -> RoutingPlan:
        """The pure function of the method on what it reads, `given` a key and the `Slots`."""
        raise NotImplementedError

    def slots(
        self,
        group_size: int,
        num_experts: int,
        token_mask_GS: jax.Array | None,
        *,
        training: bool,
    ) -> Slots:
        """The capacity of an expert for a group of S tokens, and how choices queue for it."""
        factor = self.capacity_factor if training else self.eval_capacity_factor
        capacity = group_size  # drops nothing: a token takes at most one slot of an expert
        if factor is not None:
            capacity = expert_capacity(
                group_size,
                num_experts,
                factor,
                num_choices=self.num_choices,
                min_capacity=self.min_capacity,
            )
        return {
            "capacity": capacity,
            "token_mask_GS": token_mask_GS,
            "slot_rule": self.slot_rule,
            "renormalize_after_drop": self.renormalize_after_drop,
            "batch_priority": self.batch_priority,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top2(TokenChoice):
    """GShard's gate; see `moe.routing.top2`. In evaluation a random policy becomes "all"."""

    second_policy: SecondPolicy = "random"
    """Which second choices are kept in training: random, all, sampling or none."""
    kind: Literal["top2"] = "top2"

    num_choices: ClassVar[int] = 2

    def __post_init__(self):
        super().__post_init__()
        check_choice("second_policy", self.second_policy, SecondPolicy)

    def route(self, logits_GSE, *, key, **slots: Unpack[Slots]) -> RoutingPlan:
        """`top2`; without a key nothing is drawn."""
        policy = self.second_policy
        if key is None and policy in ("random", "sampling"):
            policy = "all"
        return top2(logits_GSE, second_policy=policy, key=key, **slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KChoices(TokenChoice):
    """What the rules share in which a token has as many experts as one likes."""

    num_choices: int = 2
    """K, experts of a token."""

    def __post_init__(self):
        super().__post_init__()
        if self.num_choices < 1:  # that they are at most E is checked where E is known
            raise UserError(f"num_choices must be at least 1: got {self.num_choices}. Raise it.")


def check_unused(rule: TokenChoice, *names: str) -> None:
    """Raises a UserError if settings that the rule has no use for are not at their defaults."""
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.name in names and value != field.default:
            raise UserError(
                f"{field.name} must be left at {field.default!r} in {type(rule).__name__}, which has "
                f"no use for it: got {value!r}. Leave it out."
            )
