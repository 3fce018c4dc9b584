"""Translation of lines: with a model that copies its source, and with the real Transformer."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.decoding import DecodingConfig, translate
from moe.decoding.batch import search_batch
from moe.decoding.search import SearchConfig
from moe.errors import UserError
from moe.models import DecodeCache, Transformer, TransformerConfig

SMALL = DecodingConfig(beam_size=2, batch_tokens=32, max_source_length=64)


class WordTokenizer:
    """One id a word, given at first sight."""

    pad_id, unk_id, bos_id, eos_id = range(4)

    def __init__(self, words: str = "", *, source: WordTokenizer | None = None):
        self.words = ["", "", "", "", "<2de>", "<2ja>", *words.split()]
        self.source = source or self

    def tag_id(self, language):
        if f"<2{language}>" not in self.words:
            raise UserError(f'language must be known: got "{language}". Choose de or ja.')
        return self.words.index(f"<2{language}>")

    def encode_batch(self, texts):
        return [[self._id(word) for word in text.split(" ")] for text in texts]

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids)

    def _id(self, word):
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)


class CopyModel(nnx.Module):
    """Says its source again, language tag first, and never ends if told so."""

    def __init__(self, vocab_size=200, *, never_ends=False):
        self.vocab_size, self.never_ends = vocab_size, never_ends
        self.scale = nnx.Param(jnp.float32(10.0))

    def encode(self, source_BL, segments_BL, positions_BL, *, key=None):
        return source_BL[:, :, None], {}

    def start_decoding(self, memory_BTM, segments_BT, *, max_length, source_BT):
        source_BT = jnp.pad(memory_BTM[:, :, 0], ((0, 0), (0, max_length)))
        source_YBTND = source_BT[None, :, :, None, None]
        return DecodeCache(own=(), memory=source_YBTND, source_mask_BT=segments_BT > 0)

    def decode_step(self, token_B, step, cache):
        next_B = cache.memory[0, :, step, 0, 0]
        logits_BV = jax.nn.one_hot(next_B, self.vocab_size) * self.scale[...]
        return logits_BV.at[:, WordTokenizer.eos_id].add(-20.0 * self.never_ends), cache


def test_translations_come_in_the_order_of_the_lines_and_empty_lines_stay_empty():
    lines = [" ".join(f"w{i}" for i in range(length)) for length in (9, 1, 20, 3, 40, 15, 2)]
    lines[3] = ""
    lines.insert(2, "  \t ")
    expected = [f"<2de> {line}" if line.strip() else "" for line in lines]
    assert (
        translate(CopyModel(), WordTokenizer(), lines, target_lang="de", config=SMALL) == expected
    )


def test_each_line_may_have_its_own_language():
    found = translate(
        CopyModel(), WordTokenizer(), ["a", "b", "a"], target_lang=["ja", "de", "de"], config=SMALL
    )
    assert found == ["<2ja> a", "<2de> b", "<2de> a"]


def test_sources_are_read_by_their_own_tokenizer_and_targets_written_by_theirs():
    tokenizer = WordTokenizer("eins zwei", source=WordTokenizer("one two"))
    found = translate(CopyModel(), tokenizer, ["two one"], target_lang="ja", config=SMALL)
    assert found == ["<2ja> zwei eins"]


def test_no_lines_need_no_model():
    assert translate(None, WordTokenizer(), [], target_lang="de") == []
    assert translate(None, WordTokenizer(), [" ", ""], target_lang="de") == ["", ""]


def test_a_bucket_is_compiled_once_and_again_used_by_later_calls(caplog):
    calls = []

    class Counting(CopyModel):
        def encode(self, *arguments, **options):
            calls.append(arguments[0].shape)
            return super().encode(*arguments, **options)

    lines = ["a " * 4 + "a"] * 5 + ["b " * 20 + "b"]
    for _ in range(2):
        translate(Counting(), WordTokenizer(), lines, target_lang="de", config=SMALL)
    assert calls == [(2, 16), (1, 32)]  # 32 tokens a batch


def test_line_that_is_too_long_is_named_before_anything_is_translated():
    with pytest.raises(UserError, match=r"line 2 must have at most max_source_length=64 .* got 65"):
        translate(None, WordTokenizer(), ["a", "b " * 62 + "b"], target_lang="de", config=SMALL)


def test_unknown_language_and_wrong_number_of_languages_are_named():
    with pytest.raises(UserError, match='got "xx"'):
        translate(None, WordTokenizer(), ["a"], target_lang="xx")
    with pytest.raises(UserError, match="got 1 languages for 2 sentences"):
        translate(None, WordTokenizer(), ["a", "b"], target_lang=["de"])


def test_translation_without_end_is_cut_and_counted(caplog):
    config = dataclasses.replace(SMALL, max_length_ratio=1.0)
    with caplog.at_level(logging.WARNING):
        [found] = translate(
            CopyModel(never_ends=True), WordTokenizer(), ["a b"], target_lang="de", config=config
        )
    assert len(found.split(" ")) == 4 + 16  # tag, a, b, eos and 16
    assert "1 of 1 translations were cut" in caplog.text


@pytest.mark.parametrize(
    "field, value", [("beam_size", 0), ("batch_tokens", 0), ("length_penalty", -1.0)]
)
def test_impossible_config_is_named(field, value):
    with pytest.raises(UserError, match=f"{field} must be at least .* got {value}"):
        DecodingConfig(**{field: value})


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    config = TransformerConfig(
        vocab_size=37, d_model=16, d_hidden=24, num_heads=2, num_experts=3,
        num_encoder_layers=2, num_decoder_layers=4,
    )  # fmt: skip
    model = Transformer(config, rngs=nnx.Rngs(5))
    # Sharper than at the start, so that hypotheses differ by more than rounding.
    model.embedding_VM[...] = model.embedding_VM[...] * 3
    return model


def test_scores_are_the_models_own_log_probabilities(transformer):
    """Positions, caches and the reordering of beams, against the model fed with the result."""
    config = SearchConfig(bos_id=2, eos_id=3, max_length=9, beam_size=3, num_best=3)
    lengths_B, limits_B = np.array([5, 7, 0, 2]), np.array([9, 9, 0, 6])
    is_source_BL = np.arange(7) < lengths_B[:, None]
    source_BL = np.random.default_rng(0).integers(4, 37, (4, 7)) * is_source_BL
    graph, state = nnx.split(transformer)
    found = search_batch(graph, state, source_BL, lengths_B, limits_B, config=config)

    target_NT = np.asarray(found.tokens_BKT).reshape(12, 9)
    length_N = np.asarray(found.lengths_BK).reshape(12)
    is_target_NT = np.arange(9) < length_N[:, None]
    logits_NTV, _ = nnx.jit(lambda model, batch: model(**batch))(
        transformer,
        {
            "source_BL": np.repeat(source_BL, 3, axis=0),
            "source_segments_BL": np.repeat(is_source_BL, 3, axis=0).astype(np.int32),
            "source_positions_BL": np.tile(np.arange(7), (12, 1)),
            "target_in_BL": np.roll(target_NT, 1, axis=1) * (np.arange(9) > 0)
            + 2 * (np.arange(9) == 0),
            "target_segments_BL": is_target_NT.astype(np.int32),
            "target_positions_BL": np.tile(np.arange(9), (12, 1)),
        },
    )
    log_probs_NTV = np.asarray(jax.nn.log_softmax(logits_NTV))
    said_NT = np.take_along_axis(log_probs_NTV, target_NT[:, :, None], axis=2)[:, :, 0]
    expected_N = (said_NT * is_target_NT).sum(axis=1) / ((5 + length_N) / 6) ** 0.6
    rows = [0, 1, 3]
    # Sums of up to 9 float32 log probabilities, in another order of operations.
    np.testing.assert_allclose(
        np.asarray(found.scores_BK)[rows], expected_N.reshape(4, 3)[rows], atol=2e-4
    )
    assert length_N.reshape(4, 3)[2].tolist() == [0, 0, 0]
    assert len({tuple(tokens) for tokens in target_NT[:3].tolist()}) == 3


def test_translation_does_not_depend_on_neighbours_or_place(transformer):
    tokenizer = WordTokenizer(" ".join(f"w{i}" for i in range(31)))
    rng = np.random.default_rng(1)
    lines = [" ".join(f"w{i}" for i in rng.integers(31, size=n)) for n in (3, 12, 7, 9, 5, 11, 20)]
    config = DecodingConfig(beam_size=3, batch_tokens=64)
    languages = ["de", "ja", "de", "ja", "de", "ja", "de"]
    together = translate(transformer, tokenizer, lines, target_lang=languages, config=config)
    backwards = translate(
        transformer, tokenizer, lines[::-1], target_lang=languages[::-1], config=config
    )
    alone = [
        translate(transformer, tokenizer, [line], target_lang=language, config=config)[0]
        for line, language in zip(lines, languages, strict=True)
    ]
    assert together == backwards[::-1] == alone
    assert len(set(together)) == len(lines)
