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
from moe.sharding.mesh import AXES, MeshConfig, WeightUpdate, make_mesh
from moe.sharding.pipeline import from_microbatches, pipeline, to_microbatches
from moe.sharding.rules import (
    ANY,
    LAYOUT,
    current_layout,
    layout,
    mesh_axes,
    num_shards,
    partition_spec,
)
from moe.sharding.weight_update import current_weight_update, gathered, spread, weight_update

__all__ = [
    "ANY",
    "AXES",
    "LAYOUT",
    "Collective",
    "Explanation",
    "MeshConfig",
    "Tensor",
    "WeightUpdate",
    "constrain",
    "count_collectives",
    "current_layout",
    "current_weight_update",
    "explain",
    "from_microbatches",
    "gathered",
    "layout",
    "make_mesh",
    "mesh_axes",
    "mesh_split",
    "num_shards",
    "pad_to_split",
    "param",
    "partition_spec",
    "pipeline",
    "replicate",
    "shardings",
    "split",
    "split_convolution",
    "spread",
    "to_microbatches",
    "weight_update",
]
