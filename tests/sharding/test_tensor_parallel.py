"""Data x expert x model: the inside of every layer is split, and a training step is that of one device."""

from __future__ import annotations

import jax
import numpy as np

from moe.sharding import MeshConfig, explain, make_mesh
from tests.training.two_steps import small_model_and_batch, two_steps


def test_a_training_step_on_data_x_expert_x_model_gives_the_numbers_of_one(tmp_path):
    setting = small_model_and_batch(tmp_path / "run")
    expected = two_steps(*setting)
    mesh = make_mesh(MeshConfig(data=2, expert=2, model=2))
    with jax.set_mesh(mesh):
        found = two_steps(*setting, mesh=mesh)
    pair = found.state.params["encoder"]["pairs"]["sparse"]
    # [Y, E, M, H]: 8 experts over 2, 32 hidden over 2; [Y, M, N, D]: 2 heads over 2.
    assert pair["ffn"]["experts"]["wi_EMH"][...].addressable_shards[0].data.shape == (1, 4, 16, 16)
    assert pair["attention"]["wq_MND"][...].addressable_shards[0].data.shape == (1, 16, 1, 8)
    collectives = explain(found.program).collectives
    along = {one.axes for one in collectives if one.kind == "all-to-all"}
    assert along == {("expert",)}
    assert any("model" in one.axes for one in collectives)
    compared = [(s.state.params, s.metrics) for s in (expected, found)]
    for a, b in zip(*map(jax.tree.leaves, compared), strict=True):
        # As in tests/training/test_step.py: Adam divides by the root of tiny squared gradients.
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
