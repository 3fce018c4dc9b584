"""Top-2 gating and the MoE layer once more, in numpy, one token at a time.

Everything fast is compared with this file, so it shares no code with `moe` and prefers loops to
cleverness. It has two halves. `choose` takes the decisions: integers and booleans, in the order in
which routing semantics states them. The rest computes numbers from decisions already taken, by
analytic functions that accept complex input: `gradient` steps in the imaginary direction, which
needs no difference of nearby values and is therefore exact to the last digits of float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FIRST, SECOND = 0, 1


@dataclass(frozen=True)
class Choices:
    """What every token wants and gets; the last dimension is first and second choice.

    A token of importance 1 has both choices, one of importance in (0, 1) only its most probable
    expert, as a second choice, and one of importance 0 (padding) has none.
    """

    expert_GSK: np.ndarray
    slot_GSK: np.ndarray
    assigned_GSK: np.ndarray
    kept_GSK: np.ndarray
    importance_GS: np.ndarray
    capacity: int


@dataclass(frozen=True)
class Plan:
    """The whole result of top-2 gating."""

    choices: Choices
    probs_GSE: np.ndarray
    gate_GSK: np.ndarray
    aux_loss: float
    z_loss: float


def top2(logits_GSE, *, renormalize_after_drop: bool = False, **decisions) -> Plan:
    """Top-2 gating; `decisions` are the keyword arguments of `choose`."""
    logits_GSE = np.asarray(logits_GSE, np.float64)
    choices = choose(logits_GSE, **decisions)
    probs_GSE = softmax(logits_GSE)
    return Plan(
        choices=choices,
        probs_GSE=probs_GSE,
        gate_GSK=gates(probs_GSE, choices, renormalize_after_drop=renormalize_after_drop),
        aux_loss=aux_loss(probs_GSE, choices.importance_GS),
        z_loss=z_loss(logits_GSE, choices.importance_GS),
    )


# The decisions.


def choose(
    logits_GSE: np.ndarray,
    *,
    capacity: int,
    token_mask_GS: np.ndarray | None = None,
    importance_GS: np.ndarray | None = None,
    second_wanted_GS: np.ndarray | None = None,
    second_expert_GS: np.ndarray | None = None,
    slot_rule: str = "code",
    batch_priority: bool = False,
) -> Choices:
    """Experts and slots of every token, group by group.

    Randomness is outside: `second_wanted_GS` is False where the policy gave the second expert up,
    `second_expert_GS` is the expert drawn by the "sampling" policy. Without them the policy is
    "all"; all False is "none".
    """
    num_groups, num_tokens, num_experts = logits_GSE.shape
    importance_GS = np.ones((num_groups, num_tokens)) if importance_GS is None else importance_GS
    if token_mask_GS is not None:
        importance_GS = np.where(token_mask_GS, importance_GS, 0.0)
    expert_GSK = np.zeros((num_groups, num_tokens, 2), int)
    slot_GSK = np.zeros((num_groups, num_tokens, 2), int)
    assigned_GSK = np.zeros((num_groups, num_tokens, 2), bool)

    for g in range(num_groups):
        for s in range(num_tokens):
            ranking = best_first(logits_GSE[g, s])
            expert_GSK[g, s] = ranking[:2]
            if second_expert_GS is not None:
                expert_GSK[g, s, SECOND] = second_expert_GS[g, s]
            if importance_GS[g, s] == 1:
                wanted = second_wanted_GS is None or bool(second_wanted_GS[g, s])
                assigned_GSK[g, s] = True, wanted
            elif importance_GS[g, s] > 0:
                expert_GSK[g, s, SECOND] = ranking[0]
                assigned_GSK[g, s] = False, True

        order = range(num_tokens)
        if batch_priority:
            order = best_first([row.max() for row in softmax(logits_GSE[g])])
        count_E = [0] * num_experts
        for s in order:
            if assigned_GSK[g, s, FIRST]:
                slot_GSK[g, s, FIRST] = count_E[expert_GSK[g, s, FIRST]]
                count_E[expert_GSK[g, s, FIRST]] += 1
        if slot_rule == "code":
            count_E = [min(count, capacity) for count in count_E]
        for s in order:
            # By the paper's rule even a second choice that the policy gave up uses up a slot.
            counts = importance_GS[g, s] > 0 if slot_rule == "paper" else assigned_GSK[g, s, SECOND]
            if counts:
                slot_GSK[g, s, SECOND] = count_E[expert_GSK[g, s, SECOND]]
                count_E[expert_GSK[g, s, SECOND]] += 1

    kept_GSK = assigned_GSK & (slot_GSK < capacity)
    return Choices(expert_GSK, slot_GSK, assigned_GSK, kept_GSK, importance_GS, capacity)


def best_first(values) -> list[int]:
    """Indices from the largest value to the smallest, the lower index first in a tie."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


