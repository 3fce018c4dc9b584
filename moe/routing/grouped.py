"""Every expert on its own rows: matrix products over ragged groups.

Rows are sorted by expert; group e is the group_sizes_E[e] rows after those of the experts before it.

On CPU nothing multiplies ragged groups natively (`jax.lax.ragged_dot` computes every expert on every
row), so `blocked` cuts each group into blocks of a few static sizes and runs one loop for each size:
slice the rows and the expert's weights, multiply, write the result in place. Rows a block has beyond
its group are computed and thrown away; sizes are dense around the mean group, so they are few. Loops
with a dynamic number of steps have no derivative in JAX, hence `_run` brings its own.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from moe.errors import UserError

GroupedImplementation = Literal["auto", "blocked", "ragged_dot", "tokamax"]

# `linear(x, w, b)` is x w + b with each row's expert (b may be None). A stage computes rows from rows
# and the weights of all experts by it alone: `stage(linear, weights, rows)`.
Linear = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
Stage = Callable[[Linear, Any, Any], Any]


class ExpertWeights(NamedTuple):
    """The weights of E feed-forward networks; those left out are None."""

    wi_EMH: jax.Array
    wo_EHM: jax.Array
    wg_EMH: jax.Array | None = None
    bi_EH: jax.Array | None = None
    bg_EH: jax.Array | None = None
    bo_EM: jax.Array | None = None


def grouped_product(
    x_RM: jax.Array,
    w_EMH: jax.Array,
    group_sizes_E: jax.Array,
    *,
    implementation: GroupedImplementation = "auto",
) -> jax.Array:
    """Multiplies the rows of each group by its own matrix.

    Args:
      x_RM: rows sorted by group.
      w_EMH: a matrix for each group.
      group_sizes_E: int32, rows of each group; any may be 0. Their sum is at most R.
      implementation: "blocked" (CPU), "ragged_dot" (`jax.lax.ragged_dot`), "tokamax" (the Pallas
        kernels of that package for GPU and TPU). "auto" is "blocked" on CPU; elsewhere "tokamax"
        where it is installed, else "ragged_dot". It is decided when the program is lowered, so that
        one compiled for another platform is right.

    Returns:
      y_RH: rows of group e are those of x times w[e]; rows past the last group are zero, whatever x
      holds there. Gradients likewise: zero for such rows, and for the matrix of an empty group. Only
      reverse-mode derivatives are defined.

    Raises:
      UserError: an unknown implementation, or "tokamax" where the package is missing.
    """
    _check(implementation)
    return _run((_multiply,), implementation, w_EMH, x_RM, group_sizes_E)


def grouped_ffn(
    x_RM: jax.Array,
    weights: ExpertWeights,
    group_sizes_E: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array],
    implementation: GroupedImplementation = "auto",
) -> jax.Array:
    """Runs each expert's feed-forward network on its own rows.

    y = act(x wi + bi) wo + bo, or gated y = (act(x wg + bg) * (x wi + bi)) wo + bo. The same numbers
    as with two `grouped_product`s; on CPU faster, as hidden rows stay in the cache from one product
    to the next, and what the activation makes of them is never written out.

    Args, Returns and Raises are as in `grouped_product`; `activation` acts on single elements.
    """
    _check(implementation)
    stages = (_to_hidden, functools.partial(_from_hidden, activation))
    return _run(stages, implementation, weights, x_RM, group_sizes_E)


def _check(implementation: GroupedImplementation) -> None:
    if implementation not in get_args(GroupedImplementation):
        raise UserError(
            f"implementation must be one of {get_args(GroupedImplementation)}: "
            f"got {implementation!r}. Choose one of them."
        )
    if implementation == "tokamax" and not _has_tokamax():
        raise UserError(
            "implementation must be installed: got 'tokamax', which is not. "
            "Run `pip install tokamax` or choose 'auto'."
        )


def _has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def _multiply(linear: Linear, w_EMH, x_RM):
    return linear(x_RM, w_EMH, None)


def _to_hidden(linear: Linear, weights: ExpertWeights, x_RM):
    h_RH = linear(x_RM, weights.wi_EMH, weights.bi_EH)
    g_RH = None if weights.wg_EMH is None else linear(x_RM, weights.wg_EMH, weights.bg_EH)
    return h_RH, g_RH


def _from_hidden(activation, linear: Linear, weights: ExpertWeights, hidden):
    h_RH, g_RH = hidden
    h_RH = activation(h_RH) if g_RH is None else activation(g_RH) * h_RH
    return linear(h_RH, weights.wo_EHM, weights.bo_EM)


# The derivative is common to all implementations: keep what goes into each stage, and go back through
# one stage after the other. (Differentiating "auto" would keep the residuals of every platform.)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(stages: Sequence[Stage], implementation, weights, x_RM, group_sizes_E) -> jax.Array:
    return _forward(stages, implementation, False, weights, x_RM, group_sizes_E)[-1]


def _run_forward(stages, implementation, weights, x_RM, group_sizes_E):
    *inputs, y_RM = _forward(stages, implementation, True, weights, x_RM, group_sizes_E)
    return y_RM, (weights, inputs, group_sizes_E)


def _run_backward(stages, implementation, residuals, dy_RM):
    ways = {"blocked": _blocked_backward, "other": _native_backward}
    dweights, dx_RM = _on_platform(ways, implementation, stages, *residuals, dy_RM)
    return dweights, dx_RM, None


_run.defvjp(_run_forward, _run_backward)


def _forward(stages, implementation, keep, weights, x_RM, group_sizes_E) -> Sequence[Any]:
    """x, what each stage makes of it (without `keep` None for all but the last)."""
    ways = {"blocked": _blocked_forward, "other": _native_forward}
    ways = {name: functools.partial(way, keep=keep) for name, way in ways.items()}
    return x_RM, *_on_platform(ways, implementation, stages, weights, x_RM, group_sizes_E)


def _on_platform(ways, implementation, stages, *arrays):
    if implementation == "blocked":
        return ways["blocked"](stages, *arrays)
    product = "ragged_dot"
    if implementation == "tokamax" or (implementation == "auto" and _has_tokamax()):
        product = "tokamax"
    native = functools.partial(ways["other"], stages, product=product)
    if implementation != "auto":
        return native(*arrays)
    return lax.platform_dependent(
        *arrays, cpu=functools.partial(ways["blocked"], stages), default=native
    )


# Natively: the platform multiplies ragged groups.


def _native_linear(product: str, group_sizes_E: jax.Array, num_rows: int) -> Linear:
    real_R1 = (jnp.arange(num_rows) < jnp.sum(group_sizes_E))[:, None]

    def linear(x_RM, w_EMH, b_EH):
        if product == "tokamax":
            import tokamax

            multiply = tokamax.ragged_dot
        else:
            multiply = lax.ragged_dot
        # Of rows past the end kernels promise nothing.
        y_RH = multiply(jnp.where(real_R1, x_RM, 0), w_EMH, group_sizes_E)
        if b_EH is not None:
            y_RH += jnp.repeat(b_EH, group_sizes_E, axis=0, total_repeat_length=num_rows)
        return jnp.where(real_R1, y_RH, 0)

    return linear


def _native_forward(stages, weights, x_RM, group_sizes_E, *, product, keep):
    linear = _native_linear(product, group_sizes_E, len(x_RM))
    rows, outputs = x_RM, []
    for stage in stages:
        rows = stage(linear, weights, rows)
        outputs.append(rows)
    return [*(outputs[:-1] if keep else [None] * (len(stages) - 1)), outputs[-1]]


def _native_backward(stages, weights, inputs, group_sizes_E, dy_RM, *, product):
    linear = _native_linear(product, group_sizes_E, len(dy_RM))
    return _through_stages(stages, linear, weights, inputs, dy_RM)


def _through_stages(stages, linear: Linear, weights, inputs, dy):
    """dweights and dx of all stages, from the last to the first."""
    dweights = jax.tree.map(jnp.zeros_like, weights)
    for stage, rows in zip(reversed(stages), reversed(inputs), strict=True):
        _, back = jax.vjp(functools.partial(stage, linear), weights, rows)
        more, dy = back(dy)
        dweights = jax.tree.map(jnp.add, dweights, more)
    return dweights, dy


# In blocks: XLA loops over slices.

_FEW_ROWS = 8


class _Block(NamedTuple):
    expert: jax.Array
    nth: jax.Array  # of the expert's blocks
    start: jax.Array  # of the rows sliced; they may begin before the group and end after it
    mask_B1: jax.Array  # which of them are the block's own

    def rows(self, array):
        return lax.dynamic_slice_in_dim(array, self.start, len(self.mask_B1))

    def own_rows(self, array):
        return jnp.where(self.mask_B1, self.rows(array), 0)

    def put(self, array, rows):
        """Writes the block's own rows."""
        rows = jnp.where(self.mask_B1, rows.astype(array.dtype), self.rows(array))
        return lax.dynamic_update_slice_in_dim(array, rows, self.start, 0)

    def of_expert(self, array):
        return lax.dynamic_index_in_dim(array, self.expert, keepdims=False)

    def add_to_expert(self, array, more):
        """Adds to what the expert's earlier blocks have written; the first has nothing to read."""

        def add(_, total):
            return total + self.of_expert(array)

        total = lax.fori_loop(0, jnp.minimum(self.nth, 1), add, more.astype(array.dtype))
        return lax.dynamic_update_index_in_dim(array, total, self.expert, 0)


