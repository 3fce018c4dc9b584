"""The rule in which experts choose their tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from moe.errors import UserError
from moe.layers.routers.linear import Router
from moe.routing import RoutingPlan, expert_capacity
from moe.routing.expert_choice import expert_choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Every expert picks its best tokens; see `moe.routing.expert_choice`.

    The same in training and evaluation: there is no dropless form.
    """

    capacity_factor: float = 2.0
    """Experts that a token gets on average; an expert picks this many times S / E, rounded up."""
    kind: Literal["expert_choice"] = "expert_choice"

    causal_safe: ClassVar[bool] = False
    """Whether a token is picked depends on the tokens after it."""
    ids: ClassVar[None] = None
    """What the router reads beside the tokens: nothing."""

    def __post_init__(self):
        if not self.capacity_factor > 0:
            raise UserError(
                f"capacity_factor must be positive: got {self.capacity_factor}. "
                "2.0 gives a token two experts on average."
            )

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> ExpertChoiceRouter:
        """The router of this rule."""
        return ExpertChoiceRouter(d_model, num_experts, rule=self, rngs=rngs)

    def __call__(
        self, logits_GSE: jax.Array, *, token_mask_GS: jax.Array | None = None
    ) -> RoutingPlan:
        """The plan for `logits_GSE`."""
        _, group_size, num_experts = logits_GSE.shape
        capacity = expert_capacity(
            group_size, num_experts, self.capacity_factor, num_choices=1, min_capacity=1
        )
        return expert_choice(logits_GSE, capacity=capacity, token_mask_GS=token_mask_GS)


class ExpertChoiceRouter(Router):
    """A learned projection to expert logits, and an `ExpertChoice` rule; it has no balance loss."""

    def __call__(
        self, x_GSM: jax.Array, *, token_mask_GS: jax.Array | None = None, **_: Any
    ) -> RoutingPlan:
        """The plan for the tokens; ids, sequences and a key change nothing."""
        return self.rule(self.logits(x_GSM), token_mask_GS=token_mask_GS)
