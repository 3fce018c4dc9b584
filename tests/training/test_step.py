from __future__ import annotations

import jax
import numpy as np
import pytest

from moe.sharding import MeshConfig, count_collectives, make_mesh, weight_update
from moe.training.objective import ObjectiveConfig
from moe.training.optimizer import OptimizerConfig, make_optimizer
from moe.training.state import init_state
from moe.training.step import make_train_step
from tests.training.two_steps import small_model_and_batch, two_steps


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return small_model_and_batch(tmp_path_factory.mktemp("step") / "run")


@pytest.mark.parametrize(
    # [Y, E, M, H] with the 8 experts over 4 devices; M over the 2 that would hold copies.
    ("optimizer_name", "mode", "part"),
    [
        pytest.param("adamw", "replicated", (1, 2, 16, 32), marks=pytest.mark.slow),
        ("adafactor", "fully_sharded", (1, 2, 8, 32)),
    ],
)
def test_a_training_step_on_eight_devices_gives_the_numbers_of_one(
    setting, optimizer_name, mode, part
):
    expected = two_steps(*setting, optimizer=optimizer_name)
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    with jax.set_mesh(mesh), weight_update(mode):
        found = two_steps(*setting, optimizer=optimizer_name, mesh=mesh)
    counts = count_collectives(found.program)
    experts = found.state.params["encoder"]["pairs"]["sparse"]["ffn"]["experts"]["wi_EMH"][...]
    assert experts.addressable_shards[0].data.shape == part
    assert counts["all-to-all"] == 8  # four for each of the two MoE layers
    compared = [(s.state.params, s.first, s.metrics, s.stats) for s in (expected, found)]
    for a, b in zip(*map(jax.tree.leaves, compared), strict=True):
        # Adam divides by the root of tiny squared gradients, so rounding shows up in the update;
        # an update is at most the learning rate, 1e-3.
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)


@pytest.mark.slow
def test_the_loss_falls_on_a_batch_seen_again_and_again(setting):
    model_config, batch = setting
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"), 20
    )
    graph, state = init_state(model_config, optimizer, seed=0)
    step = make_train_step(graph, optimizer, ObjectiveConfig(label_smoothing=0.0))
    losses = []
    for _ in range(20):
        state, metrics, _ = step(state, batch, jax.random.key(0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.step) == 20
