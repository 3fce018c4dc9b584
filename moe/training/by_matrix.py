"""Update rules for one matrix at a time: Adafactor, and LAMB's trust ratio.

Equal layers are stacked for a scan, and experts always are. These rules take means and norms over a
matrix, and here it is the matrix of one layer and expert, as if each were a parameter of its own:
the update depends neither on how layers are stacked nor on how many experts there are. Optax takes a
stacked parameter for one block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

_MIN_SIZE_TO_FACTOR = 128  # as in Optax: below it two vectors save little


class AdafactorState(NamedTuple):
    """Steps taken, and for each parameter its slots: means over rows and columns, or one for all."""

    step: jax.Array
    slots: Any


def own_dims(param: Any) -> tuple[int, ...]:
    """Dimensions of one matrix of a parameter: all but those that count layers and experts.

    By the dimensions that it names. One that names none (a norm's scale) is a vector, stacked or not.
    """
    if not isinstance(param, nnx.Variable):
        return tuple(range(param.ndim))
    dims = param.get_metadata().get("out_sharding")
    if not dims:
        return (param.ndim - 1,)
    return tuple(i for i, dim in enumerate(dims) if dim not in ("layers", "experts"))


def scale_by_adafactor(
    *, max_decay: float, clip_rms: float = 1.0, epsilon: float = 1e-30
) -> optax.GradientTransformation:
    """Divides gradients by a factored estimate of their root mean square, and clips what comes out.

    For a matrix it keeps the mean of squared gradients over its rows and over its columns. A matrix
    narrower than 128 or a vector keeps all of them.

    Args:
      max_decay: the means decay by 1 - step**-0.8, and by no more than this, below 1.
      clip_rms: an update of a larger root mean square is scaled down to it.
      epsilon: added to squared gradients.

    Returns:
      After one step of a constant gradient each update is its sign.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235), algorithm 4, without momentum and without
    scaling by the parameter; the cap on the decay is GShard's (arXiv:2006.16668).
    """

    def init(params) -> AdafactorState:
        slots = jax.tree.map(_first_slots, params, is_leaf=_is_variable)
        return AdafactorState(jnp.zeros((), jnp.int32), slots)

    def update(grads, state: AdafactorState, params=None):
        decay = jnp.minimum(1 - (state.step + 1.0) ** -0.8, max_decay)
        tree: Any
        leaves, tree = jax.tree.flatten(grads, is_leaf=_is_variable)
        pairs = [
            _scaled(grad, slots, decay, clip_rms, epsilon)
            for grad, slots in zip(leaves, tree.flatten_up_to(state.slots), strict=True)
        ]
        updates, slots = (jax.tree.unflatten(tree, part) for part in zip(*pairs, strict=True))
        return updates, AdafactorState(optax.safe_increment(state.step), slots)

    return optax.GradientTransformation(init, update)


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """Scales the update of each matrix to the norm of the matrix; by 1 where either norm is 0.

    Source: You et al. 2020, LAMB (arXiv:1904.00962), algorithm 2, with phi(z) = z.
    """

    def one(update, param):
        dims = own_dims(param)
        param_norm, update_norm = _norm(_value(param), dims), _norm(_value(update), dims)
        is_zero = (param_norm == 0) | (update_norm == 0)
        ratio = jnp.where(is_zero, 1, param_norm / jnp.where(is_zero, 1, update_norm))
        return _with_value(update, _value(update) * ratio)

    def update(updates, state, params=None):
        return jax.tree.map(one, updates, params, is_leaf=_is_variable), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _factored(param) -> tuple[int, int] | None:
    """The two largest dimensions of a matrix; None if it is a vector or too narrow."""
    largest = sorted(own_dims(param), key=lambda dim: param.shape[dim])[-2:]
    if len(largest) < 2 or param.shape[largest[0]] < _MIN_SIZE_TO_FACTOR:
        return None
    return largest[0], largest[1]


def _first_slots(param) -> tuple[Any, ...]:
    dims = _factored(param)
    if dims is None:
        return (jax.tree.map(jnp.zeros_like, param),)
    return tuple(_without(param, dim) for dim in reversed(dims))


def _without(param, dim: int):
    """Zeros in the shape of a parameter less one dimension, which keep the names of the others."""
    shape = [size for i, size in enumerate(param.shape) if i != dim]
    value = jnp.zeros(shape, param.dtype)
    if not isinstance(param, nnx.Variable):
        return value
    names = param.get_metadata()["out_sharding"]
    return param.replace(value, out_sharding=tuple(names[:dim] + names[dim + 1 :]))


def _scaled(grad, slots, decay, clip_rms: float, epsilon: float) -> tuple[Any, tuple[Any, ...]]:
    """The update of one parameter and its new slots."""
    gradient, dims = _value(grad), _factored(grad)
    squares = jnp.square(gradient) + epsilon
    means = [squares] if dims is None else [jnp.mean(squares, dim) for dim in reversed(dims)]
    slots = tuple(
        _with_value(slot, decay * _value(slot) + (1 - decay) * mean)
        for slot, mean in zip(slots, means, strict=True)
    )
    if dims is None:
        update = gradient * jax.lax.rsqrt(_value(slots[0]))
    else:
        update = gradient * _inverse_root(_value(slots[0]), _value(slots[1]), dims)
    rms = jnp.sqrt(jnp.mean(jnp.square(update), own_dims(grad), keepdims=True))
    return _with_value(grad, update / jnp.maximum(1.0, rms / clip_rms)), slots


def _inverse_root(row, column, dims: tuple[int, int]) -> jax.Array:
    """(row x column / mean of row) ** -0.5, each spread out again over the dimension it is a mean of.

    `row` is the mean over the larger of `dims`, `column` over the smaller.
    """
    smaller, larger = dims
    row, column = jnp.expand_dims(row, larger), jnp.expand_dims(column, smaller)
    return jax.lax.rsqrt(row / jnp.mean(row, smaller, keepdims=True)) * jax.lax.rsqrt(column)


def _norm(x, dims) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), dims, keepdims=True))


def _is_variable(x) -> bool:
    return isinstance(x, nnx.Variable)


def _value(x):
    return x[...] if isinstance(x, nnx.Variable) else x


def _with_value(like, value):
    return like.replace(value) if isinstance(like, nnx.Variable) else value
