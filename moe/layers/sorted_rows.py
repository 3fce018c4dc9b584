"""Rows sorted by expert, and sent to the devices that hold the experts: dropless across devices."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from moe import routing
from moe.layers.experts import Experts
from moe.routing import RoutingPlan
from moe.sharding import constrain, mesh_axes
from moe.sharding.exchange import EXCHANGE, Route, exchange, plan_route


class _Axes(NamedTuple):
    """What mesh axes are for where rows are sorted.

    Attributes:
      groups: tokens are split over them.
      experts: experts are; along those of `groups` rows are exchanged.
      hidden: the inside of each expert is, and tokens are copies of one another.
    """

    groups: tuple[str, ...]
    experts: tuple[str, ...]
    hidden: tuple[str, ...]

    @classmethod
    def in_force(cls) -> _Axes:
        """Those of the mesh and layout in force; weights split further are fetched."""
        mesh = jax.sharding.get_abstract_mesh()
        groups, experts, hidden = (mesh_axes(dim, mesh) for dim in ("groups", "experts", "hidden"))
        hidden = tuple(axis for axis in hidden if axis not in groups + experts)
        return cls(groups, experts, hidden)

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Devices along them have tokens for one another."""
        return tuple(axis for axis in self.experts if axis in self.groups)

    @property
    def summed(self) -> tuple[str, ...]:
        """Devices along them have the same tokens and a part of what their experts say."""
        return tuple(axis for axis in self.experts if axis not in self.groups) + self.hidden

    def spec(self, variable: nnx.Variable) -> jax.P:
        """How an expert's parameter is split."""
        axes = {"experts": self.experts, "hidden": self.hidden}
        return jax.P(*(axes.get(dim) or None for dim in _dims(variable)))


def run_sorted(plan: RoutingPlan, x_GSM: jax.Array, experts: Experts, num_chunks: int) -> jax.Array:
    """Every device sorts its tokens by expert; rows go to the devices of their experts and back."""
    graph, weights = nnx.split(experts)
    axes = _Axes.in_force()
    # By hand too where stages of a pipeline run side by side: each loops over its own rows.
    stages = mesh_axes("layers", jax.sharding.get_abstract_mesh())
    manual = {*axes.groups, *axes.experts, *axes.hidden, *stages}

    def on_one_device(x_GSM, plan, weights):
        experts = nnx.merge(graph, weights)
        if axes.hidden and experts.bo_EM is not None:  # the parts of a sum have one bias in all
            experts.bo_EM[...] *= jax.lax.axis_index(axes.hidden) == 0
        chunks = zip(_cut(plan, num_chunks), _cut(x_GSM, num_chunks), strict=True)
        return jnp.concatenate([_sorted(*chunk, experts, axes) for chunk in chunks])[None]

    if not manual:
        return on_one_device(x_GSM, plan, weights)[0]
    groups = jax.P(axes.groups)
    # Of the plan, arrays with a G are split as the tokens are; its losses are whole everywhere.
    plan_specs = jax.tree.map(lambda leaf: groups if leaf.ndim else jax.P(), plan)
    weights = jax.tree.map(_constrained, weights, is_leaf=_is_variable)
    weight_specs = jax.tree.map(axes.spec, weights, is_leaf=_is_variable)
    on_all_devices = jax.shard_map(
        on_one_device,
        in_specs=(groups, plan_specs, weight_specs),
        out_specs=jax.P(axes.summed or None, axes.groups),
        axis_names=manual,
        check_vma=False,
    )
    # By jit, for outside of a program JAX maps over all axes or none.
    y_PGSM = jax.jit(on_all_devices)(x_GSM, plan, weights)
    return jnp.sum(y_PGSM, axis=0)


def _sorted(plan: RoutingPlan, x_GSM: jax.Array, experts: Experts, axes: _Axes) -> jax.Array:
    """What the experts, wherever they are, say to the tokens of this device, or its part of the sum."""
    x_RM, group_sizes_E = routing.sorted_dispatch(plan, x_GSM)
    if not axes.experts:
        return routing.sorted_combine(plan, experts.ragged(x_RM, group_sizes_E))
    route = _route(plan, group_sizes_E, axes)
    x_QM = checkpoint_name(exchange(x_RM, route), EXCHANGE)
    y_QM = experts.ragged(x_QM, jnp.sum(route.received.size_PE, axis=0))
    y_RM = checkpoint_name(exchange(y_QM, route.back()), EXCHANGE)
    return routing.sorted_combine(plan, y_RM)


def _route(plan: RoutingPlan, group_sizes_E: jax.Array, axes: _Axes) -> Route:
    """From rows sorted by expert to the experts; tokens that are copies are sent by one device only."""
    starts_E = jnp.cumsum(group_sizes_E) - group_sizes_E
    sizes = [jax.lax.axis_size(axis) for axis in axes.experts]

    def for_peers(of_expert_E):
        of_expert = of_expert_E.reshape(*sizes, -1)
        for dim, axis in reversed(list(enumerate(axes.experts))):
            if axis not in axes.exchanged:
                here = jax.lax.axis_index(axis)
                of_expert = jax.lax.dynamic_index_in_dim(of_expert, here, dim, keepdims=False)
        return of_expert.reshape(-1, of_expert.shape[-1])

    num_rows = plan.expert_GSK.size
    size_PE = for_peers(group_sizes_E)
    most = min(num_rows, len(plan.expert_GSK) * plan.capacity * size_PE.shape[1])
    return plan_route(for_peers(starts_E), size_PE, axes.exchanged, num_rows=num_rows, most=most)


def _dims(variable: nnx.Variable) -> tuple[str, ...]:
    """Names of a parameter's dimensions, less the stacked layers' in a scan over them."""
    return variable.get_metadata()["out_sharding"][-variable.ndim :]


def _constrained(variable: nnx.Variable) -> nnx.Variable:
    return variable.replace(constrain(variable[...], *_dims(variable)))


def _is_variable(x) -> bool:
    return isinstance(x, nnx.Variable)


def _cut(tree, num_parts: int) -> list:
    """Equal parts of arrays along their groups; scalars go to all."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [jnp.split(x, num_parts) if x.ndim else [x] * num_parts for x in leaves]
    return [jax.tree.unflatten(structure, part) for part in zip(*parts, strict=True)]
