"""Groups of tokens that fit a mesh, where results do not depend on them."""

from __future__ import annotations

from flax import nnx

from moe.layers import MoE
from moe.sharding import num_shards


def fit_groups(model: nnx.Module, num_tokens: int) -> None:
    """Makes the groups of all MoE layers so small that no two devices share one.

    Calls of `num_tokens` tokens, or of a multiple, are then cut as a single device would cut those
    that lie on it. For deterministic, dropless evaluation, where groups change no result. Does
    nothing where the mesh in force does not split tokens.

    Args:
      model: changed in place.
      num_tokens: of all devices together; the devices must divide it.
    """
    num_devices = num_shards("groups")
    if num_devices == 1:
        return
    of_device = num_tokens // num_devices
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, MoE):
            sizes = range(min(layer.group_size, of_device), 0, -1)
            layer.group_size = next(size for size in sizes if of_device % size == 0)
