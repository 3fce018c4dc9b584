"""How a layer carries tokens to its experts and back: the choice of a back-end, and its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moe import routing
from moe.errors import UserError
from moe.layers.experts import Experts
from moe.routing import RoutingPlan, SoftPlan
from moe.sharding import constrain, mesh_axes, num_shards

Dispatch = Literal["auto", "sorted", "gather", "einsum"]

_TO_SLOTS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "gather": (routing.gather_dispatch, routing.gather_combine),
    "einsum": (routing.einsum_dispatch, routing.einsum_combine),
}


class DispatchChoice(NamedTuple):
    """A back-end and why it was taken."""

    name: Dispatch
    reason: str


def choose_dispatch(wanted: Dispatch, plan: RoutingPlan | SoftPlan) -> DispatchChoice:
    """The back-end for a plan on the mesh in force; "auto" takes the fastest, the numbers are the same.

    Raises:
      UserError: an index back-end for a plan whose weights are dense.
    """
    if isinstance(plan, SoftPlan):
        if wanted in ("sorted", "gather"):
            raise UserError(
                f'dispatch must be "einsum" or "auto" for soft routing: got {wanted!r}. '
                "Every slot is a mixture of all tokens, there is nothing to index."
            )
        return DispatchChoice("einsum", "soft routing: every slot is a mixture of all tokens")
    if wanted != "auto":
        return DispatchChoice(wanted, "asked for")
    num_devices = num_shards("experts")
    if num_devices > 1:
        return DispatchChoice(
            "gather", f"experts are split over {num_devices} devices: equal slots travel all-to-all"
        )
    if plan.expert_GSK.shape[-1] == plan.num_experts:
        return DispatchChoice("gather", "experts pick their tokens: no slot is empty")
    if jax.default_backend() == "cpu":
        return DispatchChoice("sorted", "experts are on every device: sorted rows have no padding")
    if plan.is_dropless:
        return DispatchChoice(
            "sorted", "dropless: sorted rows, not a slot for each token and expert"
        )
    return DispatchChoice(
        "gather", "limited capacity: slots of equal size make one batched product"
    )


def run_experts(
    choice: DispatchChoice, plan: RoutingPlan | SoftPlan, x_GSM: jax.Array, experts: Experts
) -> jax.Array:
    """Dispatch, experts, combine: y_GSM in x's type."""
    if choice.name == "sorted":
        assert isinstance(plan, RoutingPlan)
        return _run_sorted(plan, x_GSM, experts)
    dispatch, combine = _TO_SLOTS[choice.name]
    x_GECM = dispatch(plan, x_GSM)
    y_GECM = from_experts(experts(to_experts(x_GECM)))
    return combine(plan, y_GECM)


def to_experts(x_GECM: jax.Array) -> jax.Array:
    """From the devices that hold the tokens to those that hold the experts: x[E_expert, G, C, M].

    Swapped between two constraints, this compiles to one all-to-all. Written as a single einsum to
    EGCM with one constraint it would cost all-gathers.
    """
    x_GECM = constrain(x_GECM, "groups", None, None, None)
    return constrain(jnp.swapaxes(x_GECM, 0, 1), "experts", "exchanged_groups", None, None)


def from_experts(y_EGCM: jax.Array) -> jax.Array:
    """The way back, the second all-to-all: y[G_(data,expert), E, C, M]."""
    y_EGCM = constrain(y_EGCM, "experts", "exchanged_groups", None, None)
    return constrain(jnp.swapaxes(y_EGCM, 0, 1), "groups", None, None, None)


def _run_sorted(plan: RoutingPlan, x_GSM: jax.Array, experts: Experts) -> jax.Array:
    """Every device sorts its own tokens and holds every expert: no token crosses devices."""
    graph, weights = nnx.split(experts)

    def on_one_device(x_GSM, plan, weights):
        x_RM, group_sizes_E = routing.sorted_dispatch(plan, x_GSM)
        y_RM = nnx.merge(graph, weights).ragged(x_RM, group_sizes_E)
        return routing.sorted_combine(plan, y_RM)

    axes = mesh_axes("groups", jax.sharding.get_abstract_mesh())
    if not axes:
        return on_one_device(x_GSM, plan, weights)
    groups = jax.P(axes)
    # Of the plan, arrays with a G are split as the tokens are; its losses are whole everywhere.
    plan_specs = jax.tree.map(lambda leaf: groups if leaf.ndim else jax.P(), plan)
    on_all_devices = jax.shard_map(
        on_one_device, in_specs=(groups, plan_specs, jax.P()), out_specs=groups, check_vma=False
    )
    return on_all_devices(x_GSM, plan, weights)
