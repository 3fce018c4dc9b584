"""Selection limited to a few groups of experts, so that a token travels to few devices."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.checks import check_choice
from moe.routing.token_choice import best_experts

GroupScore = Literal["max", "top2_sum"]


def limited_to_groups(
    scores_GSE: jax.Array,
    *,
    num_choices: int,
    num_expert_groups: int,
    num_kept_groups: int,
    group_score: GroupScore,
) -> jax.Array:
    """Rules out the experts of all but each token's best groups.

    Experts in order form `num_expert_groups` equal groups (not those that tokens are cut into). Put
    each on one device or node, and no token is sent to more than `num_kept_groups` of them.

    Args:
      scores_GSE: what experts are chosen by.
      num_choices: K, experts that are going to be chosen.
      num_expert_groups: a divisor of E; 1 is no limit.
      num_kept_groups: groups a token may choose from.
      group_score: a group is as good as its best expert ("max", DeepSeek-V2) or as the sum of its
        two best ("top2_sum", DeepSeek-V3). Ties go to the lower index.

    Returns:
      scores_GSE, -inf outside the kept groups.

    Raises:
      UserError: groups that do not divide E, fewer experts in the kept groups than choices, more
        groups kept than there are, or a sum of two in groups of one.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.2.2; DeepSeek-V3 (arXiv:2412.19437), 2.1.2.
    """
    *leading, num_experts = scores_GSE.shape
    _check_groups(num_experts, num_choices, num_expert_groups, num_kept_groups, group_score)
    if num_kept_groups == num_expert_groups:
        return scores_GSE
    group_size = num_experts // num_expert_groups
    by_group = scores_GSE.reshape(*leading, num_expert_groups, group_size)
    group_scores = jnp.max(by_group, axis=-1)
    if group_score == "top2_sum":
        best = jax.nn.one_hot(jnp.argmax(by_group, axis=-1), group_size, dtype=bool)
        group_scores += jnp.max(jnp.where(best, -jnp.inf, by_group), axis=-1)
    kept = best_experts(group_scores, num_kept_groups)
    kept = jnp.any(jax.nn.one_hot(kept, num_expert_groups, dtype=bool), axis=-2)
    return jnp.where(jnp.repeat(kept, group_size, axis=-1), scores_GSE, -jnp.inf)


def _check_groups(num_experts, num_choices, num_groups, num_kept, group_score):
    check_choice("group_score", group_score, GroupScore)
    if num_groups < 1 or num_experts % num_groups:
        raise UserError(
            f"num_expert_groups must divide num_experts: got num_expert_groups={num_groups}, "
            f"num_experts={num_experts}. Change one of them; 1 is no limit."
        )
    if not 1 <= num_kept <= num_groups:
        raise UserError(
            f"num_kept_groups must be in [1, num_expert_groups]: got num_kept_groups={num_kept}, "
            f"num_expert_groups={num_groups}. Change one of them."
        )
    group_size = num_experts // num_groups
    if num_choices > num_kept * group_size:
        raise UserError(
            f"num_choices must not exceed the experts of the kept groups: got "
            f"num_choices={num_choices}, num_kept_groups={num_kept} of {group_size} experts each. "
            "Keep more groups or choose fewer experts."
        )
    if group_score == "top2_sum" and group_size < 2 and num_kept < num_groups:
        raise UserError(
            f"group_score must be 'max' for groups of one expert: got {group_score!r}, "
            f"num_expert_groups={num_groups}, num_experts={num_experts}. Make larger groups."
        )
