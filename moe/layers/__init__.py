"""Flax NNX layers: usable one by one in any NNX model."""

from __future__ import annotations

from moe.layers.experts import Experts
from moe.layers.moe import MoE, MoEStats
from moe.layers.router import Router, Top2

__all__ = ["Experts", "MoE", "MoEStats", "Router", "Top2"]
