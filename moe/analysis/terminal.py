"""The load of a run as a short table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.analysis.advice import percent
from moe.analysis.summary import LoadReport

if TYPE_CHECKING:
    from rich.table import Table

_STYLE = {"fix": "bold red", "watch": "yellow", "fine": "green"}


def load_table(report: LoadReport) -> Table:
    """One line a layer; print it with a `rich.console.Console`."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Expert load of {escape(report.run)}")
    table.add_column("layer")
    table.add_column("verdict")
    for head in ("busiest/mean", "effective experts", "dead", "router entropy", "dropped", "bits"):
        table.add_column(head, justify="right")
    for layer in report.layers:
        verdict = report.verdict(layer)
        dropped = layer.training_drop_rate
        table.add_row(
            layer.name,
            f"[{_STYLE[verdict]}]{verdict}[/]",
            f"{layer.max_over_mean:.2f} (expert {layer.hottest})",
            f"{layer.effective_experts:.1f} of {layer.num_experts}",
            str(len(layer.dead(report.thresholds.dead))),
            f"{layer.router_entropy:.2f}",
            "–" if dropped is None else percent(dropped),
            f"{layer.specialisation_bits:.2f}",
        )
    return table


def findings_text(report: LoadReport) -> str:
    """The findings as lines of text, the worst first."""
    lines = [
        f"{finding.severity}: {finding.where}: {finding.title}. {finding.cure}"
        for finding in report.findings
        if finding.severity != "note"
    ]
    return "\n".join(lines) or "Nothing to fix: every layer is within the thresholds."
