"""The Transformer in micro-batches: the numbers of one batch, on any number of stages."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import Top2
from moe.models import Transformer, TransformerConfig
from moe.sharding import MeshConfig, make_mesh, shardings
from tests.models.test_transformer import ONE, TWO, rows

LENGTH = 9  # of a row and of a group, so that no token competes with those of other rows
CONFIG = TransformerConfig(
    vocab_size=53,
    d_model=12,
    d_hidden=20,
    num_heads=3,
    num_encoder_layers=4,
    num_decoder_layers=4,
    num_experts=5,
    router=Top2(capacity_factor=1.0),
    group_size=LENGTH,
)


def batch(sentences=([ONE, TWO], [ONE], [TWO], [TWO], [], [ONE])):
    """Six rows, one of them without a token."""
    of_rows = [rows(one, source_length=LENGTH, target_length=LENGTH) for one in sentences]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *of_rows)


def forward(stages: int = 1, key: jax.Array | None = None, **options):
    """Logits and statistics of a model on a mesh of so many stages."""
    config = dataclasses.replace(CONFIG, **options)
    graph, params = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))
    run = jax.jit(lambda params, rows: nnx.merge(graph, params)(**rows, key=key))
    if stages == 1:
        return run(params, batch())
    mesh = make_mesh(MeshConfig(data=1, stage=stages), jax.devices()[:stages])
    with jax.set_mesh(mesh):
        return run(jax.device_put(params, shardings(params, mesh)), batch())


def assert_same(expected, found):
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        # The same sums in arrays of other shapes.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_micro_batches_give_the_logits_losses_and_loads_of_the_batch():
    expected, found = forward(), forward(num_microbatches=3)
    real = np.asarray(batch()["target_segments_BL"]) > 0
    np.testing.assert_allclose(expected[0][real], found[0][real], rtol=1e-4, atol=1e-5)
    # Five rows have a token; a third of the micro-batches has only one of them.
    assert found[1]["encoder"].num_balanced.tolist() == [5, 5]
    assert_same(expected[1], found[1])


@pytest.mark.slow
def test_noise_does_not_depend_on_the_number_of_stages():
    key = jax.random.key(5)
    one, two = (forward(stages, key, num_microbatches=3) for stages in (1, 2))
    assert_same(one, two)
    assert not np.allclose(one[0], forward(num_microbatches=3)[0], atol=1e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: forward(key=jax.random.key(0), num_microbatches=4),
            r"rows of a batch must divide .* got 6 rows for 4 x 1",
        ),
        (
            lambda: forward(num_microbatches=3, pipeline_rounds=3),
            "number of layers must divide by stages x rounds: got 2 for 1 x 3",
        ),
        (
            lambda: dataclasses.replace(CONFIG, num_microbatches=0),
            r"model\.num_microbatches must be at least 1: got 0",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_both_sides(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_plans_are_not_for_micro_batches():
    model = Transformer(dataclasses.replace(CONFIG, num_microbatches=3), rngs=nnx.Rngs(0))
    model.set_attributes(capture_plan=True)
    with pytest.raises(UserError, match=r"num_microbatches must be 1 .* got 3"):
        model(**batch())


def test_evaluation_takes_rows_that_micro_batches_do_not_divide():
    assert_same(forward()[0], forward(num_microbatches=4)[0])
