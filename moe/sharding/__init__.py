"""Annotations that turn a single-device program into a partitioned one."""

from __future__ import annotations

from moe.sharding.annotations import LAYOUT, constrain, param, partition_spec, shardings
from moe.sharding.collectives import count_collectives
from moe.sharding.mesh import AXES, MeshConfig, make_mesh

__all__ = [
    "AXES",
    "LAYOUT",
    "MeshConfig",
    "constrain",
    "count_collectives",
    "make_mesh",
    "param",
    "partition_spec",
    "shardings",
]
