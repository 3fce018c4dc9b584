"""Benchmarks: our layers beside a dense layer and beside the peers that can be installed.

`bench_layer` measures; `show` prints. docs/performance.md has the results and how they came about.
"""

from __future__ import annotations

from moe.bench.config import GPU_CONFIG, LayerBenchConfig, LayerBenchOptions, case_names
from moe.bench.layer import bench_layer
from moe.bench.results import LayerBenchmark, Row, Section, Timing
from moe.bench.table import layer_table, show
from moe.bench.workload import Workload

__all__ = [
    "GPU_CONFIG",
    "LayerBenchConfig",
    "LayerBenchOptions",
    "LayerBenchmark",
    "Row",
    "Section",
    "Timing",
    "Workload",
    "bench_layer",
    "case_names",
    "layer_table",
    "show",
]
