"""The rule and router of noisy top-k."""

from __future__ import annotations

import dataclasses
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from moe.layers.routers.linear import Router, project
from moe.layers.routers.token_choice import KChoices, Slots, check_unused
from moe.routing import RoutingPlan
from moe.routing.noisy_top_k import noisy_top_k
from moe.sharding import param


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyTopK(KChoices):
    """Shazeer's gate of 2017; see `moe.routing.noisy_top_k`. In evaluation there is no noise.

    Its balance loss is its own: importance plus load, 0 when balanced. The paper has no capacity
    (`capacity_factor=None`) and weighs both losses by 0.1.
    """

    kind: Literal["noisy_top_k"] = "noisy_top_k"

    def __post_init__(self):
        super().__post_init__()
        check_unused(self, "balance", "balance_over")

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> NoisyRouter:
        """The router of this rule."""
        return NoisyRouter(d_model, num_experts, rule=self, rngs=rngs)

    def route(self, logits_GSE, noise_logits_GSE, *, key, **slots: Unpack[Slots]) -> RoutingPlan:
        """`noisy_top_k`; without a key no noise."""
        noise_logits_GSE = None if key is None else noise_logits_GSE
        return noisy_top_k(
            logits_GSE, noise_logits_GSE, num_choices=self.num_choices, key=key, **slots
        )


class NoisyRouter(Router):
    """A projection to logits, and one to the size of their noise, zero (softplus 0.69) at first."""

    rule: NoisyTopK

    def __init__(self, d_model: int, num_experts: int, *, rule: NoisyTopK, rngs: nnx.Rngs):
        super().__init__(d_model, num_experts, rule=rule, rngs=rngs)
        self.noise_kernel_ME = param(jnp.zeros((d_model, num_experts)), "model", None)

    def read(self, x_GSM: jax.Array) -> tuple[jax.Array, ...]:
        """Logits, and those of the noise."""
        return *super().read(x_GSM), project(x_GSM, self.noise_kernel_ME[...])
