"""`moe train` with a shared weight update, in checkpoints too; what the update computes is tested in
tests/sharding/test_weight_update.py."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from moe.models import TransformerConfig
from moe.sharding import MeshConfig
from moe.training import CheckpointConfig, train
from moe.training.run import read_checkpoint
from tests.training.small import small_config

# 6, 11 and 393 divide by nothing here, so most slots and parameters are stored padded.
MODEL = TransformerConfig(
    d_model=6, d_hidden=11, num_heads=1, num_encoder_layers=2, num_decoder_layers=2, num_experts=2,
    group_size=48, dropout=0.0,
)  # fmt: skip


def go_on(run_dir, steps, num_devices, mode, expert):
    config = small_config(
        run_dir,
        steps=steps,
        model=MODEL,
        checkpoint=CheckpointConfig(every=1),
        mesh=MeshConfig(expert=expert, weight_update=mode),
    )
    return train(config, devices=jax.devices()[:num_devices]).run


@pytest.mark.slow  # three training runs
def test_a_run_goes_on_in_another_mode_on_other_devices(tmp_path):
    alone = go_on(tmp_path / "alone", 3, 1, "replicated", 1)
    go_on(tmp_path / "changing", 2, 8, "fully_sharded", 2)
    changing = go_on(tmp_path / "changing", 3, 4, "sharded", 1)
    expected, found = (read_checkpoint(run, "last")[1] for run in (alone, changing))
    assert int(found.step) == 3
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Adam divides by the root of tiny squared gradients, so rounding shows up in the update;
        # an update is at most the learning rate, 3e-3.
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=3e-5)
