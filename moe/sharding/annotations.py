"""Annotations by logical dimension: name the dimensions, and a layout says where each is split.

    with jax.set_mesh(make_mesh(MeshConfig(expert=8))):
        x_GSM = constrain(x_GSM, "groups", None, "model")

Without a mesh every annotation is the identity, so a layer runs unchanged on one device. Parameters
carry their dimensions as Flax's own sharding metadata; `nnx.get_partition_spec` reads it too.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe.errors import UserError

Axes = str | tuple[str, ...] | None

LAYOUT: dict[str, Axes] = {
    # Tokens are split over every axis that is not a model axis: groups over data and expert together.
    "batch": ("data", "expert"),
    "groups": ("data", "expert"),
    # After the all-to-all the expert axis holds experts, and groups keep the data axis alone.
    "exchanged_groups": "data",
    "experts": "expert",
}
"""Logical dimension -> mesh axes; a dimension that is not named here is not split."""


def param(value: jax.Array, *dims: str | None) -> nnx.Param:
    """A parameter that knows its logical dimensions, one name (or None) for each.

    Raises:
      UserError: as many names as dimensions are not given.
    """
    _check_rank(value.shape, dims)
    # Placed by whoever holds the mesh (`shardings`), not at creation: layers know no mesh.
    return nnx.Param(value, out_sharding=dims, eager_sharding=False)


def constrain(x: jax.Array, *dims: str | None) -> jax.Array:
    """Tells the compiler how `x` is split, by the name of each dimension; None is unsplit.

    The identity in value always, and altogether without a mesh (`jax.set_mesh`).

    Raises:
      UserError: wrong number of names, or a size that its mesh axes do not divide.
    """
    _check_rank(x.shape, dims)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = partition_spec(dims, mesh)
    _check_divides(x.shape, dims, spec, mesh)
    return jax.lax.with_sharding_constraint(x, spec)


def shardings(tree, mesh: jax.sharding.Mesh):
    """Where each array of a tree lives: a parameter as its dimensions say, all else on every device.

    Args:
      tree: NNX states, and what Optax makes of them: an optimizer's slot keeps the dimensions of its
        parameter if it has its rank (Adam's moments; not Adafactor's factors, which are small).
        Shapes are read, values are not.

    Returns:
      The same tree with a `NamedSharding` for each array.

    Raises:
      UserError: a size that its mesh axes do not divide.
    """

    def one(x):
        if not isinstance(x, nnx.Variable):
            return NamedSharding(mesh, PartitionSpec())
        dims = x.get_metadata().get("out_sharding") or ()
        if len(dims) != x.ndim:
            dims = (None,) * x.ndim
        spec = partition_spec(dims, mesh)
        _check_divides(x.shape, dims, spec, mesh)
        return x.replace(NamedSharding(mesh, spec))

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def partition_spec(dims: tuple[str | None, ...], mesh) -> PartitionSpec:
    """What `LAYOUT` makes of the named dimensions on the axes that `mesh` has."""

    def axes_of(dim: str | None):
        axes = LAYOUT.get(dim) if dim is not None else None
        names = (axes,) if isinstance(axes, str) else axes or ()
        present = tuple(name for name in names if name in mesh.shape)
        return present or None

    return PartitionSpec(*(axes_of(dim) for dim in dims))


def _check_rank(shape, dims):
    if len(shape) != len(dims):
        raise UserError(
            f"dims must name every dimension: got {dims} for shape {tuple(shape)}. "
            "Use None for a dimension that is not split."
        )


def _check_divides(shape, dims, spec, mesh):
    for size, dim, axes in zip(shape, dims, spec, strict=True):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        num_parts = 1
        for axis in axes:
            num_parts *= mesh.shape[axis]
        if size % num_parts:
            raise UserError(
                f"dimension {dim!r} must divide over mesh axes {axes}: got size {size} over "
                f"{num_parts} devices. Change the size or the mesh."
            )
