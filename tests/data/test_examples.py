"""Sentence pairs as token ids."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from moe.data.examples import as_dataset, encode_pairs
from moe.data.pairs import Direction, SentencePair
from moe.data.tokenizer import TokenizerConfig, train_tokenizer
from moe.errors import UserError
from tests.data.small_mixture import DE_EN, EN_DE, make_pairs, small_tokenizer

LENGTHS = {"source_length": 30, "target_length": 30}


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_source_is_tag_pieces_eos_and_a_target_pieces_eos(in_memory):
    tokenizer = small_tokenizer()
    pairs = make_pairs({EN_DE: 40, DE_EN: 50})
    encoded = encode_pairs(pairs, tokenizer, **LENGTHS, in_memory=in_memory)
    assert {direction: len(examples) for direction, examples in encoded.items()} == {
        EN_DE: 40,
        DE_EN: 50,
    }
    for direction, examples in encoded.items():
        for index, pair in enumerate(pairs[direction]):
            example = examples[index]
            source = [tokenizer.tag_id(direction.target_lang), *tokenizer.encode(pair.source), 3]
            assert example["source"].tolist() == source
            assert example["target"].tolist() == [*tokenizer.encode(pair.target), 3]
            assert example["source"].dtype == np.uint16


def test_each_side_is_encoded_by_its_own_tokenizer(tmp_path):
    pairs = make_pairs({EN_DE: 300})
    config = TokenizerConfig(vocab_size=290, source_vocab_size=280)
    tokenizer = train_tokenizer(pairs, config, temperature=1.0, path=tmp_path / "model")
    example = encode_pairs(pairs, tokenizer, **LENGTHS)[EN_DE][7]
    pieces = tokenizer.source.encode("seven")
    assert pieces != tokenizer.encode("seven")
    assert example["source"].tolist() == [tokenizer.source.tag_id("de"), *pieces, 3]
    assert example["target"].tolist() == [*tokenizer.encode("sieben"), 3]


def test_what_fits_exactly_stays_and_one_token_more_is_left_out(caplog):
    tokenizer = small_tokenizer()
    pairs = make_pairs({EN_DE: 200})
    sources = [len(tokenizer.encode(pair.source)) + 2 for pair in pairs[EN_DE]]
    targets = [len(tokenizer.encode(pair.target)) + 1 for pair in pairs[EN_DE]]
    limits = {"source_length": int(np.median(sources)), "target_length": int(np.median(targets))}
    fits = [s <= limits["source_length"] and t <= limits["target_length"]
            for s, t in zip(sources, targets, strict=True)]  # fmt: skip
    assert 0 < sum(fits) < 200
    kept = encode_pairs(pairs, tokenizer, **limits)[EN_DE]
    lazy = encode_pairs(pairs, tokenizer, **limits, in_memory=False)[EN_DE]
    assert [lazy[i] is not None for i in range(200)] == fits
    read = [example for i in range(200) if (example := lazy[i])]
    assert [kept[i]["source"].tolist() for i in range(len(kept))] == [
        example["source"].tolist() for example in read
    ]
    assert f"{200 - sum(fits)} of 200 sentence pairs are left out" in caplog.text


def test_nothing_is_said_when_nothing_is_left_out(caplog):
    with caplog.at_level(logging.DEBUG, "moe"):
        encode_pairs(make_pairs({EN_DE: 3}), small_tokenizer(), **LENGTHS)
    assert not caplog.records


def test_empty_texts_are_only_tag_and_eos():
    tokenizer = small_tokenizer()
    pairs = {EN_DE: [SentencePair("", "", *EN_DE)]}
    example = encode_pairs(pairs, tokenizer, **LENGTHS)[EN_DE][0]
    assert example["source"].tolist() == [tokenizer.tag_id("de"), 3]
    assert example["target"].tolist() == [3]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_direction_in_which_no_pair_fits_is_an_error(in_memory):
    pairs = {**make_pairs({EN_DE: 9}), DE_EN: [SentencePair("vier " * 40, "four", *DE_EN)]}
    message = r"got \(30, 30\), too short for all of 1 pairs of de-en"
    with pytest.raises(UserError, match=message):
        encode_pairs(pairs, small_tokenizer(), **LENGTHS, in_memory=in_memory)


def test_a_language_without_a_tag_is_an_error():
    pairs = make_pairs({EN_DE: 2})
    pairs = {**pairs, Direction("en", "xx"): pairs[EN_DE]}
    with pytest.raises(UserError, match='got "xx"'):
        encode_pairs(pairs, small_tokenizer(), **LENGTHS)


def test_more_pairs_than_a_chunk_are_all_there(monkeypatch):
    monkeypatch.setattr("moe.data.examples._CHUNK", 7)
    pairs = make_pairs({EN_DE: 23})
    examples = encode_pairs(pairs, small_tokenizer(), **LENGTHS)[EN_DE]
    decoded = [small_tokenizer().decode(example["target"]) for example in as_dataset(examples)]
    assert decoded == [pair.target for pair in pairs[EN_DE]]
