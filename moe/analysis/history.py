"""Reads load.jsonl, the load that a run wrote down while it trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe.analysis.load import StackLoad, summed_over_tokens
from moe.errors import UserError

Arrays = dict[str, np.ndarray]
_KEYS = ("assigned", "kept", "mean_prob", "entropy", "num_tokens")


def read_history(path: Path | str) -> dict[str, StackLoad]:
    """The load of every logged step of a run, for each stack.

    A line is `{"step": n, "stacks": {stack: {"assigned": [[.. E] per layer], "kept": [[..]],
    "mean_prob": [[..]], "entropy": [..], "num_tokens": [..]}}}`.

    A last line without its end, as a killed run leaves it, is ignored. Steps that a resumed run
    logged again count once, as it logged them last.

    Returns:
      Stack name to load, with the steps as rows in rising order; empty when there is no file or no
      complete line.

    Raises:
      UserError: a malformed line, by its number.
    """
    path = Path(path)
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    steps: dict[int, dict[str, Arrays]] = {}
    shapes: dict[str, tuple[int, ...]] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step, stacks = _parse(line)
            found = {stack: arrays["assigned"].shape for stack, arrays in stacks.items()}
            shapes = shapes or found
            if found != shapes:
                raise ValueError(f"stacks of shape {found} after {shapes}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):  # no newline after it: the run was killed while writing
                break
            raise UserError(
                f"{path} line {number} must be the load of one step: got {line[:60]!r} "
                f"({type(error).__name__}: {error}). Remove that line."
            ) from error
        steps[step] = stacks
    return {stack: _stacked(stack, steps) for stack in shapes or {}}


def _parse(line: str) -> tuple[int, dict[str, Arrays]]:
    record = json.loads(line)
    return int(record["step"]), {name: _arrays(x) for name, x in record["stacks"].items()}


def _arrays(record: Mapping[str, Any]) -> Arrays:
    arrays = {key: np.asarray(record[key], np.float64) for key in _KEYS}
    shape_YE = arrays["assigned"].shape
    for key in _KEYS:
        expected = shape_YE[:1] if key in ("entropy", "num_tokens") else shape_YE
        if len(shape_YE) != 2 or arrays[key].shape != expected:
            raise ValueError(f"{key} of shape {arrays[key].shape}, assigned of shape {shape_YE}")
    assigned_YE, kept_YE = arrays["assigned"], arrays["kept"]
    if not (np.all(kept_YE >= 0) and np.all(kept_YE <= assigned_YE)):
        raise ValueError("kept must lie between 0 and assigned")
    return arrays


def _stacked(stack: str, steps: Mapping[int, dict[str, Arrays]]) -> StackLoad:
    rows = tuple(sorted(steps))
    column = {key: np.stack([steps[step][stack][key] for step in rows]) for key in _KEYS}
    tokens_RY = column["num_tokens"].astype(np.int64)
    prob_RYE, entropy_RY = summed_over_tokens(column["mean_prob"], column["entropy"], tokens_RY)
    return StackLoad(
        rows=rows,
        assigned_RYE=column["assigned"].astype(np.int64),
        kept_RYE=column["kept"].astype(np.int64),
        prob_RYE=prob_RYE,
        entropy_RY=entropy_RY,
        num_tokens_RY=tokens_RY,
    )
