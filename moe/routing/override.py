"""Forcing a routing: masked outputs, missing experts, a perfectly even load.

A plan may also be captured from one call and passed to another; see `MoE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from moe.errors import UserError
from moe.routing.checks import check_router_inputs
from moe.routing.plan import RoutingPlan, SoftPlan
from moe.routing.token_choice import Queueing, normalized, queue_for_slots, real_logits, values_of


def mask_expert_outputs(
    plan: RoutingPlan | SoftPlan, rate: float, *, key: jax.Array | None = None
) -> RoutingPlan:
    """Expert output masking (EOM), a dropout of whole expert outputs that leaves the rest of a token.

    Args:
      plan: of any router with gates. Experts, slots and load stay: a masked output is computed.
      rate: share of the kept choices that is masked, in [0, 1).
      key: a mask is drawn and the gates of masked choices are 0; None is evaluation: every gate is
        multiplied by 1 - rate, so that a token's expected output is the same. Neither renormalises.

    Returns:
      The plan with other gates.

    Raises:
      UserError: a rate outside [0, 1), or a plan without gates.

    Source: NLLB team 2022 (arXiv:2207.04672), expert output masking, and the published code. The
    Transformers port masks single numbers of an output, scales those that are left by
    1 / (1 - rate), and multiplies by 1 - rate in evaluation as well.
    """
    if isinstance(plan, SoftPlan):
        raise UserError(
            f"plan must choose experts: got {type(plan).__name__}, whose weights are dense. "
            "Set output_masking=0 or use a router with gates."
        )
    if not 0 <= rate < 1:
        raise UserError(f"rate must be in [0, 1): got {rate}. NLLB uses 0.2.")
    factor = jnp.float32(1 - rate)
    if key is not None:
        factor = jax.random.bernoulli(key, 1 - rate, plan.gate_GSK.shape)
    return dataclasses.replace(plan, gate_GSK=plan.gate_GSK * factor)


def balanced(
    logits_GSE: jax.Array,
    *,
    num_choices: int,
    capacity: int,
    token_mask_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Deals real tokens out in turn, whatever they are: what a layer could do if it were balanced.

    Choice k of the n-th real token of group g is expert (g + n K + k) mod E. For throughput ceilings;
    a model trained without it makes no sense with it.

    Args:
      logits_GSE: router logits; they decide the gates alone. Zeros give gates of 1/K.
      num_choices: K, in [1, E].
      capacity: C; nothing is dropped from ceil(n K / E) on, n being the real tokens of a group.
      token_mask_GS: False for padding, which takes no turn.
      queueing: as for `top_k`.

    Returns:
      The plan. Loads in a group differ by one at most, and its gates are those of `top_k`: the
      probabilities of the choices over their sum.

    Raises:
      UserError: K outside [1, E], capacity < 1, or a mask whose shape is not (G, S).
    """
    check_router_inputs(
        logits_GSE, capacity=capacity, num_choices=num_choices, token_mask_GS=token_mask_GS
    )
    logits_GSE, token_mask_GS = real_logits(logits_GSE, token_mask_GS)
    num_groups, _, num_experts = logits_GSE.shape
    turn_GS = jnp.cumsum(token_mask_GS, axis=1, dtype=jnp.int32) - token_mask_GS
    first_GS = turn_GS * num_choices + jnp.arange(num_groups)[:, None]
    expert_GSK = (first_GS[..., None] + jnp.arange(num_choices)) % num_experts
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    return queue_for_slots(
        logits_GSE,
        probs_GSE,
        expert_GSK,
        normalized(values_of(expert_GSK, probs_GSE)),
        token_mask_GS=token_mask_GS,
        capacity=capacity,
        **queueing,
    )


def without_experts(logits_GSE: jax.Array, experts: Sequence[int]) -> jax.Array:
    """Logits in which the experts are impossible, so that tokens are routed to the next best ones.

    Args:
      logits_GSE: router logits, in float32 or with -inf.
      experts: indices in [0, E), at least one of E missing. A router that chooses K experts needs K.

    Returns:
      The logits, -inf for the experts: probability 0, no gradient.

    Raises:
      UserError: an index outside [0, E), or all experts.
    """
    excluded_E = _excluded(experts, logits_GSE.shape[-1])
    return jnp.where(excluded_E, -jnp.inf, logits_GSE)


def drop_experts(
    plan: RoutingPlan, experts: Sequence[int], *, renormalize: bool = False
) -> RoutingPlan:
    """The plan without what the experts do: their choices are dropped, and counted as dropped.

    Args:
      plan: of any index router.
      experts: indices in [0, E).
      renormalize: the gates left to a token take over those it lost, so that their sum stays; a token
        that lost all has none either way. Otherwise its output is smaller.

    Returns:
      The plan; no token goes to another expert than before.

    Raises:
      UserError: an index outside [0, E), or all experts.
    """
    excluded_E = jnp.asarray(_excluded(experts, plan.num_experts))
    kept_GSK = plan.kept_GSK & ~excluded_E[plan.expert_GSK]
    gate_GSK = plan.gate_GSK * kept_GSK
    if renormalize:
        total_GS1 = jnp.sum(plan.gate_GSK, axis=-1, keepdims=True)
        gate_GSK = normalized(gate_GSK) * total_GS1
    return dataclasses.replace(plan, kept_GSK=kept_GSK, gate_GSK=gate_GSK)


def _excluded(experts: Sequence[int], num_experts: int) -> np.ndarray:
    if not all(0 <= e < num_experts for e in experts) or len(set(experts)) == num_experts:
        raise UserError(
            f"experts must be indices in [0, {num_experts}), not all of them: got {tuple(experts)}. "
            "Leave one that tokens can go to."
        )
    return np.isin(np.arange(num_experts), np.asarray(experts, int))
