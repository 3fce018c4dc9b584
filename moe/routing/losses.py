"""What a router is trained with besides the task: balance and small logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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


def _mean_over_real(x_GSE: jax.Array, weight_GS: jax.Array, num_real_G: jax.Array) -> jax.Array:
    total_GE = jnp.sum(x_GSE * weight_GS[..., None], axis=1)
    return total_GE / jnp.maximum(num_real_G, 1)[:, None]
