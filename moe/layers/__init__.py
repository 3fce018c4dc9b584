"""Flax NNX layers: usable one by one in any NNX model."""

from __future__ import annotations

from moe.layers.experts import Experts
from moe.layers.feed_forward import FeedForward
from moe.layers.moe import MoE, MoEStats
from moe.layers.routers import (
    Balanced,
    ExpertChoice,
    Hash,
    NoisyTopK,
    Router,
    RouterBias,
    Rule,
    SigmoidTopK,
    Sinkhorn,
    Soft,
    TaskRouting,
    Top1,
    Top2,
    TopK,
    TwoLevel,
    Without,
    update_router_biases,
)
from moe.layers.shared import ConditionalMoE, ResidualMoE, SharedExperts

__all__ = [
    "Balanced",
    "ConditionalMoE",
    "ExpertChoice",
    "Experts",
    "FeedForward",
    "Hash",
    "MoE",
    "MoEStats",
    "NoisyTopK",
    "ResidualMoE",
    "Router",
    "RouterBias",
    "Rule",
    "SharedExperts",
    "SigmoidTopK",
    "Sinkhorn",
    "Soft",
    "TaskRouting",
    "Top1",
    "Top2",
    "TopK",
    "TwoLevel",
    "Without",
    "update_router_biases",
]
