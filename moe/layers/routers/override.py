"""Rules that override a routing: an even load for throughput ceilings, a model without some experts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
from flax import nnx

from moe.errors import UserError
from moe.layers.routers.linear import Router
from moe.layers.routers.token_choice import TokenChoice, Top2
from moe.layers.routers.top_k import Top1, TopK
from moe.routing import RoutingPlan
from moe.routing.override import balanced, drop_experts, without_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balanced(TokenChoice):
    """Tokens are dealt out in turn; see `moe.routing.balanced`. For throughput ceilings only.

    The router's work and parameters are those of `TopK`.
    """

    num_choices: int = 2
    """K, experts of a token."""
    kind: Literal["balanced"] = "balanced"

    def __post_init__(self):
        super().__post_init__()
        if self.num_choices < 1:
            raise UserError(f"num_choices must be at least 1: got {self.num_choices}. Raise it.")

    def __call__(
        self,
        logits_GSE: jax.Array,
        *,
        token_mask_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan; a key means training: limited capacity, of which an even load needs 1.0."""
        _, group_size, num_experts = logits_GSE.shape
        return balanced(
            logits_GSE,
            num_choices=self.num_choices,
            capacity=self.capacity(
                group_size, num_experts, self.num_choices, training=key is not None
            ),
            token_mask_GS=token_mask_GS,
            **self.queueing,
        )


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

    def plan(
        self, x_GSM: jax.Array, token_mask_GS: jax.Array | None, key: jax.Array | None
    ) -> RoutingPlan:
        """As `Router.plan`. A choice for which groups of experts leave nothing else is dropped."""
        plan = super().plan(x_GSM, token_mask_GS, key)
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
