"""One section of the benchmark, in a process whose cores were limited before any library started.

`python -m moe.bench.worker` reads an order as JSON on standard input and answers in JSON lines.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.bench.config import PEERS
from moe.bench.results import Row, Section
from moe.bench.workload import Workload
from moe.errors import UserError

if TYPE_CHECKING:
    from moe.bench.measure import Case

# Where the cases of each optional package are.
ROOMS = {"torch": "moe.bench.torch_layers", "transformers": "moe.bench.hugging_face"}

Report = Callable[[int, int, str], None]
"""Called with the samples done, all samples, and what is being done."""


def main() -> None:
    """Measures the section that is asked for; what the user can mend comes back as `error`."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between our lines

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    order = json.load(sys.stdin)
    workload = Workload(**order["workload"])
    try:
        limit_cores(workload)
        section = measure_section(
            workload,
            names=order["names"],
            rounds=order["rounds"],
            report=lambda done, total, label: reply(progress=[done, total, label]),
        )
    except UserError as error:
        reply(error=str(error))
        return
    reply(
        rows=[dataclasses.asdict(row) for row in section.rows],
        busiest=section.busiest,
        device_peak_bytes=section.device_peak_bytes,
        device=device_name(workload),
    )


def limit_cores(workload: Workload) -> None:
    """Pins the process to as many cores as it may use; every pool made later has at most as many."""
    if workload.device == "cpu" and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) < workload.threads:
            raise UserError(
                f"threads must be at most the cores of this process: got {workload.threads}, there "
                f"are {len(allowed)}. Lower --threads."
            )
        os.sched_setaffinity(0, allowed[: workload.threads])


def measure_section(
    workload: Workload,
    *,
    names: Sequence[str],
    rounds: int,
    report: Report = lambda done, total, label: None,
) -> Section:
    """Builds the named cases and times them in turns, in this process.

    Cases that cannot run (too large, package or device lacking) become rows that say why.

    Raises:
      UserError: the device is not attached.
    """
    from moe.bench.measure import in_turns, warm_up

    check_device(workload)
    cases: list[Case] = []
    repeats: list[dict] = []
    rows: dict[str, Row] = {}
    to_build = builders(names)
    for number, (name, build) in enumerate(to_build.items()):
        report(number, len(to_build), f"building {name}")
        try:
            case = build(workload)
            rows[name], calls = warm_up(case)
        except Exception as error:  # of many libraries
            rows[name] = Row(name=name, note=f"not measured: {_reason(error)}")
            continue
        cases.append(case)
        repeats.append(calls)
    gc.collect()
    samples = _Counter(rounds * sum(len(calls) for calls in repeats), report)
    timings = in_turns(cases, repeats, rounds=rounds, on_sample=samples.next)
    for case, passes in zip(cases, timings, strict=True):
        rows[case.name] = dataclasses.replace(
            rows[case.name], forward=passes["forward"], train=passes.get("train")
        )
    return Section(
        workload=workload,
        rows=tuple(rows.values()),
        busiest=workload.busiest(),
        device_peak_bytes=_device_peak(workload),
    )


def builders(names: Sequence[str]) -> dict[str, Callable[[Workload], Case]]:
    """How the named cases are built, without those whose packages are not installed."""
    from moe.bench.jax_layers import CASES

    found = dict(CASES)
    for package, module in ROOMS.items():
        asked_for = any(name in PEERS[package] for name in names)
        if asked_for and all(importlib.util.find_spec(needed) for needed in ("torch", package)):
            found |= importlib.import_module(module).CASES
    return {name: build for name, build in found.items() if name in names}


def check_device(workload: Workload) -> None:
    """Raises a UserError if the device is not attached."""
    if workload.device == "cpu":
        return
    import jax

    try:
        jax.devices("gpu")
    except RuntimeError as error:
        raise UserError(
            f"device must be attached: got gpu, JAX sees {jax.default_backend()}. "
            "Install moe-jax[gpu] on a machine that has one, or take --device cpu."
        ) from error


def device_name(workload: Workload) -> str:
    """The model of the processor or GPU."""
    if workload.device == "gpu":
        import jax

        return jax.devices("gpu")[0].device_kind
    about, name = Path("/proc/cpuinfo"), platform.processor()
    if about.exists():
        lines = [line for line in about.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    return f"{name or platform.machine()}, {os.cpu_count()} cores"


class _Counter:
    def __init__(self, total: int, report: Report):
        self.done, self.total, self.report = 0, total, report

    def next(self) -> None:
        self.done += 1
        self.report(self.done, self.total, "timing")


def _reason(error: Exception) -> str:
    """One line: a case's own words, or the kind of a library's error and how it begins."""
    from moe.bench.measure import CaseSkipped

    if isinstance(error, CaseSkipped):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _device_peak(workload: Workload) -> int | None:
    if workload.device == "cpu":
        return None
    import jax

    stats = jax.devices("gpu")[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


if __name__ == "__main__":
    main()
