"""What a run would cost: sizes read from the compiled step, and times modelled from them."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from moe.planning.ahead import CompiledStep, compile_step
from moe.planning.chips import Slice
from moe.planning.flops import product_flops
from moe.planning.step_time import MODEL, StepTime, model_step_time
from moe.sharding import Collective, hlo
from moe.sharding.explain import read_collectives
from moe.training import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
      total: all of them.
      experts: those of experts.
      active: those that one token meets; None where the router does not fix how many experts.
    """

    total: int
    experts: int
    active: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device; the compiler's numbers.

    Attributes:
      weights: parameters.
      optimizer: what the optimizer keeps.
      batch: the batch and all other arguments.
      results: outputs that do not replace an argument: metrics and expert load.
      activations: what the forward pass keeps for the backward pass.
      temporaries: gradients, copies and all else, at the worst moment.
      program: the machine code; None where none was made.
    """

    weights: int
    optimizer: int
    batch: int
    results: int
    activations: int
    temporaries: int
    program: int | None

    @property
    def total(self) -> int:
        """All of them that are known."""
        return sum(size or 0 for size in dataclasses.asdict(self).values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Collectives of one kind along the same axes from the same line, summed over a step.

    Attributes:
      kind: as in `Collective`.
      axes: as in `Collective`.
      count: how many stand in the program; one in a loop counts once.
      runs: how many run in a step.
      bytes_per_device: of all of them in a step.
      source: the line they come from.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    runs: int
    bytes_per_device: int
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run before it is paid for.

    Attributes:
      name: of the experiment and model.
      where: of the devices, such as "v5p:4x4x8" or "8 x cpu".
      num_devices: devices.
      mesh: devices along each axis.
      remat: what the backward pass computes again, a policy of `TransformerConfig`.
      weight_update: as in `MeshConfig`.
      parameters: counted.
      memory: compiled.
      memory_limit: bytes a device has; None where unknown.
      exchanges: compiled, those with most bytes first.
      flops_per_device: products of a step; traced.
      tokens: source and target positions of a batch.
      lower_seconds, compile_seconds: measured here.
      time: modelled; None where the chip is unknown.
      dollars_per_hour: list price of all chips; None where the chip is unknown.
      steps: of the run.
    """

    name: str
    where: str
    num_devices: int
    mesh: dict[str, int]
    remat: str
    weight_update: str
    parameters: Parameters
    memory: Memory
    memory_limit: float | None
    exchanges: tuple[Exchange, ...]
    flops_per_device: float
    tokens: int
    lower_seconds: float
    compile_seconds: float
    time: StepTime | None
    dollars_per_hour: float | None
    steps: int

    @property
    def fits(self) -> bool | None:
        """Whether a device has the memory; None where that is unknown."""
        return None if self.memory_limit is None else self.memory.total <= self.memory_limit

    @property
    def dollars(self) -> float | None:
        """Of the whole run, by the modelled time."""
        if self.time is None or self.dollars_per_hour is None:
            return None
        return self.time.step * self.steps / 3600 * self.dollars_per_hour

    def collectives(self, kind: str) -> int:
        """How many of a kind stand in the program."""
        return sum(exchange.count for exchange in self.exchanges if exchange.kind == kind)

    def bytes_per_device(self, kind: str) -> int:
        """Bytes of all of a kind in a step."""
        return sum(one.bytes_per_device for one in self.exchanges if one.kind == kind)

    def as_json(self) -> dict[str, Any]:
        """Everything, and by which way each figure was found."""
        document = dataclasses.asdict(self)
        document["memory"]["total"] = self.memory.total
        document |= {"fits": self.fits, "dollars": self.dollars}
        if self.time is not None:
            more = {"step": self.time.step, "utilisation": self.time.utilisation, "model": MODEL}
            document["time"] |= more
        document["found"] = FOUND
        return document


FOUND = {
    "parameters": "counted",
    "memory": "compiled",
    "exchanges": "compiled",
    "flops_per_device": "traced",
    "compile_seconds": "measured",
    "time": "modelled",
    "dollars": "modelled",
}
"""Where each figure comes from."""


