"""Tries the meshes that a run may have on a number of devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax

from moe.errors import UserError
from moe.planning.chips import Slice
from moe.planning.plan import Plan, plan
from moe.sharding import MeshConfig
from moe.training import TrainConfig


def legal_meshes(config: TrainConfig, num_devices: int) -> Iterator[MeshConfig]:
    """The meshes whose axes divide what they split, from the most expert parallelism down.

    Experts divide over `expert`; heads, hidden widths and vocabulary over `model`; rows and groups of
    the batch over `data` x `expert`.
    """
    model, mixture = config.model, config.mixture
    inner = (model.num_heads, model.d_hidden, model.expert_width, model.vocab_size)
    tokens = [mixture.batch_size * n for n in (mixture.source_length, mixture.target_length)]
    groups = [math.ceil(n / min(model.group_size, n)) for n in tokens]
    split = (mixture.batch_size, *(groups if model.num_experts else ()))
    for expert in sorted(_divisors(num_devices), reverse=True):
        if model.num_experts % expert or (expert > 1 and not model.num_experts):
            continue
        for tensor in _divisors(num_devices // expert):
            data = num_devices // expert // tensor
            if all(n % tensor == 0 for n in inner) and all(n % (data * expert) == 0 for n in split):
                yield MeshConfig(data=data, expert=expert, model=tensor)


def search(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    name: str = "run",
    where: Slice | None = None,
) -> list[Plan]:
    """Compiles the run on every legal mesh, and puts those that fit first.

    In order of the modelled step; where nothing is modelled, of the bytes that a device sends, then
    of its memory. Every mesh costs a compilation.

    Raises:
      UserError: no mesh is legal.
    """
    meshes = list(legal_meshes(config, len(devices)))
    if not meshes:
        model, mixture = config.model, config.mixture
        raise UserError(
            f"devices must divide the run: got {len(devices)} for {model.num_experts} experts, "
            f"{model.num_heads} heads, {mixture.batch_size} rows of {mixture.target_length} in groups "
            f"of {model.group_size}. Change the batch or the number of devices."
        )
    plans = [
        plan(dataclasses.replace(config, mesh=mesh), devices, name=name, where=where)
        for mesh in meshes
    ]
    return sorted(plans, key=_rank)


def _rank(one: Plan) -> tuple:
    sent = sum(exchange.bytes_per_device for exchange in one.exchanges)
    step = one.time.step if one.time is not None else 0.0
    return one.fits is False, step, sent, one.memory.total


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
