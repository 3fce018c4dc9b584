"""The rule of two gates: one over groups of experts, one over the experts of each."""

from __future__ import annotations

import dataclasses
from typing import Literal, Unpack

import jax
from flax import nnx

from moe.errors import UserError
from moe.layers.routers.linear import Router, project
from moe.layers.routers.token_choice import KChoices, Slots
from moe.routing import RoutingPlan
from moe.routing.top_k import top_k
from moe.routing.two_level import two_level_logits
from moe.sharding import param


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLevel(KChoices):
    """The K experts of the largest products of both gates; see `moe.routing.two_level_logits`.

    The gates of a token are divided by their sum.
    """

    num_expert_groups: int = 2
    """Groups that the experts form, in order."""
    kind: Literal["two_level"] = "two_level"

    def __post_init__(self):
        super().__post_init__()
        if self.num_expert_groups < 2:
            raise UserError(
                f"num_expert_groups must be at least 2: got {self.num_expert_groups}. "
                "Raise it, or use TopK."
            )

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> TwoLevelRouter:
        """The router of this rule."""
        return TwoLevelRouter(d_model, num_experts, rule=self, rngs=rngs)

    def route(self, logits_GSE, *, key, **slots: Unpack[Slots]) -> RoutingPlan:
        """`top_k` of the joint logits."""
        return top_k(logits_GSE, num_choices=self.num_choices, **slots)


class TwoLevelRouter(Router):
    """Two projections, to groups of experts and to experts; their product is routed on."""

    def __init__(self, d_model: int, num_experts: int, *, rule: TwoLevel, rngs: nnx.Rngs):
        super().__init__(d_model, num_experts, rule=rule, rngs=rngs)
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        outer_MA = init(rngs.params(), (d_model, rule.num_expert_groups))
        self.outer_kernel_MA = param(outer_MA, "model", None)

    def logits(self, x_GSM: jax.Array) -> jax.Array:
        """logits_GSE of both gates together."""
        outer_GSA = project(x_GSM, self.outer_kernel_MA[...])
        return two_level_logits(outer_GSA, super().logits(x_GSM))
