"""Weight-update sharding: devices that hold copies of a parameter share the work of its update.

    with jax.set_mesh(mesh), weight_update("sharded"):
        ...

The axes that split the batch hold copies of most parameters, and with them of gradients and of the
optimizer's slots. When the update is sharded, one dimension of each is split over these axes as well:
each device gets the sum of its part of the gradients, updates that part, and the new parameters are
gathered.

Source: Xu et al. 2020 (arXiv:2004.13336); with fully sharded parameters Rajbhandari et al. 2020, ZeRO
(arXiv:1910.02054). Where no dimension divides we pad one of it for storage alone, so the optimizer
sees true shapes and its means and norms are exact. The compiler chooses how a gradient is reduced to
parts. The TPU's (libtpu 0.0.52), along sides of the torus: a reduce-scatter, or a ring of permutations
behind the product that makes the gradient; over a whole slice: an all-reduce, which is on all links at
once, and a slice of it. The CPU's: always the latter.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from moe.sharding.mesh import WeightUpdate
from moe.sharding.rules import mesh_axes, partition_spec, spec_of

# Part of the key of jit's cache, as the layout in force.
_in_force = jax.make_user_context("replicated")


@contextlib.contextmanager
def weight_update(mode: WeightUpdate) -> Iterator[None]:
    """Within it, training steps are traced and states are placed as `MeshConfig.weight_update` says."""
    with _in_force(mode):
        yield


def current_weight_update() -> WeightUpdate:
    """The mode in force: that of the innermost `weight_update`, else "replicated"."""
    return _in_force.value


def spread_spec(shape: Sequence[int], dims: Sequence[str | None], mesh) -> PartitionSpec:
    """As the layout says, and one dimension also over the axes along which there would be copies.

    Args:
      shape: of a parameter or slot.
      dims: the name of each dimension. That of layers is left alone: a scan takes one at a time.
      mesh: axes that split the batch and not this array are those of its copies.

    Returns:
      For [16, 6] over 4 devices the split ("data", None): the outermost dimension that divides, one
      that is whole before one that is split. Where none divides, the one that has to be padded
      least; it is then split unevenly.
    """
    splits = [mesh_axes(dim, mesh) for dim in dims]
    taken = {axis for axes in splits for axis in axes}
    copies = tuple(axis for axis in mesh_axes("batch", mesh) if axis not in taken)
    candidates = [index for index, dim in enumerate(dims) if dim != "layers"]
    if copies and candidates:

        def padding(index: int) -> int:
            axes = (*splits[index], *copies)
            missing = -shape[index] % math.prod(mesh.shape[axis] for axis in axes)
            return missing * math.prod(shape) // shape[index]

        splits[min(candidates, key=lambda i: (padding(i), bool(splits[i])))] += copies
    return spec_of(splits, dims)


def spread(tree):
    """Tells the compiler to split parameters, gradients or slots further, as `spread_spec` says.

    A gradient is then reduced to parts. With "replicated" updates, or without a mesh, the identity.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or current_weight_update() == "replicated":
        return tree

    def one(x: nnx.Variable) -> nnx.Variable:
        spec = spread_spec(x.shape, names(x), mesh)
        return x.replace(jax.lax.with_sharding_constraint(x[...], spec))

    return _map(one, tree)


def gathered(params):
    """Parameters as the layout says, for use: with "fully_sharded" ones their parts are gathered here.

    Stacked layers are left as they are until a scan hands them over one by one, so call it within
    the scan too; the gradient is then reduced to parts layer by layer. In a function under
    `jax.checkpoint` the backward pass gathers again rather than keep what was gathered.
    """

    def gather(x: nnx.Variable, mesh) -> nnx.Variable:
        dims = _given_names(x)
        dims = dims[len(dims) - x.ndim :]  # a scan takes the layers off, and leaves their name
        if "layers" in dims:
            return x
        whole, part = partition_spec(dims, mesh), spread_spec(x.shape, dims, mesh)
        return x if whole == part else x.replace(_gather(x[...], whole, part))

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or current_weight_update() != "fully_sharded":
        return params
    return _map(lambda x: gather(x, mesh), params)


def padded(tree, mesh):
    """Parameters or slots as long as equal parts need: for what leaves and enters a program.

    Where no dimension divides, one is filled up with zeros at its end; `unpadded` takes them off.
    """

    def one(x: nnx.Variable) -> nnx.Variable:
        parts = num_parts(spread_spec(x.shape, names(x), mesh), mesh)
        missing = [-size % number for size, number in zip(x.shape, parts, strict=True)]
        if not any(missing):
            return x
        value = jnp.pad(x[...], [(0, number) for number in missing])
        return x.replace(value, unpadded_shape=tuple(x.shape))

    return _map(one, tree)


def unpadded(tree):
    """The inverse of `padded`; the identity where nothing was padded."""

    def one(x: nnx.Variable) -> nnx.Variable:
        metadata = x.get_metadata()
        shape = metadata.pop("unpadded_shape", None)
        return x if shape is None else x.from_metadata(resized(x[...], shape), metadata)

    return _map(one, tree)


def num_parts(spec: PartitionSpec, mesh) -> list[int]:
    """How many parts each dimension of an array is split into."""
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return [math.prod(mesh.shape[axis] for axis in of_dim) for of_dim in axes]


def resized(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` cut off, or filled up with zeros, at the end of each dimension."""
    x = x[tuple(map(slice, shape))]
    return jnp.pad(x, [(0, size - have) for size, have in zip(shape, x.shape, strict=True)])


def names(x: nnx.Variable) -> tuple[str | None, ...]:
    """The name of each dimension of a parameter or slot; none of a slot of another rank.

    A parameter that names none (a norm's scale) is a vector, stacked or not.
    """
    dims = _given_names(x)
    return dims if len(dims) == x.ndim else (None,) * x.ndim


def _given_names(x: nnx.Variable) -> tuple[str | None, ...]:
    return x.get_metadata().get("out_sharding") or ("layers",) * (x.ndim - 1) + (None,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, whole: PartitionSpec, part: PartitionSpec) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, part)  # here, and not before the loop
    return jax.lax.with_sharding_constraint(x, whole)


def _gather_forward(x, whole, part):
    return _gather(x, whole, part), None


def _gather_backward(whole, part, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, part),)


_gather.defvjp(_gather_forward, _gather_backward)


def _map(function: Callable[[nnx.Variable], Any], tree):
    """`function` of the parameters of a tree that hold an array; all else as it is."""

    def one(x):
        has_array = isinstance(x, nnx.Variable) and hasattr(x.get_raw_value(), "shape")
        return function(x) if has_array else x

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
