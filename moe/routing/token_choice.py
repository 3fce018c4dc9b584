"""What all token-choice routers share: choosing experts, queueing for slots, and the plan.

A router of this kind decides which experts a token wants and with what gates. From there on all are
alike: choices queue for slots, those that find none are dropped and counted, and a `RoutingPlan`
comes out.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import jax
import jax.numpy as jnp

from moe.routing.checks import check_choice
from moe.routing.losses import load_balance_loss, router_z_loss
from moe.routing.plan import RoutingPlan

SlotRule = Literal["code", "paper"]


class Queueing(TypedDict, total=False):
    """How choices queue for slots; keyword arguments of every token-choice router.

    slot_rule: "code" (default): the choices of rank k queue behind the *kept* choices of the ranks
      before, and one that was not assigned takes no slot; "paper": the count runs over every wanted
      choice, kept or not. From Lepikhin et al. 2020 (arXiv:2006.16668): the authors' code, and
      Algorithm 1.
    batch_priority: hand out slots by top router probability, highest first, not in token order
      (Riquelme et al. 2021, arXiv:2106.05974, section 4).
    renormalize_after_drop: divide the gates of the kept choices by their sum (fairseq, NLLB).
      Otherwise a token that lost an expert keeps a smaller output, as in GShard.
    """

    slot_rule: SlotRule
    batch_priority: bool
    renormalize_after_drop: bool


def queue_for_slots(
    logits_GSE: jax.Array,
    probs_GSE: jax.Array,
    expert_GSK: jax.Array,
    gate_GSK: jax.Array,
    *,
    token_mask_GS: jax.Array,
    capacity: int,
    assigned_GSK: jax.Array | None = None,
    wanted_GSK: jax.Array | None = None,
    slot_rule: SlotRule = "code",
    batch_priority: bool = False,
    renormalize_after_drop: bool = False,
) -> RoutingPlan:
    """The plan of given choices: slots in order of rank then token, drops at `capacity`, losses.

    Args:
      logits_GSE: what the z-loss is taken of; float32.
      probs_GSE: what the balance loss and the priority are taken of; float32.
      expert_GSK: experts by rank, best first, all different for one token.
      gate_GSK: their weights before any drop; 0 where not wanted.
      token_mask_GS: real tokens.
      capacity: C; S or more is dropless.
      assigned_GSK: choices that are queued for, False for padding; all of real tokens by default.
      wanted_GSK: choices that `slot_rule="paper"` counts; `assigned_GSK` by default.
      slot_rule, batch_priority, renormalize_after_drop: see `Queueing`.

    Returns:
      The plan. Its aux loss is `load_balance_loss` of the first choices.

    Raises:
      UserError: an unknown slot rule.
    """
    check_choice("slot_rule", slot_rule, SlotRule)
    if assigned_GSK is None:
        assigned_GSK = jnp.broadcast_to(token_mask_GS[..., None], expert_GSK.shape)
    counted_GSK = assigned_GSK
    if slot_rule == "paper" and wanted_GSK is not None:
        counted_GSK = wanted_GSK
    slot_GSK = _slots(
        jax.nn.one_hot(expert_GSK, logits_GSE.shape[-1], dtype=bool) & counted_GSK[..., None],
        priority_GS=jnp.max(probs_GSE, axis=-1) if batch_priority else None,
        limit=capacity if slot_rule == "code" else None,
    )
    # A token takes at most one slot of an expert: with S of them nothing can be dropped.
    dropless = capacity >= logits_GSE.shape[1]
    kept_GSK = assigned_GSK if dropless else assigned_GSK & (slot_GSK < capacity)
    gate_GSK = gate_GSK * kept_GSK
    return RoutingPlan(
        expert_GSK=expert_GSK,
        slot_GSK=slot_GSK,
        gate_GSK=normalized(gate_GSK) if renormalize_after_drop else gate_GSK,
        assigned_GSK=assigned_GSK,
        kept_GSK=kept_GSK,
        token_mask_GS=token_mask_GS,
        probs_GSE=probs_GSE,
        aux_loss=load_balance_loss(probs_GSE, expert_GSK[..., 0], assigned_GSK[..., 0]),
        z_loss=router_z_loss(logits_GSE, token_mask_GS),
        capacity=capacity,
    )


def real_logits(
    logits_GSE: jax.Array, token_mask_GS: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Logits in float32, zero for padding (what it holds must not matter, were it NaN); the mask."""
    if token_mask_GS is None:
        token_mask_GS = jnp.ones(logits_GSE.shape[:2], bool)
    token_mask_GS = token_mask_GS.astype(bool)
    return jnp.where(token_mask_GS[..., None], logits_GSE.astype(jnp.float32), 0), token_mask_GS


