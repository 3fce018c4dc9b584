"""A plan as tables for the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from moe.planning.plan import Plan
from moe.planning.step_time import MODEL


def show(plan: Plan, console: Console) -> None:
    """Prints the figures, the collectives, and what the modelled figures assume."""
    table = Table("figure", "value", "found", title=f"{escape(plan.name)} on {plan.where}")
    table.columns[1].justify = "right"
    for row in rows(plan):
        table.add_row(*map(escape, row))
    console.print(table)
    console.print(_exchange_table(plan))
    if plan.time is not None:
        console.print(Text(f"Modelled: {MODEL}"))


def rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Figure, value and how it was found, in reading order."""
    parameters, memory = plan.parameters, plan.memory
    active = "depends on the data" if parameters.active is None else f"{parameters.active:,}"
    lines = [
        ("mesh", " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()), "given"),
        ("computed again in the backward pass", plan.remat, "given"),
        ("weights and slots", plan.weight_update, "given"),
        ("parameters", f"{parameters.total:,}", "counted"),
        ("  of experts", f"{parameters.experts:,}", "counted"),
        ("  active per token", active, "counted"),
        ("memory a device", gib(memory.total), "compiled"),
        *(
            (f"  {name}", gib(size), "compiled")
            for name, size in dataclasses.asdict(memory).items()
            if size is not None
        ),
        ("memory it has", _fits(plan), "given"),
        ("all-to-alls in the program", str(plan.collectives("all-to-all")), "compiled"),
        ("products a step and device", f"{plan.flops_per_device / 1e12:.3f} TFLOP", "traced"),
        (
            "compile time" + (", no machine code" if memory.program is None else ""),
            f"{plan.compile_seconds:.1f} s",
            "measured",
        ),
    ]
    if plan.time is not None:
        lines += [
            ("step time", milliseconds(plan.time.step), "modelled"),
            ("  products", milliseconds(plan.time.products), "modelled"),
            ("  memory traffic", milliseconds(plan.time.memory), "modelled"),
            ("  communication", milliseconds(plan.time.communication), "modelled"),
            ("utilisation", f"{plan.time.utilisation:.0%}", "modelled"),
            (f"cost of {plan.steps:,} steps", f"${plan.dollars:,.0f}", "modelled"),
        ]
    return lines


def ranking(plans: Sequence[Plan]) -> Table:
    """Plans of one run on several meshes, as they are ordered."""
    heads = ("mesh", "remat", "memory a device", "fits", "step, modelled", "bytes sent a device")
    table = Table(*heads)
    for plan in plans:
        sent = sum(one.bytes_per_device for one in plan.exchanges)
        table.add_row(
            " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()),
            plan.remat,
            gib(plan.memory.total),
            {True: "yes", False: "no", None: "unknown"}[plan.fits],
            "" if plan.time is None else milliseconds(plan.time.step),
            gib(sent),
        )
    return table


def gib(num_bytes: float) -> str:
    """Bytes to read: "1.50 GiB", "1.50 MiB"."""
    if num_bytes >= 2**29:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"


def milliseconds(seconds: float) -> str:
    """Seconds to read: "12.30 ms"."""
    return f"{seconds * 1e3:.2f} ms"


def _fits(plan: Plan) -> str:
    if plan.memory_limit is None:
        return "unknown"
    return f"{gib(plan.memory_limit)}: {'fits' if plan.fits else 'does not fit'}"


def _exchange_table(plan: Plan) -> Table:
    table = Table(title="Collectives (compiled)")
    for head in ("in program", "runs a step"):
        table.add_column(head, justify="right")
    table.add_column("kind")
    table.add_column("along")
    table.add_column("bytes a device and step", justify="right")
    table.add_column("line", overflow="fold")
    for one in plan.exchanges:
        line = "/".join(one.source.split("/")[-2:])
        size = gib(one.bytes_per_device)
        cells = (str(one.count), str(one.runs), one.kind, " ".join(one.axes), size, line)
        table.add_row(*map(escape, cells))
    return table
