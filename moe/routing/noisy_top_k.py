"""Noisy top-k routing, the first sparsely-gated MoE."""

from __future__ import annotations

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.checks import check_router_inputs
from moe.routing.losses import cv_squared_loss
from moe.routing.plan import RoutingPlan
from moe.routing.token_choice import Queueing, best_experts, queue_for_slots, real_logits, values_of

_LEAST_STD = 1e-2  # that the load divides by; below it the gradient of the load runs away


def noisy_top_k(
    logits_GSE: jax.Array,
    noise_logits_GSE: jax.Array | None,
    *,
    num_choices: int,
    capacity: int,
    key: jax.Array | None = None,
    token_mask_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Adds learned noise to the logits, keeps the K largest, and takes the softmax over those.

        H_e = logits_e + N(0, 1) * softplus(noise_logits_e)
        gates = softmax over e of (H_e if it is among the K largest, else -inf)

    Args:
      logits_GSE: router logits of any float type; E at least 2.
      noise_logits_GSE: how much noise each gets, before the softplus; None is none (evaluation).
      num_choices: K, in [1, E].
      capacity: C, slots per group and expert, at least 1. The paper has no such limit: S or more.
      key: of the noise.
      token_mask_GS: False for padding, which takes no slot and counts in no loss.
      queueing: `slot_rule`, `batch_priority` and `renormalize_after_drop`; see `Queueing`.

    Returns:
      The plan. `probs_GSE` are those of the noisy logits; the z-loss is of the clean ones. Its
      aux loss is the paper's: CV^2 of the importance (sum of gates of an expert, before any drop)
      plus CV^2 of the load (`choice_probability`, or counts where there is no noise). It is 0 when
      balanced, and 2 * (E - 1) when every token gives one expert all its weight.

    Raises:
      UserError: K outside [1, E], capacity < 1, noise without a key or of another shape than the
        logits, an unknown rule, or a mask whose shape is not (G, S).

    Source: Shazeer et al. 2017 (arXiv:1701.06538), equations 3-7 and appendix A. Both losses have
    one weight here (both 0.1 in the paper's main results).
    """
    check_router_inputs(
        logits_GSE, capacity=capacity, num_choices=num_choices, token_mask_GS=token_mask_GS
    )
    logits_GSE, token_mask_GS = real_logits(logits_GSE, token_mask_GS)
    noisy_GSE = logits_GSE
    if noise_logits_GSE is not None:
        normal_GSE = _standard_normal(logits_GSE, noise_logits_GSE, key)
        std_GSE = jax.nn.softplus(real_logits(noise_logits_GSE, token_mask_GS)[0])
        noisy_GSE += normal_GSE * std_GSE
    expert_GSK = best_experts(noisy_GSE, num_choices)
    chosen_GSE = jax.nn.one_hot(expert_GSK, logits_GSE.shape[-1], dtype=bool).any(axis=-2)
    gates_GSE = jax.nn.softmax(jnp.where(chosen_GSE, noisy_GSE, -jnp.inf), axis=-1)
    load_GSE = chosen_GSE.astype(jnp.float32)
    if noise_logits_GSE is not None:
        load_GSE = choice_probability(logits_GSE, noisy_GSE, std_GSE, num_choices)
    plan = queue_for_slots(
        logits_GSE,
        jax.nn.softmax(noisy_GSE, axis=-1),
        expert_GSK,
        values_of(expert_GSK, gates_GSE),
        token_mask_GS=token_mask_GS,
        capacity=capacity,
        **queueing,
    )
    aux_loss = cv_squared_loss(gates_GSE, token_mask_GS) + cv_squared_loss(load_GSE, token_mask_GS)
    return dataclasses.replace(plan, aux_loss=aux_loss)


def choice_probability(
    logits_GSE: jax.Array, noisy_GSE: jax.Array, std_GSE: jax.Array, num_choices: int
) -> jax.Array:
    """P(x, i): how likely expert i is to be chosen, were its noise drawn again and no other.

    Summed over tokens it is a load that, unlike the count, has a gradient.

    Args:
      logits_GSE: without noise; float32.
      noisy_GSE: with the noise that was drawn; float32.
      std_GSE: standard deviation of the noise; taken as at least 0.01.
      num_choices: K. With K = E everything is chosen: 1.

    Returns:
      Probabilities in [0, 1]: the normal distribution function of how far the clean logit is above
      the K-th largest noisy logit of the other experts, in standard deviations.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), equations 8 and 9. The authors' code adds 0.01
    to the standard deviation everywhere; ours bounds it, and here only.
    """
    num_experts = logits_GSE.shape[-1]
    if num_choices == num_experts:
        return jnp.ones_like(logits_GSE)
    ranked_GSK = best_experts(noisy_GSE, num_choices + 1)
    last_in_GS, first_out_GS = jnp.unstack(values_of(ranked_GSK[..., -2:], noisy_GSE), axis=-1)
    chosen_GSE = jax.nn.one_hot(ranked_GSK[..., :-1], num_experts, dtype=bool).any(axis=-2)
    # Of the others: without a chosen expert the K-th largest is the one that is now left out.
    threshold_GSE = jnp.where(chosen_GSE, first_out_GS[..., None], last_in_GS[..., None])
    return jax.scipy.special.ndtr((logits_GSE - threshold_GSE) / jnp.maximum(std_GSE, _LEAST_STD))


def _standard_normal(logits_GSE, noise_logits_GSE, key) -> jax.Array:
    if noise_logits_GSE.shape != logits_GSE.shape:
        raise UserError(
            f"noise_logits_GSE must have the shape of the logits: got {noise_logits_GSE.shape}, "
            f"logits_GSE has {logits_GSE.shape}. Make them of the same tokens and experts."
        )
    if key is None:
        raise UserError(
            "key must be given for noise: got noise_logits_GSE, key=None. "
            "Pass a key in training, or noise_logits_GSE=None in evaluation."
        )
    return jax.random.normal(key, logits_GSE.shape)
