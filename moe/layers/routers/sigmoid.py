"""The rule and router of sigmoid scores, and the update of their biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from moe.errors import UserError
from moe.layers.routers.linear import Router
from moe.layers.routers.token_choice import Slots
from moe.layers.routers.top_k import GroupLimited
from moe.routing import ExpertLoad, RoutingPlan
from moe.routing.group_limit import GroupScore
from moe.routing.sigmoid_top_k import check_scale, sigmoid_top_k, updated_bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidTopK(GroupLimited):
    """DeepSeek-V3's gate, balanced by a bias; see `moe.routing.sigmoid_top_k`.

    The trainer moves the bias after each step, by `update_router_biases`. DeepSeek-V3's small loss
    beside it is `balance="all", balance_over="sequence"` with weight 1e-4; loss-free is weight 0.
    """

    scale: float = 1.0
    """What the gates of a token sum to; 2.5 in DeepSeek-V3."""
    bias_rate: float = 0.001
    """What the bias of an expert moves by in a step; 0 keeps it."""
    group_score: GroupScore = "top2_sum"
    """What a group is worth: its best expert, or the sum of its two best."""
    kind: Literal["sigmoid_top_k"] = "sigmoid_top_k"

    def __post_init__(self):
        super().__post_init__()
        check_scale(self.scale)
        if not self.bias_rate >= 0:
            raise UserError(
                f"bias_rate must not be negative: got {self.bias_rate}. Use 0 to keep the bias."
            )

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> SigmoidRouter:
        """The router of this rule."""
        return SigmoidRouter(d_model, num_experts, rule=self, rngs=rngs)

    def route(self, logits_GSE, bias_E, *, key, **slots: Unpack[Slots]) -> RoutingPlan:
        """`sigmoid_top_k`."""
        return sigmoid_top_k(logits_GSE, bias_E, scale=self.scale, **self.choosing, **slots)


class RouterBias(nnx.Variable):
    """A selection bias, and `rate`, what it moves by: state of a router that no gradient trains.

    Not an `nnx.Param`, so that `nnx.Optimizer(..., wrt=nnx.Param)` leaves it alone.
    """


class SigmoidRouter(Router):
    """A projection to logits, and a bias for the selection."""

    rule: SigmoidTopK

    def __init__(self, d_model: int, num_experts: int, *, rule: SigmoidTopK, rngs: nnx.Rngs):
        super().__init__(d_model, num_experts, rule=rule, rngs=rngs)
        self.bias_E = RouterBias(
            jnp.zeros(num_experts), rate=rule.bias_rate, out_sharding=(None,), eager_sharding=False
        )

    def read(self, x_GSM: jax.Array) -> tuple[jax.Array, ...]:
        """Logits and bias."""
        return *super().read(x_GSM), self.bias_E[...]


def update_router_biases(
    params: nnx.State, before: nnx.State, loads: ExpertLoad | Mapping[str, Any]
) -> nnx.State:
    """Moves the selection biases by the load of the step; everything else stays.

    Args:
      params: a model's state after the optimizer, which may have decayed the biases: not read.
      before: the same before the optimizer; its biases routed the step.
      loads: the load by the first name of a parameter's path (a Transformer's statistics), or one
        load for all routers. Leading dimensions (layers) are those of the biases.

    Returns:
      `params` with every `RouterBias` replaced; the same where there is none.
    """

    def one(path, new, old):
        if not isinstance(new, RouterBias):
            return new
        load = loads if isinstance(loads, ExpertLoad) else loads[path[0].key]
        rate = old.get_metadata()["rate"]
        return new.replace(updated_bias(old[...], load.assigned_E, rate))

    return jax.tree_util.tree_map_with_path(
        one, params, before, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
