"""A run goes on with other devices, and with other experts on them, as if nothing had changed."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from moe.data.mixture import TrainBatches
from moe.models import TransformerConfig
from moe.sharding import MeshConfig
from moe.training import CheckpointConfig, ObjectiveConfig, open_run, train
from moe.training.run import read_checkpoint
from moe.upcycle.run import upcycle_run, upcycle_run_config
from tests.training.small import small_config

pytestmark = pytest.mark.slow  # three meshes, and three more of resized runs, are compiled
# A gradient is a sum over devices, whose order differs: 1e-6 of it in float32. Adam divides a gradient
# by its own size, so where it is near 0 a step of learning_rate 3e-3 may differ by a part of itself.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
MODEL = TransformerConfig(
    d_model=8,
    d_hidden=11,
    num_heads=1,
    num_encoder_layers=2,
    num_decoder_layers=2,
    num_experts=8,
    group_size=48,
    dropout=0.1,
)


def config_of(run_dir, **changes):
    """Each step drops more than 0 %, so the weight of the balance loss grows in each."""
    objective = ObjectiveConfig(drop_band=(0.0, 0.0))
    model, checkpoint = MODEL, CheckpointConfig(every=1)
    return small_config(
        run_dir, **{"model": model, "objective": objective, "checkpoint": checkpoint} | changes
    )


def go_on(run_dir, steps, expert, num_devices, **changes):
    config = config_of(run_dir, steps=steps, mesh=MeshConfig(expert=expert), **changes)
    return train(config, devices=jax.devices()[:num_devices])


def metrics(run_dir, name):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four steps on 8 devices, and the same with 2, 1 and 8 devices from the second on.

    Both run folders, and the batches of both.
    """
    folder, batches = tmp_path_factory.mktemp("elastic"), []
    make = TrainBatches.__next__

    def recorded(self):
        batches.append(make(self))
        return batches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainBatches, "__next__", recorded)
        go_on(folder / "whole", 4, expert=8, num_devices=8)
        whole = batches.copy()
        batches.clear()
        for steps, expert, num_devices in [(1, 8, 8), (2, 2, 2), (3, 1, 1), (4, 8, 8)]:
            go_on(folder / "parts", steps, expert, num_devices)
    return folder / "whole", folder / "parts", whole, batches


def test_other_devices_from_step_to_step_see_the_same_batches(runs):
    _, _, whole, parts = runs
    assert len(whole) == len(parts) == 4
    for batch, other in zip(whole, parts, strict=True):
        for array, same in zip(batch, other, strict=True):
            np.testing.assert_array_equal(array, same)


def test_other_devices_from_step_to_step_train_as_the_same_ones(runs):
    whole, parts, *_ = runs
    for name in ("loss", "validation_loss", "aux_loss", "drop_rate", "num_tokens", "grad_norm"):
        np.testing.assert_allclose(metrics(parts, name), metrics(whole, name), **CLOSE)
    weights = metrics(parts, "balance_weight")
    assert weights == metrics(whole, "balance_weight")
    assert weights == sorted(set(weights))  # it went on where it was


def test_parameters_optimizer_and_data_end_where_the_same_devices_end(runs):
    (_, ours, data), (_, theirs, other_data) = (
        read_checkpoint(open_run(path), "last") for path in runs[:2]
    )
    assert data == other_data
    assert int(ours.step) == 4
    for array, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(array, other, **CLOSE)


@pytest.fixture(params=[16, 4])
def resized(runs, request, tmp_path):
    """A run of 16 or of 4 experts, made of the 8 that were on 8 devices."""
    whole = open_run(runs[0])
    config = upcycle_run_config(whole, str(tmp_path / "resized"), request.param)
    return upcycle_run(whole.path, config, checkpoint="last", noise=0.01)


def test_a_run_of_8_devices_becomes_one_of_more_or_fewer_experts(runs, resized):
    whole, num_experts = open_run(runs[0]), resized.config.model.num_experts
    (_, old, old_data), (_, new, data) = (read_checkpoint(run, "last") for run in (whole, resized))
    assert (int(new.step), data) == (0, old_data)
    ffn, old_ffn = (s.params["decoder"]["pairs"]["sparse"]["ffn"] for s in (new, old))
    assert ffn["experts"]["wi_EMH"].shape == (1, num_experts, 8, 11)
    assert ffn["router"]["kernel_ME"].shape == (1, 8, num_experts)
    if num_experts > 8:  # the old ones are in their places
        np.testing.assert_array_equal(
            ffn["experts"]["wi_EMH"][:, :8], old_ffn["experts"]["wi_EMH"][...]
        )


def test_a_resized_run_goes_on_learning_on_another_mesh(runs, resized):
    """With 16 experts on 4 devices of which 2 along the experts, with 4 experts on 2 devices."""
    num_devices = {16: 4, 4: 2}[resized.config.model.num_experts]
    mesh = MeshConfig(expert=2)
    config = dataclasses.replace(resized.config, steps=2, mesh=mesh)
    outcome = train(config, devices=jax.devices()[:num_devices])
    assert outcome.step == 2
    assert outcome.validation_loss < metrics(runs[0], "validation_loss")[-1]
