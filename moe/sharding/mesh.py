"""The device mesh: made once, by the experiment, and entered with `jax.set_mesh`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from moe.errors import UserError

AXES = ("data", "expert", "model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each mesh axis has; together they use every device."""

    data: int | None = None
    """Devices along which the batch alone is split; None is all that the others leave."""
    expert: int = 1
    """Devices along which experts are split; tokens are split over them too."""
    model: int = 1
    """Devices along which the inside of FFNs, experts and attention is split: tensor parallelism."""

    def __post_init__(self):
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
    data = len(devices) // (config.expert * config.model) if config.data is None else config.data
    sizes = (data, config.expert, config.model)
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh must fit the devices: got data={config.data or 'any'} x expert={config.expert} x "
            f"model={config.model} for {len(devices)} attached device(s). Change --mesh.data, "
            "--mesh.expert or --mesh.model (on CPU, "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N simulates N devices)."
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
