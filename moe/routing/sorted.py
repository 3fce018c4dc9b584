"""Dispatch without slots: rows sorted by expert, as many for each as chose it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe.routing.plan import RoutingPlan
from moe.routing.rows import collect, spread


def sorted_dispatch(plan: RoutingPlan, x_GSM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Copies each kept token once for each of its experts, in the order of the experts.

    Nothing is padded: what a plan keeps is computed, whatever its capacity. All groups together are
    one sequence of rows.

    Returns:
      x_RM with R = G * S * K, and group_sizes_E (int32): expert e has the group_sizes_E[e] rows after
      those of the experts before it. Rows past the last group are zero.

    Source: the ragged groups of Gale et al. 2022, MegaBlocks (arXiv:2211.15841), without blocks.
    """
    place_1TK, row_of_place_1R = _places(plan)
    x_1RM = spread(x_GSM.reshape(1, -1, x_GSM.shape[-1]), place_1TK, row_of_place_1R)
    return x_1RM[0], group_sizes(plan)


def sorted_combine(plan: RoutingPlan, y_RM: jax.Array) -> jax.Array:
    """Adds up each token's expert outputs, weighted by its gates. Returns y_GSM in y's type.

    Same numbers and gradients as `einsum_combine`. Sums in float32.
    """
    num_groups, group_size, num_choices = plan.expert_GSK.shape
    gate_1TK = plan.gate_GSK.reshape(1, -1, num_choices)
    return collect(y_RM[None], gate_1TK, *_places(plan)).reshape(num_groups, group_size, -1)


def group_sizes(plan: RoutingPlan) -> jax.Array:
    """group_sizes_E, int32: kept choices of each expert over all groups."""
    expert_R = jnp.where(plan.kept_GSK, plan.expert_GSK, plan.num_experts).reshape(-1)
    return jnp.bincount(expert_R, length=plan.num_experts).astype(jnp.int32)


def _places(plan: RoutingPlan) -> tuple[jax.Array, jax.Array]:
    """A row's place is its position in the stable sort by expert; choices not kept have none."""
    num_choices = plan.expert_GSK.shape[-1]
    kept_R = plan.kept_GSK.reshape(-1)
    num_rows = len(kept_R)
    expert_R = jnp.where(kept_R, plan.expert_GSK.reshape(-1), plan.num_experts)
    order_R = jnp.argsort(expert_R, stable=True).astype(jnp.int32)
    position_R = jnp.zeros_like(order_R).at[order_R].set(jnp.arange(num_rows, dtype=jnp.int32))
    place_R = jnp.where(kept_R, position_R, num_rows)
    row_of_place_R = jnp.where(jnp.arange(num_rows) < jnp.sum(kept_R), order_R, num_rows)
    return place_R.reshape(1, -1, num_choices), row_of_place_R[None]
