"""`moe plan`: a run's step compiled ahead of time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console

from moe.cli.arguments import check_folder_exists
from moe.cli.experiment import read_config

if TYPE_CHECKING:
    from moe.training import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Compile the training step of an experiment without running it, and say what it would take."""

    topology: str | None = None
    """TPU slice to compile for, such as v5p:8x16x16; needs the extra [tpu] and no TPU."""
    devices: int | None = None
    """CPU devices to simulate instead; without either, the attached devices."""
    model: str | None = None
    """Which of the experiment's models, where its config() takes a name."""
    search: bool = False
    """Compile for every legal mesh and as many rematerialisation policies as it takes to fit, rank
    what fits, and show the best."""
    memory: float | None = None
    """GiB that a device has; by default its chip's, or what an attached device says."""
    machine_code: bool = False
    """For a topology, wait for the machine code too: minutes more, for the bytes it takes."""
    output: str | None = None
    """JSON file to write."""
    page: str | None = None
    """HTML page with charts to write."""


def plan(arguments: Sequence[str]) -> int:
    """Show memory, communication and modelled time of a run before it is paid for."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: moe plan experiments/NAME.py [--topology v5p:4x4x8] [--field value ...]")
        print("`moe plan experiments/NAME.py --help` lists the options of the plan.")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    prog = f"moe plan {arguments[0]}"
    options, others = tyro.cli(
        PlanArguments, prog=prog, args=arguments[1:], return_unknown_args=True
    )
    config = read_config(arguments[0], others, prog=prog, model=options.model)
    check_folder_exists("output", options.output)
    check_folder_exists("page", options.page)
    _plan(options, config, name=options.model or Path(arguments[0]).stem)
    return 0


def _plan(options: PlanArguments, config: TrainConfig, *, name: str) -> None:
    """Makes the plan on the devices of the options, and writes it where they say."""
    from moe import planning

    where, devices = planning.planned_devices(options.topology, options.devices)
    console = Console()
    limit = None if options.memory is None else options.memory * 2**30
    if options.search:
        plans = planning.search(
            config, devices, name=name, where=where, memory_limit=limit, tell=console.print
        )
        console.print(planning.ranking(plans))
        best = plans[0]
    else:
        best = planning.plan(
            config,
            devices,
            name=name,
            where=where,
            memory_limit=limit,
            machine_code=options.machine_code,
        )
    planning.show(best, console)
    if options.output is not None:
        text = json.dumps(best.as_json(), indent=2) + "\n"
        Path(options.output).write_text(text, encoding="utf-8")
    if options.page is not None:
        Path(options.page).write_text(planning.plan_page(best), encoding="utf-8")
