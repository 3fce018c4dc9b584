"""How even a load is: numbers without unit, computed from the shares of the experts.

A share is the fraction of a layer's token choices that one expert received; the last axis holds the
experts and sums to 1, leading axes are free. Shares of a layer that received nothing are nan, and
so is every number made of them. With K choices per token "collapsed" means that all tokens choose
the same K experts; K = 1 in the limits below unless K is named.
"""

from __future__ import annotations

import numpy as np


def shares(counts_E: np.ndarray) -> np.ndarray:
    """Counts of choices as fractions of their sum over the experts; nan where the sum is 0."""
    total = counts_E.sum(-1, keepdims=True, dtype=np.float64)
    return np.divide(counts_E, total, out=np.full(counts_E.shape, np.nan), where=total > 0)


def max_over_mean(share_E: np.ndarray) -> np.ndarray:
    """Load of the busiest expert over the mean load: 1 balanced, E / K collapsed.

    It is also the smallest capacity factor at which nothing would be dropped (see `drop_rate_at`).
    """
    return share_E.max(-1) * share_E.shape[-1]


def variation(share_E: np.ndarray) -> np.ndarray:
    """Coefficient of variation, standard deviation over mean: 0 balanced, sqrt(E / K - 1) collapsed."""
    return share_E.std(-1) * share_E.shape[-1]


def effective_experts(share_E: np.ndarray) -> np.ndarray:
    """How many evenly used experts have the same load entropy: E balanced, K collapsed."""
    return np.exp(entropy(share_E))


def entropy(share_E: np.ndarray) -> np.ndarray:
    """Shannon entropy in nats: log E balanced, log K collapsed."""
    return -_times_log(share_E, share_E).sum(-1)


def drop_rate_at(share_E: np.ndarray, capacity_factor: float) -> np.ndarray:
    """The fraction of choices that `capacity_factor` would drop: sum_e max(0, share_e - factor / E).

    The model: one group, so large that its shares are those measured. Real groups are small and
    each is less even than their sum, so training drops more; a random second policy makes fewer
    choices than capacity is planned for, so it drops less. `min_capacity` is left out.
    """
    room = capacity_factor / share_E.shape[-1]
    return np.maximum(share_E - room, 0).sum(-1)


def divergence_bits(share_RE: np.ndarray) -> np.ndarray:
    """How far each row's load lies from the rows' mean load: Kullback-Leibler divergence in bits.

    Every row weighs the same, whatever its number of tokens, so that the number describes the
    router and not the mix of the data. 0 for a row like the mean; at most log2 R, for a row that
    uses experts nobody else uses. The mean over rows is the mutual information of row and expert.
    Small samples read too high, by about (E - 1) / (2 n ln 2) bits for n choices.

    Args:
      share_RE: a row for each direction; leading axes are free. Rows of nan are left out.
    """
    counted = ~np.isnan(share_RE).any(-1, keepdims=True)
    rows = np.maximum(counted.sum(-2, keepdims=True), 1)
    mean_E = np.where(counted, share_RE, 0).sum(-2, keepdims=True) / rows
    return (_times_log(share_RE, share_RE) - _times_log(share_RE, mean_E)).sum(-1) / np.log(2)


def _times_log(factor: np.ndarray, argument: np.ndarray) -> np.ndarray:
    """factor * log(argument) with 0 log 0 = 0."""
    safe = np.where(factor > 0, argument, 1)
    return factor * np.log(safe)
