"""A training step on stages x all other axes, with rematerialisation, is that of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from moe.data import train_batches
from moe.sharding import MeshConfig, explain, make_mesh, weight_update
from moe.training.objective import ObjectiveConfig
from moe.training.optimizer import OptimizerConfig, make_optimizer
from moe.training.run import start_run
from moe.training.state import init_state
from moe.training.step import batch_sharding, make_train_step
from tests.training.small import small_config


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """mesh, options -> parameters and metrics after two steps, and the program."""
    config = small_config(tmp_path_factory.mktemp("pipeline") / "run")
    pairs = config.source.pairs("train")
    run = start_run(config, pairs)
    rows = next(train_batches(pairs, run.tokenizer, config.mixture, seed=0))
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
    deep: dict[str, Any] = {"num_encoder_layers": 8, "num_decoder_layers": 8, "num_microbatches": 2}

    def two_steps(mesh=None, **options):
        model = dataclasses.replace(run.model_config, **deep, **options)
        graph, state = init_state(model, optimizer, seed=3, mesh=mesh)
        step: Any = make_train_step(graph, optimizer, ObjectiveConfig())
        placed = rows if mesh is None else jax.device_put(rows, batch_sharding(mesh))
        compiled = step.lower(state, placed, jax.random.key(7)).compile()
        for _ in range(2):  # the learning rate of step 0 is 0
            state, metrics, _ = compiled(state, placed, jax.random.key(7))
        return jax.device_get((state.params, metrics)), compiled

    return two_steps


@pytest.fixture(scope="module")
def expected(steps):
    return steps()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshConfig(stage=4), {}),
        (MeshConfig(stage=2, expert=2, weight_update="fully_sharded"), {"remat": "full"}),
        (MeshConfig(stage=2, expert=2, model=2), {"remat": "exchange"}),
        (MeshConfig(stage=2, expert=2), {"pipeline_rounds": 2, "remat": "dots"}),
    ],
    ids=str,
)
def test_training_on_stages_gives_the_numbers_of_one_device(steps, expected, mesh, options):
    with jax.set_mesh(make_mesh(mesh)), weight_update(mesh.weight_update):
        found, compiled = steps(make_mesh(mesh), **options)
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        # As in tests/training/test_step.py: Adam divides by the root of tiny squared gradients.
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    between = [one for one in explain(compiled).collectives if "stage" in one.axes]
    assert {one.kind for one in between if one.loops} == {"collective-permute"}
