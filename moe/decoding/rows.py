"""Work on the rows of a batch that needs no other device, where the compiler cannot see so."""

from __future__ import annotations

from collections.abc import Callable

import jax

from moe.sharding import mesh_axes


def on_own_rows(function: Callable, *, in_dims: tuple[int, ...], out_dim: int) -> Callable:
    """The same function, run by each device of the mesh on the rows that it holds.

    Args:
      function: of as many trees of arrays as `in_dims` has entries. What it makes of a row may
        depend on that row alone.
      in_dims: which dimension of each tree's arrays counts the rows.
      out_dim: the same for the result.

    Returns:
      `function` itself where no mesh splits rows. Other axes, such as `model`, stay the compiler's.
    """
    axes = mesh_axes("batch", jax.sharding.get_abstract_mesh())
    if not axes:
        return function

    def rows_at(dim: int) -> jax.sharding.PartitionSpec:
        return jax.P(*(None,) * dim, axes)

    return jax.shard_map(
        function,
        in_specs=tuple(rows_at(dim) for dim in in_dims),
        out_specs=rows_at(out_dim),
        axis_names=set(axes),
        check_vma=False,
    )