# The numbers, analytic in logits, tokens and weights.


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last dimension."""
    exponentials = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def gates(probs_GSE, choices: Choices, *, renormalize_after_drop: bool = False) -> np.ndarray:
    """The weight of every choice, 0 where it is not kept."""
    gate_GSK = np.zeros(choices.expert_GSK.shape, probs_GSE.dtype)
    for g, s in np.ndindex(choices.importance_GS.shape):
        if choices.importance_GS[g, s] == 1:
            first, second = probs_GSE[g, s, choices.expert_GSK[g, s]]
            pair = np.array([first / (first + second), second / (first + second)])
        else:
            pair = np.array([0, 1], probs_GSE.dtype)
        pair = pair * choices.kept_GSK[g, s]
        if renormalize_after_drop and choices.kept_GSK[g, s].any():
            pair = pair / pair.sum()
        gate_GSK[g, s] = pair
    return gate_GSK


def aux_loss(probs_GSE, importance_GS) -> float:
    """E times the sum over experts of share times mean probability, over groups that count."""
    losses = []
    for probs_SE, importance_S in zip(probs_GSE, importance_GS, strict=True):
        counted = [probs_E for probs_E, i in zip(probs_SE, importance_S, strict=True) if i == 1]
        if not counted:
            continue
        num_experts = len(counted[0])
        share_E = np.zeros(num_experts)
        for probs_E in counted:
            share_E[best_first(probs_E.real)[0]] += 1 / len(counted)
        mean_prob_E = sum(counted) / len(counted)
        losses.append(num_experts * sum(share_E * mean_prob_E))
    return sum(losses) / len(losses) if losses else 0.0


def z_loss(logits_GSE, importance_GS) -> float:
    """The mean of logsumexp(logits)**2 over real tokens."""
    squares = []
    for g, s in np.ndindex(importance_GS.shape):
        if importance_GS[g, s] > 0:
            largest = logits_GSE[g, s].real.max()
            squares.append((np.log(np.exp(logits_GSE[g, s] - largest).sum()) + largest) ** 2)
    return sum(squares) / len(squares) if squares else 0.0


def dispatch(x_GSM: np.ndarray, choices: Choices, num_experts: int) -> np.ndarray:
    """The experts' input: every kept choice's token in its slot, zeros in the free slots."""
    num_groups, _, width = x_GSM.shape
    x_GECM = np.zeros((num_groups, num_experts, choices.capacity, width), x_GSM.dtype)
    for g, s, k in np.argwhere(choices.kept_GSK):
        x_GECM[g, choices.expert_GSK[g, s, k], choices.slot_GSK[g, s, k]] = x_GSM[g, s]
    return x_GECM


def combine(y_GECM: np.ndarray, choices: Choices, gate_GSK: np.ndarray) -> np.ndarray:
    """Every token's weighted sum of what its experts put into its slots."""
    y_GSM = np.zeros(
        (*gate_GSK.shape[:2], y_GECM.shape[-1]), np.result_type(y_GECM.dtype, gate_GSK.dtype)
    )
    for g, s, k in np.argwhere(choices.kept_GSK):
        slot = choices.slot_GSK[g, s, k]
        y_GSM[g, s] += gate_GSK[g, s, k] * y_GECM[g, choices.expert_GSK[g, s, k], slot]
    return y_GSM


def moe_layer(x_GSM, router_ME, wi_EMH, wo_EHM, choices: Choices, **options) -> np.ndarray:
    """The layer without slots: each kept choice of a token runs its expert on that token."""
    gate_GSK = gates(softmax(x_GSM @ router_ME), choices, **options)
    y_GSM = np.zeros(x_GSM.shape, np.result_type(gate_GSK, x_GSM, wi_EMH, wo_EHM))
    for g, s, k in np.argwhere(choices.kept_GSK):
        e = choices.expert_GSK[g, s, k]
        y_GSM[g, s] += gate_GSK[g, s, k] * (relu(x_GSM[g, s] @ wi_EMH[e]) @ wo_EHM[e])
    return y_GSM


def relu(values: np.ndarray) -> np.ndarray:
    """max(0, x), by the real part."""
    return np.where(values.real > 0, values, 0)


def gradient(function: Callable[[np.ndarray], complex], point) -> np.ndarray:
    """The gradient of an analytic scalar function at a real point, by complex steps."""
    point = np.asarray(point, np.complex128)
    step = 1e-40  # its square vanishes beside 1, so the only error is rounding
    result = np.zeros(point.shape)
    for index in np.ndindex(point.shape):
        moved = point.copy()
        moved[index] += step * 1j
        result[index] = np.imag(function(moved)) / step
    return result
