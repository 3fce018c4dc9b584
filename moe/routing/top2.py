"""GShard's top-2 gate with limited expert capacity."""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.losses import load_balance_loss, router_z_loss
from moe.routing.plan import RoutingPlan

SecondPolicy = Literal["random", "all", "sampling", "none"]
SlotRule = Literal["code", "paper"]


def top2(
    logits_GSE: jax.Array,
    *,
    capacity: int,
    second_policy: SecondPolicy = "random",
    key: jax.Array | None = None,
    token_mask_GS: jax.Array | None = None,
    importance_GS: jax.Array | None = None,
    slot_rule: SlotRule = "code",
    renormalize_after_drop: bool = False,
    batch_priority: bool = False,
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
      slot_rule: "code": second choices queue behind the *kept* first choices, and one that the
        policy dropped takes no slot; "paper": the count runs over every choice, kept or not.
      renormalize_after_drop: divide the gates of the kept choices by their sum (fairseq, NLLB).
        Otherwise a token that lost an expert keeps a smaller output, as in GShard.
      batch_priority: hand out slots by top probability, highest first, not in token order (V-MoE).

    Returns:
      The plan, K = 2. Gates carry gradient to the logits; experts and slots are integers.

    Raises:
      UserError: E < 2, capacity < 1, an unknown policy or rule, a random policy without a key,
        or a mask or importance whose shape is not (G, S).

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), Algorithm 1, with the placement of the authors'
    published code; batch priority from Riquelme et al. 2021 (arXiv:2106.05974), section 4.
    """
    _check(logits_GSE, capacity, second_policy, key, token_mask_GS, importance_GS, slot_rule)
    real_GS, both_GS = _real_tokens(logits_GSE, token_mask_GS, importance_GS)

    # What padding holds must not matter, were it NaN.
    logits_GSE = jnp.where(real_GS[..., None], logits_GSE.astype(jnp.float32), 0)
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    first_GS, second_GS = _two_best(logits_GSE, second_policy, key)
    # A token of partial importance has one choice, in the second column.
    expert_GSK = jnp.stack([first_GS, jnp.where(both_GS, second_GS, first_GS)], axis=-1)
    wanted_GSK = jnp.stack([both_GS, real_GS], axis=-1)

    chosen_GSKE = jax.nn.one_hot(expert_GSK, logits_GSE.shape[-1], dtype=bool)
    prob_GSK = jnp.sum(probs_GSE[:, :, None] * chosen_GSKE, axis=-1)
    gate_GSK = _normalized(prob_GSK * wanted_GSK)
    assigned_GSK = wanted_GSK & (_policy(gate_GSK, second_policy, key) | ~both_GS[..., None])
    counted_GSK = wanted_GSK if slot_rule == "paper" else assigned_GSK
    priority_GS = jnp.max(probs_GSE, axis=-1) if batch_priority else None
    slot_GSK = _slots(
        chosen_GSKE & counted_GSK[..., None],
        priority_GS,
        first_limit=capacity if slot_rule == "code" else None,
    )
    kept_GSK = assigned_GSK & (slot_GSK < capacity)
    gate_GSK = gate_GSK * kept_GSK
    return RoutingPlan(
        expert_GSK=expert_GSK,
        slot_GSK=slot_GSK,
        gate_GSK=_normalized(gate_GSK) if renormalize_after_drop else gate_GSK,
        assigned_GSK=assigned_GSK,
        kept_GSK=kept_GSK,
        token_mask_GS=real_GS,
        probs_GSE=probs_GSE,
        aux_loss=load_balance_loss(probs_GSE, first_GS, both_GS),
        z_loss=router_z_loss(logits_GSE, real_GS),
        capacity=capacity,
    )


def _check(logits_GSE, capacity, second_policy, key, token_mask_GS, importance_GS, slot_rule):
    if logits_GSE.ndim != 3 or logits_GSE.shape[-1] < 2:
        raise UserError(
            f"logits_GSE must be (groups, tokens, experts) with at least 2 experts: "
            f"got shape {logits_GSE.shape}. Reshape it or add experts."
        )
    if capacity < 1:
        raise UserError(f"capacity must be at least 1: got {capacity}. Use expert_capacity().")
    for name, value, allowed in (
        ("second_policy", second_policy, get_args(SecondPolicy)),
        ("slot_rule", slot_rule, get_args(SlotRule)),
    ):
        if value not in allowed:
            raise UserError(f"{name} must be one of {allowed}: got {value!r}. Choose one of them.")
    if second_policy in ("random", "sampling") and key is None:
        raise UserError(
            f"key must be given for a random policy: got second_policy={second_policy!r}, key=None. "
            'Pass a key in training, or second_policy="all" in evaluation.'
        )
    for name, array in (("token_mask_GS", token_mask_GS), ("importance_GS", importance_GS)):
        if array is not None and array.shape != logits_GSE.shape[:2]:
            raise UserError(
                f"{name} must have the shape (G, S) of the logits: got {array.shape}, "
                f"logits_GSE has {logits_GSE.shape}. Group it as the tokens are grouped."
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

    By logits, not probabilities: they still differ where those have underflowed to 0. By argmax and
    mask, not top_k: over a sharded G, top_k costs an all-gather.
    """
    first_GS = jnp.argmax(logits_GSE, axis=-1)
    others_GSE = logits_GSE
    if second_policy == "sampling":
        others_GSE = logits_GSE + jax.random.gumbel(key, logits_GSE.shape)
    # Another expert than the first even where every other logit is -inf.
    others_GSE = jnp.maximum(others_GSE, jnp.finfo(jnp.float32).min)
    first_GSE = jax.nn.one_hot(first_GS, logits_GSE.shape[-1], dtype=bool)
    return first_GS, jnp.argmax(jnp.where(first_GSE, -jnp.inf, others_GSE), axis=-1)


