"""Rules that override a routing: an even load for throughput ceilings, a model without some experts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, Unpack

import jax
from flax import nnx

from moe.errors import UserError
from moe.layers.routers.linear import Router
from moe.layers.routers.token_choice import KChoices, Slots, Top2
from moe.layers.routers.top_k import Top1, TopK
from moe.routing import RoutingPlan
from moe.routing.override import balanced, drop_experts, without_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balanced(KChoices):
    """Tokens are dealt out in turn; see `moe.routing.balanced`. For throughput ceilings only.

    The router's work and parameters are those of `TopK`.
    """

    kind: Literal["balanced"] = "balanced"

    def route(self, logits_GSE, *, key, **slots: Unpack[Slots]) -> RoutingPlan:
        """`balanced`; an even load needs a capacity factor of 1.0."""
        return balanced(logits_GSE, num_choices=self.num_choices, **slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Without:
    """A rule that does without some experts: their tokens go to the next best ones.

    Its router has the parameters of the rule's, so that a trained model can be asked what it loses.
    """

    experts: tuple[int, ...]
    """The experts that get nothing, the same in every layer; () is the rule itself."""
    rule: Top1 | Top2 | TopK = Top2()
    """The rule for the others."""
    kind: Literal["without"] = "without"

    causal_safe: ClassVar[bool] = True
    ids: ClassVar[None] = None

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> RouterWithout:
        """The router of this rule."""
        return RouterWithout(d_model, num_experts, rule=self.rule, experts=self.experts, rngs=rngs)


class RouterWithout(Router):
    """A `Router` whose logits are -inf for some experts."""

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        rule: Top1 | Top2 | TopK,
        experts: tuple[int, ...],
        rngs: nnx.Rngs,
    ):
        super().__init__(d_model, num_experts, rule=rule, rngs=rngs)
        self.experts = experts

    def plan(self, x_GSM, ids_GS, token_mask_GS, key) -> RoutingPlan:
        """As `Router.plan`. A choice for which groups of experts leave nothing else is dropped."""
        plan = super().plan(x_GSM, ids_GS, token_mask_GS, key)
        num_choices, num_left = plan.expert_GSK.shape[-1], plan.num_experts - len(set(self.experts))
        if num_left < num_choices:
            raise UserError(
                f"experts must leave one for each choice: got {self.experts} of {plan.num_experts} "
                f"for {num_choices} choices. Take fewer out."
            )
        return drop_experts(plan, self.experts)

    def logits(self, x_GSM: jax.Array) -> jax.Array:
        """logits_GSE, -inf for the experts that get nothing."""
        return without_experts(super().logits(x_GSM), self.experts)
