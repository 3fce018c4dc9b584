"""Which mesh axes a named dimension is split over: the default layout, and others in its place.

    with layout({"experts": "cols", "hidden": None}):
        ...

A layout never changes a result, only where its parts live and what travels between devices.

Source: Shazeer et al. 2018, Mesh-TensorFlow (arXiv:1811.02084), section 3. There a dimension is split
over at most one axis; here over several, as in GSPMD (arXiv:2105.04663).
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import PartitionSpec

from moe.dims import DIMS
from moe.errors import UserError
from moe.sharding.mesh import AXES

Axes = str | tuple[str, ...] | None

ANY = PartitionSpec.UNCONSTRAINED
"""In place of a name or an axis: the compiler decides how this dimension is split."""

Dim = Any  # a name, None or ANY

LAYOUT: Mapping[str, Axes] = MappingProxyType(
    {
        # Tokens are split over every axis that splits no weights of a dense layer.
        "batch": ("data", "expert"),
        "groups": ("data", "expert"),
        # After the all-to-all the expert axis holds experts, and groups keep the data axis alone.
        "exchanged_groups": "data",
        "experts": "expert",
        # Tensor parallelism: the inner dimension of FFNs, experts and attention, and the logits'.
        "hidden": "model",
        "heads": "model",
        "vocabulary": "model",
        # Pipeline parallelism: each stage holds layers that follow one another.
        "layers": "stage",
    }
)
"""The default: dimension -> mesh axes; a dimension that is not named here is not split."""


def _names(axes: Axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _frozen(rules: Mapping[str, Axes]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(sorted((dim, _names(axes)) for dim, axes in rules.items()))


# Part of the key of jit's cache, so that another layout traces again.
_in_force = jax.make_user_context(_frozen(LAYOUT))


@contextlib.contextmanager
def layout(rules: Mapping[str, Axes], *, replace: bool = False) -> Iterator[None]:
    """Within it, dimensions are split as `rules` say.

    Args:
      rules: dimension -> mesh axis, several axes, or None for unsplit; a new name becomes known.
        "exchanged_groups" follows from "groups" and "experts", unless given: the axes of the first
        less those of the second.
      replace: forget the rules in force before; else `rules` is put over them.

    Functions under `jax.jit` are traced again for another layout and found again for the same one.

    Raises:
      UserError: a rule that is not made of axis names, or names one twice.
    """
    for dim, axes in rules.items():
        names = _names(axes)
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise UserError(
                f"a layout rule must be an axis, several different ones or None: got {axes!r} for "
                f"{dim!r}. Write for example 'data' or ('data', 'expert')."
            )
    merged: dict[str, Axes] = {} if replace else {**current_layout()}
    merged.update(rules)
    changed = replace or "groups" in rules or "experts" in rules
    if changed and "exchanged_groups" not in rules:
        experts = _names(merged.get("experts"))
        groups = _names(merged.get("groups"))
        merged["exchanged_groups"] = tuple(axis for axis in groups if axis not in experts)
    with _in_force(_frozen(merged)):
        yield


def current_layout() -> dict[str, tuple[str, ...]]:
    """The rules in force: those of the innermost `layout`, else `LAYOUT`."""
    return dict(_in_force.value)


def mesh_axes(dim: str | None, mesh) -> tuple[str, ...]:
    """The axes of `mesh` that a dimension is split over; empty where it is not.

    An axis that the mesh lacks, or that has one device, splits nothing.

    Raises:
      UserError: an unknown dimension, or a layout's axis that is none of the mesh's nor of `AXES`.
    """
    if dim is None:
        return ()
    rules = current_layout()
    _check_known(dim, rules)
    names = rules.get(dim, ())
    for name in names:
        if mesh.shape and name not in mesh.shape and name not in AXES:
            raise UserError(
                f"the layout must use axes of the mesh: got {name!r} for dimension {dim!r}, the mesh "
                f"has {tuple(mesh.shape)}. Change the layout or the mesh."
            )
    return tuple(name for name in names if mesh.shape.get(name, 1) > 1)


def num_shards(dim: str) -> int:
    """Parts that the mesh in force (`jax.set_mesh`) cuts a dimension into; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh_axes(dim, mesh))


def partition_spec(dims: Sequence[Dim], mesh) -> PartitionSpec:
    """What the layout in force makes of the named dimensions on the axes that `mesh` has.

    Raises:
      UserError: as `mesh_axes`, or one axis for two of the dimensions.
    """
    splits = [ANY if dim is ANY else mesh_axes(dim, mesh) for dim in dims]
    return spec_of(splits, dims)


def spec_of(splits: Sequence[Any], dims: Sequence[Any]) -> PartitionSpec:
    """The axes of each dimension, or `ANY`, as JAX's type; `dims` is what errors call the dimensions.

    Raises:
      UserError: one axis for two dimensions.
    """
    taken: dict[str, Any] = {}
    for dim, axes in zip(dims, splits, strict=True):
        for axis in () if axes is ANY else axes:
            if axis in taken:
                raise UserError(
                    f"a mesh axis must split one dimension of an array: got {axis!r} for "
                    f"dimensions {taken[axis]!r} and {dim!r}. Split one of them otherwise."
                )
            taken[axis] = dim
    return PartitionSpec(*(axes or None for axes in splits))


def _check_known(dim: str, rules: Mapping[str, Axes]) -> None:
    known = sorted({*DIMS.values(), *LAYOUT, *rules})
    if dim not in known:
        near = difflib.get_close_matches(str(dim), known) or known
        raise UserError(
            f"a dimension must have a known name: got {dim!r}, near are {', '.join(near)}. "
            "Correct it, or name it in a layout."
        )
