"""How a layer carries tokens to its experts and back: the choice of a back-end, and its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moe import routing
from moe.errors import UserError
from moe.layers.experts import Experts
from moe.layers.sorted_rows import run_sorted
from moe.routing import RoutingPlan, SoftPlan
from moe.sharding import constrain, num_shards
from moe.sharding.exchange import EXCHANGE

Dispatch = Literal["auto", "sorted", "gather", "einsum"]

_TO_SLOTS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "gather": (routing.gather_dispatch, routing.gather_combine),
    "einsum": (routing.einsum_dispatch, routing.einsum_combine),
}


class DispatchChoice(NamedTuple):
    """A back-end and why it was taken."""

    name: Dispatch
    reason: str


def choose_dispatch(wanted: Dispatch, plan: RoutingPlan | SoftPlan) -> DispatchChoice:
    """The back-end for a plan on the mesh in force; "auto" takes the fastest, the numbers are the same.

    Raises:
      UserError: an index back-end for a plan whose weights are dense.
    """
    if isinstance(plan, SoftPlan):
        if wanted in ("sorted", "gather"):
            raise UserError(
                f'dispatch must be "einsum" or "auto" for soft routing: got {wanted!r}. '
                "Every slot is a mixture of all tokens, there is nothing to index."
            )
        return DispatchChoice("einsum", "soft routing: every slot is a mixture of all tokens")
    if wanted != "auto":
        return DispatchChoice(wanted, "asked for")
    if plan.expert_GSK.shape[-1] == plan.num_experts:
        return DispatchChoice("gather", "experts pick their tokens: no slot is empty")
    num_devices = num_shards("experts")
    if num_devices == 1 and jax.default_backend() == "cpu":
        return DispatchChoice("sorted", "experts are on every device: sorted rows have no padding")
    if plan.is_dropless:
        return DispatchChoice(
            "sorted", "dropless: sorted rows, not a slot for each token and expert"
        )
    if num_devices > 1:
        return DispatchChoice(
            "gather", f"experts are split over {num_devices} devices: equal slots travel all-to-all"
        )
    return DispatchChoice(
        "gather", "limited capacity: slots of equal size make one batched product"
    )


def run_experts(
    choice: DispatchChoice,
    plan: RoutingPlan | SoftPlan,
    x_GSM: jax.Array,
    experts: Experts,
    *,
    exchange_chunks: int = 1,
) -> jax.Array:
    """Dispatch, experts, combine: y_GSM in x's type.

    Where experts are split over devices, in `exchange_chunks` equal parts of a device's groups, or the
    next smaller number that divides them. No part's exchange waits for the experts of another.
    """
    num_chunks = 1
    if num_shards("experts") > 1:
        num_groups = len(x_GSM) // num_shards("groups")
        num_chunks = max(n for n in range(1, exchange_chunks + 1) if num_groups % n == 0)
    if choice.name == "sorted":
        assert isinstance(plan, RoutingPlan)
        return run_sorted(plan, x_GSM, experts, num_chunks)
    dispatch, combine = _TO_SLOTS[choice.name]
    return combine(plan, _run_slots(dispatch(plan, x_GSM), experts, num_chunks))


def _run_slots(x_GECM: jax.Array, experts: Experts, num_chunks: int) -> jax.Array:
    """Slots to their experts and back: y_GECM."""
    if num_chunks == 1:
        return from_experts(experts(to_experts(x_GECM)))
    _, *slots = x_GECM.shape
    # A chunk is a part of each device's groups: [devices, chunks, the device's groups in one, ...].
    x = x_GECM.reshape(num_shards("groups"), num_chunks, -1, *slots)
    y = [
        _run_slots(chunk.reshape(-1, *slots), experts, 1).reshape(chunk.shape)
        for chunk in jnp.split(x, num_chunks, axis=1)
    ]
    return jnp.concatenate(y, axis=1).reshape(x_GECM.shape)


def to_experts(x_GECM: jax.Array) -> jax.Array:
    """From the devices that hold the tokens to those that hold the experts: x[E_expert, G, C, M].

    Swapped between two constraints, this compiles to one all-to-all. Written as a single einsum to
    EGCM with one constraint it would cost all-gathers.
    """
    x_GECM = constrain(x_GECM, "groups", None, None, None)
    x_EGCM = constrain(jnp.swapaxes(x_GECM, 0, 1), "experts", "exchanged_groups", None, None)
    return checkpoint_name(x_EGCM, EXCHANGE)


def from_experts(y_EGCM: jax.Array) -> jax.Array:
    """The way back, the second all-to-all: y[G_(data,expert), E, C, M]."""
    y_EGCM = constrain(y_EGCM, "experts", "exchanged_groups", None, None)
    y_GECM = constrain(jnp.swapaxes(y_EGCM, 0, 1), "groups", None, None, None)
    return checkpoint_name(y_GECM, EXCHANGE)
