"""Two-level routing: a gate over groups of experts, and one over the experts of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe.errors import UserError


def two_level_logits(outer_GSA: jax.Array, inner_GSE: jax.Array) -> jax.Array:
    """Logits of p(group) * p(expert | group), for any rule that takes logits.

    Experts in order form A equal groups; `inner_GSE` is normalised in each of them.

    Args:
      outer_GSA: logits of the groups of experts; A divides E.
      inner_GSE: logits of the experts.

    Returns:
      logits_GSE, float32. Their logsumexp is that of `outer_GSA`, so a z-loss sees the outer gate.

    Raises:
      UserError: A does not divide E, or the tokens are not the same.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), appendix B, equation 12. There the outer gate
    chooses groups first; here the products compete, so that all choices may fall in one group.
    """
    *tokens, num_groups = outer_GSA.shape
    num_experts = inner_GSE.shape[-1]
    if list(inner_GSE.shape[:-1]) != tokens or num_experts % num_groups:
        raise UserError(
            f"outer_GSA must be of the tokens of inner_GSE, and its groups divide the experts: got "
            f"{outer_GSA.shape} and {inner_GSE.shape}. Change the number of groups or experts."
        )
    inner = inner_GSE.astype(jnp.float32).reshape(*tokens, num_groups, -1)
    joint = outer_GSA.astype(jnp.float32)[..., None] + jax.nn.log_softmax(inner, axis=-1)
    return joint.reshape(inner_GSE.shape)
