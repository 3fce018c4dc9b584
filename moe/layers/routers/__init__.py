"""Routers, one method a file: the rule (its settings, a frozen value) beside its NNX router.

`rule.router(d_model, num_experts, rngs=rngs)` is a module that is called with tokens and returns a
plan. A key means training (noise, limited capacity); without one the router is deterministic, and
dropless where the method has such a thing. `rule.causal_safe` says whether a decoder may use it,
`rule.ids` what it reads beside the tokens, if anything.
"""

from __future__ import annotations

from typing import TypeAlias

from moe.layers.routers.by_id import Hash, TaskRouting
from moe.layers.routers.expert_choice import ExpertChoice
from moe.layers.routers.linear import Router
from moe.layers.routers.noisy import NoisyTopK
from moe.layers.routers.override import Balanced, Without
from moe.layers.routers.sigmoid import RouterBias, SigmoidTopK, update_router_biases
from moe.layers.routers.sinkhorn import Sinkhorn
from moe.layers.routers.soft import Soft
from moe.layers.routers.token_choice import TokenChoice, Top2
from moe.layers.routers.top_k import Top1, TopK
from moe.layers.routers.two_level import TwoLevel

Rule: TypeAlias = (
    Top2
    | Top1
    | TopK
    | NoisyTopK
    | SigmoidTopK
    | TwoLevel
    | Hash
    | TaskRouting
    | Sinkhorn
    | ExpertChoice
    | Soft
    | Balanced
    | Without
)
"""Any routing rule; in a stored configuration the field `kind` tells them apart."""

__all__ = [
    "Balanced",
    "ExpertChoice",
    "Hash",
    "NoisyTopK",
    "Router",
    "RouterBias",
    "Rule",
    "SigmoidTopK",
    "Sinkhorn",
    "Soft",
    "TaskRouting",
    "TokenChoice",
    "Top1",
    "Top2",
    "TopK",
    "TwoLevel",
    "Without",
    "update_router_biases",
]
