"""Expert choice: every expert picks its tokens, so that all have the same load."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe.routing.checks import check_router_inputs
from moe.routing.losses import router_z_loss
from moe.routing.plan import RoutingPlan
from moe.routing.token_choice import real_logits


def expert_choice(
    logits_GSE: jax.Array, *, capacity: int, token_mask_GS: jax.Array | None = None
) -> RoutingPlan:
    """Lets each expert pick, in each group, the `capacity` tokens that have most use for it.

    Scores are the softmax over experts of each token's logits. An expert picks the highest (ties to
    the earlier token) and its gate is the score, not normalised. A token gets any number of experts,
    none included: the load counts those (`num_unrouted`). Padding is never picked; a group with fewer real
    tokens than slots leaves slots empty.

    Which tokens are picked depends on all tokens of the group, later ones too: not for causal
    decoders, in evaluation as in training.

    Args:
      logits_GSE: router logits of any float type; E at least 2.
      capacity: C, tokens that an expert picks in a group: `expert_capacity(S, E, factor,
        num_choices=1, min_capacity=1)`, where `factor` is the mean number of experts a token gets.
      token_mask_GS: False for padding.

    Returns:
      The plan with K = E: choice e is expert e. Its slots are in token order; assigned and kept are
      both "picked", so nothing is ever dropped. The aux loss is 0: every expert has the same load.

    Raises:
      UserError: E < 2, capacity < 1, or a mask whose shape is not (G, S).

    Source: Zhou et al. 2022 (arXiv:2202.09368), section 3.2. Without the limit of experts a token of
    section 3.3.
    """
    check_router_inputs(logits_GSE, capacity=capacity, num_choices=1, token_mask_GS=token_mask_GS)
    capacity = min(capacity, logits_GSE.shape[1])
    logits_GSE, mask_GS = real_logits(logits_GSE, token_mask_GS)
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    picked_GSE = _best_tokens(probs_GSE, mask_GS, capacity)
    count_GSE = jnp.cumsum(picked_GSE, axis=1, dtype=jnp.int32)
    expert_E = jnp.arange(logits_GSE.shape[-1], dtype=jnp.int32)
    return RoutingPlan(
        expert_GSK=jnp.broadcast_to(expert_E, logits_GSE.shape),
        slot_GSK=jnp.maximum(count_GSE - 1, 0),
        gate_GSK=probs_GSE * picked_GSE,
        assigned_GSK=picked_GSE,
        kept_GSK=picked_GSE,
        token_mask_GS=mask_GS,
        probs_GSE=probs_GSE,
        aux_loss=jnp.zeros((), jnp.float32),
        z_loss=router_z_loss(logits_GSE, mask_GS),
        capacity=capacity,
    )


def _best_tokens(probs_GSE, mask_GS, num_picked: int) -> jax.Array:
    """True at each expert's `num_picked` most probable real tokens, ties to the earlier.

    Not by top_k, which costs an all-gather where G is sharded, nor by a sort, 3 to 7 times slower on
    CPU.
    """
    # The bits of floats that are not negative, read as an integer, are in the order of the floats.
    rank_GSE = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(probs_GSE), jnp.int32)
    rank_GSE = jnp.where(mask_GS[..., None], rank_GSE, -1)
    least_G1E = _largest_reached_by(rank_GSE, num_picked)
    surely_GSE = rank_GSE > least_G1E
    tie_GSE = rank_GSE == least_G1E
    room_G1E = num_picked - jnp.sum(surely_GSE, axis=1, keepdims=True, dtype=jnp.int32)
    return surely_GSE | (tie_GSE & (jnp.cumsum(tie_GSE, axis=1, dtype=jnp.int32) <= room_G1E))


def _largest_reached_by(rank_GSE, count: int) -> jax.Array:
    """The largest integer that `count` tokens reach, by bisection from the highest bit; at least 0."""

    def try_bit(i, least_G1E):
        higher_G1E = least_G1E | (1 << (30 - i))
        reached_GSE = rank_GSE >= higher_G1E
        enough_G1E = jnp.sum(reached_GSE, axis=1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough_G1E, higher_G1E, least_G1E)

    return jax.lax.fori_loop(0, 31, try_bit, jnp.zeros_like(rank_GSE[:, :1]))
