"""Every expert on its own rows: matrix products over ragged groups.

Rows are sorted by expert; group e is the group_sizes_E[e] rows after those of the experts before it.
GPU and TPU have kernels for this, and so has a CPU with a compiler (`moe.routing.native`); without one
it runs in blocks (`moe.routing.blocks`).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from moe.errors import UserError
from moe.routing import blocks, native
from moe.routing.blocks import Block

GroupedImplementation = Literal["auto", "native", "blocked", "ragged_dot", "tokamax"]

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
      implementation: "native" (CPU, float32: a kernel in C++), "blocked" (CPU: loops over blocks),
        "ragged_dot" (`jax.lax.ragged_dot`), "tokamax" (the Pallas kernels of that package for GPU and
        TPU). "auto" is on CPU "native", or "blocked" where that cannot be or there is a GPU or TPU
        too; elsewhere "tokamax" where it is installed, else "ragged_dot". It is decided when the
        program is lowered, so that one compiled for another platform is right.

    Returns:
      y_RH: rows of group e are those of x times w[e]; rows past the last group are zero, whatever x
      holds there. Gradients likewise: zero for such rows, and for the matrix of an empty group. Only
      reverse-mode derivatives are defined.

    Raises:
      UserError: an unknown implementation, "tokamax" where the package is missing, or "native"
        where it cannot be compiled or a number is not float32.
    """
    _check(implementation, (w_EMH, x_RM))
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
    as with two `grouped_product`s; faster in blocks, where hidden rows stay in the cache from one
    product to the next, and what the activation makes of them is never written out.

    Args, Returns and Raises are as in `grouped_product`; `activation` acts on single elements.
    """
    _check(implementation, (weights, x_RM))
    stages = (_to_hidden, functools.partial(_from_hidden, activation))
    return _run(stages, implementation, weights, x_RM, group_sizes_E)


def _check(implementation: GroupedImplementation, arrays) -> None:
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
    if implementation == "native":
        _check_native(arrays)


def _check_native(arrays) -> None:
    if not _all_float32(arrays):
        dtypes = ", ".join(str(x.dtype) for x in jax.tree.leaves(arrays))
        raise UserError(
            f"weights and rows must be float32 for 'native': got {dtypes}. "
            "Convert them or choose 'auto'."
        )
    if native.missing() is not None:
        raise UserError(
            "implementation must be one that this machine can compile: got 'native', for which "
            f"{native.missing()}. Install a C++17 compiler, name it in CXX, or choose 'auto'."
        )


def _all_float32(arrays) -> bool:
    return all(x.dtype == jnp.float32 for x in jax.tree.leaves(arrays))


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


def _forward(stages, implementation, keep, weights, x_RM, group_sizes_E) -> Sequence[Any]:
    """x, then what each stage makes of it; without `keep` None for all but the last."""

    def run(name, *arrays):
        if name == "blocked":
            return _forward_in_blocks(stages, keep, *arrays)
        return _forward_at_once(stages, keep, name, *arrays)

    return x_RM, *_on_platform(implementation, run, weights, x_RM, group_sizes_E)


def _run_backward(stages, implementation, residuals, dy_RM):
    def run(name, *arrays):
        if name == "blocked":
            return _backward_in_blocks(stages, *arrays)
        return _backward_at_once(stages, name, *arrays)

    return *_on_platform(implementation, run, *residuals, dy_RM), None


_run.defvjp(_run_forward, _run_backward)


def _on_platform(implementation: GroupedImplementation, run, *arrays):
    """run(name, *arrays) with the name of an implementation."""
    if implementation != "auto":
        return run(implementation, *arrays)
    floats = [x for x in jax.tree.leaves(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
    # Asked where programs run on the CPU alone: a machine with a GPU or TPU need not compile it.
    has_native = (
        jax.default_backend() == "cpu" and _all_float32(floats) and native.missing() is None
    )
    on_cpu = "native" if has_native else "blocked"
    elsewhere = "tokamax" if _has_tokamax() else "ragged_dot"
    return lax.platform_dependent(
        *arrays, cpu=functools.partial(run, on_cpu), default=functools.partial(run, elsewhere)
    )


def _through_stages(stages, linear: Linear, weights, inputs, dy):
    """dweights and dx of all stages, from the last to the first."""
    dweights = jax.tree.map(jnp.zeros_like, weights)
    for stage, rows in zip(reversed(stages), reversed(inputs), strict=True):
        _, back = jax.vjp(functools.partial(stage, linear), weights, rows)
        more, dy = back(dy)
        dweights = jax.tree.map(jnp.add, dweights, more)
    return dweights, dy


def _forward_at_once(stages, keep, implementation, weights, x_RM, group_sizes_E):
    linear = _linear(implementation, group_sizes_E, len(x_RM))
    rows, outputs = x_RM, []
    for stage in stages:
        rows = stage(linear, weights, rows)
        outputs.append(rows)
    return outputs if keep else [*[None] * (len(stages) - 1), rows]


def _backward_at_once(stages, implementation, weights, inputs, group_sizes_E, dy_RM):
    linear = _linear(implementation, group_sizes_E, len(dy_RM))
    return _through_stages(stages, linear, weights, inputs, dy_RM)


def _linear(implementation, group_sizes_E: jax.Array, num_rows: int) -> Linear:
    if implementation == "native":
        return functools.partial(_native_linear, group_sizes_E)
    if implementation == "tokamax":
        import tokamax

        product = tokamax.ragged_dot
    else:
        product = lax.ragged_dot
    real_R1 = (jnp.arange(num_rows) < jnp.sum(group_sizes_E))[:, None]

    def linear(x_RM, w_EMH, b_EH):
        # Of rows past the end kernels promise nothing.
        y_RH = product(jnp.where(real_R1, x_RM, 0), w_EMH, group_sizes_E)
        if b_EH is not None:
            y_RH += jnp.repeat(b_EH, group_sizes_E, axis=0, total_repeat_length=num_rows)
        return jnp.where(real_R1, y_RH, 0)

    return linear


def _native_linear(group_sizes_E, x_RM, w_EMH, b_EH):
    y_RH = native.product(x_RM, w_EMH, group_sizes_E)
    if b_EH is None:
        return y_RH
    # So the sum of the gradient over a group's rows is a product too, not a scatter-add.
    return y_RH + native.product(jnp.ones((len(x_RM), 1)), b_EH[:, None], group_sizes_E)


def _forward_in_blocks(stages, keep, weights, x_RM, group_sizes_E):
    def visit(block: Block, outputs):
        rows, written = block.rows(x_RM), []
        for stage, output in zip(stages, outputs, strict=True):
            rows = stage(functools.partial(_block_linear, block), weights, rows)
            written.append(None if output is None else jax.tree.map(block.put, output, rows))
        return written

    shapes = jax.eval_shape(
        lambda *arrays: _forward_at_once(stages, keep, "ragged_dot", *arrays),
        weights,
        x_RM,
        group_sizes_E,
    )
    empty = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    return _for_each_block(weights, group_sizes_E, len(x_RM), visit, empty)


def _block_linear(block: Block, x_BM, w_EMH, b_EH):
    if len(x_BM) <= blocks.FEW_ROWS:
        y_BH = blocks.few_rows_product(block, x_BM, w_EMH)
    else:
        y_BH = x_BM @ block.of_expert(w_EMH)
    return y_BH if b_EH is None else y_BH + block.of_expert(b_EH)


def _backward_in_blocks(stages, weights, inputs, group_sizes_E, dy_RM):
    def visit(block: Block, gradients):
        dweights, dx_RM = gradients
        of_expert = jax.tree.map(block.of_expert, weights)
        own = jax.tree.map(block.own_rows, inputs)
        more, dx_BM = _through_stages(stages, _dense_linear, of_expert, own, block.own_rows(dy_RM))
        return jax.tree.map(block.add_to_expert, dweights, more), block.put(dx_RM, dx_BM)

    zeros = jax.tree.map(jnp.zeros_like, (weights, inputs[0]))
    return _for_each_block(weights, group_sizes_E, len(dy_RM), visit, zeros)


def _for_each_block(weights, group_sizes_E, num_rows: int, visit, carry):
    num_weights = sum(leaf.size for leaf in jax.tree.leaves(weights)) / max(1, len(group_sizes_E))
    num_flops = 2 * num_rows * num_weights
    return blocks.for_each_block(group_sizes_E, num_rows, visit, carry, num_flops=num_flops)


def _dense_linear(x_BM, w_MH, b_H):
    y_BH = blocks.dense_product(x_BM, w_MH)
    return y_BH if b_H is None else y_BH + b_H
