"""Ragged groups in blocks of a few static sizes: one loop for each size, its number of steps dynamic.

On CPU nothing multiplies ragged groups natively (`jax.lax.ragged_dot` computes every expert on every
row). XLA needs static shapes but not static trip counts; rows a block has beyond its group are computed
and thrown away, and as sizes are dense around the mean group, they are few. Such loops update arrays in
place and have no derivative in JAX: who uses them brings one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

FEW_ROWS = 8  # up to here reading a matrix takes longer than multiplying with it
SMALL_FLOPS, LARGE_FLOPS = 1e8, 2e10  # about a millisecond, and a quarter of a second, on one core

Carry = TypeVar("Carry")


class Block(NamedTuple):
    """Some rows of one group, all to be multiplied with the same matrix."""

    expert: jax.Array
    nth: jax.Array  # of the expert's blocks
    start: jax.Array  # of the rows sliced; they may begin before the group and end after it
    mask_B1: jax.Array  # which of them are the block's own

    def rows(self, array: jax.Array) -> jax.Array:
        """The rows sliced, those of other groups too."""
        return lax.dynamic_slice_in_dim(array, self.start, len(self.mask_B1))

    def own_rows(self, array: jax.Array) -> jax.Array:
        """The rows with zeros where they are another group's, whatever these hold."""
        return jnp.where(self.mask_B1, self.rows(array), 0)

    def put(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        """Writes the block's own rows."""
        rows = jnp.where(self.mask_B1, rows.astype(array.dtype), self.rows(array))
        return lax.dynamic_update_slice_in_dim(array, rows, self.start, 0)

    def of_expert(self, array: jax.Array) -> jax.Array:
        """The expert's slice of weights stacked by expert."""
        return lax.dynamic_index_in_dim(array, self.expert, keepdims=False)

    def add_to_expert(self, array: jax.Array, more: jax.Array) -> jax.Array:
        """Adds to what the expert's earlier blocks have written; the first has nothing to read."""

        def add(_, total):
            return total + self.of_expert(array)

        total = lax.fori_loop(0, jnp.minimum(self.nth, 1), add, more.astype(array.dtype))
        return lax.dynamic_update_index_in_dim(array, total, self.expert, 0)


def block_sizes(num_rows: int, num_experts: int, num_flops: float) -> list[int]:
    """The sizes a block may have, largest first, denser around the mean group the more the work.

    More sizes waste fewer rows: 1 to 3 % of an even load with steps of 1/32 near the mean, about 10 %
    with five sizes. Each is a loop to compile, so they must be worth it.
    """
    mean = num_rows / num_experts
    if num_flops < SMALL_FLOPS:
        sizes = [math.ceil(mean * share) for share in (0.5, 1.5)]
    elif mean <= FEW_ROWS:
        sizes = [1, 2, 4, 6, 8, 16]
    elif num_flops < LARGE_FLOPS:
        sizes = [math.ceil(mean * share) for share in (0.25, 0.625, 0.875, 1.0625, 1.5)]
    else:
        near = [1 + share / 32 for share in range(-2, 3)]
        shares = (0.125, 0.25, 0.5, 0.75, 0.875, *near, 1.125, 1.25, 1.5)
        sizes = [math.ceil(mean * share) for share in shares]
    return sorted({min(size, num_rows) for size in sizes}, reverse=True)


def for_each_block(
    group_sizes_E: jax.Array,
    num_rows: int,
    visit: Callable[[Block, Carry], Carry],
    carry: Carry,
    *,
    num_flops: float,
) -> Carry:
    """carry = visit(block, carry) for blocks that cover every group; an expert's come in order.

    A group is cut into blocks of the largest size, and one of the smallest size that holds the rest.
    `num_flops`, of all visits together, decides how fine the sizes are.
    """
    num_experts = len(group_sizes_E)
    if 0 in (num_rows, num_experts):
        return carry
    sizes = block_sizes(num_rows, num_experts, num_flops)
    largest = sizes[0]
    ends_E = jnp.cumsum(group_sizes_E)
    block_ends_E = jnp.cumsum(-(-group_sizes_E // largest))
    block_Q = jnp.arange(num_experts + num_rows // largest)  # Q: as many blocks as there can be
    expert_Q = jnp.searchsorted(block_ends_E, block_Q, side="right")
    nth_Q = block_Q - jnp.append(0, block_ends_E)[expert_Q]
    start_Q = (ends_E - group_sizes_E)[expert_Q] + nth_Q * largest
    end_Q = jnp.minimum(start_Q + largest, ends_E[expert_Q])
    fits_QS = (end_Q - start_Q)[:, None] <= jnp.array(sizes)
    size_Q = jnp.sum(fits_QS, axis=1) - 1  # an index into the sizes
    size_Q = jnp.where(block_Q < block_ends_E[-1], size_Q, len(sizes))
    order_Q = jnp.argsort(size_Q, stable=True)
    bounds = jnp.cumsum(jnp.bincount(size_Q, length=len(sizes)))

    for index, size in enumerate(sizes):

        def step(i, carry, size=size):
            which = order_Q[i]
            start = jnp.minimum(start_Q[which], num_rows - size)
            row_B = start + jnp.arange(size)
            own_B = (start_Q[which] <= row_B) & (row_B < end_Q[which])
            return visit(Block(expert_Q[which], nth_Q[which], start, own_B[:, None]), carry)

        carry = lax.fori_loop(bounds[index - 1] if index else 0, bounds[index], step, carry)
    return carry


def few_rows_product(block: Block, x_BM: jax.Array, w_EMH: jax.Array) -> jax.Array:
    """The product where reading the matrix is what takes the time: no copy of it is made first.

    Adds up rows of the matrix times their element of x, eight stretches of about 2048 numbers at a
    time, in strips that stay in the first cache while each row of x uses them.
    """
    (num_rows, d_model), d_hidden = x_BM.shape, w_EMH.shape[2]
    if d_model % 8:
        return x_BM @ block.of_expert(w_EMH)
    stretch = math.gcd(d_model // 8, max(1, 2048 // d_hidden))  # rows of the matrix
    strip = math.gcd(d_hidden, 256)

    def add_eight(i, total):
        for j in range(8):
            first = (8 * i + j) * stretch
            w = lax.dynamic_slice(w_EMH, (block.expert, first, 0), (1, stretch, d_hidden))
            w = w.reshape(stretch, d_hidden // strip, 1, strip).astype(total.dtype)
            x = lax.dynamic_slice_in_dim(x_BM, first, stretch, axis=1)
            total += x.T.reshape(stretch, 1, num_rows, 1).astype(total.dtype) * w
        return total

    dtype = jnp.promote_types(x_BM.dtype, jnp.float32)
    zeros = jnp.zeros((stretch, d_hidden // strip, num_rows, strip), dtype)
    total = lax.fori_loop(0, d_model // (8 * stretch), add_eight, zeros)
    return total.sum(axis=0).swapaxes(0, 1).reshape(num_rows, d_hidden).astype(x_BM.dtype)


@jax.custom_vjp
def dense_product(x_BM: jax.Array, w_MH: jax.Array) -> jax.Array:
    """x w, with the derivative that is quickest on CPU."""
    return x_BM @ w_MH


def _dense_product_backward(residuals, dy_BH):
    x_BM, w_MH = residuals
    # XLA on CPU multiplies a transposed left side at 80 to 90 GFLOP/s, one that lies row by row at 105;
    # the barrier keeps it from undoing the transposition.
    x_MB = lax.optimization_barrier(x_BM.T)
    return dy_BH @ w_MH.T, x_MB @ dy_BH


dense_product.defvjp(lambda x_BM, w_MH: (x_BM @ w_MH, (x_BM, w_MH)), _dense_product_backward)
