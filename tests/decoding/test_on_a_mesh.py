"""Decoding on eight devices against one: the same hypotheses, and only small things travel."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from moe.decoding import DecodingConfig, translate
from moe.decoding.batch import search_batch
from moe.layers import MoE
from moe.models import Transformer, TransformerConfig, fit_groups
from moe.sharding import MeshConfig, make_mesh, shardings
from moe.sharding.explain import read_collectives
from tests.decoding.test_translate import WordTokenizer

WORDS = [f"w{i}" for i in range(32)]
# One bucket, of which a device gets 3 sentences: one full batch, and one of two sentences.
LENGTHS = [2, 14, 5, 9, 3, 11, 7, 13, 4, 6, 8, 10, 12, 2, 3, 5, 7, 9, 11, 13, 4, 6, 8, 10, 12, 14]
CONFIG = DecodingConfig(beam_size=3, batch_tokens=48)


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = TransformerConfig(
        vocab_size=38, d_model=16, d_hidden=24, num_heads=2, num_experts=4,
        num_encoder_layers=2, num_decoder_layers=2, tied_embeddings=False,
    )  # fmt: skip
    model = Transformer(config, rngs=nnx.Rngs(0))
    # Sharper than at the start: the next best hypothesis is further away than other rounding goes.
    model.output_VM[...] = model.output_VM[...] * 6
    return model


def on_mesh(model: Transformer, mesh: jax.sharding.Mesh) -> Transformer:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.device_put(state, shardings(state, mesh)))


def translated(model: Transformer, **options) -> list[str]:
    rng = np.random.default_rng(1)
    lines = [" ".join(rng.choice(WORDS, length)) for length in LENGTHS]
    tokenizer = WordTokenizer(" ".join(WORDS))
    return translate(model, tokenizer, [*lines, ""], target_lang="de", config=CONFIG, **options)


@pytest.mark.parametrize(
    "config",
    [
        MeshConfig(data=4, expert=2),
        pytest.param(MeshConfig(data=2, expert=2, model=2), marks=pytest.mark.slow),
    ],
    ids=["experts", "experts and inside"],
)
def test_a_mesh_finds_the_hypotheses_of_one_device_in_the_same_order(config, model):
    alone = translated(model)
    assert len(set(alone)) == len(LENGTHS) + 1  # none is like another, and the empty line is empty
    mesh, met = make_mesh(config), []
    with jax.set_mesh(mesh):
        found = translated(on_mesh(model, mesh), wait_for_all=lambda: met.append(1))
    assert found == alone
    assert len(met) == 1  # several processes would meet once for each program


def test_no_cache_and_no_logits_travel_between_devices(model):
    """In a step of the search: tokens to experts and back, and whether any sentence still runs."""
    mesh = make_mesh(MeshConfig(data=4, expert=2))
    source_BL, lengths_B = np.zeros((8, 16), np.int32), np.zeros(8, np.int32)
    search = CONFIG.search(16, bos_id=2, eos_id=3)
    with jax.set_mesh(mesh):
        placed = on_mesh(model, mesh)
        placed.set_attributes(dispatch="gather")
        graph, state = nnx.split(placed)
        lowered = search_batch.lower(graph, state, source_BL, lengths_B, lengths_B, config=search)
    collectives = read_collectives(lowered.compile().as_text(), mesh.shape)
    in_search = [c for c in collectives if any(loop.trips is None for loop in c.loops)]
    assert [(c.kind, c.axes) for c in in_search] == [("all-to-all", ("expert",))] * 2
    sums = [c.bytes_per_device for c in collectives if c.kind == "all-reduce"]
    assert sums == [1]  # a truth value, in the loop's condition


def test_every_device_holds_its_part_of_the_experts(model):
    mesh = make_mesh(MeshConfig(data=4, expert=2))
    wi_YEMH = on_mesh(model, mesh).decoder.pairs.sparse.ffn.experts.wi_EMH[...]
    assert {shard.data.shape for shard in wi_YEMH.addressable_shards} == {(1, 2, 16, 24)}


@pytest.mark.parametrize(
    ("group_size", "num_tokens", "fitting"),
    [
        (1024, 8 * 48, 48),  # one group a device
        (16, 8 * 48, 16),  # three
        (20, 8 * 48, 16),  # 20 does not divide 48, the next smaller that does is 16
        (1024, 8, 1),
    ],
)
def test_groups_are_cut_from_the_tokens_of_one_device(group_size, num_tokens, fitting):
    layer = MoE(4, 4, 2, group_size=group_size, rngs=nnx.Rngs(0))
    fit_groups(layer, num_tokens)
    assert layer.group_size == group_size  # no mesh, no change
    with jax.set_mesh(make_mesh(MeshConfig(data=4, expert=2))):
        fit_groups(layer, num_tokens)
    assert layer.group_size == fitting
