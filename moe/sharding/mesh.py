"""The device mesh: made once, by the experiment, and entered with `jax.set_mesh`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

import jax
from jax.sharding import AxisType, Mesh

from moe.errors import UserError

AXES = ("data", "stage", "expert", "model")

WeightUpdate = Literal["replicated", "sharded", "fully_sharded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each mesh axis has; together they use every device."""

    data: int | None = None
    """Devices along which the batch alone is split; None is all that the others leave."""
    stage: int = 1
    """Devices along which layers are split: pipeline parallelism, of `model.num_microbatches`."""
    expert: int = 1
    """Devices along which experts are split; tokens are split over them too."""
    model: int = 1
    """Devices along which the inside of FFNs, experts and attention is split: tensor parallelism."""
    weight_update: WeightUpdate = "replicated"
    """What each device that holds a copy of a parameter does: update all of it ("replicated"); update
    its part, the optimizer's state for which it alone holds ("sharded"); and hold only that part of
    the parameter too, gathered where it is used ("fully_sharded")."""

    def __post_init__(self):
        if self.weight_update not in get_args(WeightUpdate):
            raise UserError(
                f"mesh.weight_update must be one of {get_args(WeightUpdate)}: "
                f"got {self.weight_update!r}. Choose one of them."
            )
        for axis in AXES:
            size = getattr(self, axis)
            if size is not None and size < 1:
                raise UserError(f"mesh.{axis} must be at least 1: got {size}. Use 1 for no split.")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices`, by default all that are attached.

    The compiler places what is not annotated (axis type Auto), as in GShard.

    Raises:
      UserError: the mesh does not use exactly the devices there are.
    """
    devices = jax.devices() if devices is None else devices
    others = (config.stage, config.expert, config.model)
    data = len(devices) // math.prod(others) if config.data is None else config.data
    sizes = (data, *others)
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh must fit the devices: got data={config.data or 'any'} x stage={config.stage} x "
            f"expert={config.expert} x model={config.model} for {len(devices)} attached device(s). "
            "Change --mesh.data, --mesh.stage, --mesh.expert or --mesh.model (on CPU, "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N simulates N devices)."
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
