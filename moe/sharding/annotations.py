"""Annotations: what is split and what is whole, by position or by the names of dimensions.

    with jax.set_mesh(make_mesh(MeshConfig(expert=8))):
        x_GSM = constrain(x_GSM, "groups", None, "model")   # by name; `layout` says over which axes
        x_GSM = split(x_GSM, 0, "expert")                   # the same by position

Every annotation is the identity in value, and altogether without a mesh, so a layer runs unchanged on
one device. Outside of a program an array is moved at once. Parameters carry their dimensions as Flax's
own sharding metadata; `nnx.get_partition_spec` reads it too. Within a `jax.shard_map` an annotation may
use the axes that are still automatic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe.errors import UserError
from moe.sharding.rules import ANY, Dim, partition_spec, spec_of
from moe.sharding.weight_update import names, num_parts, spread_spec

Axis = str | int
Split = Any  # an Axis, several, None or -1, or ANY


def param(value: jax.Array, *dims: str | None) -> nnx.Param:
    """A parameter that knows its logical dimensions, one name (or None) for each.

    Raises:
      UserError: as many names as dimensions are not given.
    """
    _check_rank(value.shape, dims)
    # Placed by whoever holds the mesh (`shardings`), not at creation: layers know no mesh.
    return nnx.Param(value, out_sharding=dims, eager_sharding=False)


def constrain(x: jax.Array, *dims: Dim, pad: bool = False) -> jax.Array:
    """Tells the compiler how `x` is split, by the name of each dimension.

    Args:
      x: any array.
      dims: for each dimension its name, which the layout in force gives axes to; None for unsplit;
        `ANY` for what the compiler finds best.
      pad: as in `mesh_split`.

    Raises:
      UserError: wrong number of names, an unknown one, two on one mesh axis, a size that its mesh axes
        do not divide, or an axis that is not the compiler's to place.
    """
    _check_rank(x.shape, dims)
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else _annotate(x, dims, partition_spec(dims, mesh), mesh, pad=pad)


def mesh_split(x: jax.Array, dims_mapping: Sequence[Split], *, pad: bool = False) -> jax.Array:
    """Tells the compiler how `x` is split, by the mesh axes of each dimension.

    Args:
      x: any array.
      dims_mapping: for each dimension an axis of the mesh (its name or index), a tuple of several,
        -1 (or None) for unsplit, or `ANY` for what the compiler finds best.
      pad: a size that the axes do not divide is filled up and masked by the compiler, the value is
        the same. For what is made inside a program; its inputs and outputs are not stored
        unevenly, see `pad_to_split`. For convolutions take `split_convolution` instead.

    Raises:
      UserError: wrong number of entries, an unknown axis, one axis twice, a size that the axes do not
        divide (without `pad`), or an axis that is not the compiler's to place.

    Source: Xu et al. 2021, GSPMD (arXiv:2105.04663), section 3.1. The mesh is the one in force, and an
    axis may go by its name.
    """
    _check_rank(x.shape, dims_mapping)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    splits = [ANY if entry is ANY else _axes(entry, mesh) for entry in dims_mapping]
    numbers = range(x.ndim)
    return _annotate(x, numbers, spec_of(splits, numbers), mesh, pad=pad)


def split(
    x: jax.Array,
    dim: int,
    axis: Axis | tuple[Axis, ...],
    *,
    others: Any = None,
    pad: bool = False,
) -> jax.Array:
    """`x` with one dimension split over a mesh axis, or several; all `others` unsplit or `ANY`.

    Raises:
      UserError: as `mesh_split`, or no such dimension.

    Source: Lepikhin et al. 2020, GShard (arXiv:2006.16668), section 3.2, which gives a number of
    partitions where we give an axis.
    """
    dim = _index(x, dim)
    mapping = [axis if index == dim else others for index in range(x.ndim)]
    return mesh_split(x, mapping, pad=pad)


def replicate(x: jax.Array) -> jax.Array:
    """`x` whole on every device. Source: GShard (arXiv:2006.16668), section 3.2."""
    return mesh_split(x, (None,) * x.ndim)


def pad_to_split(
    x: jax.Array, dim: int, axis: Axis | tuple[Axis, ...], *, value: float = 0
) -> tuple[jax.Array, jax.Array]:
    """Fills a dimension up until mesh axes divide it: for arrays that enter or leave a program.

    Returns:
      The array, longer at the end by as few entries `value` as make the size divide, and a mask of
      the new size, False on these. Size 5 over 2 devices becomes 6. Without a mesh nothing is added.
    """
    dim = _index(x, dim)
    mesh = jax.sharding.get_abstract_mesh()
    num_parts = 1 if mesh.empty else _size(_axes(axis, mesh), mesh)
    missing = -x.shape[dim] % num_parts
    widths = [(0, missing if index == dim else 0) for index in range(x.ndim)]
    mask = jnp.arange(x.shape[dim] + missing) < x.shape[dim]
    return jnp.pad(x, widths, constant_values=value), mask


def shardings(tree, mesh, *, spread: bool = False):
    """Where each array of a tree lives: a parameter as its dimensions say, all else on every device.

    Args:
      tree: NNX states, and what an optimizer makes of them: a slot that keeps names for its
        dimensions lives beside its parameter. Shapes are read, values are not.
      spread: split further, so that no device along the batch's axes holds a copy
        (`moe.sharding.weight_update`), where one dimension at least divides.

    Returns:
      The same tree with a `NamedSharding` for each array.

    Raises:
      UserError: an unknown name, two on one mesh axis, or a size that its mesh axes do not divide.
    """

    def one(x):
        if not isinstance(x, nnx.Variable):
            return NamedSharding(mesh, PartitionSpec())
        if not hasattr(x.get_raw_value(), "shape"):
            return x  # a slot that the optimizer has no use for
        dims = names(x) if x.get_metadata().get("out_sharding") else (None,) * x.ndim
        spec = partition_spec(dims, mesh)
        _check_divides(x.shape, dims, spec, mesh)
        further = spread_spec(x.shape, names(x), mesh) if spread else spec
        parts = num_parts(further, mesh)
        divides = not any(size % number for size, number in zip(x.shape, parts, strict=True))
        return x.replace(NamedSharding(mesh, further if divides else spec))

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _annotate(x, dims, spec: PartitionSpec, mesh, *, pad: bool) -> jax.Array:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit in types.values():
        raise UserError(
            f"mesh axes must be of type Auto: got {types}. Make the mesh with `make_mesh`, or with "
            "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * number of axes)."
        )
    for dim, entry in zip(dims, spec, strict=True):
        held = [axis for axis in _entry_axes(entry) if types[axis] == AxisType.Manual]
        if held:
            raise UserError(
                f"an annotation must use automatic axes: got {held} for dimension {dim!r}, which this "
                "jax.shard_map region holds by hand. Annotate outside of it, or leave the axis out "
                "of its axis_names."
            )
    if not pad:
        _check_divides(x.shape, dims, spec, mesh)
    if AxisType.Auto not in types.values():
        return x  # the whole mesh is held by hand: nothing is left to say
    if isinstance(x, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(x, spec)
    return _placed(x, spec)


# Outside of a program `with_sharding_constraint` refuses arrays that are not on the mesh yet.
_placed = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)


def _axes(entry: Axis | tuple[Axis, ...] | None, mesh) -> tuple[str, ...]:
    """Names of the axes that one entry of a `dims_mapping` means."""
    if entry is None or entry == -1:
        return ()
    names = tuple(mesh.axis_names)
    found = []
    for axis in entry if isinstance(entry, tuple) else (entry,):
        if axis not in names and axis not in range(len(names)):
            raise UserError(
                f"a mesh axis must be one of the mesh: got {axis!r}, the mesh has {names}. "
                "Correct the annotation or the mesh."
            )
        found.append(names[axis] if isinstance(axis, int) else axis)
    return tuple(found)


def _index(x, dim: int) -> int:
    if dim not in range(-x.ndim, x.ndim):
        raise UserError(
            f"dim must be a dimension of the array: got {dim} for shape {tuple(x.shape)}. "
            "Count from 0, or from -1 at the end."
        )
    return dim % x.ndim


def _check_rank(shape, dims):
    if len(shape) != len(dims):
        raise UserError(
            f"dims must name every dimension: got {tuple(dims)} for shape {tuple(shape)}. "
            "Use None for a dimension that is not split."
        )


def _check_divides(shape, dims, spec, mesh):
    for size, dim, entry in zip(shape, dims, spec, strict=True):
        num_parts = _size(_entry_axes(entry), mesh)
        if size % num_parts:
            raise UserError(
                f"dimension {dim!r} must divide over mesh axes {_entry_axes(entry)}: got size {size} "
                f"over {num_parts} devices. Change the size, the mesh or the layout, or pad it."
            )


def _entry_axes(entry) -> tuple[str, ...]:
    if entry is None or entry is ANY:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _size(axes: tuple[str, ...], mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
