"""Routing as pure functions on arrays: no Flax, no mesh, no configuration classes.

A router turns `logits_GSE` into a `RoutingPlan`; a dispatch back-end reads the plan and moves tokens
to expert slots and back. Every back-end gives the same numbers and the same gradients.
"""

from __future__ import annotations

from moe.routing.capacity import expert_capacity
from moe.routing.einsum import einsum_combine, einsum_dispatch
from moe.routing.gather import gather_combine, gather_dispatch
from moe.routing.losses import load_balance_loss, router_z_loss
from moe.routing.plan import ExpertLoad, RoutingPlan
from moe.routing.top2 import SecondPolicy, SlotRule, top2

__all__ = [
    "ExpertLoad",
    "RoutingPlan",
    "SecondPolicy",
    "SlotRule",
    "einsum_combine",
    "einsum_dispatch",
    "expert_capacity",
    "gather_combine",
    "gather_dispatch",
    "load_balance_loss",
    "router_z_loss",
    "top2",
]
