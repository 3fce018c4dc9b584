"""Times cases in turns, so that whatever the machine does meanwhile hits all of them alike."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from moe.bench.results import Pass, Row, Timing

_SHORTEST_S = 0.01  # a sample of fewer seconds repeats its call
_PAUSE_S = 0.002  # idle threads of the case before spin for about a millisecond


class CaseSkipped(Exception):
    """A case that cannot be measured at this size; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layer ready to run.

    Attributes:
      forward: one forward pass; returns what `wait` waits for.
      train: one forward and backward pass; None in decoding.
      wait: returns when the result is there.
      queued: calls may be queued and waited for together, as on a GPU in training.
      computed: the share of assignments that the right expert computes; None for dense.
      memory: peak bytes of a call and how they were measured.
    """

    name: str
    note: str
    forward: Callable[[], Any]
    train: Callable[[], Any] | None
    wait: Callable[[Any], object]
    memory: Callable[[], tuple[int, str] | None]
    forward_flops: float
    computed: Callable[[], float] | None = None
    gated: bool = False
    queued: bool = False

    def run(self, which: Pass, repeats: int) -> None:
        """Calls it `repeats` times, to the end."""
        call = self.forward if which == "forward" else self.train
        assert call is not None
        result = None
        for _ in range(repeats):
            result = call()
            if not self.queued:
                self.wait(result)
        self.wait(result)


def warm_up(case: Case) -> tuple[Row, dict[Pass, int]]:
    """Runs a case for the first time: what is known before timing, and the calls of one sample."""
    passes: list[Pass] = ["forward", "train"] if case.train else ["forward"]
    repeats: dict[Pass, int] = {}
    for which in passes:
        case.run(which, 1)
        start = time.perf_counter()
        case.run(which, 1)
        seconds = time.perf_counter() - start
        repeats[which] = max(1, math.ceil(_SHORTEST_S / seconds))
    memory = case.memory()
    row = Row(
        name=case.name,
        note=case.note,
        gated=case.gated,
        forward_flops=case.forward_flops,
        computed=case.computed() if case.computed else None,
        memory_bytes=memory[0] if memory else None,
        memory_source=memory[1] if memory else "",
    )
    return row, repeats


def in_turns(
    cases: Sequence[Case],
    repeats: Sequence[dict[Pass, int]],
    *,
    rounds: int,
    on_sample: Callable[[], None],
) -> list[dict[Pass, Timing]]:
    """Every round times every pass of every case once; odd rounds go backwards."""
    samples: dict[tuple[int, Pass], list[tuple[float, float]]] = {
        (i, which): [] for i in range(len(cases)) for which in repeats[i]
    }
    for number in range(rounds):
        for i, which in list(samples)[:: -1 if number % 2 else 1]:
            samples[i, which].append(_sample(cases[i], which, repeats[i][which]))
            on_sample()
    timings: list[dict[Pass, Timing]] = [{} for _ in cases]
    for (i, which), pairs in samples.items():
        cpu_s, wall_s = zip(*pairs, strict=True)
        timings[i][which] = Timing(cpu_s=cpu_s, wall_s=wall_s)
    return timings


def _sample(case: Case, which: Pass, repeats: int) -> tuple[float, float]:
    time.sleep(_PAUSE_S)
    cpu, wall = time.process_time(), time.perf_counter()
    case.run(which, repeats)
    return (time.process_time() - cpu) / repeats, (time.perf_counter() - wall) / repeats
