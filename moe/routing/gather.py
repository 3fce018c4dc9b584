"""Dispatch by indices: memory O(tokens * K * M), gathers forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe.routing.plan import RoutingPlan


def gather_dispatch(plan: RoutingPlan, x_GSM: jax.Array) -> jax.Array:
    """Copies each kept token into its slots; an empty slot is zero. Returns x_GECM.

    Same numbers and gradients as `einsum_dispatch`; never holds a tensor of G * S * E * C. Only
    reverse-mode derivatives are defined (`jax.grad`, not `jax.jvp`).
    """
    num_groups, _, num_choices = plan.expert_GSK.shape
    # Row s * K + k is token s once more for its choice k; the sum over K is the repeat's gradient.
    x_GRM = jnp.repeat(x_GSM, num_choices, axis=1)
    x_GQM = _permute_rows(x_GRM, _row_of_slot(plan), _slot_of_row(plan))
    return x_GQM.reshape(num_groups, plan.num_experts, plan.capacity, -1)


def gather_combine(plan: RoutingPlan, y_GECM: jax.Array) -> jax.Array:
    """Adds up each token's expert outputs, weighted by its gates. Returns y_GSM in y's type.

    Same numbers and gradients as `einsum_combine`. Sums in float32.
    """
    num_groups = y_GECM.shape[0]
    y_GQM = y_GECM.reshape(num_groups, plan.num_experts * plan.capacity, -1)
    y_GRM = _permute_rows(y_GQM, _slot_of_row(plan), _row_of_slot(plan))
    y_GSKM = y_GRM.reshape(*plan.expert_GSK.shape, -1)
    y_GSM = jnp.sum(plan.gate_GSK[..., None] * y_GSKM.astype(jnp.float32), axis=2)
    return y_GSM.astype(y_GECM.dtype)


def _slot_of_row(plan: RoutingPlan) -> jax.Array:
    """For row r = s * K + k, its flat slot q = e * C + c, or E * C where it has none."""
    return plan.flat_slot_GSK().reshape(plan.expert_GSK.shape[0], -1)


def _row_of_slot(plan: RoutingPlan) -> jax.Array:
    """The inverse: for each flat slot its row, or S * K where it is empty."""
    slot_GR = _slot_of_row(plan)
    num_rows, num_slots = slot_GR.shape[1], plan.num_experts * plan.capacity

    def invert(slot_R):
        empty_Q = jnp.full((num_slots,), num_rows, jnp.int32)
        return empty_Q.at[slot_R].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")

    return jax.vmap(invert)(slot_GR)


@jax.custom_vjp
def _permute_rows(x_GRM: jax.Array, source_GQ: jax.Array, target_GR: jax.Array) -> jax.Array:
    """Row q of the result is row source[q] of x; zero where source[q] is past the end.

    `target` is the inverse of `source`, so the gradient is the same gather the other way round.
    (The derivative JAX would find is a scatter-add, several times slower on CPU.)
    """
    return _take_rows(x_GRM, source_GQ)


def _take_rows(x_GRM, source_GQ):
    # One gather a group, not one over all: the partitioner then sees that groups never mix.
    return jax.vmap(lambda x_RM, source_Q: x_RM.at[source_Q].get(mode="fill", fill_value=0))(
        x_GRM, source_GQ
    )


def _permute_rows_forward(x_GRM, source_GQ, target_GR):
    return _take_rows(x_GRM, source_GQ), target_GR


def _permute_rows_backward(target_GR, dy_GQM):
    return _take_rows(dy_GQM, target_GR), None, None


_permute_rows.defvjp(_permute_rows_forward, _permute_rows_backward)
