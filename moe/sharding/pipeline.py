"""Pipeline parallelism: stages of layers on different devices, fed with one micro-batch after another.

All stages are one vectorised computation over a leading dimension of stages, which the layout splits
over the mesh axis `stage`. What they work on is a buffer of that dimension; it is shifted by one
between two ticks, and that is all that travels.

Source: Huang et al. 2019, GPipe (arXiv:1811.06965); as a shifting buffer, and the circular schedule,
Xu et al. 2021, GSPMD (arXiv:2105.04663), section 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.sharding.annotations import constrain
from moe.sharding.rules import ANY, mesh_axes

_MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "dynamic_slice",
    "gather",
    "reshape",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
}


def all_computed(primitive, *_, **__) -> bool:
    """The policy that keeps what was computed, but not what was moved or cast.

    So weights, as a layer needs them, are not kept for each tick: they are still where they were.
    """
    return primitive.name not in _MOVES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which stage computes what at which tick.

    Stage k is busy with its u-th piece of work at tick u + k: micro-batch u mod `period` in round
    u // `period`.
    """

    num_microbatches: int
    num_stages: int
    num_rounds: int = 1

    @property
    def period(self) -> int:
        """Ticks from one round to the next: a micro-batch comes back after K."""
        if self.num_rounds == 1:
            return self.num_microbatches
        return max(self.num_microbatches, self.num_stages)

    @property
    def num_ticks(self) -> int:
        """M + K - 1 for GPipe; M r + K - 1 for r rounds if M >= K."""
        before_last = self.period * (self.num_rounds - 1)
        return before_last + self.num_microbatches + self.num_stages - 1

    def round_K(self, tick: jax.Array) -> jax.Array:
        """The round that each stage is in; the nearest one where it is idle."""
        work_K = tick - jnp.arange(self.num_stages)
        return jnp.clip(work_K // self.period, 0, self.num_rounds - 1)

    def tick_KRM(self) -> jax.Array:
        """When each stage computes each round of each micro-batch."""
        sizes = self.num_stages, self.num_rounds, self.num_microbatches
        stage, turn, microbatch = (jnp.arange(size) for size in sizes)
        return stage[:, None, None] + self.period * turn[:, None] + microbatch


def pipeline(
    layer: Callable[[Any, Any, Any], tuple[Any, Any]],
    weights: Any,
    x: Any,
    beside: Any = None,
    *,
    num_stages: int,
    num_rounds: int = 1,
    policy: Callable[..., bool] = all_computed,
) -> tuple[Any, Any]:
    """Each micro-batch through all layers, with different ones in different stages at a time.

    Args:
      layer: (weights, x, beside) -> (x, out), for one layer and one micro-batch. It is also run where
        no micro-batch is due, on others in their place; what comes out is not used.
      weights: a tree of arrays led by the number of layers Y.
      x: a tree of arrays led by the number of micro-batches M: what layers change.
      beside: the same, for what layers only read. It travels with x.
      num_stages: K, a multiple of the parts that the layout in force cuts "layers" into. The result
        does not depend on it.
      num_rounds: r. With 1 a stage computes Y / K layers one after another (GPipe), and its devices
        hold their weights. With more a micro-batch passes all stages r times and Y / (K r) layers in
        each (the circular schedule); weights are stored as for 1, so each call brings them to their
        stages.
      policy: what the backward pass keeps of each tick, besides x and `beside`: one of
        `jax.checkpoint_policies`. Every product in a stage has one batch dimension more.

    Returns:
      x after the last layer, led by M, and `out` led by Y and M.

    Raises:
      UserError: K r does not divide Y.
    """
    num_layers, num_microbatches = (len(jax.tree.leaves(tree)[0]) for tree in (weights, x))
    if num_layers % (num_stages * num_rounds):
        raise UserError(
            f"the number of layers must divide by stages x rounds: got {num_layers} for {num_stages} "
            f"x {num_rounds}. Change the mesh, the rounds or the depth."
        )
    schedule = Schedule(
        num_microbatches=num_microbatches, num_stages=num_stages, num_rounds=num_rounds
    )
    weights_KR = jax.tree.map(lambda leaf: _by_stage(leaf, schedule), weights)
    waiting = jax.tree.map(lambda leaf: _queue(leaf, schedule), (x, beside))
    compute = _all_stages(layer, policy)

    def one_tick(carry, tick):
        held, waiting = carry
        held = jax.tree.map(_shifted, held)
        if num_rounds > 1:
            waiting = _enqueued(waiting, held, tick, schedule)
        x, beside = _with_first(held, waiting, tick, schedule)
        x, out = compute(weights_KR, x, beside, schedule.round_K(tick))
        x = jax.tree.map(_on_stages, x)
        return ((x, beside), waiting), (x, out)

    # Stages that nothing has reached yet work on real rows, so that nothing there is infinite.
    held = jax.lax.stop_gradient(jax.tree.map(lambda leaf: leaf[0], waiting))
    _, (x, out) = jax.lax.scan(one_tick, (held, waiting), jnp.arange(schedule.num_ticks))
    first_out = schedule.num_ticks - num_microbatches
    x = jax.tree.map(lambda leaf: leaf[first_out:, -1], x)
    return x, jax.tree.map(lambda leaf: _by_layer(leaf, schedule), out)


def to_microbatches(x: jax.Array, num_microbatches: int) -> jax.Array:
    """Rows b * M + m become rows b of micro-batch m: each device cuts up rows that it holds."""
    x = x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1)
    return constrain(x, None, "batch", *(ANY,) * (x.ndim - 2))


