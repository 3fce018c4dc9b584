"""What a chip can do, as its maker states it; the modelled figures of a plan rest on these numbers."""

from __future__ import annotations

import dataclasses
import math

from moe.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator chip.

    Attributes:
      name: as in a topology's name.
      flops_per_second: peak of bfloat16 products. XLA multiplies float32 so too, unless asked for more.
      memory_bytes: of the high-bandwidth memory.
      memory_bytes_per_second: to and from it.
      link_bytes_per_second: of one link to a neighbour, in one direction.
      torus_dims: dimensions of the torus that the links make; two links a dimension.
      dollars_per_hour: list price on demand.
    """

    name: str
    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    torus_dims: int
    dollars_per_hour: float


def _chip(name, tera_flops, gib, giga_bytes, link_giga_bytes, torus_dims, dollars) -> Chip:
    return Chip(
        name=name,
        flops_per_second=tera_flops * 1e12,
        memory_bytes=gib * GIB,
        memory_bytes_per_second=giga_bytes * 1e9,
        link_bytes_per_second=link_giga_bytes * 1e9,
        torus_dims=torus_dims,
        dollars_per_hour=dollars,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip("v4", 275, 32, 1200, 50, 3, 3.22),
        _chip("v5e", 197, 16, 800, 50, 2, 1.20),
        _chip("v5p", 459, 95, 2765, 100, 3, 4.20),
        _chip("v6e", 918, 32, 1600, 100, 2, 2.70),
    )
}
"""From Google Cloud's pages of each TPU (docs.cloud.google.com/tpu/docs/v5p and its neighbours) and its
price list for the United States, as remembered in 2026. Prices change: give your own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """Chips in a torus: what `v5p:8x16x16` names."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """As JAX and the cloud write it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        """Chips in all."""
        return math.prod(self.shape)


def read_slice(topology: str) -> Slice:
    """The slice that a topology's name means.

    Args:
      topology: chip and torus, such as "v5p:8x16x16" (2,048 chips) or "v5e:4x8".

    Raises:
      UserError: an unknown chip, or a torus that is not of its kind.
    """
    name, _, torus = topology.partition(":")
    sizes = torus.split("x")
    chip = CHIPS.get(name)
    if chip is None:
        raise UserError(
            f"topology must begin with one of {', '.join(CHIPS)}: got {topology!r}. "
            "Write for example v5p:4x4x8."
        )
    if len(sizes) != chip.torus_dims or not all(size.isdigit() and int(size) for size in sizes):
        raise UserError(
            f"topology must give a torus of {chip.torus_dims} sizes for {name}: got {topology!r}. "
            f"Write for example {name}:{'x'.join(['4'] * chip.torus_dims)}."
        )
    return Slice(chip=chip, shape=tuple(map(int, sizes)))
