"""`moe analyze`: the load of a trained run's experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from moe.cli.arguments import RunFolder, checked_split
from moe.cli.devices import MeshArguments, from_first, on_mesh, read_options
from moe.errors import UserError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from moe.analysis import LoadReport
    from moe.analysis.load import StackLoad
    from moe.training import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalyzeArguments:
    """Measure the expert load of a trained run and write load.html and load.json into its folder."""

    run: RunFolder
    """Run folder."""
    split: str = "validation"
    """Sentences to measure on: test, validation or train."""
    limit: int = 200
    """Sentences of each direction at most."""
    checkpoint: str = "best"
    """best, last, or a step."""
    mesh: MeshArguments = MeshArguments()
    """The devices."""


def analyze(arguments: Sequence[str]) -> int:
    """Show the load of every expert, by layer, language and training step."""
    options = read_options(AnalyzeArguments, arguments, prog="moe analyze")
    if options.limit < 1:
        raise UserError(f"limit must be at least 1: got {options.limit}. Raise it.")
    with on_mesh(options.mesh) as mesh:
        _analyze(options, mesh)
    return 0


def _analyze(options: AnalyzeArguments, mesh: Mesh | None) -> None:
    """All processes measure the load together; process 0 writes and prints."""
    from moe import analysis
    from moe.training import load_model, open_run
    from moe.training.hosts import agree
    from moe.training.measure import measure

    run = agree(lambda: open_run(options.run))
    if not run.config.model.num_experts:
        raise UserError(
            f"run must have MoE layers to analyse: got {run.path} with model.num_experts=0. "
            "Train one with experts."
        )
    model, step = agree(lambda: load_model(run, options.checkpoint, mesh=mesh))
    batches = agree(lambda: run.batches(checked_split(options.split), options.limit))
    loads = analysis.collect_load((one.direction, one.stats) for one in measure(model, batches))

    def write() -> None:
        report = _report(run, loads, step=step, split=options.split)
        page, _ = analysis.write_report(report, run.path)
        console = Console()
        console.print(analysis.load_table(report))
        console.print(analysis.findings_text(report))
        console.print(f"Report: {page}")

    from_first(write)


def _report(run: Run, loads: dict[str, StackLoad], *, step: int, split: str) -> LoadReport:
    from moe import analysis

    router, config = run.config.model.router, run.config
    return analysis.LoadReport(
        run=run.path.resolve().name,
        loads=loads,
        history=analysis.read_history(run.path / "load.jsonl"),
        step=step,
        split=split,
        settings=analysis.Settings(
            capacity_factor=getattr(router, "capacity_factor", None),
            balance_weight=config.objective.balance_weight,
            z_weight=config.objective.z_weight,
            batch_priority=getattr(router, "batch_priority", None),
            temperature=config.mixture.temperature,
        ),
    )
