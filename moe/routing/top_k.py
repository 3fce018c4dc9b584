"""Top-k routing with the gate conventions in use."""

from __future__ import annotations

from typing import Literal, Unpack

import jax

from moe.routing.checks import check_choice, check_router_inputs
from moe.routing.group_limit import GroupScore, limited_to_groups
from moe.routing.plan import RoutingPlan
from moe.routing.token_choice import (
    Queueing,
    best_experts,
    normalized,
    queue_for_slots,
    real_logits,
    values_of,
)

Gates = Literal["softmax_then_top_k", "renormalized", "softmax_over_selected"]


def top_k(
    logits_GSE: jax.Array,
    *,
    num_choices: int,
    capacity: int,
    gates: Gates = "renormalized",
    num_expert_groups: int = 1,
    num_kept_groups: int = 1,
    group_score: GroupScore = "max",
    token_mask_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Sends each token to its K most probable experts while they have room. Nothing is random.

    Args:
      logits_GSE: router logits of any float type; E at least 2.
      num_choices: K, in [1, E].
      capacity: C, slots per group and expert, at least 1; S or more is dropless.
      gates: "softmax_then_top_k" takes the probabilities as they are (Switch; Qwen-MoE and
        DeepSeek-V2 as published); "renormalized" divides them by their sum over the K chosen
        (GShard); "softmax_over_selected" is the softmax of the K chosen logits (Mixtral). The last
        two are one function; they differ only where probabilities underflow. With K = 1 both are 1,
        so that only the losses teach the router.
      num_expert_groups, num_kept_groups, group_score: see `limited_to_groups`; no limit by default.
      token_mask_GS: False for padding, which takes no slot and counts in no loss.
      queueing: `slot_rule`, `batch_priority` and `renormalize_after_drop`; see `Queueing`.

    Returns:
      The plan. Gates carry gradient to the logits; experts and slots are integers.

    Raises:
      UserError: K outside [1, E], capacity < 1, an unknown convention or rule, groups that do not
        divide or hold too few experts, or a mask whose shape is not (G, S).

    Source: Shazeer et al. 2017 (arXiv:1701.06538), equations 3 and 5, without the noise;
    Jiang et al. 2024 (arXiv:2401.04088), section 2.1. Slots as in `top2`.
    """
    check_router_inputs(
        logits_GSE, capacity=capacity, num_choices=num_choices, token_mask_GS=token_mask_GS
    )
    check_choice("gates", gates, Gates)
    logits_GSE, token_mask_GS = real_logits(logits_GSE, token_mask_GS)
    # By logits, not probabilities: they still differ where those have underflowed to 0.
    eligible_GSE = limited_to_groups(
        logits_GSE,
        num_choices=num_choices,
        num_expert_groups=num_expert_groups,
        num_kept_groups=num_kept_groups,
        group_score=group_score,
    )
    expert_GSK = best_experts(eligible_GSE, num_choices)
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    if gates == "softmax_over_selected":
        gate_GSK = jax.nn.softmax(values_of(expert_GSK, logits_GSE), axis=-1)
    else:
        gate_GSK = values_of(expert_GSK, probs_GSE)
        gate_GSK = normalized(gate_GSK) if gates == "renormalized" else gate_GSK
    return queue_for_slots(
        logits_GSE,
        probs_GSE,
        expert_GSK,
        gate_GSK,
        token_mask_GS=token_mask_GS,
        capacity=capacity,
        **queueing,
    )
