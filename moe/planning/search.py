"""Tries the meshes and rematerialisation policies that a run may have on a number of devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax

from moe.errors import UserError
from moe.models.config import Remat
from moe.planning.chips import Slice
from moe.planning.plan import Plan, plan
from moe.planning.report import gib
from moe.sharding import AXES, MeshConfig
from moe.training import TrainConfig

Tell = Callable[[str], None]

POLICIES: tuple[Remat, ...] = ("none", "dots", "exchange", "full")
"""From the policy that computes least again, and keeps most, on."""


def legal_meshes(config: TrainConfig, num_devices: int) -> Iterator[MeshConfig]:
    """The meshes whose axes divide what they split, from the most expert parallelism down.

    Experts divide over `expert`; heads, hidden widths and vocabulary over `model`; rows and groups of
    the batch over `data` x `expert`; layer pairs over `stage`, for a model of several micro-batches.
    """
    model, mixture = config.model, config.mixture
    parts = model.num_microbatches
    vocabularies = (model.vocab_size, model.source_vocab_size or model.vocab_size)
    inner = (model.num_heads, model.d_hidden, model.expert_width, *vocabularies)
    rows = mixture.batch_size // parts
    tokens = [rows * n for n in (mixture.source_length, mixture.target_length)]
    groups = [math.ceil(n / min(model.group_size, n)) for n in tokens]
    split = (rows, *(groups if model.num_experts else ()))
    layers = [n // 2 for n in (model.num_encoder_layers, model.num_decoder_layers)]

    def legal(data: int, stage: int, expert: int, tensor: int) -> bool:
        return (
            all(n % tensor == 0 for n in inner)
            and all(n % (data * expert) == 0 for n in split)
            and (expert == 1 or (model.num_experts > 0 and model.num_experts % expert == 0))
            and (stage == 1 or parts > 1)
            and all(n % (stage * model.pipeline_rounds) == 0 for n in layers)
        )

    for expert, stage, tensor in itertools.product(
        reversed(_divisors(num_devices)), _divisors(num_devices), _divisors(num_devices)
    ):
        data, left = divmod(num_devices, expert * stage * tensor)
        if not left and legal(data, stage, expert, tensor):
            yield dataclasses.replace(
                config.mesh, data=data, stage=stage, expert=expert, model=tensor
            )


def search(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    name: str = "run",
    where: Slice | None = None,
    memory_limit: float | None = None,
    tell: Tell = lambda line: None,
) -> list[Plan]:
    """Compiles the run on every legal mesh, and puts those that fit first.

    On each mesh it tries the rematerialisation policies from the one that computes least again on.
    The first that fits ends the mesh's turn; where a device's memory is not known, none does. What
    does not compile is left out. In order of the modelled step; where nothing is modelled, of the
    bytes that a device sends, then of its memory. Every attempt costs a compilation.

    Args:
      config: the run; the sizes of its mesh and its policy do not matter.
      devices: as in `plan`.
      name: as in `plan`.
      where: as in `plan`.
      memory_limit: as in `plan`.
      tell: is given a line for each attempt.

    Raises:
      UserError: no mesh is legal, or no attempt compiles.
    """
    meshes = list(legal_meshes(config, len(devices)))
    if not meshes:
        model, mixture = config.model, config.mixture
        raise UserError(
            f"devices must divide the run: got {len(devices)} for {model.num_experts} experts, "
            f"{model.num_heads} heads, {mixture.batch_size} rows of {mixture.target_length} in groups "
            f"of {model.group_size}. Change the batch or the number of devices."
        )

    def compiled(attempt: TrainConfig) -> Plan:
        return plan(attempt, devices, name=name, where=where, memory_limit=memory_limit)

    plans: list[Plan] = []
    for i, mesh in enumerate(meshes):
        tell(f"mesh {i + 1} of {len(meshes)}: {_shape(mesh)}")
        plans += _until_one_fits(dataclasses.replace(config, mesh=mesh), compiled, tell)
    if not plans:
        raise UserError(
            f"an attempt must compile: got none of {len(meshes)} meshes on {len(devices)} devices. "
            "Run moe plan without --search to see a whole message."
        )
    return sorted(plans, key=_rank)


def _until_one_fits(
    config: TrainConfig, compiled: Callable[[TrainConfig], Plan], tell: Tell
) -> Iterator[Plan]:
    """The plans of one mesh: policy after policy, the first that fits the last."""
    for remat in POLICIES:
        model = dataclasses.replace(config.model, remat=remat)
        try:
            one = compiled(dataclasses.replace(config, model=model))
        except Exception as error:  # whatever a compiler has against one mesh, others may do
            tell(f"  remat {remat} failed: {str(error).partition(chr(10))[0]}")
            continue
        tell(f"  remat {remat}: {gib(one.memory.total)}, {_FITS[one.fits]}")
        yield one
        if one.fits:
            return


_FITS = {True: "fits", False: "does not fit", None: "memory of the device unknown"}


def _rank(one: Plan) -> tuple:
    sent = sum(exchange.bytes_per_device for exchange in one.exchanges)
    step = one.time.step if one.time is not None else 0.0
    return one.fits is False, step, sent, one.memory.total


def _shape(mesh: MeshConfig) -> str:
    return " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
