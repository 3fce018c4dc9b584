"""The rule in which nothing is chosen: slots are mixtures of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from moe.errors import UserError
from moe.routing import SoftPlan
from moe.routing.soft import soft_logits, soft_moe
from moe.sharding import param


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soft:
    """Soft MoE; see `moe.routing.soft_moe`. The same in training and evaluation.

    The work is that of E * slots_per_expert tokens for each group, however many it holds; one slot
    for each token of a group of S is `expert_capacity(S, E, 1.0, num_choices=1, min_capacity=1)`.
    """

    slots_per_expert: int = 1
    """Mixtures that an expert sees of each group; they are learned, so S does not change them."""
    kind: Literal["soft"] = "soft"

    causal_safe: ClassVar[bool] = False
    """A slot mixes all tokens of the group, later ones too."""
    ids: ClassVar[None] = None
    """What the router reads beside the tokens: nothing."""

    def __post_init__(self):
        if self.slots_per_expert < 1:
            raise UserError(
                f"slots_per_expert must be at least 1: got {self.slots_per_expert}. Raise it."
            )

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> SoftRouter:
        """The router of this rule."""
        return SoftRouter(d_model, num_experts, rule=self, rngs=rngs)


class SoftRouter(nnx.Module):
    """A learned vector for each slot and one learned scale of the logits."""

    def __init__(self, d_model: int, num_experts: int, *, rule: Soft, rngs: nnx.Rngs):
        phi_MEC = jax.random.normal(rngs.params(), (d_model, num_experts, rule.slots_per_expert))
        self.phi_MEC = param(phi_MEC, "model", None, None)
        self.scale = param(jnp.ones(()))

    def __call__(
        self, x_GSM: jax.Array, *, token_mask_GS: jax.Array | None = None, **_: Any
    ) -> SoftPlan:
        """The plan for the tokens; ids, sequences and a key change nothing."""
        logits_GSEC = soft_logits(x_GSM, self.phi_MEC[...], self.scale[...], token_mask_GS)
        return soft_moe(logits_GSEC, token_mask_GS)
