"""Routers: a learned projection to expert logits, and the rule that makes a plan of them."""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx

from moe.errors import UserError
from moe.routing import RoutingPlan, SecondPolicy, SlotRule, expert_capacity, top2
from moe.sharding import param


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top2:
    """GShard's gate as a rule from logits to a plan; see `moe.routing.top2`.

    A key means training: the random second policy and `capacity_factor` apply. Without a key the rule
    is deterministic: second policy "all" in place of a random one, and `eval_capacity_factor`.
    """

    capacity_factor: float = 1.0
    """Room of an expert in training, in units of a balanced load."""
    eval_capacity_factor: float | None = None
    """The same in evaluation; None is dropless, so that no token depends on its neighbours."""
    min_capacity: int = 4
    """Slots an expert has at least."""
    second_policy: SecondPolicy = "random"
    """Which second choices are kept in training: random, all, sampling or none."""
    slot_rule: SlotRule = "code"
    """How slots are counted: as in the authors' code or as in the paper."""
    renormalize_after_drop: bool = False
    """Divide the gates by the sum of those kept (NLLB) instead of before any drop (GShard)."""
    batch_priority: bool = False
    """Hand out slots to the most certain tokens first."""

    def __post_init__(self):
        for name in ("capacity_factor", "eval_capacity_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(
                    f"{name} must be positive: got {value}. 1.0 is room for a balanced load."
                )
        if self.min_capacity < 1:
            raise UserError(f"min_capacity must be at least 1: got {self.min_capacity}. Raise it.")
        for name, allowed in (("second_policy", SecondPolicy), ("slot_rule", SlotRule)):
            if getattr(self, name) not in get_args(allowed):
                raise UserError(
                    f"{name} must be one of {get_args(allowed)}: got {getattr(self, name)!r}. "
                    "Choose one of them."
                )

    def __call__(
        self,
        logits_GSE: jax.Array,
        *,
        token_mask_GS: jax.Array | None = None,
        importance_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan for `logits_GSE`; `key=None` is deterministic evaluation."""
        _, group_size, num_experts = logits_GSE.shape
        training = key is not None
        policy = self.second_policy
        if not training and policy in ("random", "sampling"):
            policy = "all"
        return top2(
            logits_GSE,
            capacity=self._capacity(group_size, num_experts, training),
            second_policy=policy,
            key=key,
            token_mask_GS=token_mask_GS,
            importance_GS=importance_GS,
            slot_rule=self.slot_rule,
            renormalize_after_drop=self.renormalize_after_drop,
            batch_priority=self.batch_priority,
        )

    def _capacity(self, group_size: int, num_experts: int, training: bool) -> int:
        factor = self.capacity_factor if training else self.eval_capacity_factor
        if factor is None:
            return group_size  # a token takes at most one slot of an expert
        return expert_capacity(group_size, num_experts, factor, min_capacity=self.min_capacity)


class Router(nnx.Module):
    """Projects tokens to expert logits, in float32 whatever the tokens' type."""

    def __init__(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        self.kernel_ME = param(init(rngs.params(), (d_model, num_experts)), "model", None)

    def __call__(self, x_GSM: jax.Array) -> jax.Array:
        """logits_GSE, float32."""
        return jnp.einsum(
            "GSM,ME->GSE",
            x_GSM.astype(jnp.float32),
            self.kernel_ME[...],
            precision=jax.lax.Precision.HIGHEST,  # bfloat16 passes would change who goes where
        )