def plan(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    name: str = "run",
    where: Slice | None = None,
    memory_limit: float | None = None,
    machine_code: bool = False,
) -> Plan:
    """Compiles the training step of a run for devices, and says what it would take.

    Args:
      config: the run; its mesh must fit the devices.
      devices: attached, simulated or only described (`slice_devices`).
      name: what the plan is called.
      where: the slice that the devices make; without it nothing is modelled.
      memory_limit: bytes of a device, in place of what it says or its chip has.
      machine_code: for a slice, wait for it too: minutes more, for its bytes alone.

    Raises:
      UserError: as `compile_step`.
    """
    step = compile_step(config, devices, where=where, machine_code=machine_code)
    return plan_of(step, name=name, where=where, memory_limit=memory_limit)


def plan_of(
    step: CompiledStep, *, name: str, where: Slice | None, memory_limit: float | None = None
) -> Plan:
    """The plan of a step that is compiled already; arguments as in `plan`."""
    config, num_devices = step.config, step.mesh.size
    exchanges = read_collectives(step.program.text, dict(step.mesh.shape))
    memory, flops = _memory(step), product_flops(step.jaxpr) / num_devices
    traffic = memory.total - (memory.program or 0) + step.program.temporaries
    time = dollars = None
    if where is not None:
        time = model_step_time(
            where, flops_per_device=flops, memory_traffic=traffic, collectives=exchanges
        )
        dollars = where.chip.dollars_per_hour * num_devices
    device = step.mesh.devices.flat[0]
    if memory_limit is None:
        memory_limit = where.chip.memory_bytes if where else _memory_limit(device)
    mixture = config.mixture
    return Plan(
        name=name,
        where=where.name if where else f"{num_devices} x {device.device_kind}",
        num_devices=num_devices,
        mesh=dict(step.mesh.shape),
        remat=config.model.remat,
        weight_update=config.mesh.weight_update,
        parameters=count_parameters(config, step.state.params),
        memory=memory,
        memory_limit=memory_limit,
        exchanges=summed(exchanges),
        flops_per_device=flops,
        tokens=mixture.batch_size * (mixture.source_length + mixture.target_length),
        lower_seconds=step.lower_seconds,
        compile_seconds=step.compile_seconds,
        time=time,
        dollars_per_hour=dollars,
        steps=config.steps,
    )


def summed(collectives: Sequence[Collective]) -> tuple[Exchange, ...]:
    """Those alike in kind, axes and line as one, most bytes first."""
    groups: dict[tuple, list[Collective]] = collections.defaultdict(list)
    for one in collectives:
        groups[one.kind, one.axes, one.source].append(one)
    exchanges = (
        Exchange(
            kind=kind,
            axes=axes,
            count=len(alike),
            runs=sum(one.times or 1 for one in alike),
            bytes_per_device=sum(one.bytes_per_device * (one.times or 1) for one in alike),
            source=source,
        )
        for (kind, axes, source), alike in groups.items()
    )
    return tuple(sorted(exchanges, key=lambda one: -one.bytes_per_device))


def count_parameters(config: TrainConfig, params: nnx.State) -> Parameters:
    """Parameters of the shapes in `params`; the router's rule says how many experts a token meets."""
    total = experts = 0
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        size = math.prod(x.shape)
        total += size
        experts += size * ("experts" in [getattr(key, "key", None) for key in path])
    router = config.model.router
    kinds = {"top1": 1, "top2": 2}
    choices = getattr(router, "num_choices", kinds.get(getattr(router, "kind", "")))
    active = None
    if not experts:
        active = total
    elif choices is not None:
        active = total - experts + experts // config.model.num_experts * choices
    return Parameters(total=total, experts=experts, active=active)


def _memory(step: CompiledStep) -> Memory:
    program = step.program
    weights, optimizer = _stored(step.state.params), _stored(step.state.optimizer)
    kept = sum(hlo.num_bytes(one.type) for one in hlo.Module(program.text).kept_for_backward())
    activations = min(kept, program.temporaries)
    return Memory(
        weights=weights,
        optimizer=optimizer,
        # The TPU pads arrays to tiles: what is over the arrays' own bytes is counted here.
        batch=program.arguments - weights - optimizer,
        results=program.results,
        activations=activations,
        temporaries=program.temporaries - activations,
        program=program.code,
    )


def _stored(tree) -> int:
    """Bytes of the parts that one device holds."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _memory_limit(device: jax.Device) -> float | None:
    """What an attached device says it has; simulated ones say nothing."""
    if device.platform == "cpu":
        return None
    return (device.memory_stats() or {}).get("bytes_limit")
