"""`moe upcycle`: a run with experts from a dense one, or with another number of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tyro
from rich.console import Console

from moe.cli.arguments import RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleArguments:
    """Start a run with experts from a trained one: of a dense run each expert is a copy of its FFN; of
    a run with experts the busiest are copied or the least used merged."""

    run: RunFolder
    """Run folder."""
    new_run: RunFolder
    """Folder to make."""
    num_experts: int = 8
    """Experts of each MoE layer."""
    checkpoint: str = "best"
    """best, last, or a step of that run."""
    noise: float = 0.0
    """Noise on the copies, relative to the size of the weights."""


def upcycle(arguments: Sequence[str]) -> int:
    """Start a run with experts, or with another number of them, from a trained run."""
    options = tyro.cli(UpcycleArguments, prog="moe upcycle", args=arguments)
    from moe.training import open_run
    from moe.upcycle.run import upcycle_run, upcycle_run_config

    config = upcycle_run_config(open_run(options.run), options.new_run, options.num_experts)
    run = upcycle_run(options.run, config, checkpoint=options.checkpoint, noise=options.noise)
    console = Console()
    console.print(f"Made {run.path} at step 0, with experts made from {options.run}. Train it:")
    console.print(
        f"moe train EXPERIMENT.py --run-dir {run.path} "
        f"--model.num-experts {config.model.num_experts} --model.d-expert {config.model.d_expert}",
        soft_wrap=True,
    )
    return 0
