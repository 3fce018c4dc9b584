"""One training step as a pure function of state, batch and key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from moe.data import Batch
from moe.layers import update_router_biases
from moe.models import Stats, Transformer, TransformerConfig
from moe.sharding import partition_spec, shardings
from moe.training.objective import (
    ObjectiveConfig,
    cross_entropy,
    next_balance_weight,
    router_losses,
    total_loss,
)

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that training changes, and all that a checkpoint holds of it.

    Attributes:
      step: int32 scalar, steps taken, skipped ones included.
      params: the model's parameters, an NNX state.
      optimizer: the optimizer's state.
    """

    step: jax.Array
    params: nnx.State
    optimizer: Any


def init_state(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    mesh: Mesh | None = None,
) -> tuple[nnx.GraphDef, TrainState]:
    """The model's structure and its first state, created where the mesh wants each part.

    The same seed gives the same numbers on any mesh.
    """

    def create() -> tuple[nnx.GraphDef, TrainState]:
        graph, params = nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))
        step = jnp.zeros((), jnp.int32)
        return graph, TrainState(step=step, params=params, optimizer=optimizer.init(params))

    if mesh is None:
        return jax.jit(create)()
    graph, abstract = jax.eval_shape(create)
    return jax.jit(create, out_shardings=(graph, shardings(abstract, mesh)))()


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
        grads, (metrics, stats) = jax.grad(loss_of, has_aux=True)(
            state.params, batch, key, balance_weight
        )
        if balance_weight is not None and "drop_rate" in metrics:
            metrics["balance_weight"] = next_balance_weight(
                balance_weight, metrics["drop_rate"], objective
            )
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        metrics |= {
            "grad_norm": optax.tree.norm(grads),
            "skipped": optimizer_state.total_notfinite,
            "skipped_in_a_row": optimizer_state.notfinite_count,
        }
        params = optax.apply_updates(state.params, updates)
        state = TrainState(
            step=state.step + 1,
            params=update_router_biases(params, state.params, stats),
            optimizer=optimizer_state,
        )
        return state, metrics, stats

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
    return nnx.merge(graph, params)(**inputs, key=key)
