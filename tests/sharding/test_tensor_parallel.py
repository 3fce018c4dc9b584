"""Data x expert x model: the inside of every layer is split, and a training step is that of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from moe.data import train_batches
from moe.sharding import MeshConfig, explain, make_mesh
from moe.training.objective import ObjectiveConfig
from moe.training.optimizer import OptimizerConfig, make_optimizer
from moe.training.run import start_run
from moe.training.state import init_state
from moe.training.step import batch_sharding, make_train_step
from tests.training.small import small_config


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """mesh -> the state after two steps and the metrics of the second; the program's explanation."""
    config = small_config(tmp_path_factory.mktemp("step") / "run")
    pairs = config.source.pairs("train")
    run = start_run(config, pairs)
    batch = next(train_batches(pairs, run.tokenizer, config.mixture, seed=0))
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1), 10)

    def steps(mesh=None):
        graph, state = init_state(run.model_config, optimizer, seed=3, mesh=mesh)
        step = make_train_step(graph, optimizer, ObjectiveConfig())
        placed = batch if mesh is None else jax.device_put(batch, batch_sharding(mesh))
        key = jax.random.key(7)
        compiled = step.lower(state, placed, key).compile()
        state, *_ = compiled(state, placed, key)  # the learning rate of step 0 is 0
        state, metrics, _ = compiled(state, placed, key)
        return state, metrics, explain(compiled)

    return steps


def test_a_training_step_on_data_x_expert_x_model_gives_the_numbers_of_one(two_steps):
    expected, expected_metrics, _ = two_steps()
    mesh = make_mesh(MeshConfig(data=2, expert=2, model=2))
    with jax.set_mesh(mesh):
        found, metrics, explanation = two_steps(mesh)
    pair = found.params["encoder"]["pairs"]["sparse"]
    # [Y, E, M, H]: 8 experts over 2, 32 hidden over 2; [Y, M, N, D]: 2 heads over 2.
    assert pair["ffn"]["experts"]["wi_EMH"][...].addressable_shards[0].data.shape == (1, 4, 16, 16)
    assert pair["attention"]["wq_MND"][...].addressable_shards[0].data.shape == (1, 16, 1, 8)
    along = {one.axes for one in explanation.collectives if one.kind == "all-to-all"}
    assert along == {("expert",)}
    assert any("model" in one.axes for one in explanation.collectives)
    pairs = zip(
        jax.tree.leaves((expected.params, expected_metrics)),
        jax.tree.leaves((found.params, metrics)),
        strict=True,
    )
    for a, b in pairs:
        # As in tests/training/test_step.py: Adam divides by the root of tiny squared gradients.
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
