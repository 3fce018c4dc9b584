"""The losses of plans once more, in numpy, one token at a time; analytic, for `oracle.gradient`."""

from __future__ import annotations

import numpy as np


def parts(token_mask_GS, over: str, sequence_GS=None) -> list[list[tuple[int, int]]]:
    """The real tokens of each group, of each sequence, or of all; parts without any are left out."""
    found: dict[int, list[tuple[int, int]]] = {}
    for g, s in np.ndindex(*token_mask_GS.shape):
        if token_mask_GS[g, s]:
            part = {"group": g, "global": 0}.get(over)
            part = int(sequence_GS[g, s]) if part is None else part
            found.setdefault(part, []).append((g, s))
    return list(found.values())


def balance(probs_GSE, expert_GSK, assigned_GSK, *, over: str, sequence_GS=None, share_E=None):
    """E sum_e share_e mean_prob_e, the mean over parts; pass fewer choices to count fewer."""
    num_experts = probs_GSE.shape[-1]
    losses = []
    for part in parts(assigned_GSK.any(axis=-1), over, sequence_GS):
        count_E = np.zeros(num_experts)
        for g, s in part:
            for expert, assigned in zip(expert_GSK[g, s], assigned_GSK[g, s], strict=True):
                count_E[expert] += assigned
        count_E = count_E if share_E is None else np.asarray(share_E, float)
        mean_prob_E = sum(probs_GSE[g, s] for g, s in part) / len(part)
        losses.append(num_experts * sum(count_E / count_E.sum() * mean_prob_E))
    return sum(losses) / len(losses)


def cv_squared(value_GSE, token_mask_GS, *, over: str, sequence_GS=None):
    """Variance over squared mean of the experts' sums, the mean over parts."""
    losses = []
    for part in parts(token_mask_GS, over, sequence_GS):
        total_E = sum(value_GSE[g, s] for g, s in part)
        mean = sum(total_E) / len(total_E)
        losses.append(sum((total_E - mean) ** 2) / len(total_E) / mean**2)
    return sum(losses) / len(losses)


def entropy(probs_GSE, token_mask_GS):
    """The mean entropy of the tokens."""
    (part,) = parts(token_mask_GS, "global")
    return sum(_entropy(probs_GSE[g, s]) for g, s in part) / len(part)


def mean_entropy(probs_GSE, token_mask_GS, *, over: str, sequence_GS=None):
    """log E minus the entropy of the mean distribution, the mean over parts."""
    losses = []
    for part in parts(token_mask_GS, over, sequence_GS):
        mean_prob_E = sum(probs_GSE[g, s] for g, s in part) / len(part)
        losses.append(np.log(len(mean_prob_E)) - _entropy(mean_prob_E))
    return sum(losses) / len(losses)


def _entropy(probs_E):
    return -sum(p * np.log(p) for p in probs_E)
