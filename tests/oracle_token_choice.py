"""The token-choice routers once more, in numpy, one token at a time.

As `tests.oracle`: `choose` takes the decisions, and the rest computes numbers from decisions already
taken by analytic functions, so that `oracle.gradient` can step in the imaginary direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.oracle import best_first


@dataclass(frozen=True)
class Choices:
    """What every token wants and gets; the last dimension is the rank of the choice."""

    expert_GSK: np.ndarray
    slot_GSK: np.ndarray
    assigned_GSK: np.ndarray
    kept_GSK: np.ndarray


@dataclass(frozen=True)
class Plan:
    """The whole result of one router."""

    choices: Choices
    probs_GSE: np.ndarray
    gate_GSK: np.ndarray
    aux_loss: float
    z_loss: float


# The decisions.


def choose(
    score_GSE: np.ndarray,
    *,
    num_choices: int,
    capacity: int,
    token_mask_GS: np.ndarray,
    priority_GSE: np.ndarray | None = None,
    slot_rule: str = "code",
    num_expert_groups: int = 1,
    num_kept_groups: int = 1,
    group_score: str = "max",
) -> Choices:
    """Experts by their scores; slots by rank, then by token or by the largest priority."""
    num_groups, num_tokens, num_experts = score_GSE.shape
    shape = (num_groups, num_tokens, num_choices)
    expert_GSK, slot_GSK = np.zeros(shape, int), np.zeros(shape, int)
    assigned_GSK = np.zeros(shape, bool)
    for g in range(num_groups):
        for s in range(num_tokens):
            allowed = eligible(score_GSE[g, s], num_expert_groups, num_kept_groups, group_score)
            ranking = [e for e in best_first(score_GSE[g, s]) if e in allowed]
            expert_GSK[g, s] = ranking[:num_choices]
            assigned_GSK[g, s] = token_mask_GS[g, s]
        order = range(num_tokens)
        if priority_GSE is not None:
            order = best_first([row.max() for row in priority_GSE[g]])
        count_E = [0] * num_experts
        for k in range(num_choices):
            for s in order:
                if assigned_GSK[g, s, k]:
                    slot_GSK[g, s, k] = count_E[expert_GSK[g, s, k]]
                    count_E[expert_GSK[g, s, k]] += 1
            if slot_rule == "code":
                count_E = [min(count, capacity) for count in count_E]
    return Choices(expert_GSK, slot_GSK, assigned_GSK, assigned_GSK & (slot_GSK < capacity))


def eligible(score_E, num_expert_groups: int, num_kept_groups: int, group_score: str) -> set[int]:
    """The experts of the best groups, a group being as good as its best one or two experts."""
    size = len(score_E) // num_expert_groups
    counted = 1 if group_score == "max" else 2
    worth = [
        sum(sorted(score_E[a * size : (a + 1) * size])[-counted:]) for a in range(num_expert_groups)
    ]
    groups = best_first(worth)[:num_kept_groups]
    return {e for e in range(len(score_E)) if e // size in groups}


# The numbers, analytic in logits and noise.


def gates(
    weight_GSE: np.ndarray,
    choices: Choices,
    *,
    normalize: bool = True,
    scale: float = 1.0,
    renormalize_after_drop: bool = False,
) -> np.ndarray:
    """The weight of every choice's expert, over the sum of the chosen if so wanted; 0 if dropped."""
    gate_GSK = np.zeros(choices.expert_GSK.shape, weight_GSE.dtype)
    for g, s in np.ndindex(gate_GSK.shape[:2]):
        gate_K = weight_GSE[g, s, choices.expert_GSK[g, s]]
        if normalize:
            gate_K = gate_K / gate_K.sum()
        gate_K = gate_K * choices.kept_GSK[g, s]
        if renormalize_after_drop and choices.kept_GSK[g, s].any():
            gate_K = gate_K / gate_K.sum()
        gate_GSK[g, s] = scale * gate_K
    return gate_GSK


def load_balance(probs_GSE, choices: Choices) -> float:
    """E times the sum over experts of share of first choices times mean probability; mean of groups."""
    losses = []
    for g, probs_SE in enumerate(probs_GSE):
        real = np.flatnonzero(choices.assigned_GSK[g, :, 0])
        if len(real):
            share_E = np.zeros(probs_SE.shape[-1])
            for s in real:
                share_E[choices.expert_GSK[g, s, 0]] += 1 / len(real)
            losses.append(len(share_E) * sum(share_E * probs_SE[real].mean(0)))
    return sum(losses) / len(losses)


def sigmoid(logits):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-logits))


def softplus(logits):
    """log(1 + exp(x))."""
    return np.log(1 + np.exp(logits))


def importance(noisy_GSE, choices: Choices) -> np.ndarray:
    """G(x) of Shazeer et al., equation 3: a softmax over the chosen experts, 0 elsewhere."""
    gate_GSE = np.zeros(noisy_GSE.shape, noisy_GSE.dtype)
    for g, s in np.ndindex(noisy_GSE.shape[:2]):
        chosen_K = choices.expert_GSK[g, s]
        weight_K = np.exp(noisy_GSE[g, s, chosen_K])
        gate_GSE[g, s, chosen_K] = weight_K / weight_K.sum()
    return gate_GSE


def chosen(choices: Choices, num_experts: int) -> np.ndarray:
    """1 where an expert is among the token's choices, else 0."""
    count_GSE = np.zeros((*choices.expert_GSK.shape[:2], num_experts))
    for g, s, k in np.ndindex(choices.expert_GSK.shape):
        count_GSE[g, s, choices.expert_GSK[g, s, k]] = 1
    return count_GSE


def smooth_load(logits_GSE, noisy_GSE, std_GSE, num_choices: int) -> np.ndarray:
    """P(x, i), equations 8 and 9, with the standard deviation bounded by 0.01."""
    load_GSE = np.ones(noisy_GSE.shape, noisy_GSE.dtype)
    if num_choices == noisy_GSE.shape[-1]:
        return load_GSE
    for g, s, i in np.ndindex(noisy_GSE.shape):
        others = [noisy_GSE[g, s, e] for e in range(noisy_GSE.shape[-1]) if e != i]
        kth_excluding = sorted(others, key=lambda value: -value.real)[num_choices - 1]
        std = std_GSE[g, s, i] if std_GSE[g, s, i].real > 0.01 else 0.01
        load_GSE[g, s, i] = normal_cdf((logits_GSE[g, s, i] - kth_excluding) / std)
    return load_GSE


def normal_cdf(z) -> complex:
    """Of a real number, or of one with an imaginary part so small that its square is nothing."""
    density = math.exp(-(z.real**2) / 2) / math.sqrt(2 * math.pi)
    value = math.erfc(-z.real / math.sqrt(2)) / 2
    return value + 1j * z.imag * density if np.iscomplexobj(z) else value


def cv_squared(value_GSE, token_mask_GS) -> float:
    """Variance over squared mean of the experts' sums over real tokens."""
    total_E = sum(value_GSE[g, s] for g, s in np.argwhere(token_mask_GS))
    mean = total_E.sum() / len(total_E)
    return sum((total - mean) ** 2 for total in total_E) / len(total_E) / mean**2
