"""`moe train`: one process of one run."""

from __future__ import annotations

from collections.abc import Sequence

import tyro
from rich.console import Console

from moe.cli.devices import HOSTS_USAGE, end_without
from moe.cli.experiment import read_config


def train(arguments: Sequence[str]) -> int:
    """Train the run of an experiment file, or go on with it."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: moe train experiments/NAME.py [--field value ...]")
        print("`moe train experiments/NAME.py --help` lists every field with its meaning.")
        print(f"Several processes: {HOSTS_USAGE}; see docs/multihost.md.")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    import jax

    from moe.training import HostsConfig, LostProcessError, join_hosts
    from moe.training import train as run_training

    hosts, others = tyro.cli(
        HostsConfig, args=arguments[1:], return_unknown_args=True, add_help=False
    )
    if not {"-h", "--help"} & set(others):
        join_hosts(hosts)  # before the experiment's file, which may ask JAX for the devices
    config = read_config(
        arguments[0],
        others,
        prog=f"moe train {arguments[0]}",
        description="Every field of the run, with the experiment's value as its default. "
        f"Several processes: {HOSTS_USAGE}.",
    )
    console = Console(stderr=True, quiet=jax.process_index() > 0)
    try:
        outcome = run_training(config, console=console)
    except LostProcessError as error:
        end_without(error)
    if outcome.signal:
        console.print(f"Stopped at step {outcome.step}; the same command goes on from there.")
        return 128 + outcome.signal
    console.print(f"Trained {outcome.run.path} to step {outcome.step}.")
    return 0
