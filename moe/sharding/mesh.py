"""The device mesh: made once, by the experiment, and entered with `jax.set_mesh`."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import AxisType, Mesh

from moe.errors import UserError

AXES = ("data", "expert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each mesh axis has; their product is the number of devices used."""

    data: int = 1
    """Devices along which the batch alone is split."""
    expert: int = 1
    """Devices along which experts are split; tokens are split over them too."""

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise UserError(
                    f"mesh.{axis} must be at least 1: got {getattr(self, axis)}. Use 1 for no split."
                )

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.expert


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of `config` over the attached devices, all of which it must use.

    The compiler places what is not annotated (axis type Auto), as in GShard.

    Raises:
      UserError: the mesh does not have as many devices as are attached.
    """
    if config.num_devices != jax.device_count():
        raise UserError(
            f"mesh must fit the devices: got data={config.data} x expert={config.expert} = "
            f"{config.num_devices}, but {jax.device_count()} device(s) are attached. "
            "Change --mesh.data or --mesh.expert (on CPU, XLA_FLAGS="
            "--xla_force_host_platform_device_count=N simulates N devices)."
        )
    sizes = (config.data, config.expert)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
