"""GShard's top-2 gate with limited expert capacity."""

from __future__ import annotations

from typing import Literal, Unpack

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.checks import check_choice, check_router_inputs
from moe.routing.plan import RoutingPlan
from moe.routing.token_choice import (
    Queueing,
    best_experts,
    normalized,
    queue_for_slots,
    real_logits,
    values_of,
)

SecondPolicy = Literal["random", "all", "sampling", "none"]


def top2(
    logits_GSE: jax.Array,
    *,
    capacity: int,
    second_policy: SecondPolicy = "random",
    key: jax.Array | None = None,
    token_mask_GS: jax.Array | None = None,
    importance_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Sends each token to its two most probable experts while they have room.

    In order: softmax in float32; first and second choice (ties to the lower index); losses; gates
    normalised over the two; the policy thins out second choices; all first choices of a group take
    their slots before any second choice; a choice whose slot is at or beyond `capacity` is dropped
    and its gate is 0.

    Args:
      logits_GSE: router logits of any float type; E at least 2.
      capacity: C, slots per group and expert, at least 1; see `expert_capacity`.
      second_policy: "random" keeps the second expert with probability min(1, 2 * its gate), the
        paper's rule; "all" always; "sampling" draws it from the remaining probabilities
        (Gumbel-max) and keeps it; "none" never, the first gate staying normalised by both.
      key: randomness for "random" and "sampling"; not read by the others.
      token_mask_GS: False for padding, which takes no slot and counts in no loss.
      importance_GS: 1 = both choices; in (0, 1) = the first choice alone, placed with the second
        choices, gate 1, whatever the policy; 0 = as padding. After Mesh-TensorFlow. The load-balance
        loss counts tokens of importance 1.
      queueing: `slot_rule`, `batch_priority` and `renormalize_after_drop`; see `Queueing`.

    Returns:
      The plan, K = 2. Gates carry gradient to the logits; experts and slots are integers.

    Raises:
      UserError: E < 2, capacity < 1, an unknown policy or rule, a random policy without a key,
        or a mask or importance whose shape is not (G, S).

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), Algorithm 1, with the placement of the authors'
    published code; batch priority from Riquelme et al. 2021 (arXiv:2106.05974), section 4.
    """
    check_router_inputs(
        logits_GSE,
        capacity=capacity,
        num_choices=2,
        token_mask_GS=token_mask_GS,
        importance_GS=importance_GS,
    )
    _check_policy(second_policy, key)
    real_GS, both_GS = _real_tokens(logits_GSE, token_mask_GS, importance_GS)
    logits_GSE, _ = real_logits(logits_GSE, real_GS)
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    first_GS, second_GS = _two_best(logits_GSE, second_policy, key)
    # A token of partial importance has one choice, in the second column.
    expert_GSK = jnp.stack([first_GS, jnp.where(both_GS, second_GS, first_GS)], axis=-1)
    wanted_GSK = jnp.stack([both_GS, real_GS], axis=-1)
    gate_GSK = normalized(values_of(expert_GSK, probs_GSE) * wanted_GSK)
    policy_GSK = _policy(gate_GSK, second_policy, key) | ~both_GS[..., None]
    return queue_for_slots(
        logits_GSE,
        probs_GSE,
        expert_GSK,
        gate_GSK,
        assigned_GSK=wanted_GSK & policy_GSK,
        token_mask_GS=real_GS,
        capacity=capacity,
        wanted_GSK=wanted_GSK,
        **queueing,
    )


def _check_policy(second_policy, key):
    check_choice("second_policy", second_policy, SecondPolicy)
    if second_policy in ("random", "sampling") and key is None:
        raise UserError(
            f"key must be given for a random policy: got second_policy={second_policy!r}, key=None. "
            'Pass a key in training, or second_policy="all" in evaluation.'
        )


def _real_tokens(logits_GSE, token_mask_GS, importance_GS) -> tuple[jax.Array, jax.Array]:
    """Tokens that are routed at all, and those with both choices."""
    real_GS = jnp.ones(logits_GSE.shape[:2], bool)
    if token_mask_GS is not None:
        real_GS = token_mask_GS.astype(bool)
    if importance_GS is None:
        return real_GS, real_GS
    return real_GS & (importance_GS > 0), real_GS & (importance_GS >= 1)


def _two_best(logits_GSE, second_policy, key) -> tuple[jax.Array, jax.Array]:
    """The most probable expert, and the most probable or a drawn one of the others.

    By logits, not probabilities: they still differ where those have underflowed to 0.
    """
    best_GSK = best_experts(logits_GSE, 2)
    if second_policy != "sampling":
        return best_GSK[..., 0], best_GSK[..., 1]
    first_GSE = jax.nn.one_hot(best_GSK[..., 0], logits_GSE.shape[-1], dtype=bool)
    drawn_GSE = logits_GSE + jax.random.gumbel(key, logits_GSE.shape)
    drawn_GSE = jnp.maximum(drawn_GSE, jnp.finfo(jnp.float32).min)
    second_GS = jnp.argmax(jnp.where(first_GSE, -jnp.inf, drawn_GSE), axis=-1)
    return best_GSK[..., 0], second_GS.astype(jnp.int32)


def _policy(gate_GSK, second_policy, key) -> jax.Array:
    """Which wanted choices the policy lets through; first choices always."""
    second_GS = jnp.full(gate_GSK.shape[:2], second_policy != "none")
    if second_policy == "random":
        second_GS = jax.random.uniform(key, gate_GSK.shape[:2]) < 2 * gate_GSK[..., 1]
    return jnp.stack([jnp.ones_like(second_GS), second_GS], axis=-1)
