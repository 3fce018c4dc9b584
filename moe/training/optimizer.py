"""The optimizer and its learning-rate schedule, both Optax's."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from moe.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: Literal["adamw", "adafactor", "muon"] = "adamw"
    """AdamW; Adafactor (GShard's; less memory); or Muon for the matrices with AdamW for the rest."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["rsqrt", "linear", "constant"] = "rsqrt"
    """After the warm-up: fall as 1/sqrt(step), fall in a line to 0 at the last step, or stay."""
    warmup_steps: int = 1000
    """Steps in which the learning rate rises from 0 in a line."""
    beta1: float = 0.9
    """AdamW and the AdamW part of Muon: decay of the mean of gradients."""
    beta2: float = 0.98
    """The same: decay of the mean of squared gradients."""
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
            mask=_has_matrices,
        )
    elif config.name == "muon":
        rule = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            consistent_rms=0.2,  # the size of AdamW's updates, so that learning rates carry over
            muon_weight_dimension_numbers=_matrices,
        )
    else:
        rule = optax.adafactor(
            rate, multiply_by_parameter_scale=False, weight_decay_rate=config.weight_decay or None
        )
    clipped = optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
    return optax.apply_if_finite(clipped, max_consecutive_errors=2**30)


def _has_matrices(params: nnx.State) -> nnx.State:
    """Which parameters are matrices, once layers and experts are taken one by one; vectors are not.

    By the dimensions that a parameter names. One that names none (a norm's scale) is a vector,
    stacked or not.
    """

    def read(param) -> bool:
        if not isinstance(param, nnx.Variable):
            return param.ndim > 1
        dims = param.get_metadata().get("out_sharding") or ()
        return len([dim for dim in dims if dim not in ("layers", "experts")]) > 1

    return jax.tree.map(read, params, is_leaf=lambda p: isinstance(p, nnx.Variable))


def _matrices(params: nnx.State) -> nnx.State:
    """How Muon is to read each parameter: as matrices from its input to its output dimensions.

    Layers and experts are matrices of their own. Embeddings, routers and vectors are left to AdamW.

    Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); updates scaled as in Liu et
    al. 2025 (arXiv:2502.16982), equation 4.
    """

    def read(param: nnx.Variable) -> nnx.Variable:
        dims = param.get_metadata().get("out_sharding") or ()
        if not {"hidden", "heads"} & set(dims) or "model" not in dims:
            return param.replace(None)
        own = [i for i, dim in enumerate(dims) if dim not in ("layers", "experts")]
        inward = own[:1] if dims[own[0]] == "model" else own[:-1]
        outward = tuple(i for i in own if i not in inward)
        return param.replace(optax.contrib.MuonDimensionNumbers(tuple(inward), outward))

    return jax.tree.map(read, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