def _block_sizes(num_rows: int, num_experts: int) -> list[int]:
    """The sizes a block may have, largest first: steps of 1/32 near the mean group, else coarser.

    Fewer sizes compile faster, more waste fewer rows (these 1 to 3 % of an even load).
    """
    mean = num_rows / num_experts
    if mean <= _FEW_ROWS:
        sizes = [1, 2, 4, 6, 8, 16]
    else:
        near = [1 + share / 32 for share in range(-2, 3)]
        shares = (0.125, 0.25, 0.5, 0.75, 0.875, *near, 1.125, 1.25, 1.5)
        sizes = [math.ceil(mean * share) for share in shares]
    return sorted({min(size, num_rows) for size in sizes}, reverse=True)


def _for_each_block(group_sizes_E, num_rows: int, visit, carry):
    """carry = visit(block, carry) for blocks that cover every group; an expert's come in order.

    A group is cut into blocks of the largest size, and one of the smallest size that holds the rest.
    """
    num_experts = len(group_sizes_E)
    sizes = _block_sizes(num_rows, num_experts)
    largest = sizes[0]
    ends_E = jnp.cumsum(group_sizes_E)
    last_block_E = jnp.cumsum(-(-group_sizes_E // largest))
    block_Q = jnp.arange(num_experts + num_rows // largest)  # as many as there can be
    expert_Q = jnp.searchsorted(last_block_E, block_Q, side="right")
    nth_Q = block_Q - jnp.append(0, last_block_E)[expert_Q]
    start_Q = (ends_E - group_sizes_E)[expert_Q] + nth_Q * largest
    end_Q = jnp.minimum(start_Q + largest, ends_E[expert_Q])
    fits_QS = (end_Q - start_Q)[:, None] <= jnp.array(sizes)
    size_Q = jnp.sum(fits_QS, axis=1) - 1  # an index into the sizes
    size_Q = jnp.where(block_Q < last_block_E[-1], size_Q, len(sizes))
    order_Q = jnp.argsort(size_Q, stable=True)
    bounds = jnp.cumsum(jnp.bincount(size_Q, length=len(sizes)))

    for index, size in enumerate(sizes):

        def step(i, carry, size=size):
            which = order_Q[i]
            start = jnp.minimum(start_Q[which], num_rows - size)
            row_B = start + jnp.arange(size)
            own_B = (start_Q[which] <= row_B) & (row_B < end_Q[which])
            return visit(_Block(expert_Q[which], nth_Q[which], start, own_B[:, None]), carry)

        carry = lax.fori_loop(bounds[index - 1] if index else 0, bounds[index], step, carry)
    return carry


def _blocked_forward(stages, weights, x_RM, group_sizes_E, *, keep):
    def visit(block, outputs):
        linear = functools.partial(_linear_of, block)
        rows, written = block.rows(x_RM), []
        for stage, output in zip(stages, outputs, strict=True):
            rows = stage(linear, weights, rows)
            written.append(jax.tree.map(block.put, output, rows if output is not None else None))
        return written

    rows, empty = x_RM, []
    for stage in stages:
        rows = jax.eval_shape(functools.partial(stage, _shape_of_linear), weights, rows)
        empty.append(jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), rows))
    if not keep:
        empty[:-1] = [None] * (len(stages) - 1)
    if 0 in (len(x_RM), len(group_sizes_E)):
        return empty
    return _for_each_block(group_sizes_E, len(x_RM), visit, empty)


def _linear_of(block: _Block, x_BM, w_EMH, b_EH):
    product = _few_rows_product if len(x_BM) <= _FEW_ROWS else _product
    y_BH = product(block, x_BM, w_EMH)
    return y_BH if b_EH is None else y_BH + block.of_expert(b_EH)


def _product(block: _Block, x_BM, w_EMH):
    return x_BM @ block.of_expert(w_EMH)


def _few_rows_product(block: _Block, x_BM, w_EMH):
    """The product where reading the matrix is what takes the time: no copy of it is made first.

    Adds up rows of the matrix times their element of x, eight stretches of about 2048 numbers at a
    time, in strips that stay in the first cache while each row of x uses them.
    """
    (num_rows, d_model), d_hidden = x_BM.shape, w_EMH.shape[2]
    if d_model % 8:
        return _product(block, x_BM, w_EMH)
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

    zeros = jnp.zeros((stretch, d_hidden // strip, num_rows, strip), jnp.float32)
    total = lax.fori_loop(0, d_model // (8 * stretch), add_eight, zeros)
    return total.sum(axis=0).swapaxes(0, 1).reshape(num_rows, d_hidden).astype(x_BM.dtype)


def _shape_of_linear(x_RM, w_EMH, b_EH):
    return x_RM @ w_EMH[0] + (0 if b_EH is None else b_EH[0])


def _blocked_backward(stages, weights, inputs, group_sizes_E, dy_RM):
    def visit(block, gradients):
        dweights, dx_RM = gradients
        of_expert = jax.tree.map(block.of_expert, weights)
        own = jax.tree.map(block.own_rows, inputs)
        more, dx_BM = _through_stages(stages, _dense, of_expert, own, block.own_rows(dy_RM))
        return jax.tree.map(block.add_to_expert, dweights, more), block.put(dx_RM, dx_BM)

    zeros = jax.tree.map(jnp.zeros_like, (weights, inputs[0]))
    if 0 in (len(dy_RM), len(group_sizes_E)):
        return zeros
    return _for_each_block(group_sizes_E, len(dy_RM), visit, zeros)


def _dense(x_BM, w_MH, b_H):
    y_BH = _dense_product(x_BM, w_MH)
    return y_BH if b_H is None else y_BH + b_H


@jax.custom_vjp
def _dense_product(x_BM, w_MH):
    return x_BM @ w_MH


def _dense_product_backward(residuals, dy_BH):
    x_BM, w_MH = residuals
    # XLA on CPU multiplies a transposed left side at 80 to 90 GFLOP/s, one that lies row by row at 105;
    # the barrier keeps it from undoing the transposition.
    x_MB = lax.optimization_barrier(x_BM.T)
    return dy_BH @ w_MH.T, x_MB @ dy_BH


_dense_product.defvjp(lambda x_BM, w_MH: (x_BM @ w_MH, (x_BM, w_MH)), _dense_product_backward)
