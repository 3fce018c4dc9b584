"""What a layer asks for a plan: jitter before, the balance loss after; mostly a linear map between."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe.routing import RoutingPlan, balance_loss
from moe.routing.top1 import jittered
from moe.sharding import param


class RuleRouter(nnx.Module):
    """Tokens in, the plan of a token-choice rule out. A subclass says `plan`."""

    rule: Any  # of `moe.layers.routers`

    def __call__(
        self,
        x_GSM: jax.Array,
        *,
        token_mask_GS: jax.Array | None = None,
        ids_GS: jax.Array | None = None,
        sequence_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan for the tokens.

        Args:
          x_GSM: tokens.
          token_mask_GS: False for padding.
          ids_GS: an integer for each token, read by the routers that do not look at `x_GSM` alone
            (hash and task routing).
          sequence_GS: the row of the batch that a token is of, for a balance loss per sequence.
          key: randomness of training; None is deterministic.
        """
        if key is not None and self.rule.jitter > 0:
            jitter_key, key = jax.random.split(key)
            x_GSM = jittered(x_GSM, self.rule.jitter, key=jitter_key)
        plan = self.plan(x_GSM, ids_GS, token_mask_GS, key)
        choices, over = self.rule.balance, self.rule.balance_over
        if (choices, over) == ("first", "group"):
            return plan  # as it comes from the pure function
        loss = balance_loss(plan, choices=choices, over=over, sequence_GS=sequence_GS)
        return dataclasses.replace(plan, aux_loss=loss)

    def plan(
        self,
        x_GSM: jax.Array,
        ids_GS: jax.Array | None,
        token_mask_GS: jax.Array | None,
        key: jax.Array | None,
    ) -> RoutingPlan:
        """What the rule makes of the tokens as the router sees them."""
        raise NotImplementedError


class Router(RuleRouter):
    """A learned projection to expert logits, and a rule that makes a plan of them."""

    def __init__(self, d_model: int, num_experts: int, *, rule: Any, rngs: nnx.Rngs):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        self.kernel_ME = param(init(rngs.params(), (d_model, num_experts)), "model", None)
        self.rule = rule

    def plan(self, x_GSM, ids_GS, token_mask_GS, key) -> RoutingPlan:
        """What the rule makes of what it reads."""
        return self.rule(*self.read(x_GSM), token_mask_GS=token_mask_GS, key=key)

    def read(self, x_GSM: jax.Array) -> tuple[jax.Array, ...]:
        """What the rule reads of the tokens: their logits, and in some subclasses more."""
        return (self.logits(x_GSM),)

    def logits(self, x_GSM: jax.Array) -> jax.Array:
        """logits_GSE, in float32 whatever the tokens' type."""
        return project(x_GSM, self.kernel_ME[...])


def project(x_GSM: jax.Array, kernel_ME: jax.Array) -> jax.Array:
    """x kernel in float32 with all its bits: bfloat16 passes would change who goes where."""
    return jnp.einsum(
        "GSM,ME->GSE", x_GSM.astype(jnp.float32), kernel_ME, precision=jax.lax.Precision.HIGHEST
    )
