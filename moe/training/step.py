"""One training step as a pure function of state, batch and key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from moe.data import Batch
from moe.layers import update_router_biases
from moe.models import Stats
from moe.sharding import gathered, partition_spec, spread
from moe.sharding.weight_update import unpadded
from moe.training.objective import (
    ObjectiveConfig,
    cross_entropy,
    next_balance_weight,
    router_losses,
    total_loss,
)
from moe.training.state import TrainState, placed, updated

Metrics = dict[str, jax.Array]


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch are split over every axis that is not a model axis."""
    return NamedSharding(mesh, partition_spec(("batch", None), mesh))


def make_train_step(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, objective: ObjectiveConfig
) -> Callable[..., tuple[TrainState, Metrics, Stats]]:
    """The compiled step `(state, batch, key, balance_weight=None) -> (state, metrics, expert load)`.

    `state` is donated. `balance_weight` replaces the objective's, where a drop band adapts it; the
    weight for the next step is then among the metrics.

    The key is folded with the step, so a resumed run draws what an uninterrupted one would have.
    Metrics: loss (cross-entropy, smoothed as configured, nats a token), aux_loss, z_loss, drop_rate,
    grad_norm, num_tokens (real target tokens), and skipped and skipped_in_a_row (steps whose
    gradient was not finite, in all and up to now).
    """

    def loss_of(params, batch: Batch, key, balance_weight):
        logits_BLV, stats = forward(graph, params, batch, key)
        mask_BL = jnp.asarray(batch.target_segments_BL) > 0
        loss = cross_entropy(
            logits_BLV,
            jnp.asarray(batch.target_out_BL),
            mask_BL,
            label_smoothing=objective.label_smoothing,
        )
        routers = router_losses(stats)
        metrics = {"loss": loss, "num_tokens": jnp.sum(mask_BL), **routers}
        return total_loss(loss, routers, objective, balance_weight), (metrics, stats)

    def step(state: TrainState, batch: Batch, key: jax.Array, balance_weight=None):
        key = jax.random.fold_in(key, state.step)
        state = unpadded(state)
        grads, (metrics, stats) = jax.grad(loss_of, has_aux=True)(
            state.params, batch, key, balance_weight
        )
        if balance_weight is not None and "drop_rate" in metrics:
            metrics["balance_weight"] = next_balance_weight(
                balance_weight, metrics["drop_rate"], objective
            )
        grads = spread(grads)
        new = updated(state, grads, optimizer)
        params = update_router_biases(new.params, state.params, stats)
        metrics |= {
            "grad_norm": optax.tree.norm(grads),
            "skipped": new.optimizer.total_notfinite,
            "skipped_in_a_row": new.optimizer.notfinite_count,
        }
        return placed(dataclasses.replace(new, params=params)), metrics, stats

    return jax.jit(step, donate_argnums=0)


def make_eval_step(
    graph: nnx.GraphDef,
) -> Callable[[nnx.State, Batch], tuple[jax.Array, jax.Array, Stats]]:
    """The compiled `(params, batch) -> (summed loss in nats, real target tokens, expert load)`.

    Deterministic and dropless, without label smoothing.
    """

    def step(params, batch: Batch):
        logits_BLV, stats = forward(graph, params, batch, None)
        mask_BL = jnp.asarray(batch.target_segments_BL) > 0
        num_tokens = jnp.sum(mask_BL)
        loss = cross_entropy(logits_BLV, jnp.asarray(batch.target_out_BL), mask_BL)
        return loss * num_tokens, num_tokens, stats

    return jax.jit(step)


def forward(
    graph: nnx.GraphDef, params: nnx.State, batch: Batch, key: jax.Array | None
) -> tuple[jax.Array, Stats]:
    """Teacher-forced logits_BLV and the expert load."""
    inputs = batch._asdict()
    del inputs["target_out_BL"]
    return nnx.merge(graph, gathered(unpadded(params)))(**inputs, key=key)
