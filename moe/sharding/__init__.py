"""Annotations that turn a single-device program into a partitioned one."""

from __future__ import annotations

from moe.sharding.annotations import (
    constrain,
    mesh_split,
    pad_to_split,
    param,
    replicate,
    shardings,
    split,
)
from moe.sharding.convolution import split_convolution
from moe.sharding.explain import Collective, Explanation, Tensor, count_collectives, explain
from moe.sharding.mesh import AXES, MeshConfig, make_mesh
from moe.sharding.rules import (
    ANY,
    LAYOUT,
    current_layout,
    layout,
    mesh_axes,
    num_shards,
    partition_spec,
)

__all__ = [
    "ANY",
    "AXES",
    "LAYOUT",
    "Collective",
    "Explanation",
    "MeshConfig",
    "Tensor",
    "constrain",
    "count_collectives",
    "current_layout",
    "explain",
    "layout",
    "make_mesh",
    "mesh_axes",
    "mesh_split",
    "num_shards",
    "pad_to_split",
    "param",
    "partition_spec",
    "replicate",
    "shardings",
    "split",
    "split_convolution",
]
