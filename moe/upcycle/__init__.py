"""A trained dense FFN or model as the start of one with experts; a trained layer with more or fewer.

Runs are in `moe.upcycle.run`, which needs all of `moe.training`.
"""

from __future__ import annotations

from moe.upcycle.dense import upcycle, upcycle_config, upcycle_model
from moe.upcycle.resize import grow_experts, merge_experts, prune_experts, resize_model

__all__ = [
    "grow_experts",
    "merge_experts",
    "prune_experts",
    "resize_model",
    "upcycle",
    "upcycle_config",
    "upcycle_model",
]
