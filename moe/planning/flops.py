"""Counts the products of a program as it was traced: every pass of every loop, backward included."""

from __future__ import annotations

import math
from typing import Any

import jax


def product_flops(jaxpr: Any) -> float:
    """Floating-point operations of all matrix products, over all devices.

    A multiplication and an addition are two. Loops count as often as they run; a loop of unknown
    length, which the training step has none of, counts once, and of branches the costliest.

    Args:
      jaxpr: a (closed) jaxpr, such as `jax.jit(f).trace(...).jaxpr`.

    Returns:
      `[2, 3] @ [3, 5]` has 60.
    """
    return sum(_flops(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _flops(equation) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * equation.outvars[0].aval.size * math.prod(shape[dim] for dim in contracted)
    if name == "ragged_dot_general":  # each row meets one matrix of the stack
        rows, inner = equation.invars[0].aval.shape[-2:]
        return 2.0 * rows * inner * equation.outvars[0].aval.shape[-1]
    if name == "cond":
        return max(product_flops(branch) for branch in params["branches"])
    inside = sum(
        product_flops(inner)
        for inner in jax.tree.leaves(params, is_leaf=_is_jaxpr)
        if _is_jaxpr(inner)
    )
    if name == "scan":
        return inside * params["length"]
    if name == "shard_map":  # its shapes are those of one device
        return inside * math.prod(
            params["mesh"].shape[axis] for axis in params["newly_manual_axes"]
        )
    return inside


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
