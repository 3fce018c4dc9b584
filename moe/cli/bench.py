"""`moe bench`: the layer timed beside others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console


def bench(arguments: Sequence[str]) -> int:
    """Time the MoE layer beside a dense layer and the peers that are installed: `moe bench layer`."""
    if arguments[:1] != ["layer"]:
        print("usage: moe bench layer [--device gpu] [--field value ...]")
        print("`moe bench layer --help` lists every field with its meaning.")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    from moe.bench import LayerBenchOptions, bench_layer, show

    options = tyro.cli(
        LayerBenchOptions,
        prog="moe bench layer",
        default=LayerBenchOptions.defaults(arguments[1:]),
        args=arguments[1:],
    )
    benchmark = bench_layer(options, console=Console(stderr=True))
    if options.output is not None:
        text = json.dumps(benchmark.as_json(), indent=2) + "\n"
        Path(options.output).write_text(text, encoding="utf-8")
    show(benchmark, Console())
    return 0
