"""The tables of docs/scaling.md: GShard's models, planned for as many TPU chips as experts.

Command:  python experiments/gshard_plans.py runs/plans
Hardware: two cores and the extra [tpu], no TPU: fifteen minutes. The result is in docs/scaling.md.

One `moe plan` after the other, each in a process of its own, with its document in the folder. Plans that
are there already are read, not made again. Then the tables, as Markdown.
"""

from __future__ import annotations

import collections
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, get_args

from moe.planning import Chip, Slice, StepTime, model_step_time
from moe.sharding import Collective
from moe.sharding.mesh import WeightUpdate

SLICES = {16: "v5p:2x2x4", 128: "v5p:4x4x8", 512: "v5p:8x8x8", 2048: "v5p:8x16x16"}

UPDATES = get_args(WeightUpdate)


class Case(NamedTuple):
    """A plan: the model, what is changed of it, chips, and the paper's GB a device."""

    model: str
    chips: int
    changes: str = ""
    paper: float | None = None

    @property
    def name(self) -> str:
        """Of its document."""
        return "-".join([self.model, *self.changes.replace("--", "").split()])


SEVEN = (
    Case("128e_12l", 128, paper=4.2),
    Case("128e_36l", 128),
    Case("512e_12l", 512, paper=4.25),
    Case("512e_36l", 512),
    Case("2048e_12l", 2048, paper=4.85),
    Case("2048e_36l", 2048, paper=12.0),
    Case("2048e_60l", 2048, paper=13.9),
)
# The same tokens on each device: 2,048, as the models of 512 and 2,048 experts have.
COPIES = "--mesh.weight-update replicated"
GROWTH = (
    Case(
        "128e_12l", 16, f"{COPIES} --model.num-experts 16 --mesh.expert 16 --mixture.batch-size 256"
    ),
    Case("128e_12l", 128, f"{COPIES} --mixture.batch-size 2048"),
    Case("512e_12l", 512, COPIES),
    Case("2048e_12l", 2048, COPIES),
)
V3 = Chip(  # what the paper ran on; its data sheet. A chip has two of the paper's devices.
    name="v3",
    flops_per_second=123e12,
    memory_bytes=32 * 2**30,
    memory_bytes_per_second=900e9,
    link_bytes_per_second=82e9,
    torus_dims=2,
    dollars_per_hour=2.2,
)


def main(folder: Path) -> None:
    """Makes what is missing and prints the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    heads = ("model", "chips", "parameters", "weights", *UPDATES, "paper", "collectives")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for case in SEVEN:
        modes = [case._replace(changes=f"--mesh.weight-update {mode}") for mode in UPDATES]
        print(_size_row(case, [_plan(mode, folder) for mode in modes]), flush=True)
    print("\n| chips | tokens a chip | all-to-all | compile | step v5p | all-to-all v3 | step v3 |")
    print("|---|---|---|---|---|---|---|")
    for case in GROWTH:
        print(_growth_row(case, _plan(case, folder)), flush=True)


def _plan(case: Case, folder: Path) -> dict:
    path = folder / f"{case.name}.json"
    if not path.exists():
        experiment = str(Path(__file__).with_name("gshard.py"))
        command = [sys.executable, "-m", "moe.cli", "plan", experiment, "--model", case.model]
        command += ["--topology", SLICES[case.chips], "--output", str(path), *case.changes.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text(encoding="utf-8"))


def _size_row(case: Case, plans: list[dict]) -> str:
    """One model, planned with each of `UPDATES`; weights and collectives are the first's."""
    first = plans[0]
    counts: collections.Counter[str] = collections.Counter()
    for one in first["exchanges"]:
        counts[one["kind"]] += one["count"]
    cells = (
        case.model,
        f"{first['num_devices']:,}",
        f"{first['parameters']['total']:,}",
        f"{first['memory']['weights'] / 1e9:.2f} GB",
        *(f"{plan['memory']['total'] / 1e9:.2f} GB" for plan in plans),
        "" if case.paper is None else f"{case.paper} GB",
        ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())),
    )
    return f"| {' | '.join(cells)} |"


def _growth_row(case: Case, plan: dict) -> str:
    side = 2 ** (math.log2(case.chips) // 2)
    torus = Slice(chip=V3, shape=(int(side), case.chips // int(side)))
    step, exchanged = (_step_on(torus, plan, kind) for kind in ("", "all-to-all"))
    sent = sum(e["bytes_per_device"] for e in plan["exchanges"] if e["kind"] == "all-to-all")
    cells = (
        f"{case.chips:,}",
        f"{plan['tokens'] // 2 // case.chips:,}",
        f"{sent / 2**20:.1f} MiB",
        f"{plan['compile_seconds']:.0f} s",
        f"{plan['time']['step'] * 1e3:.2f} ms",
        f"{exchanged.communication * 1e3:.2f} ms",
        f"{step.step * 1e3:.2f} ms",
    )
    return f"| {' | '.join(cells)} |"


def _step_on(torus: Slice, plan: dict, kind: str) -> StepTime:
    """The modelled step on another torus, with the collectives whose kind has `kind` in its name."""
    memory = plan["memory"]
    collectives = tuple(
        Collective(
            kind=one["kind"],
            axes=tuple(one["axes"]),
            num_devices=plan["num_devices"],
            bytes_per_device=one["bytes_per_device"],
            source=one["source"],
            loops=(),
        )
        for one in plan["exchanges"]
        if kind in one["kind"]
    )
    return model_step_time(
        torus,
        flops_per_device=plan["flops_per_device"],
        memory_traffic=memory["total"] + memory["activations"] + memory["temporaries"],
        collectives=collectives,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
