"""Sinkhorn routing: in training tokens are assigned by a transport plan that balances the experts."""

from __future__ import annotations

import dataclasses
from typing import Literal, Unpack

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.checks import check_choice, check_router_inputs
from moe.routing.plan import RoutingPlan
from moe.routing.token_choice import Queueing, best_experts, queue_for_slots, real_logits, values_of

Gating = Literal["sigmoid", "softmax"]


def sinkhorn(
    logits_GSE: jax.Array,
    *,
    capacity: int,
    num_choices: int = 1,
    num_iterations: int,
    gating: Gating = "sigmoid",
    token_mask_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Sends tokens where a balanced transport plan has most of them; weighs them by the raw logits.

    Args:
      logits_GSE: router logits of any float type; E at least 2.
      capacity: C, slots per group and expert; S or more is dropless.
      num_choices: K, the experts where the transport plan is largest.
      num_iterations: of `transport_plan`. 0 is evaluation: the K largest logits, so that no token
        depends on another.
      gating: the gate of a chosen expert is the "sigmoid" of its logit or its "softmax" over all E.
      token_mask_GS: False for padding, which the transport leaves out.
      queueing: `slot_rule`, `batch_priority` and `renormalize_after_drop`; see `Queueing`.

    Returns:
      The plan. Gates carry gradient to the logits; the assignment carries none. The aux loss is 0:
      the transport balances. The largest entries of a balanced plan are only nearly balanced.

    Raises:
      UserError: K > E, capacity < 1, a negative number of iterations, an unknown gating, or a mask
        whose shape is not (G, S).

    Source: Clark et al. 2022 (arXiv:2202.01169), S-BASE, after Lewis et al. 2021, BASE layers
    (arXiv:2103.16716), whose assignment is exactly balanced (an auction). Gates and evaluation are
    those of BASE and Megatron-LM. Over each group, not the whole batch.
    """
    check_router_inputs(
        logits_GSE, capacity=capacity, num_choices=num_choices, token_mask_GS=token_mask_GS
    )
    check_choice("gating", gating, Gating)
    if num_iterations < 0:
        raise UserError(f"num_iterations must be at least 0: got {num_iterations}. Raise it.")
    logits_GSE, mask_GS = real_logits(logits_GSE, token_mask_GS)
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    scores_GSE = logits_GSE
    if num_iterations:
        scores_GSE = transport_plan(logits_GSE, mask_GS, num_iterations=num_iterations)
    expert_GSK = best_experts(scores_GSE, num_choices)
    gates_GSE = probs_GSE if gating == "softmax" else jax.nn.sigmoid(logits_GSE)
    plan = queue_for_slots(
        logits_GSE,
        probs_GSE,
        expert_GSK,
        values_of(expert_GSK, gates_GSE),
        assigned_GSK=jnp.broadcast_to(mask_GS[..., None], expert_GSK.shape),
        token_mask_GS=mask_GS,
        capacity=capacity,
        **queueing,
    )
    return dataclasses.replace(plan, aux_loss=jnp.zeros((), jnp.float32))


def transport_plan(
    logits_GSE: jax.Array, token_mask_GS: jax.Array, *, num_iterations: int
) -> jax.Array:
    """The plan that shares tokens out evenly at least cost: exp(logits) scaled by row and column.

    Each iteration scales the real tokens' rows to 1, then the experts' columns to N / E, where N is
    the group's number of real tokens; rows are scaled once more at the end. In float32 logarithms,
    where large logits cannot overflow.

    Returns:
      The logarithm of the plan, (G, S, E): rows sum to exactly 1, columns to N / E the more nearly the
      more iterations. Without gradient. Rows of padding mean nothing.

    Source: Sinkhorn and Knopp 1967; entropic transport with temperature 1, Cuturi 2013
    (arXiv:1306.0895).
    """
    logits_GSE = jax.lax.stop_gradient(logits_GSE)
    num_real_G11 = jnp.sum(token_mask_GS, axis=1, dtype=jnp.float32)[:, None, None]
    share_G11 = jnp.log(jnp.maximum(num_real_G11, 1) / logits_GSE.shape[-1])

    def scale(_, column_G1E):
        rows_GSE = jax.nn.log_softmax(logits_GSE + column_G1E, axis=-1)
        total_G1E = jax.nn.logsumexp(
            rows_GSE - column_G1E, axis=1, keepdims=True, where=token_mask_GS[..., None]
        )
        # -inf where nothing can be scaled: a group of padding, an expert that all rule out.
        return jnp.where(jnp.isfinite(total_G1E), share_G11 - total_G1E, 0)

    column_G1E = jax.lax.fori_loop(0, num_iterations, scale, jnp.zeros_like(logits_GSE[:, :1]))
    return jax.nn.log_softmax(logits_GSE + column_G1E, axis=-1)
