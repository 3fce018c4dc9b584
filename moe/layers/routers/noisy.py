"""The rule and router of noisy top-k."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from moe.layers.routers.linear import Router, project
from moe.layers.routers.token_choice import TokenChoice, check_num_choices, check_unused
from moe.routing import RoutingPlan
from moe.routing.noisy_top_k import noisy_top_k
from moe.sharding import param


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyTopK(TokenChoice):
    """Shazeer's gate of 2017; see `moe.routing.noisy_top_k`. In evaluation there is no noise.

    Its balance loss is its own: importance plus load, 0 when balanced. The paper has no capacity
    (`capacity_factor=None`) and weighs both losses by 0.1.
    """

    num_choices: int = 2
    """K, experts of a token."""
    kind: Literal["noisy_top_k"] = "noisy_top_k"

    def __post_init__(self):
        super().__post_init__()
        check_num_choices(self.num_choices)
        check_unused(self, "balance", "balance_over")

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> NoisyRouter:
        """The router of this rule."""
        return NoisyRouter(d_model, num_experts, rule=self, rngs=rngs)

    def __call__(
        self,
        logits_GSE: jax.Array,
        noise_logits_GSE: jax.Array,
        *,
        token_mask_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan for the logits; `key=None` is evaluation: no noise, nothing dropped."""
        _, group_size, num_experts = logits_GSE.shape
        return noisy_top_k(
            logits_GSE,
            None if key is None else noise_logits_GSE,
            num_choices=self.num_choices,
            capacity=self.capacity(
                group_size, num_experts, self.num_choices, training=key is not None
            ),
            key=key,
            token_mask_GS=token_mask_GS,
            **self.queueing,
        )


class NoisyRouter(Router):
    """A projection to logits, and one to the size of their noise, zero (softplus 0.69) at first."""

    rule: NoisyTopK

    def __init__(self, d_model: int, num_experts: int, *, rule: NoisyTopK, rngs: nnx.Rngs):
        super().__init__(d_model, num_experts, rule=rule, rngs=rngs)
        self.noise_kernel_ME = param(jnp.zeros((d_model, num_experts)), "model", None)

    def plan(
        self, x_GSM: jax.Array, token_mask_GS: jax.Array | None, key: jax.Array | None
    ) -> RoutingPlan:
        """As `Router.plan`, with the noise."""
        noise_logits_GSE = project(x_GSM, self.noise_kernel_ME[...])
        return self.rule(self.logits(x_GSM), noise_logits_GSE, token_mask_GS=token_mask_GS, key=key)