def _policy(gate_GSK, second_policy, key) -> jax.Array:
    """Which wanted choices the policy lets through; first choices always."""
    second_GS = jnp.full(gate_GSK.shape[:2], second_policy != "none")
    if second_policy == "random":
        second_GS = jax.random.uniform(key, gate_GSK.shape[:2]) < 2 * gate_GSK[..., 1]
    return jnp.stack([jnp.ones_like(second_GS), second_GS], axis=-1)


def _normalized(gate_GSK: jax.Array) -> jax.Array:
    total_GS1 = jnp.sum(gate_GSK, axis=-1, keepdims=True)
    return gate_GSK / jnp.where(total_GS1 > 0, total_GS1, 1)


def _slots(counted_GSKE, priority_GS, *, first_limit: int | None) -> jax.Array:
    """Place of each choice in its expert's queue: first choices in order, then second choices.

    `first_limit` bounds what the first choices take, so that second choices queue behind the kept
    ones only. Counts in int32: a bfloat16 running sum is exact only to 256.
    """
    if priority_GS is not None:
        order_GS = jnp.argsort(-priority_GS, axis=1, stable=True)
        counted_GSKE = jnp.take_along_axis(counted_GSKE, order_GS[..., None, None], axis=1)
    count_GSKE = counted_GSKE.astype(jnp.int32)
    before_GSKE = jnp.cumsum(count_GSKE, axis=1) - count_GSKE
    taken_GE = jnp.sum(count_GSKE[:, :, 0], axis=1)
    if first_limit is not None:
        taken_GE = jnp.minimum(taken_GE, first_limit)
    before_GSKE = before_GSKE.at[:, :, 1].add(taken_GE[:, None])
    slot_GSK = jnp.sum(before_GSKE * count_GSKE, axis=-1)
    if priority_GS is not None:
        back_GS = jnp.argsort(order_GS, axis=1)
        slot_GSK = jnp.take_along_axis(slot_GSK, back_GS[..., None], axis=1)
    return slot_GSK
