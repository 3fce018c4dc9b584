"""What a run records while it trains: JSON lines, TensorBoard events, the expert load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import tensorboardX

from moe.models import Stats
from moe.training.run import write_atomically

LOAD_FIELDS = {
    "assigned": "assigned_E",
    "kept": "kept_E",
    "mean_prob": "mean_prob_E",
    "entropy": "entropy",
    "num_tokens": "num_tokens",
    "num_unrouted": "num_unrouted",
}


class RunLogs:
    """Appends to metrics.jsonl, load.jsonl and tensorboard/ of a run folder.

    Opened at step s it first forgets what is later than s: those steps are about to be run again.
    """

    def __init__(self, path: Path, *, step: int):
        self._metrics = _reopen(path / "metrics.jsonl", step)
        self._load = _reopen(path / "load.jsonl", step)
        self._events = tensorboardX.SummaryWriter(str(path / "tensorboard"), purge_step=step + 1)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics.jsonl and one point of each curve."""
        self._write(self._metrics, {"step": step} | values)
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def load(self, step: int, stats: Stats) -> None:
        """One line of load.jsonl: the load of every expert of every MoE layer."""
        stacks: dict[str, dict[str, Any]] = {
            stack: {name: getattr(load, field).tolist() for name, field in LOAD_FIELDS.items()}
            | {"dispatch": load.dispatch and ": ".join(load.dispatch)}
            for stack, load in jax.device_get(stats).items()
        }
        if stacks:
            self._write(self._load, {"step": step, "stacks": stacks})

    def close(self) -> None:
        """Flushes and closes all files."""
        for file in (self._metrics, self._load, self._events):
            file.close()

    def _write(self, file, line: dict[str, Any]) -> None:
        file.write(json.dumps(line) + "\n")
        file.flush()


def _reopen(path: Path, step: int):
    """The file for appending, without its lines later than `step` and without a half line."""
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _upto(line, step)]
        write_atomically(path, "".join(line + "\n" for line in kept))
    return path.open("a", encoding="utf-8")


def _upto(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # cut off when the process was killed
