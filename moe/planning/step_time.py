"""How long a step would take: a model of few terms, each of which can be checked by hand."""

from __future__ import annotations

import dataclasses

from moe.planning.chips import Chip, Slice
from moe.sharding import Collective

MODEL = (
    "Step = max(products / peak, memory traffic / memory bandwidth) + communication: nothing waits for "
    "anything else, and no exchange is hidden behind products. Memory traffic: arguments and outputs "
    "once, temporaries written and read once. All-reduce: 2 b (n-1)/n over all links out of a chip; "
    "all-gather and reduce-scatter half of that. All-to-all: b d / (8 w), the bisection of a torus "
    "whose longest side is d, on links of w bytes a second: in a square 2-D torus of D chips it grows "
    "with sqrt(D), in a cube with the cube root. A lower bound; real steps take longer."
)
"""The assumptions, in a sentence that stands under every modelled figure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step; all modelled.

    Attributes:
      products: of matrix products at the chip's peak.
      memory: of memory traffic.
      communication: of all collectives, one after the other.
    """

    products: float
    memory: float
    communication: float

    @property
    def step(self) -> float:
        """The whole step."""
        return max(self.products, self.memory) + self.communication

    @property
    def utilisation(self) -> float:
        """Share of the chip's peak that the products get, in [0, 1]."""
        return self.products / self.step if self.step else 0.0


def model_step_time(
    where: Slice,
    *,
    flops_per_device: float,
    memory_traffic: float,
    collectives: tuple[Collective, ...],
) -> StepTime:
    """The time of a step on a slice; see `MODEL`."""
    chip = where.chip
    exchanges = (one_exchange(one, where) * (one.times or 1) for one in collectives)
    return StepTime(
        products=flops_per_device / chip.flops_per_second,
        memory=memory_traffic / chip.memory_bytes_per_second,
        communication=sum(exchanges),
    )


def one_exchange(collective: Collective, where: Slice) -> float:
    """Seconds of one collective, once.

    A permutation goes over one link. A part of the slice is taken as a torus of its own, as near a
    cube as its number of chips allows.
    """
    chip, size, n = where.chip, collective.bytes_per_device, collective.num_devices
    if n < 2:
        return 0.0
    if "all-to-all" in collective.kind:
        side = max(where.shape) if n == where.num_chips else n ** (1 / chip.torus_dims)
        return all_to_all_seconds(size, side, chip)
    if collective.kind == "collective-permute":
        return size / chip.link_bytes_per_second
    out_of_a_chip = 2 * chip.torus_dims * chip.link_bytes_per_second
    passes = 2 if collective.kind == "all-reduce" else 1
    return passes * size * (n - 1) / n / out_of_a_chip


def all_to_all_seconds(num_bytes: float, longest_side: float, chip: Chip) -> float:
    """Half of each chip's bytes cross the middle of the longest side, both ways round.

    D/2 chips send b/2 each across; of the 2 D/d links that cross (a torus is cut twice) each carries
    w in that direction: (D/2)(b/2) / (2 (D/d) w) = b d / (8 w). But never faster than all links of a
    chip together.
    """
    bisection = num_bytes * longest_side / (8 * chip.link_bytes_per_second)
    return max(bisection, num_bytes / (2 * chip.torus_dims * chip.link_bytes_per_second))
