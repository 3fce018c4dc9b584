"""Weights of layers that people already run, by their names: in, and out again.

    tensors = moe.convert.read_tensors("mixtral/", prefix="model.layers.0.block_sparse_moe")
    layer = moe.convert.read_layer(tensors, family="mixtral", prefix="model.layers.0.block_sparse_moe")
    moe.convert.write_layer(layer, family="mixtral")  # the same names, the same bits

Numpy arrays go in and come out: neither torch nor the peers are needed. What each family computes,
and where the peer computes something else, is in docs/parity.md.
"""

from __future__ import annotations

from moe.convert.families import Family, read_rule
from moe.convert.files import read_tensors
from moe.convert.layer import read_layer, write_layer

__all__ = ["Family", "read_layer", "read_rule", "read_tensors", "write_layer"]
