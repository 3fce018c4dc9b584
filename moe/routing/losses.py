"""What a router is trained with besides the task: balance, small logits, clear decisions.

All are scalars without weight, over the real tokens of one layer: average them over layers. Losses of
sums over tokens have a scope: a group, a sequence (both averaged over those with a real token, so
that the mean over equal microbatches is the loss of the whole batch), or "global": all tokens of the
call, under a mesh those of all devices.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.checks import check_choice
from moe.routing.plan import RoutingPlan

BalanceChoices = Literal["first", "all"]
BalanceScope = Literal["group", "sequence", "global"]


def balance_loss(
    plan: RoutingPlan,
    *,
    choices: BalanceChoices = "first",
    over: BalanceScope = "group",
    sequence_GS: jax.Array | None = None,
    share_E: jax.Array | None = None,
) -> jax.Array:
    """The load-balance loss of a plan over other choices or another scope than `plan.aux_loss`.

    E times the sum over experts of share times mean router probability. The share of an expert is
    that of the assigned choices, before any slot is full.

    Args:
      plan: of a router in which tokens choose.
      choices: "first" counts choices of rank 0 and the tokens that have one; "all" every choice.
      over: "group", "sequence" or "global", see above.
      sequence_GS: for "sequence", the row of the batch that each token is of, in [0, G * S). Not
        read for padding; a sequence may span groups.
      share_E: for "global", how the choices of a larger batch fell on the experts, as counts or
        shares. The loss is then linear in the probabilities, so its mean over equal microbatches is
        the loss of that batch. Without it every microbatch is balanced by itself.

    Returns:
      Scalar without unit: 1 when balanced, 0 when there is no real token. When every token gives one
      expert all its probability: E for "first", E / K for "all".

    Raises:
      UserError: unknown choices or scope, "sequence" without ids of the mask's shape, or a share that
        is not (E,) or not for "global".

    Gradient flows through the probabilities only: the share is a count.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), Algorithm 1, is "first" over "group". All choices
    over a sequence: DeepSeek-V3 (arXiv:2412.19437), equations 17-20. One share for the whole batch:
    Qiu et al. 2025 (arXiv:2501.11873).
    """
    check_choice("choices", choices, BalanceChoices)
    _check_share(share_E, over, plan.num_experts)
    num_counted = 1 if choices == "first" else plan.expert_GSK.shape[-1]
    expert_GSK = plan.expert_GSK[..., :num_counted]
    assigned_GSK = plan.assigned_GSK[..., :num_counted]
    chosen_GSKE = jax.nn.one_hot(expert_GSK, plan.num_experts, dtype=jnp.int32)
    count_GSE = jnp.sum(chosen_GSKE * assigned_GSK[..., None], axis=-2)
    counted_GS = jnp.any(assigned_GSK, axis=-1)
    count_NE, num_real_N = _sums(count_GSE, counted_GS, over, sequence_GS)
    prob_NE, _ = _sums(plan.probs_GSE, counted_GS, over, sequence_GS)
    if share_E is not None:
        count_NE = jax.lax.stop_gradient(share_E)[None]
    loss_N = plan.num_experts * jnp.sum(_shares(count_NE) * _shares(prob_NE), axis=-1)
    return _mean(loss_N, num_real_N > 0)


def load_balance_loss(
    probs_GSE: jax.Array, first_choice_GS: jax.Array, token_mask_GS: jax.Array
) -> jax.Array:
    """Penalises groups that send most of their tokens to few experts.

    Per group, the share of real tokens whose first choice is expert e times the mean router
    probability of e, summed over experts, times E; averaged over the groups that hold a real token.

    Args:
      probs_GSE: router probabilities, float32; each row sums to 1.
      first_choice_GS: index in [0, E) of every token's most probable expert.
      token_mask_GS: False for padding, which counts nowhere.

    Returns:
      Scalar without unit: 1 when balanced, E when every token picks one expert with probability 1,
      0 when there is no real token. The caller multiplies by its weight (1e-2 in our configs).

    Gradient flows through probs_GSE only: the share is a count.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), Algorithm 1, l_aux. Larger by E**2 than the
    paper's text, as in the authors' code, so that balance is 1 whatever E is.
    """
    num_experts = probs_GSE.shape[-1]
    weight_GS = token_mask_GS.astype(jnp.float32)
    num_real_G = weight_GS.sum(axis=1)
    first_GSE = jax.nn.one_hot(first_choice_GS, num_experts, dtype=jnp.float32)
    share_GE = _mean_over_real(first_GSE, weight_GS, num_real_G)
    mean_prob_GE = _mean_over_real(probs_GSE, weight_GS, num_real_G)
    loss_G = num_experts * jnp.sum(share_GE * mean_prob_GE, axis=-1)
    num_groups = jnp.sum(num_real_G > 0)
    return jnp.sum(loss_G) / jnp.maximum(num_groups, 1)


def router_z_loss(logits_GSE: jax.Array, token_mask_GS: jax.Array) -> jax.Array:
    """Keeps router logits small, where float32 softmax is exact and gradients are not saturated.

    The mean over real tokens of logsumexp(logits)**2.

    Args:
      logits_GSE: router logits, float32.
      token_mask_GS: False for padding, which counts nowhere.

    Returns:
      Scalar, nats squared: (log E)**2 for all-zero logits, 0 when there is no real token.

    Source: Zoph et al. 2022, ST-MoE (arXiv:2202.08906), equation 5.
    """
    weight_GS = token_mask_GS.astype(jnp.float32)
    squared_GS = jax.nn.logsumexp(logits_GSE, axis=-1) ** 2
    return jnp.sum(squared_GS * weight_GS) / jnp.maximum(jnp.sum(weight_GS), 1)


def cv_squared_loss(
    value_GSE: jax.Array,
    token_mask_GS: jax.Array,
    *,
    over: BalanceScope = "global",
    sequence_GS: jax.Array | None = None,
) -> jax.Array:
    """Shazeer's importance and load losses: how unevenly the experts' sums over tokens are spread.

    Args:
      value_GSE: of gates, the importance loss; of the probabilities that an expert is chosen
        (`choice_probability`), the load loss. Not negative.
      token_mask_GS: False for padding, which counts nowhere.
      over, sequence_GS: as in `balance_loss`. The paper's is "global": of a batch in microbatches,
        take `cv_squared` of their summed values, since the mean of their losses is larger.

    Returns:
      Scalar without unit: 0 when balanced, E - 1 when one expert has everything, E / K - 1 when K
      experts share it, 0 when there is no real token.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), equations 6, 7 and 11.
    """
    value_NE, num_real_N = _sums(value_GSE, token_mask_GS, over, sequence_GS)
    return _mean(cv_squared(value_NE), num_real_N > 0)


def cv_squared(value_E: jax.Array) -> jax.Array:
    """Squared coefficient of variation: variance over squared mean; 0 where all values are 0.

    Of the last dimension. 0 when all are equal, E - 1 when all but one are 0.
    """
    share_E = _shares(value_E)
    return value_E.shape[-1] * jnp.sum((share_E - jnp.mean(share_E, -1, keepdims=True)) ** 2, -1)


def router_entropy_loss(probs_GSE: jax.Array, token_mask_GS: jax.Array) -> jax.Array:
    """Makes each token's decision clear: the mean over real tokens of the router's entropy.

    With a positive weight tokens decide; with a negative one they stay undecided (exploration).

    Args:
      probs_GSE: router probabilities, float32.
      token_mask_GS: False for padding, which counts nowhere.

    Returns:
      Scalar, nats: log E when no token prefers an expert, 0 when each gives one expert everything,
      the same one (collapse) or not: it says nothing about balance.

    Source: the local loss of Mustafa et al. 2022, LIMoE (arXiv:2206.02770).
    """
    return _mean(_entropy(probs_GSE), token_mask_GS)


def mean_entropy_loss(
    probs_GSE: jax.Array,
    token_mask_GS: jax.Array,
    *,
    over: BalanceScope = "global",
    sequence_GS: jax.Array | None = None,
) -> jax.Array:
    """Spreads tokens over experts: log E minus the entropy of the mean router distribution.

    Together with `router_entropy_loss` every token decides, and all together are balanced.

    Args:
      probs_GSE: router probabilities, float32.
      token_mask_GS: False for padding, which counts nowhere.
      over, sequence_GS: as in `balance_loss`; a mean of "global" losses of microbatches is larger
        than the loss of the whole.

    Returns:
      Scalar, nats: 0 when balanced, log E when every token gives the same expert everything, 0 when
      there is no real token.

    Source: the global loss of Mustafa et al. 2022, LIMoE (arXiv:2206.02770), shifted by
    log E so that balance is 0, and without their threshold.
    """
    prob_NE, num_real_N = _sums(probs_GSE, token_mask_GS, over, sequence_GS)
    loss_N = jnp.log(probs_GSE.shape[-1]) - _entropy(_shares(prob_NE))
    return _mean(loss_N, num_real_N > 0)


def adapted_weight(
    weight: jax.Array | float,
    drop_rate: jax.Array | float,
    *,
    low: float,
    high: float,
    step: float = 1.02,
    least: float = 1e-4,
    most: float = 1.0,
) -> jax.Array:
    """The weight of a balance loss after a step, so that the share of dropped choices stays in a band.

    Args:
      weight: of the step.
      drop_rate: share of the step's choices that found no slot, in [0, 1].
      low, high: the band. Above it the weight grows, below it the weight shrinks.
      step: what it is multiplied or divided by.
      least, most: its bounds. Where even `most` cannot hold the band, capacity is too small.

    Returns:
      Scalar: weight * step, weight / step or weight itself, in [least, most]. The weight itself if
      the drop rate is not finite.

    Raises:
      UserError: a band that is not 0 <= low <= high <= 1, a step not above 1, or bounds that are not
        0 < least <= most.
    """
    if not 0 <= low <= high <= 1:
        raise UserError(
            f"low and high must be a band in [0, 1]: got low={low}, high={high}. Order them."
        )
    if not step > 1:
        raise UserError(f"step must be above 1: got {step}. 1.02 doubles a weight in 35 steps.")
    if not 0 < least <= most:
        raise UserError(
            f"least and most must be positive, in order: got least={least}, most={most}. Order them."
        )
    drop_rate = jnp.asarray(drop_rate, jnp.float32)
    factor = jnp.where(drop_rate > high, step, jnp.where(drop_rate < low, 1 / step, 1.0))
    return jnp.clip(weight * factor, least, most)


def _sums(
    x_GSE: jax.Array, token_mask_GS: jax.Array, over: BalanceScope, sequence_GS: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """x summed over the real tokens of each part (N groups, sequences, or the whole), their number."""
    check_choice("over", over, BalanceScope)
    x_GSE = jnp.where(token_mask_GS[..., None], x_GSE, 0)
    if over == "group":
        return jnp.sum(x_GSE, axis=1), jnp.sum(token_mask_GS, axis=1)
    if over == "global":
        return jnp.sum(x_GSE, axis=(0, 1))[None], jnp.sum(token_mask_GS)[None]
    if sequence_GS is None or sequence_GS.shape != token_mask_GS.shape:
        got = None if sequence_GS is None else sequence_GS.shape
        raise UserError(
            f"sequence_GS must have the shape of the token mask: got {got}, the mask has "
            f"{token_mask_GS.shape}. Pass the row of the batch that each token is of."
        )
    num_tokens = token_mask_GS.size  # no batch has more rows than tokens
    sequence_T = jnp.where(token_mask_GS, sequence_GS, num_tokens).reshape(-1)  # out of range: lost
    x_TE = x_GSE.reshape(num_tokens, -1)
    count_T = jnp.ones(num_tokens, jnp.int32)
    return (
        jax.ops.segment_sum(x_TE, sequence_T, num_segments=num_tokens),
        jax.ops.segment_sum(count_T, sequence_T, num_segments=num_tokens),
    )


def _shares(x_NE: jax.Array) -> jax.Array:
    """x over its sum; 0 where all is 0."""
    total_N1 = jnp.sum(x_NE, axis=-1, keepdims=True)
    return x_NE / jnp.where(total_N1 == 0, 1, total_N1)


def _entropy(probs_E: jax.Array) -> jax.Array:
    """In nats; its gradient is finite where a probability is 0."""
    return -jnp.sum(probs_E * jnp.log(jnp.where(probs_E > 0, probs_E, 1)), axis=-1)


def _mean(x: jax.Array, counted: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(counted, x, 0)) / jnp.maximum(jnp.sum(counted), 1)


def _mean_over_real(x_GSE: jax.Array, weight_GS: jax.Array, num_real_G: jax.Array) -> jax.Array:
    total_GE = jnp.sum(x_GSE * weight_GS[..., None], axis=1)
    return total_GE / jnp.maximum(num_real_G, 1)[:, None]


def _check_share(share_E: jax.Array | None, over: str, num_experts: int) -> None:
    if share_E is not None and (over != "global" or share_E.shape != (num_experts,)):
        raise UserError(
            f'share_E must have shape (E,) and go with over="global": got {share_E.shape} with '
            f"E={num_experts} and over={over!r}. Leave it out or sum it over the whole batch."
        )
