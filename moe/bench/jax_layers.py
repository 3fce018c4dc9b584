"""Our layer with each back-end, and the dense layer it replaces, in JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from moe.bench.measure import Case
from moe.bench.results import CEILING
from moe.bench.workload import TOP_K, Workload
from moe.layers import MoE, Top2
from moe.layers.dispatch import Dispatch
from moe.layers.feed_forward import FeedForward

_EINSUM_GROUP = 256  # its one-hot products grow with the group; nobody would take a larger one
_DROPLESS = ("auto", "sorted")

# What a layer returns: its output, the losses it adds to training, its statistics.
Call = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array | float, Any]]


def dense(workload: Workload, *, gated: bool = False) -> Case:
    """The feed-forward layer with the FLOPs of the experts that one token uses."""
    weights = _dense_weights(workload, gated)
    graph = nnx.split(nnx.eval_shape(lambda: _dense_layer(workload, gated)))[0]
    return _case(
        "dense-jax-swiglu" if gated else "dense-jax",
        workload,
        graph,
        weights,
        lambda layer, x_BLM: (layer(x_BLM), 0.0, None),
        gated=gated,
        note=f"d_hidden {TOP_K * workload.d_hidden}",
    )


def sparse(workload: Workload, *, dispatch: Dispatch, gated: bool = False) -> Case:
    """Our layer, with routing, losses and statistics."""
    weights = _moe_weights(workload, gated)
    graph = nnx.split(nnx.eval_shape(lambda: _moe_layer(workload, dispatch, gated)))[0]
    key = jax.random.key(workload.seed) if workload.training else None

    def call(layer, x_BLM):
        y_BLM, stats = layer(x_BLM, key=key)
        return y_BLM, 0.01 * stats.aux_loss + 0.001 * stats.z_loss, stats

    return _case(
        f"moe-{dispatch}" + ("-swiglu" if gated else ""),
        workload,
        graph,
        weights,
        call,
        gated=gated,
        note=_moe_note(workload, dispatch),
        computed=lambda stats: float(stats.kept_E.sum() / stats.assigned_E.sum()),
    )


def ceiling(workload: Workload) -> Case:
    """A large square matrix product: the speed that nothing made of products can pass."""
    size = min(8192 if workload.device == "gpu" else 2048, 4 * workload.d_model)
    # Random numbers: a GPU computes constants faster than anything a layer holds.
    a = jax.random.normal(jax.random.key(workload.seed), (size, size), workload.dtype)
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    return Case(
        name=CEILING,
        note=f"{size} x {size}",
        forward=lambda: product(a, a),
        train=None,
        wait=jax.block_until_ready,
        memory=lambda: None,
        forward_flops=2.0 * size**3,
        queued=workload.device == "gpu",
    )


CASES: dict[str, Callable[[Workload], Case]] = {
    CEILING: ceiling,
    "dense-jax": dense,
    "dense-jax-swiglu": functools.partial(dense, gated=True),
    **{f"moe-{name}": functools.partial(sparse, dispatch=name) for name in get_args(Dispatch)},
    "moe-auto-swiglu": functools.partial(sparse, dispatch="auto", gated=True),
}


def _case(
    name: str,
    workload: Workload,
    graph,
    weights,
    call: Call,
    *,
    note: str,
    gated: bool,
    computed: Callable[[Any], float] | None = None,
) -> Case:
    """Compiles the forward and the forward-backward pass of a layer on the workload's tokens."""
    leaves, tree = jax.tree.flatten(weights)  # a flat list costs less at every call than a state
    arrays = workload.arrays()
    x_BLM, cotangent_BLM = (
        jnp.asarray(a, workload.dtype)[None] for a in (arrays.x_NM, arrays.cotangent_NM)
    )

    def run(leaves, x_BLM):
        return call(nnx.merge(graph, jax.tree.unflatten(tree, leaves)), x_BLM)

    run_forward = jax.jit(lambda *given: run(*given)[::2]).lower(leaves, x_BLM).compile()
    train, step_program = None, None
    if workload.training:
        train, step_program = _training(run, leaves, x_BLM, cotangent_BLM)

    def memory():
        plan = (step_program or run_forward).memory_analysis()
        if plan is None:
            return None
        return (
            plan.temp_size_in_bytes + plan.output_size_in_bytes,
            "in JAX as the compiled program plans it",
        )

    return Case(
        name=name,
        note=note,
        forward=lambda: run_forward(leaves, x_BLM),
        train=train,
        wait=jax.block_until_ready,
        memory=memory,
        forward_flops=workload.forward_flops(gated),
        computed=(lambda: computed(run_forward(leaves, x_BLM)[1])) if computed else None,
        gated=gated,
        queued=workload.device == "gpu",
    )


