"""Routing as pure functions on arrays: no Flax, no mesh, no configuration classes.

A router turns `logits_GSE` into a `RoutingPlan`; a dispatch back-end reads the plan and moves tokens
to experts and back. Every back-end gives the same numbers and the same gradients.
"""

from __future__ import annotations

from moe.routing.by_id import hash_routing, task_routing
from moe.routing.capacity import expert_capacity
from moe.routing.einsum import einsum_combine, einsum_dispatch
from moe.routing.expert_choice import expert_choice
from moe.routing.gather import gather_combine, gather_dispatch
from moe.routing.grouped import ExpertWeights, grouped_ffn, grouped_product
from moe.routing.losses import (
    BalanceChoices,
    BalanceScope,
    adapted_weight,
    balance_loss,
    cv_squared,
    cv_squared_loss,
    load_balance_loss,
    mean_entropy_loss,
    router_entropy_loss,
    router_z_loss,
)
from moe.routing.noisy_top_k import noisy_top_k
from moe.routing.override import balanced, drop_experts, mask_expert_outputs, without_experts
from moe.routing.plan import ExpertLoad, RoutingPlan, SoftPlan
from moe.routing.sigmoid_top_k import sigmoid_top_k, updated_bias
from moe.routing.sinkhorn import sinkhorn
from moe.routing.soft import soft_logits, soft_moe
from moe.routing.sorted import sorted_combine, sorted_dispatch
from moe.routing.token_choice import SlotRule
from moe.routing.top1 import top1
from moe.routing.top2 import SecondPolicy, top2
from moe.routing.top_k import top_k
from moe.routing.two_level import two_level_logits

__all__ = [
    "BalanceChoices",
    "BalanceScope",
    "ExpertLoad",
    "ExpertWeights",
    "RoutingPlan",
    "SecondPolicy",
    "SlotRule",
    "SoftPlan",
    "adapted_weight",
    "balance_loss",
    "balanced",
    "cv_squared",
    "cv_squared_loss",
    "drop_experts",
    "einsum_combine",
    "einsum_dispatch",
    "expert_capacity",
    "expert_choice",
    "gather_combine",
    "gather_dispatch",
    "grouped_ffn",
    "grouped_product",
    "hash_routing",
    "load_balance_loss",
    "mask_expert_outputs",
    "mean_entropy_loss",
    "noisy_top_k",
    "router_entropy_loss",
    "router_z_loss",
    "sigmoid_top_k",
    "sinkhorn",
    "soft_logits",
    "soft_moe",
    "sorted_combine",
    "sorted_dispatch",
    "task_routing",
    "top1",
    "top2",
    "top_k",
    "two_level_logits",
    "updated_bias",
    "without_experts",
]
