"""The benchmark of one MoE layer: every section in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moe.bench.config import PEERS, LayerBenchConfig, case_names
from moe.bench.results import LayerBenchmark, Row, Section
from moe.bench.workload import Workload
from moe.errors import UserError


def bench_layer(config: LayerBenchConfig, *, console: Console | None = None) -> LayerBenchmark:
    """Measures every section in a process of its own, all its cases in turns.

    The cases of a section see the same tokens and the same router weights, hence the same routing. All
    gradients are with respect to the parameters and the tokens. Our layers are timed with routing,
    losses and statistics; the peers compute no losses inside the layer, which favours them.

    Args:
      config: sizes, device and cases.
      console: where progress is shown; None shows it on standard error.

    Raises:
      UserError: an unknown case, a device that is not attached, more threads than cores, or a process
        that the system ended for want of memory.
    """
    names = case_names(config.cases)
    missing = _missing(names)
    workloads = list(config.workloads())
    sections, devices = [], set()
    console = console or Console(stderr=True)
    with _progress(console) as progress:
        for number, workload in enumerate(workloads):
            label = f"{number + 1} of {len(workloads)}, {workload.describe()}"
            task = progress.add_task(label, total=None, status="starting")
            if not console.is_terminal:  # a bar shows nothing in a file
                console.print(label)

            def show(done: int, total: int, status: str, task=task) -> None:
                progress.update(task, completed=done, total=total, status=status)

            section, device = _run_worker(workload, names, config.rounds, show)
            progress.update(task, status="done")
            sections.append(section)
            devices.add(device)
    return LayerBenchmark(
        settings=dataclasses.asdict(config),
        environment=_environment(", ".join(sorted(devices))),
        missing=missing,
        sections=tuple(sections),
    )


def _run_worker(
    workload: Workload,
    names: tuple[str, ...],
    rounds: int,
    show: Callable[[int, int, str], None],
) -> tuple[Section, str]:
    """One section in a fresh process; and the name of its device."""
    order = {"workload": dataclasses.asdict(workload), "names": names, "rounds": rounds}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "moe.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_worker_environment(workload),
            text=True,
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(order))
            process.stdin.close()
            answer = None
            for line in process.stdout:
                message = json.loads(line)
                if "progress" in message:
                    show(*message["progress"])
                else:
                    answer = message
            process.wait()
        finally:
            process.kill()  # of no effect once it has ended
            process.wait()
        if answer is None:
            errors.seek(0)
            raise _died(workload, process.returncode, errors.read())
    if "error" in answer:
        raise UserError(answer["error"])
    section = Section(
        workload=workload,
        rows=tuple(Row.from_json(row) for row in answer["rows"]),
        busiest=answer["busiest"],
        device_peak_bytes=answer["device_peak_bytes"],
    )
    return section, answer["device"]


def _died(workload: Workload, code: int, stderr: str) -> Exception:
    if code == -9:
        return UserError(
            f"the cases must fit into memory together: got killed at {workload.describe()}. "
            "Name fewer --cases, or lower --experts or --tokens."
        )
    return RuntimeError(f"moe.bench.worker ended with code {code}:\n{stderr[-4000:]}")


def _worker_environment(workload: Workload) -> dict[str, str]:
    """Limits that libraries read when they start."""
    if workload.device == "gpu":  # JAX and torch share the memory
        return os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    threads = str(workload.threads)
    limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return os.environ | limits | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _missing(names: tuple[str, ...]) -> tuple[str, ...]:
    """What is not installed though a case that was asked for needs it."""
    sentences = []
    for package, peers in PEERS.items():
        wanted = [name for name in peers if name in names]
        if wanted and importlib.util.find_spec(package) is None:
            sentences.append(
                f"{package} is not installed ({', '.join(wanted)}): pip install 'moe-jax[parity]'"
            )
    return tuple(sentences)


def _environment(device: str) -> dict[str, str]:
    found = {"device": device, "system": platform.platform(), "python": platform.python_version()}
    for package in ("moe-jax", "jax", "jaxlib", "flax", "tokamax", "torch", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    found["command"] = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    return found


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    )
