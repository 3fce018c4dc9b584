"""Rows that move between devices, to each as many as there are for it.

P peers exchange rows by hand, within a `jax.shard_map`. What a device has for a peer is E slices of its
array, one for each of the peer's experts (for all that this file knows, bins); the peer puts the rows
of one expert together, in the order of the devices that they come from.

Where the platform has a ragged all-to-all (TPU and NVIDIA GPU) only these rows travel. Elsewhere they
travel in blocks of the most rows that one device can have for another. Same numbers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

EXCHANGE = "exchange"
"""What crossed devices, by this name for `jax.checkpoint_policies`: kept, it need not cross again."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices:
    """The rows of one device's array that it shares with each peer.

    Attributes:
      start_PE: int32, the first row of each slice.
      size_PE: int32, its rows; may be 0.
      remote_start_PE: int32, the first row of its copy in the peer's array.
      num_rows: rows of the array, those in no slice too.
    """

    start_PE: jax.Array
    size_PE: jax.Array
    remote_start_PE: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """Who sends which rows to whom, as one device sees it.

    Attributes:
      sent: of the array that it sends from.
      received: of the array that it receives into.
      axes: mesh axes along which devices are peers, the first varies slowest.
      most: rows that one device has for another at most.
    """

    sent: Slices
    received: Slices
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})

    def back(self) -> Route:
        """The same rows the other way."""
        return dataclasses.replace(self, sent=self.received, received=self.sent)


def plan_route(
    start_PE: jax.Array, size_PE: jax.Array, axes: tuple[str, ...], *, num_rows: int, most: int
) -> Route:
    """Tells every peer what comes; the devices exchange 3 P E integers, which no gradient needs.

    Args:
      start_PE: int32, first row of the slice for expert e of peer p.
      size_PE: int32, its rows.
      axes: mesh axes, held by hand, along which devices are peers; none is a device alone.
      num_rows: rows of the array that they are slices of.
      most: an upper bound of each peer's sum of sizes, on every device.

    Returns:
      A route into an array of P * most rows, sorted by expert; expert e has
      `route.received.size_PE.sum(0)[e]` of them.
    """
    told_PE2 = _all_to_all(jnp.stack([size_PE, start_PE], axis=-1), axes)
    arriving_PE, remote_start_PE = told_PE2[..., 0], told_PE2[..., 1]
    arriving_R = arriving_PE.T.reshape(-1)
    place_PE = (jnp.cumsum(arriving_R) - arriving_R).reshape(arriving_PE.T.shape).T
    sent = Slices(
        start_PE=start_PE,
        size_PE=size_PE,
        remote_start_PE=_all_to_all(place_PE, axes),
        num_rows=num_rows,
    )
    received = Slices(
        start_PE=place_PE,
        size_PE=arriving_PE,
        remote_start_PE=remote_start_PE,
        num_rows=len(size_PE) * most,
    )
    return Route(sent=sent, received=received, axes=axes, most=most)


@jax.custom_vjp
def exchange(x_RM: jax.Array, route: Route) -> jax.Array:
    """Moves rows along a route: `route.received.num_rows` of them, zero where nothing arrives.

    The gradient is the exchange back. Reverse mode only.
    """
    if not route.axes:
        return padded_exchange(x_RM, route)
    # Chosen when the program is lowered, so that one compiled for another platform is right.
    return lax.platform_dependent(
        x_RM, route, tpu=ragged_exchange, cuda=ragged_exchange, default=padded_exchange
    )


def _exchange_forward(x_RM, route):
    return exchange(x_RM, route), route


def _exchange_backward(route, dy_RM):
    return exchange(dy_RM, route.back()), None


exchange.defvjp(_exchange_forward, _exchange_backward)


def ragged_exchange(x_RM: jax.Array, route: Route) -> jax.Array:
    """`exchange` where no row travels that is none."""
    empty_RM = jnp.zeros((route.received.num_rows, x_RM.shape[1]), x_RM.dtype)
    return lax.ragged_all_to_all(x_RM, empty_RM, *ragged_arguments(route), axis_name=route.axes)


def ragged_arguments(route: Route) -> tuple[jax.Array, ...]:
    """Input offsets, send sizes, output offsets and receive sizes, as `jax.lax.ragged_all_to_all`."""
    sent = route.sent
    arrays_PE = (sent.start_PE, sent.size_PE, sent.remote_start_PE, route.received.size_PE)
    return tuple(array_PE.reshape(-1) for array_PE in arrays_PE)


def padded_exchange(x_RM: jax.Array, route: Route) -> jax.Array:
    """`exchange` in blocks of `route.most` rows for each peer, what is missing filled with zeros."""
    x_PQM = _take(x_RM, _row_of_place(route.sent, route.most))
    y_PQM = _all_to_all(x_PQM, route.axes)
    row_R = _row_of_place(route.received, route.most).reshape(-1)
    nowhere_R = jnp.full((route.received.num_rows,), row_R.size)
    place_R = nowhere_R.at[row_R].set(jnp.arange(row_R.size), mode="drop")
    return _take(y_PQM.reshape(-1, x_RM.shape[1]), place_R)


def _row_of_place(slices: Slices, most: int) -> jax.Array:
    """row_PQ: which row stands at place q of the block of peer p; `num_rows` where none does.

    A block is the slices of its peer, one after the other.
    """
    end_PE = jnp.cumsum(slices.size_PE, axis=1)
    shift_PE = slices.start_PE - (end_PE - slices.size_PE)
    place_Q = jnp.arange(most)
    expert_PQ = jax.vmap(lambda end_E: jnp.searchsorted(end_E, place_Q, side="right"))(end_PE)
    shift_PQ = jnp.take_along_axis(shift_PE, expert_PQ, axis=1, mode="clip")
    return jnp.where(place_Q < end_PE[:, -1:], place_Q + shift_PQ, slices.num_rows)


def _take(x_RM: jax.Array, index: jax.Array) -> jax.Array:
    """x[index]; zero where the index is past the end."""
    return x_RM.at[index].get(mode="fill", fill_value=0)


def _all_to_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x[p] of this device becomes x[this device] of peer p."""
    return lax.all_to_all(x, axes, 0, 0, tiled=True) if axes else x
