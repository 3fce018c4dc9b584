"""A section of the benchmark that is measured in seconds."""

from __future__ import annotations

from moe.bench import Workload

WORKLOAD = Workload(
    tokens=64,
    d_model=16,
    d_hidden=32,
    num_experts=4,
    dtype="float32",
    device="cpu",
    threads=1,
    training=True,
    skew=0.0,
    capacity_factor=1.25,
    group_size=64,
)
