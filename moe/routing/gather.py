"""Dispatch by indices to the slots of limited capacity: memory O(tokens * K * M)."""

from __future__ import annotations

import jax

from moe.routing.plan import RoutingPlan
from moe.routing.rows import collect, invert, spread


def gather_dispatch(plan: RoutingPlan, x_GSM: jax.Array) -> jax.Array:
    """Copies each kept token into its slots; an empty slot is zero. Returns x_GECM.

    Same numbers and gradients as `einsum_dispatch`; never holds a tensor of G * S * E * C. Only
    reverse-mode derivatives are defined (`jax.grad`, not `jax.jvp`).
    """
    x_GQM = spread(x_GSM, *_places(plan))
    return x_GQM.reshape(len(x_GSM), plan.num_experts, plan.capacity, -1)


def gather_combine(plan: RoutingPlan, y_GECM: jax.Array) -> jax.Array:
    """Adds up each token's expert outputs, weighted by its gates. Returns y_GSM in y's type.

    Same numbers and gradients as `einsum_combine`. Sums in float32.
    """
    y_GQM = y_GECM.reshape(len(y_GECM), plan.num_experts * plan.capacity, -1)
    return collect(y_GQM, plan.gate_GSK, *_places(plan))


def _places(plan: RoutingPlan) -> tuple[jax.Array, jax.Array]:
    """A row's place is its flat slot e * C + c."""
    place_GSK = plan.flat_slot_GSK()
    return place_GSK, invert(place_GSK, plan.num_experts * plan.capacity)
