"""Sigmoid scores, balanced by a bias on the selection: DeepSeek-V3's routing."""

from __future__ import annotations

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.checks import check_router_inputs
from moe.routing.group_limit import GroupScore, limited_to_groups
from moe.routing.plan import RoutingPlan
from moe.routing.token_choice import Queueing, best_experts, queue_for_slots, real_logits, values_of


def sigmoid_top_k(
    logits_GSE: jax.Array,
    bias_E: jax.Array,
    *,
    num_choices: int,
    capacity: int,
    scale: float = 1.0,
    num_expert_groups: int = 1,
    num_kept_groups: int = 1,
    group_score: GroupScore = "top2_sum",
    token_mask_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Chooses the K experts of the highest sigmoid(logit) + bias; the gates know no bias.

        s_e = sigmoid(logits_e)
        chosen = the K largest of s_e + bias_e
        gate_e = scale * s_e / (sum of s over the chosen)

    Args:
      logits_GSE: router logits of any float type; E at least 2.
      bias_E: what `updated_bias` keeps; no gradient reaches it.
      num_choices: K, in [1, E]. With K = 1 the gate is `scale`: only the losses teach the router.
      capacity: C, slots per group and expert, at least 1; S or more is dropless.
      scale: what the gates of a token sum to; positive. 2.5 in DeepSeek-V3.
      num_expert_groups, num_kept_groups, group_score: see `limited_to_groups`, here of the biased
        scores; no limit by default.
      token_mask_GS: False for padding, which takes no slot and counts in no loss.
      queueing: `slot_rule`, `batch_priority` and `renormalize_after_drop`; see `Queueing`.

    Returns:
      The plan. `probs_GSE` are the scores divided by their sum, of which DeepSeek-V3's own balance
      loss is taken; first choices are those of the highest biased score.

    Raises:
      UserError: K outside [1, E], capacity < 1, a scale that is not positive, a bias that is not
        (E,), an unknown rule, groups that do not divide or hold too few experts, or a mask whose
        shape is not (G, S).

    Source: DeepSeek-V3 (arXiv:2412.19437), equations 13-16. The bias is from Wang et al. 2024
    (arXiv:2408.15664), who leave the gates unnormalised.
    """
    check_router_inputs(
        logits_GSE, capacity=capacity, num_choices=num_choices, token_mask_GS=token_mask_GS
    )
    check_scale(scale)
    if bias_E.shape != logits_GSE.shape[-1:]:
        raise UserError(
            f"bias_E must have one number for each expert: got shape {bias_E.shape}, "
            f"logits_GSE has {logits_GSE.shape}. Pass that of this layer alone."
        )
    logits_GSE, token_mask_GS = real_logits(logits_GSE, token_mask_GS)
    biased_GSE = jax.nn.sigmoid(logits_GSE) + jax.lax.stop_gradient(bias_E)
    eligible_GSE = limited_to_groups(
        biased_GSE,
        num_choices=num_choices,
        num_expert_groups=num_expert_groups,
        num_kept_groups=num_kept_groups,
        group_score=group_score,
    )
    expert_GSK = best_experts(eligible_GSE, num_choices)
    # Scores over their sum are the softmax of their logarithms, which does not underflow.
    log_scores_GSE = jax.nn.log_sigmoid(logits_GSE)
    plan = queue_for_slots(
        logits_GSE,
        jax.nn.softmax(log_scores_GSE, axis=-1),
        expert_GSK,
        jax.nn.softmax(values_of(expert_GSK, log_scores_GSE), axis=-1),
        token_mask_GS=token_mask_GS,
        capacity=capacity,
        **queueing,
    )
    return dataclasses.replace(plan, gate_GSK=scale * plan.gate_GSK)


def updated_bias(bias_E: jax.Array, assigned_E: jax.Array, rate: float) -> jax.Array:
    """The selection bias after a step: up for experts with less than the mean load, down for others.

    Args:
      bias_E: the bias of the step; leading dimensions (layers) are separate routers.
      assigned_E: choices of each expert in the step, dropped ones included
        (`ExpertLoad.assigned_E`), over the whole batch: all devices, and the sum of all microbatches.
      rate: what it moves by, whatever the load. 0.001 in both papers.

    Returns:
      bias + rate * sign(mean load - load): unchanged where the load is the mean.

    Source: Wang et al. 2024 (arXiv:2408.15664), Algorithm 1.
    """
    load_E = assigned_E.astype(jnp.float32)
    return bias_E + rate * jnp.sign(jnp.mean(load_E, axis=-1, keepdims=True) - load_E)


def check_scale(scale: float) -> None:
    """Raises a UserError unless `scale` is positive."""
    if not scale > 0:
        raise UserError(f"scale must be positive: got {scale}. 1.0 makes the gates sum to 1.")
