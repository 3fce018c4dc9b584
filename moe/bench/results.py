"""What the benchmark measured, and the numbers derived from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from moe.bench.workload import Workload

Pass = Literal["forward", "train"]
CEILING = "matmul"
# What a case is compared with: the first that was measured.
DENSE = ("dense-torch", "dense-jax")
DENSE_GATED = ("dense-torch-swiglu", "dense-jax-swiglu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call, one number for each round."""

    cpu_s: tuple[float, ...]
    """Processor time of the whole process."""
    wall_s: tuple[float, ...]
    """Time on the clock."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One case of a section."""

    name: str
    note: str = ""
    """What a reader must know to compare it, or why it was not measured."""
    gated: bool = False
    """Three products with weights (SwiGLU) in place of two."""
    forward_flops: float = 0.0
    """Of the matrix products that the tokens asked for."""
    computed: float | None = None
    """Share of the assignments that the right expert computed; None where there are none."""
    forward: Timing | None = None
    """Forward pass."""
    train: Timing | None = None
    """Forward and backward, with gradients of all parameters and of the tokens."""
    memory_bytes: int | None = None
    """Peak during a call beside parameters and tokens: activations, temporaries, results."""
    memory_source: str = ""
    """How that was measured."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Row:
        """The row that `dataclasses.asdict` wrote."""
        timings = {
            name: None if document[name] is None else Timing(**document[name])
            for name in ("forward", "train")
        }
        return cls(**{**document, **timings})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The cases measured side by side in one process."""

    workload: Workload
    rows: tuple[Row, ...]
    busiest: float
    """Assignments of the busiest expert over the mean."""
    device_peak_bytes: int | None = None
    """Highest memory of the device while the section ran, by its own count."""

    def row(self, name: str) -> Row | None:
        """The row of that name, if it was measured."""
        return next((row for row in self.rows if row.name == name and row.forward), None)

    def clock(self) -> Literal["cpu", "wall"]:
        """Processor time with one thread, which other work on the machine hardly moves; else wall."""
        on_one_core = self.workload.device == "cpu" and self.workload.threads == 1
        return "cpu" if on_one_core else "wall"

    def seconds(self, row: Row, which: Pass) -> float | None:
        """Median of a call by the section's clock."""
        times = self._times(row, which)
        return None if times is None else float(np.median(times))

    def reference(self, row: Row) -> Row | None:
        """The dense layer that a case is compared with."""
        wanted = DENSE_GATED if row.gated else DENSE
        return next((found for name in wanted if (found := self.row(name))), None)

    def eff(self, row: Row, which: Pass) -> float | None:
        """Time of the dense layer over the time of the case, the median of the rounds' ratios.

        1 is as fast as the dense layer of the same active FLOPs, 2 twice as fast. None without one.
        """
        reference = self.reference(row)
        if reference is None or row.name == CEILING:
            return None
        ours, dense = self._times(row, which), self._times(reference, which)
        return None if ours is None or dense is None else float(np.median(dense / ours))

    def of_ceiling(self, row: Row, which: Pass) -> float | None:
        """Share of the speed of a large matrix product; below 1, since a layer does more than products."""
        ceiling, seconds = self.row(CEILING), self.seconds(row, which)
        ceiling_seconds = ceiling and self.seconds(ceiling, "forward")
        if not (ceiling and ceiling_seconds and seconds) or row is ceiling:
            return None
        flops = row.forward_flops * (3 if which == "train" else 1)
        return flops / seconds / (ceiling.forward_flops / ceiling_seconds)

    def cores(self) -> float:
        """Most cores that any case kept busy: processor time over wall time."""
        timings = [t for row in self.rows for t in (row.forward, row.train) if t is not None]
        return max((sum(t.cpu_s) / sum(t.wall_s) for t in timings), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """The samples and what follows from them."""
        rows = []
        for row in self.rows:
            reference = self.reference(row)
            derived: dict[str, Any] = {"reference": reference.name if reference else None}
            for which in ("forward", "train"):
                derived[f"eff_{which}"] = self.eff(row, which)
                derived[f"of_ceiling_{which}"] = self.of_ceiling(row, which)
            rows.append(dataclasses.asdict(row) | derived)
        return {
            "workload": dataclasses.asdict(self.workload),
            "clock": self.clock(),
            "busiest_over_mean": self.busiest,
            "most_cores_used": self.cores(),
            "device_peak_bytes": self.device_peak_bytes,
            "rows": rows,
        }

    def _times(self, row: Row, which: Pass) -> np.ndarray | None:
        timing: Timing | None = getattr(row, which)
        return None if timing is None else np.asarray(getattr(timing, f"{self.clock()}_s"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBenchmark:
    """Everything `bench_layer` measured.

    Attributes:
      settings: the configuration, by field.
      environment: device, versions of the libraries, the command.
      missing: packages that are not installed, each with the sentence that says what it would add.
      sections: one for each number of threads, size and number of experts.
    """

    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    missing: tuple[str, ...]
    sections: tuple[Section, ...]

    def as_json(self) -> dict[str, Any]:
        """A document for `json.dump`."""
        return {
            "settings": dict(self.settings),
            "environment": dict(self.environment),
            "missing": list(self.missing),
            "sections": [section.as_json() for section in self.sections],
        }