def best_experts(scores_GSE: jax.Array, num_choices: int) -> jax.Array:
    """The experts of the highest scores, best first, ties to the lower index: expert_GSK.

    All different, even where scores are -inf. By rounds of argmax and mask, not top_k: over a
    sharded G, top_k costs an all-gather.
    """
    # A chosen expert is at -inf; one that is merely impossible must stay above it.
    rest_GSE = jnp.maximum(scores_GSE, jnp.finfo(scores_GSE.dtype).min)
    chosen = []
    for _ in range(num_choices):
        best_GS = jnp.argmax(rest_GSE, axis=-1)
        chosen.append(best_GS)
        taken_GSE = jax.nn.one_hot(best_GS, scores_GSE.shape[-1], dtype=bool)
        rest_GSE = jnp.where(taken_GSE, -jnp.inf, rest_GSE)
    return jnp.stack(chosen, axis=-1).astype(jnp.int32)


def values_of(expert_GSK: jax.Array, values_GSE: jax.Array) -> jax.Array:
    """The value of each chosen expert: values_GSK. (One-hot sums: the gradient needs no scatter.)"""
    num_experts = values_GSE.shape[-1]
    chosen_GSKE = jax.nn.one_hot(expert_GSK, num_experts, dtype=bool)
    return jnp.sum(jnp.where(chosen_GSKE, values_GSE[:, :, None], 0), axis=-1)


def normalized(gate_GSK: jax.Array) -> jax.Array:
    """Gates divided by their sum over the choices; zeros stay zeros."""
    total_GS1 = jnp.sum(gate_GSK, axis=-1, keepdims=True)
    return gate_GSK / jnp.where(total_GS1 > 0, total_GS1, 1)


def _slots(counted_GSKE, *, priority_GS, limit: int | None) -> jax.Array:
    """Place of each choice in its expert's queue: all of rank 0 in order, then rank 1, and so on.

    `limit` bounds what the ranks before take, so that a choice queues behind kept ones only. Counts
    in int32: a bfloat16 running sum is exact only to 256.
    """
    if priority_GS is not None:
        order_GS = jnp.argsort(-priority_GS, axis=1, stable=True)
        counted_GSKE = jnp.take_along_axis(counted_GSKE, order_GS[..., None, None], axis=1)
    count_GSKE = counted_GSKE.astype(jnp.int32)
    total_GKE = jnp.sum(count_GSKE, axis=1)
    taken_GKE = jnp.cumsum(total_GKE, axis=1) - total_GKE
    if limit is not None:
        taken_GKE = jnp.minimum(taken_GKE, limit)
    before_GSKE = jnp.cumsum(count_GSKE, axis=1) - count_GSKE + taken_GKE[:, None]
    slot_GSK = jnp.sum(before_GSKE * count_GSKE, axis=-1)
    if priority_GS is not None:
        back_GS = jnp.argsort(order_GS, axis=1)
        slot_GSK = jnp.take_along_axis(slot_GSK, back_GS[..., None], axis=1)
    return slot_GSK
