from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.models import Transformer, TransformerConfig

V = 53
SMALL = {
    "vocab_size": V,
    "d_model": 12,
    "d_hidden": 20,
    "num_heads": 3,
    "num_encoder_layers": 2,
    "num_decoder_layers": 4,
    "num_experts": 5,
    "dispatch": "einsum",  # compiles fastest
}


def make_model(**options) -> Transformer:
    return Transformer(TransformerConfig(**(SMALL | options)), rngs=nnx.Rngs(0))


def rows(sentences: list[tuple[list[int], list[int]]], source_length=11, target_length=9):
    """One packed row: each (source, target) is a segment."""
    row = {}
    for side, length in (("source", source_length), ("target", target_length)):
        tokens, segments, positions = [], [], []
        for number, pair in enumerate(sentences, start=1):
            ids = pair[0 if side == "source" else 1]
            tokens += ids
            segments += [number] * len(ids)
            positions += range(len(ids))
        pad = [0] * (length - len(tokens))
        name = "source_BL" if side == "source" else "target_in_BL"
        row[name] = jnp.asarray([tokens + pad])
        row[f"{side}_segments_BL"] = jnp.asarray([segments + pad])
        row[f"{side}_positions_BL"] = jnp.asarray([positions + pad])
    return row


ONE = ([5, 6, 7, 8], [1, 20, 21])
TWO = ([9, 10, 11, 12, 13], [1, 30, 31, 32])


@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_packed_sentences_do_not_see_one_another(positions):
    model = make_model(positions=positions)
    forward = nnx.jit(lambda model, row: model(**row)[0])
    packed_BLV = forward(model, rows([ONE, TWO]))
    alone_BLV = forward(model, rows([TWO]))
    # The same sums in rows of other padding.
    np.testing.assert_allclose(packed_BLV[0, 3:7], alone_BLV[0, :4], rtol=1e-4, atol=1e-5)


def test_a_target_token_does_not_see_later_ones():
    graph, params = nnx.split(make_model(tied_embeddings=False))

    def logit(params):
        return nnx.merge(graph, params)(**rows([TWO]))[0][0, 1, 0]

    gradient_VM = jax.grad(logit)(params)["embedding_VM"].get_value()
    seen = np.flatnonzero(np.abs(gradient_VM).sum(1))
    # Position 1 sees the source (9..13) and targets 1 and 30, not 31 and 32.
    assert set(seen) == {9, 10, 11, 12, 13, 1, 30}


def test_source_tokens_may_have_an_embedding_of_their_own():
    graph, params = nnx.split(make_model(source_vocab_size=V + 7, num_experts=0))
    row = rows([([5, V + 6, 7], [1, 20])])

    def logit(params):
        return nnx.merge(graph, params)(**row)[0][0, 1, 30]

    gradient = jax.grad(logit)(params)
    seen = {
        name: set(np.flatnonzero(np.abs(gradient[name].get_value()).sum(1)))
        for name in ("source_embedding_VM", "embedding_VM")
    }
    assert seen["source_embedding_VM"] == {5, 7, V + 6}
    assert seen["embedding_VM"] == {1, 20, 30}  # 30 as the output's row


@pytest.mark.parametrize(
    "options", [{}, {"positions": "relative"}, {"num_experts": 0}, {"d_head": 6}]
)
def test_decoding_with_a_cache_gives_the_teacher_forced_logits(options):
    model = make_model(**options)
    row = rows([TWO], source_length=7, target_length=4)
    logits_BLV, _ = model(**row)
    memory, _ = model.encode(
        row["source_BL"], row["source_segments_BL"], row["source_positions_BL"]
    )
    cache = model.start_decoding(memory, row["source_segments_BL"], max_length=6)
    decode_step = nnx.jit(lambda model, *inputs: model.decode_step(*inputs))
    for step, token in enumerate(TWO[1]):
        logits_BV, cache = decode_step(model, jnp.asarray([token]), jnp.asarray(step), cache)
        np.testing.assert_allclose(logits_BV, logits_BLV[:, step], rtol=1e-4, atol=1e-5)


def test_stats_have_a_row_for_each_moe_layer_of_each_stack():
    row = rows([ONE, TWO])
    _, stats = make_model()(**row)
    assert stats["encoder"].assigned_E.shape == (1, 5)
    assert stats["decoder"].assigned_E.shape == (2, 5)
    # 9 source tokens and 7 target tokens are real; each makes two choices.
    assert stats["encoder"].num_tokens.tolist() == [9]
    assert stats["decoder"].assigned_E.sum(-1).tolist() == [14, 14]


def test_a_dense_model_has_no_stats_and_the_same_active_size():
    dense = make_model(num_experts=0)
    _, stats = dense(**rows([ONE]))
    assert stats == {}
    widths = [
        ffn.wi_MH.shape[-1]
        for ffn in (dense.encoder.pairs.dense.ffn, dense.encoder.pairs.sparse.ffn)
    ]
    assert widths == [20, 40]


def test_dropout_and_random_routing_need_a_key_and_repeat_with_it():
    model = make_model(dropout=0.3)
    row = rows([ONE])
    first, again, other = (model(**row, key=jax.random.key(seed))[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    np.testing.assert_array_equal(model(**row)[0], model(**row)[0])


def test_bfloat16_computes_in_bfloat16_over_float32_parameters():
    model = make_model(dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    logits_BLV, stats = model(**rows([ONE]))
    assert logits_BLV.dtype == jnp.float32
    assert stats["encoder"].mean_prob_E.dtype == jnp.float32
    exact_BLV, _ = make_model()(**rows([ONE]))
    # 8 bits of mantissa through six layers.
    np.testing.assert_allclose(logits_BLV[0, :3], exact_BLV[0, :3], atol=0.15)


def test_the_program_does_not_grow_with_depth():
    def size(layers):
        model = make_model(num_encoder_layers=layers, num_decoder_layers=layers)
        graph, params = nnx.split(model)
        return len(str(jax.make_jaxpr(lambda p: nnx.merge(graph, p)(**rows([ONE]))[0])(params)))

    # Only the numbers of layers in shapes differ.
    assert size(8) < 1.02 * size(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_encoder_layers": 3}, "num_encoder_layers must be even and at least 2: got 3"),
        ({"num_experts": 1}, "num_experts must be 0 .* got 1"),
        ({"num_heads": 5}, "d_model must divide by num_heads: got d_model=12, num_heads=5"),
        ({"d_head": 5}, "d_head must be even for rotary positions: got 5"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\): got 1.0"),
    ],
)
def test_malformed_shapes_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        TransformerConfig(**(SMALL | options))
