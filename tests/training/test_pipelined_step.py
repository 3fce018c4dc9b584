"""A training step on stages x all other axes, with rematerialisation, is that of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from moe.sharding import MeshConfig, explain, make_mesh, weight_update
from tests.training.two_steps import small_model_and_batch, two_steps

DEEP: dict[str, Any] = {"num_encoder_layers": 8, "num_decoder_layers": 8, "num_microbatches": 2}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    model_config, batch = small_model_and_batch(tmp_path_factory.mktemp("pipeline") / "run")
    return dataclasses.replace(model_config, **DEEP), batch


@pytest.fixture(scope="module")
def expected(setting):
    return two_steps(*setting)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshConfig(stage=4), {}),
        (MeshConfig(stage=2, expert=2, weight_update="fully_sharded"), {"remat": "full"}),
        (MeshConfig(stage=2, data=2, expert=2, weight_update="sharded"), {}),
        (MeshConfig(stage=2, expert=2, model=2), {"remat": "exchange"}),
        (MeshConfig(stage=2, expert=2), {"pipeline_rounds": 2, "remat": "dots"}),
    ],
    ids=str,
)
def test_training_on_stages_gives_the_numbers_of_one_device(setting, expected, mesh, options):
    model_config, batch = setting
    devices = make_mesh(mesh)
    with jax.set_mesh(devices), weight_update(mesh.weight_update):
        found = two_steps(dataclasses.replace(model_config, **options), batch, mesh=devices)
    compared = [(s.state.params, s.metrics) for s in (expected, found)]
    for a, b in zip(*map(jax.tree.leaves, compared), strict=True):
        # As in tests/training/test_step.py: Adam divides by the root of tiny squared gradients.
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    between = [one for one in explain(found.program).collectives if "stage" in one.axes]
    assert {one.kind for one in between if one.loops} == {"collective-permute"}