def _training(run: Callable, leaves, x_BLM, cotangent_BLM) -> tuple[Callable, Any]:
    """The forward-backward pass of `run` as a call without arguments, and its compiled program."""

    def loss(leaves, x_BLM, cotangent_BLM):
        y_BLM, losses, _ = run(leaves, x_BLM)
        return jnp.sum(y_BLM * cotangent_BLM, dtype=jnp.float32) + losses, y_BLM

    def step(leaves, x_BLM, cotangent_BLM, _):
        # The output is returned, or XLA would leave out the product that only it needs.
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(leaves, x_BLM, cotangent_BLM)

    # The last call's gradients are given back for the next one's: fresh memory would cost page
    # faults that a training step, where gradients are temporaries, does not have.
    donating = jax.jit(step, donate_argnums=3, keep_unused=True)
    last = jax.tree.map(jnp.zeros_like, ((leaves, x_BLM), x_BLM))
    program = donating.lower(leaves, x_BLM, cotangent_BLM, last).compile()

    def train():
        nonlocal last
        last = program(leaves, x_BLM, cotangent_BLM, last)
        return last

    return train, program


def _moe_layer(workload: Workload, dispatch: Dispatch, gated: bool) -> MoE:
    factor = None if dispatch in _DROPLESS else workload.capacity_factor
    return MoE(
        workload.d_model,
        workload.d_hidden,
        workload.num_experts,
        router=Top2(capacity_factor=factor, second_policy="all"),
        dispatch=dispatch,
        group_size=min(workload.group_size, _EINSUM_GROUP)
        if dispatch == "einsum"
        else workload.group_size,
        activation=jax.nn.silu if gated else jax.nn.relu,
        gated=gated,
        rngs=nnx.Rngs(workload.seed),
    )


def _dense_layer(workload: Workload, gated: bool) -> FeedForward:
    return FeedForward(
        workload.d_model,
        TOP_K * workload.d_hidden,
        activation=jax.nn.silu if gated else jax.nn.relu,
        gated=gated,
        rngs=nnx.Rngs(workload.seed),
    )


@functools.lru_cache(maxsize=1)
def _dense_weights(workload: Workload, gated: bool):
    return _cast(nnx.state(_dense_layer(workload, gated)), workload)


@functools.lru_cache(maxsize=1)  # shared by the back-ends: a section holds one copy
def _moe_weights(workload: Workload, gated: bool):
    state: Any = nnx.state(_moe_layer(workload, "auto", gated))
    state["experts"] = _cast(state["experts"], workload)
    state["router"]["kernel_ME"][...] = jnp.asarray(workload.arrays().kernel_ME)
    return state


def _cast(state, workload: Workload):
    return jax.tree.map(lambda leaf: leaf.astype(workload.dtype), state)


def _moe_note(workload: Workload, dispatch: Dispatch) -> str:
    if dispatch in _DROPLESS or not workload.training:
        return "dropless"
    layer = nnx.eval_shape(lambda: _moe_layer(workload, dispatch, False))
    return f"capacity factor {workload.capacity_factor:g}, groups of {layer.group_size}"
