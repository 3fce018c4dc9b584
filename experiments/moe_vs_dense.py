"""Study: does the MoE model learn more than a dense one of the same active FLOPs?

Both see the same batches in the same order for the same number of steps. In the dense model every
second FFN has twice the width in place of the two experts a token uses, so a token costs the same.

Command:  python experiments/moe_vs_dense.py
Hardware: two CPU cores.
Time:     about 4 minutes a variant.
Result:   no better on unseen sentences, closer to the training text: docs/study-moe-vs-dense.md.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import demo
import plotly.graph_objects as go
from rich.console import Console
from rich.table import Table

from moe.layers import Top2
from moe.training import CheckpointConfig, TrainConfig, train

FOLDER = Path("runs/moe_vs_dense")
STEPS = 600
ALWAYS_BOTH = Top2(capacity_factor=1.25, second_policy="all")  # the demo's, but for the policy
VARIANTS: dict[str, dict[str, Any]] = {
    "moe": {},
    "dense": {"num_experts": 0},
    "moe_both": {"router": ALWAYS_BOTH},
}


def config(variant: str = "moe", steps: int = STEPS) -> TrainConfig:
    """The demo's model, changed as the variant says and validated ten times on the way."""
    base = demo.config()
    return dataclasses.replace(
        base,
        run_dir=str(FOLDER / variant),
        steps=steps,
        model=dataclasses.replace(base.model, **VARIANTS[variant]),
        checkpoint=CheckpointConfig(every=max(steps // 10, 1)),
        validation_sentences=100,
    )


def main(steps: int) -> None:
    """Trains all variants and shows their curves side by side."""
    for variant in VARIANTS:
        outcome = train(config(variant, steps))
        if outcome.signal:
            sys.exit(128 + outcome.signal)
        print(f"{variant}: {_speed(outcome.run.path):,.0f} target tokens/s")
    curves = {variant: _curve(FOLDER / variant) for variant in VARIANTS}
    Console().print(_table(curves))
    figure = go.Figure(
        [go.Scatter(x=list(c), y=list(c.values()), name=name) for name, c in curves.items()],
        layout={"xaxis_title": "step", "yaxis_title": "validation loss, nats a token"},
    )
    figure.write_html(FOLDER / "curves.html")
    print(f"Curves: {FOLDER / 'curves.html'}")


def _speed(run: Path) -> float:
    """Median target tokens a second."""
    return statistics.median(r["tokens_per_second"] for r in _metrics(run) if "loss" in r)


def _curve(run: Path) -> dict[int, float]:
    """Validation loss by step."""
    points = [r for r in _metrics(run) if "validation_loss" in r]
    return {int(r["step"]): r["validation_loss"] for r in points}


def _metrics(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _table(curves: dict[str, dict[int, float]]) -> Table:
    table = Table("step", *curves, title="Validation loss, nats a target token")
    for step in curves["moe"]:
        table.add_row(str(step), *(f"{curve[step]:.4f}" for curve in curves.values()))
    return table


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)
