"""The optimizer and its learning-rate schedule, both Optax's."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from moe.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: Literal["adamw", "adafactor"] = "adamw"
    """AdamW, or Adafactor (GShard's; less memory)."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["rsqrt", "linear", "constant"] = "rsqrt"
    """After the warm-up: fall as 1/sqrt(step), fall in a line to 0 at the last step, or stay."""
    warmup_steps: int = 1000
    """Steps in which the learning rate rises from 0 in a line."""
    beta1: float = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: float = 0.98
    """AdamW: decay of the mean of squared gradients."""
    weight_decay: float = 0.0
    """Share of a matrix taken off, times the learning rate, each step; vectors are left alone."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    def __post_init__(self):
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise UserError(f"optimizer.{name} must be positive: got {getattr(self, name)}.")
        if self.warmup_steps < 1:
            raise UserError(
                f"optimizer.warmup_steps must be at least 1: got {self.warmup_steps}. Raise it."
            )


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each step of a run of `steps`."""
    peak, warmup = config.learning_rate, config.warmup_steps
    after = {
        "rsqrt": lambda step: peak * jnp.sqrt(warmup / (warmup + jnp.maximum(step, 0))),
        "linear": optax.linear_schedule(peak, 0.0, max(steps - warmup, 1)),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """Clipping, the optimizer and its schedule; a step with a non-finite gradient changes nothing.

    The state counts such steps, in a row and in all (`optax.ApplyIfFiniteState`); the training loop
    decides how many are too many.
    """
    rate = learning_rate(config, steps)
    if config.name == "adamw":
        rule = optax.adamw(
            rate,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )
    else:
        rule = optax.adafactor(
            rate, multiply_by_parameter_scale=False, weight_decay_rate=config.weight_decay or None
        )
    clipped = optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
    return optax.apply_if_finite(clipped, max_consecutive_errors=2**30)
