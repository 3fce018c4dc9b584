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
from moe.training.by_matrix import own_dims, scale_by_adafactor, scale_by_trust_ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    name: Literal["adamw", "adafactor", "lamb", "muon", "sgd"] = "adamw"
    """AdamW; Adafactor (GShard's; less memory); LAMB (for large batches); Muon for the matrices with
    AdamW for the rest; or SGD with momentum."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["rsqrt", "linear", "constant"] = "rsqrt"
    """After the warm-up: fall as 1/sqrt(step), fall in a line to 0 at the last step, or stay."""
    warmup_steps: int = 1000
    """Steps in which the learning rate rises from 0 in a line."""
    beta1: float = 0.9
    """Decay of the mean of gradients; of their sum in SGD. Adafactor has none."""
    beta2: float = 0.98
    """Decay of the mean of squared gradients; for Adafactor the most that 1 - step**-0.8 rises to."""
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
    rule = optax.chain(
        optax.clip_by_global_norm(config.clip_norm), _rule(config, learning_rate(config, steps))
    )
    return optax.apply_if_finite(rule, max_consecutive_errors=2**30)


def _rule(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    betas = {"b1": config.beta1, "b2": config.beta2}
    decay = optax.add_decayed_weights(config.weight_decay, mask=_has_matrices)
    step = optax.scale_by_learning_rate(rate)
    match config.name:
        case "adamw":
            return optax.adamw(rate, **betas, weight_decay=config.weight_decay, mask=_has_matrices)
        case "adafactor":
            return optax.chain(scale_by_adafactor(max_decay=config.beta2), decay, step)
        case "lamb":
            adam = optax.scale_by_adam(**betas, eps=1e-6)
            return optax.chain(adam, decay, scale_by_trust_ratio(), step)
        case "sgd":
            return optax.chain(optax.trace(config.beta1), decay, step)
        case "muon":
            return optax.contrib.muon(
                rate,
                weight_decay=config.weight_decay,
                adam_b1=config.beta1,
                adam_b2=config.beta2,
                consistent_rms=0.2,  # the size of AdamW's updates, so that learning rates carry over
                muon_weight_dimension_numbers=_matrices,
            )
    raise AssertionError(f"no rule for {config.name}")


def _has_matrices(params: nnx.State) -> nnx.State:
    """Which parameters are matrices, once layers and experts are taken one by one; vectors are not."""
    return jax.tree.map(
        lambda param: len(own_dims(param)) > 1,
        params,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


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
        own = own_dims(param)
        inward = own[:1] if dims[own[0]] == "model" else own[:-1]
        outward = tuple(i for i in own if i not in inward)
        return param.replace(optax.contrib.MuonDimensionNumbers(tuple(inward), outward))

    return jax.tree.map(read, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
