"""Hash, expert choice, Soft MoE and Sinkhorn in numpy, one token at a time.

As in `tests.oracle`: functions of decisions give integers and booleans; functions of numbers are
analytic and accept complex input, so that `tests.oracle.gradient` can step in the imaginary direction.
"""

from __future__ import annotations

import numpy as np

from tests.oracle import best_first


def queue(expert_GSK, mask_GS, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots and kept choices: all first choices in token order, then all second ones, and so on.

    Choices of a later rank queue behind the kept ones of the ranks before.
    """
    num_groups, num_tokens, num_choices = expert_GSK.shape
    slot_GSK = np.zeros(expert_GSK.shape, int)
    for g in range(num_groups):
        count = {}
        for k in range(num_choices):
            count = {e: min(n, capacity) for e, n in count.items()}
            for s in range(num_tokens):
                if mask_GS[g, s]:
                    e = int(expert_GSK[g, s, k])
                    slot_GSK[g, s, k] = count.get(e, 0)
                    count[e] = count.get(e, 0) + 1
    return slot_GSK, mask_GS[..., None] & (slot_GSK < capacity)


# Hash.


def hashed_experts(token_id: int, num_experts: int, num_choices: int, seed: int) -> list[int]:
    """The experts whose 24-bit hash together with the id is largest, in Python's integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    salts = [mix((e + mix(seed % 2**32)) % 2**32) for e in range(num_experts)]
    hashes = [mix(mix(token_id % 2**32) ^ salt) // 256 for salt in salts]
    return best_first(hashes)[:num_choices]


# Expert choice.


def picks(probs_GSE, mask_GS, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens each expert picks, and their slots, which are in token order."""
    picked_GSE = np.zeros(probs_GSE.shape, bool)
    slot_GSE = np.zeros(probs_GSE.shape, int)
    for g in range(len(probs_GSE)):
        real = [s for s in range(probs_GSE.shape[1]) if mask_GS[g, s]]
        for e in range(probs_GSE.shape[2]):
            best = best_first([probs_GSE[g, s, e] for s in real])[:capacity]
            for slot, s in enumerate(sorted(real[i] for i in best)):
                picked_GSE[g, s, e] = True
                slot_GSE[g, s, e] = slot
    return picked_GSE, slot_GSE


# Soft MoE.


def soft_logits(x_GSM, phi_MEC, scale):
    """scale times the cosine of every token and slot vector."""

    def unit(vector):
        return vector / np.sqrt(sum(value**2 for value in vector) + 1e-12)

    num_groups, num_tokens, _ = x_GSM.shape
    _, num_experts, num_slots = phi_MEC.shape
    logits_GSEC = np.zeros(
        (num_groups, num_tokens, num_experts, num_slots),
        np.result_type(x_GSM.dtype, phi_MEC.dtype, type(scale)),
    )
    for g, s, e, c in np.ndindex(logits_GSEC.shape):
        logits_GSEC[g, s, e, c] = scale * sum(unit(x_GSM[g, s]) * unit(phi_MEC[:, e, c]))
    return logits_GSEC


def soft_weights(logits_GSEC, mask_GS):
    """Dispatch and combine: each slot's shares of the real tokens, each token's of the slots."""
    dispatch_GSEC = np.zeros_like(logits_GSEC)
    combine_GSEC = np.zeros_like(logits_GSEC)
    num_groups, num_tokens, num_experts, num_slots = logits_GSEC.shape
    for g in range(num_groups):
        real = [s for s in range(num_tokens) if mask_GS[g, s]]
        for e, c in np.ndindex(num_experts, num_slots):
            total = sum(np.exp(logits_GSEC[g, s, e, c]) for s in real)
            for s in real:
                dispatch_GSEC[g, s, e, c] = np.exp(logits_GSEC[g, s, e, c]) / total
        for s in real:
            combine_GSEC[g, s] = np.exp(logits_GSEC[g, s]) / np.exp(logits_GSEC[g, s]).sum()
    return dispatch_GSEC, combine_GSEC


def soft_layer(x_GSM, dispatch_GSEC, combine_GSEC, expert):
    """Mixes tokens into slots, runs `expert(e, vector)` on each, mixes slots into tokens."""
    y_GSM = np.zeros(x_GSM.shape, np.result_type(x_GSM.dtype, combine_GSEC.dtype))
    for g, _, e, c in np.ndindex((len(x_GSM), 1, *dispatch_GSEC.shape[2:])):
        mixture_M = sum(
            dispatch_GSEC[g, s, e, c] * x_GSM[g, s]
            for s in range(x_GSM.shape[1])
            if dispatch_GSEC[g, s, e, c] != 0
        )
        if np.ndim(mixture_M) == 0:
            continue  # a group of padding
        for s in range(x_GSM.shape[1]):
            y_GSM[g, s] += combine_GSEC[g, s, e, c] * expert(e, mixture_M)
    return y_GSM


# Sinkhorn.


def transport(logits_SE, num_iterations: int) -> np.ndarray:
    """exp(logits) of real tokens, scaled by rows to 1 and by columns to S / E, and rows once more."""
    plan_SE = np.exp(np.asarray(logits_SE, np.float64))
    num_tokens, num_experts = plan_SE.shape
    for _ in range(num_iterations):
        for s in range(num_tokens):
            plan_SE[s] /= plan_SE[s].sum()
        for e in range(num_experts):
            plan_SE[:, e] *= num_tokens / num_experts / plan_SE[:, e].sum()
    return plan_SE / plan_SE.sum(axis=1, keepdims=True)


def assigned_experts(logits_GSE, mask_GS, num_choices: int, num_iterations: int) -> np.ndarray:
    """The experts where each real token's row of its group's transport plan is largest."""
    expert_GSK = np.zeros((*mask_GS.shape, num_choices), int)
    for g in range(len(logits_GSE)):
        real = [s for s in range(mask_GS.shape[1]) if mask_GS[g, s]]
        if not real:
            continue
        for s, row in zip(real, transport(logits_GSE[g, real], num_iterations), strict=True):
            expert_GSK[g, s] = best_first(row)[:num_choices]
    return expert_GSK


def sigmoid(values):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-values))
