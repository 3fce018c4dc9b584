"""The rule of two gates: one over groups of experts, one over the experts of each."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
from flax import nnx

from moe.errors import UserError
from moe.layers.routers.linear import Router, project
from moe.layers.routers.token_choice import TokenChoice, check_num_choices
from moe.routing import RoutingPlan
from moe.routing.top_k import top_k
from moe.routing.two_level import two_level_logits
from moe.sharding import param


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoLevel(TokenChoice):
    """The K experts of the largest products of both gates; see `moe.routing.two_level_logits`."""

    num_choices: int = 2
    """K, experts of a token; their gates are divided by their sum."""
    num_expert_groups: int = 2
    """Groups that the experts form, in order."""
    kind: Literal["two_level"] = "two_level"

    def __post_init__(self):
        super().__post_init__()
        check_num_choices(self.num_choices)
        if self.num_expert_groups < 2:
            raise UserError(
                f"num_expert_groups must be at least 2: got {self.num_expert_groups}. "
                "Raise it, or use TopK."
            )

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> TwoLevelRouter:
        """The router of this rule."""
        return TwoLevelRouter(d_model, num_experts, rule=self, rngs=rngs)

    def __call__(
        self,
        logits_GSE: jax.Array,
        *,
        token_mask_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan for the joint logits; a key means training: limited capacity."""
        _, group_size, num_experts = logits_GSE.shape
        return top_k(
            logits_GSE,
            num_choices=self.num_choices,
            capacity=self.capacity(
                group_size, num_experts, self.num_choices, training=key is not None
            ),
            token_mask_GS=token_mask_GS,
            **self.queueing,
        )


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
