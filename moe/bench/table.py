"""The benchmark as tables for the terminal."""

from __future__ import annotations

import statistics

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe.bench.results import CEILING, DENSE, LayerBenchmark, Pass, Row, Section


def show(benchmark: LayerBenchmark, console: Console) -> None:
    """Prints what ran, a table for each section, and how to read them."""
    versions = [f"{name} {value}" for name, value in benchmark.environment.items() if value]
    console.print(Text(", ".join(versions)))
    for section in benchmark.sections:
        console.print(layer_table(section))
    for sentence in (*_legend(benchmark), *benchmark.missing):
        console.print(Text(sentence))


def layer_table(section: Section) -> Table:
    """One section, a case a row."""
    workload = section.workload
    table = Table(
        title=f"{workload.describe()}, d_model {workload.d_model}, d_hidden {workload.d_hidden}, "
        f"{workload.dtype}; busiest expert {section.busiest:.2f} x mean; "
        f"at most {section.cores():.2f} cores used",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        title_justify="left",
    )
    table.add_column("case", no_wrap=True)
    table.add_column("com-\nputed", justify="right")
    passes: list[Pass] = ["forward", "train"] if workload.training else ["forward"]
    for which in passes:
        label = "forward" if which == "forward" else "fwd+bwd"
        for measure in ("wall ms", "cpu ms", "eff"):
            table.add_column(f"{label}\n{measure}", justify="right")
    table.add_column("of cei-\nling", justify="right")
    table.add_column("peak\nMiB", justify="right")
    table.add_column("note", overflow="fold")
    for row in section.rows:
        cells = [cell for which in passes for cell in _cells(section, row, which)]
        ceiling = _percent(section.of_ceiling(row, passes[-1]))
        table.add_row(row.name, _percent(row.computed), *cells, ceiling, _mebibytes(row), row.note)
    return table


def _cells(section: Section, row: Row, which: Pass) -> list[str]:
    timing = row.forward if which == "forward" else row.train
    if timing is None:
        return ["", "", ""]
    eff = section.eff(row, which)
    return [
        _milliseconds(timing.wall_s),
        _milliseconds(timing.cpu_s),
        "" if eff is None else f"{eff:.2f}",
    ]


def _legend(benchmark: LayerBenchmark) -> list[str]:
    sections = benchmark.sections
    rows = [row for section in sections for row in section.rows]
    memory_sources = dict.fromkeys(row.memory_source for row in rows if row.memory_source)
    lines = [
        "computed: share of the assignments that the right expert computed, measured.",
        "eff: time of the dense layer of the same active FLOPs over that of the case, by processor "
        "time with one thread and by wall time otherwise; medians of the rounds' ratios.",
        f"of ceiling: speed of the layer's products over that of {CEILING}, in forward + backward "
        "(decoding: forward).",
        f"peak: beside parameters and tokens, in the same pass; {'; '.join(memory_sources)}.",
    ]
    if not any(section.row(DENSE[0]) for section in sections):
        lines.append("eff is against the dense layer in JAX: the one in torch was not measured.")
    for section in sections:
        w = section.workload
        if w.device == "cpu" and section.cores() > 1.1 * w.threads:
            lines.append(
                f"Threads were not limited in {w.describe()}: {section.cores():.2f} cores were used."
            )
        if w.device == "cpu" and 0 < section.cores() < 0.8:
            lines.append(
                f"The machine was busy in {w.describe()}: no case had more than "
                f"{section.cores():.2f} of a core. Trust processor time, not wall time."
            )
        if section.device_peak_bytes:
            peak = section.device_peak_bytes / 2**30
            lines.append(f"Peak of JAX on the device in {w.describe()}: {peak:.1f} GiB, all cases.")
    return lines


def _milliseconds(seconds: tuple[float, ...]) -> str:
    middle = statistics.median(seconds) * 1000
    return f"{middle:.0f}" if middle >= 100 else f"{middle:.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}" if share < 1 else "100%"


def _mebibytes(row: Row) -> str:
    return "" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:,.0f}"
