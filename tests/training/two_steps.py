"""Two steps of a small run, to be compared between meshes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from moe.data import train_batches
from moe.models import TransformerConfig
from moe.training.objective import ObjectiveConfig
from moe.training.optimizer import OptimizerConfig, make_optimizer
from moe.training.run import start_run
from moe.training.state import TrainState, init_state
from moe.training.step import batch_sharding, make_train_step
from tests.training.small import small_config


class TwoSteps(NamedTuple):
    state: TrainState
    first: Any  # metrics of the first step
    metrics: Any  # of the second
    stats: Any
    program: jax.stages.Compiled


def small_model_and_batch(folder) -> tuple[TransformerConfig, Any]:
    config = small_config(folder)
    pairs = config.source.pairs("train")
    run = start_run(config, pairs)
    return run.model_config, next(train_batches(pairs, run.tokenizer, config.mixture, seed=0))


def two_steps(model_config, batch, *, optimizer: str = "adamw", mesh=None) -> TwoSteps:
    """The learning rate of the first step is 0."""
    options: Any = {"name": optimizer}
    rule = make_optimizer(OptimizerConfig(**options, warmup_steps=1), 10)
    graph, state = init_state(model_config, rule, seed=3, mesh=mesh)
    if mesh is not None:
        batch = jax.device_put(batch, batch_sharding(mesh))
    step: Any = make_train_step(graph, rule, ObjectiveConfig())
    key = jax.random.key(7)
    program = step.lower(state, batch, key).compile()
    state, first, _ = program(state, batch, key)
    state, metrics, stats = program(state, batch, key)
    return TwoSteps(state, first, metrics, stats, program)