def from_microbatches(x: jax.Array) -> jax.Array:
    """The rows of all micro-batches in their order; undoes `to_microbatches`."""
    x = x.swapaxes(0, 1)
    x = x.reshape(-1, *x.shape[2:])
    return constrain(x, "batch", *(ANY,) * (x.ndim - 1))


def _all_stages(layer, policy) -> Callable:
    """The layers of all stages at once, each with the weights of its round."""

    def one_stage(weights_R, x, beside, turn):
        weights = jax.tree.map(lambda leaf: leaf[turn if len(leaf) > 1 else 0], weights_R)
        return jax.lax.scan(lambda x, weights: layer(weights, x, beside), x, weights)

    # Within a scan the compiler cannot merge the second computation with the first.
    return _over_stages(jax.checkpoint(one_stage, policy=policy, prevent_cse=False))


def _over_stages(function, in_axes=0) -> Callable:
    """Vectorised over stages; annotations inside get the axes of that dimension added."""
    axes = mesh_axes("layers", jax.sharding.get_abstract_mesh())
    return jax.vmap(function, in_axes=in_axes, spmd_axis_name=axes or None)


def _on_stages(x: jax.Array) -> jax.Array:
    return constrain(x, "layers", *(ANY,) * (x.ndim - 1))


def _by_stage(leaf: jax.Array, schedule: Schedule) -> jax.Array:
    """Y layers as K, r, layers of a chunk: stage k has chunk j * K + k in round j."""
    chunks = leaf.reshape(schedule.num_rounds, schedule.num_stages, -1, *leaf.shape[1:])
    return _on_stages(chunks.swapaxes(0, 1))


def _by_layer(out: jax.Array, schedule: Schedule) -> jax.Array:
    """From ticks, K, layers of a chunk to Y, M, without what idle stages computed."""
    out = _over_stages(lambda of_tick, tick_RM: of_tick[tick_RM], (1, 0))(out, schedule.tick_KRM())
    out = jnp.moveaxis(out, (1, 0, 3, 2), (0, 1, 2, 3))
    return out.reshape(-1, *out.shape[3:])


def _queue(leaf: jax.Array, schedule: Schedule) -> jax.Array:
    """What stage 0 takes at each tick of a period; a copy for each stage, so that its gradient is
    summed over them once and not at each tick."""
    if len(leaf) < schedule.period:
        leaf = leaf[jnp.arange(schedule.period) % len(leaf)]
    queue = jnp.broadcast_to(leaf[:, None], (len(leaf), schedule.num_stages, *leaf.shape[1:]))
    return constrain(queue, None, "layers", *(ANY,) * (leaf.ndim - 1))


def _enqueued(waiting, held, tick: jax.Array, schedule: Schedule):
    """The queue with what came back to stage 0 in its turn for the next round."""
    has_come = tick >= schedule.num_stages
    slot = (tick - schedule.num_stages) % schedule.period

    def one(waiting, held):
        return waiting.at[slot].set(jnp.where(has_come, held, waiting[slot]))

    return jax.tree.map(one, waiting, held)


def _shifted(held: jax.Array) -> jax.Array:
    """For stage k what stage k - 1 held, for stage 0 what the last did."""
    return _on_stages(jnp.roll(held, 1, axis=0))


def _with_first(held, waiting, tick: jax.Array, schedule: Schedule):
    """What is held, and at stage 0 what is next in the queue."""

    def one(held, waiting):
        is_first = jnp.arange(len(held)).reshape(-1, *(1,) * (held.ndim - 1)) == 0
        return jnp.where(is_first, waiting[tick % schedule.period], held)

    return jax.tree.map(one, held, waiting)
