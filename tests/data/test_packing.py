"""Packed rows against loops, and the batches for the validation loss."""

from __future__ import annotations

from collections import Counter

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.packing import BatchShape, PackedBatches, eval_batches, make_batch
from moe.data.pairs import SentencePair
from moe.errors import UserError
from tests.data.small_mixture import (
    DE_EN,
    EN_DE,
    EN_FR,
    make_pairs,
    small_tokenizer,
    texts,
    unpack,
)

BOS = 2


def make_examples(lengths):
    """Examples whose tokens tell where they come from: 100, 101, .. and 500, 501, .. go on."""
    ends = np.cumsum(np.array(lengths).reshape(-1, 2), axis=0)
    return [
        {
            "source": np.arange(100 + s_end - s, 100 + s_end, dtype=np.uint16),
            "target": np.arange(500 + t_end - t, 500 + t_end, dtype=np.uint16),
        }
        for (s, t), (s_end, t_end) in zip(lengths, ends, strict=True)
    ]


def pack(lengths, **shape):
    stream = grain.MapDataset.source(make_examples(lengths))
    return list(PackedBatches(stream, BatchShape(**shape), bos_id=BOS))


def first_fit(lengths, num_rows, source_length, target_length, max_per_row):
    """Numbers of the examples in each row of each batch, by the definition."""
    batches = []
    rows: list[list[int]] = []
    for number, (source, target) in enumerate(lengths):
        for row in rows:
            used_source = sum(lengths[i][0] for i in row)
            used_target = sum(lengths[i][1] for i in row)
            if (
                used_source + source <= source_length
                and used_target + target <= target_length
                and len(row) < max_per_row
            ):
                row.append(number)
                break
        else:
            if len(rows) == num_rows:
                batches.append(rows)
                rows = []
            rows.append([number])
    return [*batches, rows] if rows else batches


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5)), min_size=1, max_size=60),
    num_rows=st.integers(1, 5),
    source_length=st.integers(7, 19),
    target_length=st.integers(5, 17),
    max_per_row=st.sampled_from([1, 3, 100]),
)
def test_packing_is_first_fit_and_loses_nothing(lengths, **shape):
    examples = make_examples(lengths)
    batches = pack(lengths, **shape)
    expected = first_fit(lengths, **shape)
    assert len(batches) == len(expected)
    for batch, rows in zip(batches, expected, strict=True):
        numbers = [number for row in rows for number in row]
        assert list(unpack(batch)) == [
            (
                examples[number]["source"].tolist(),
                [BOS, *examples[number]["target"][:-1].tolist()],
                examples[number]["target"].tolist(),
            )
            for number in numbers
        ]
        assert batch.source_segments_BL.max(1).tolist() == [
            *map(len, rows),
            *[0] * (shape["num_rows"] - len(rows)),
        ]
        for field, array in batch._asdict().items():
            side = field.split("_")[0]
            assert array.shape == (shape["num_rows"], shape[f"{side}_length"])
            assert array.dtype == np.int32
            padding = getattr(batch, f"{side}_segments_BL") == 0
            assert not array[padding].any()


def test_a_row_laid_out_by_hand():
    rows = [[{"source": np.array([8, 9, 3]), "target": np.array([7, 3])},
             {"source": np.array([8, 3]), "target": np.array([6, 5, 3])}]]  # fmt: skip
    batch = make_batch(rows, BatchShape(2, 6, 7, 9), bos_id=BOS)
    assert [array[0].tolist() for array in batch] == [
        [8, 9, 3, 8, 3, 0],
        [1, 1, 1, 2, 2, 0],
        [0, 1, 2, 0, 1, 0],
        [2, 7, 2, 6, 5, 0, 0],
        [7, 3, 6, 5, 3, 0, 0],
        [1, 1, 2, 2, 2, 0, 0],
        [0, 1, 0, 1, 2, 0, 0],
    ]
    assert not np.concatenate([array[1] for array in batch]).any()


def test_only_the_last_rows_begun_are_looked_through(monkeypatch):
    monkeypatch.setattr("moe.data.packing._OPEN_ROWS", 2)
    # Rows of 5: 3, 3, 3 begin three rows; 2 would fit into the first, and goes into the second.
    (batch,) = pack([(3, 1)] * 3 + [(2, 1)], num_rows=4, source_length=5, target_length=5,
                    max_per_row=5)  # fmt: skip
    assert batch.source_segments_BL.max(1).tolist() == [1, 2, 1, 0]


def test_a_restored_iterator_packs_the_same():
    lengths = [(1 + i % 5, 1 + i % 3) for i in range(200)]
    dataset = PackedBatches(
        grain.MapDataset.source(make_examples(lengths)), BatchShape(3, 8, 8, 8), bos_id=BOS
    )
    iterator = iter(dataset)
    states, batches = [], []
    for batch in iterator:
        batches.append(batch)
        states.append(iterator.get_state())
    for index in (0, 3, len(states) - 1):
        restored = iter(dataset)
        restored.set_state(states[index])
        rest = list(restored)
        assert len(rest) == len(batches) - index - 1
        for batch, same in zip(batches[index + 1 :], rest, strict=True):
            np.testing.assert_array_equal(batch, same)


def test_short_sentences_fill_the_rows():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(2.1, 0.5, size=5000).astype(int).clip(2, 40)  # 9 tokens on average
    other = (lengths * rng.uniform(0.7, 1.4, size=5000)).astype(int).clip(2, 40)
    *batches, _ = pack(
        list(zip(lengths.tolist(), other.tolist(), strict=True)),
        num_rows=32,
        source_length=64,
        target_length=64,
        max_per_row=64,
    )
    for field in ("source_segments_BL", "target_segments_BL"):
        assert np.mean([getattr(batch, field) > 0 for batch in batches]) > 0.93


EVAL = {"batch_size": 4, "source_length": 24, "target_length": 20}


def test_evaluation_sees_every_pair_once_in_order_one_a_row():
    pairs = make_pairs({EN_DE: 11, DE_EN: 8, EN_FR: 1})
    batches = list(eval_batches(pairs, small_tokenizer(), **EVAL))
    assert [direction for direction, _ in batches] == [DE_EN] * 2 + [EN_DE] * 3 + [EN_FR]
    for direction in pairs:
        seen = [text for d, batch in batches if d == direction for text in texts(batch)]
        assert seen == [(pair.source, pair.target) for pair in pairs[direction]]
    for _, batch in batches:
        assert batch.source_BL.shape == (4, 24) and batch.target_in_BL.shape == (4, 20)
        assert batch.source_segments_BL.max() == 1
    last_of_en_de = batches[4][1]
    assert last_of_en_de.target_segments_BL.max(1).tolist() == [1, 1, 1, 0]


def test_packed_evaluation_sees_the_same_pairs_in_fewer_batches():
    pairs = make_pairs({EN_DE: 50, DE_EN: 50})
    plain = list(eval_batches(pairs, small_tokenizer(), **EVAL))
    packed = list(eval_batches(pairs, small_tokenizer(), **EVAL, pack=True))
    assert len(packed) < len(plain) / 2
    for direction in pairs:
        assert Counter(t for d, batch in packed if d == direction for t in texts(batch)) == Counter(
            t for d, batch in plain if d == direction for t in texts(batch)
        )


def test_evaluation_leaves_out_what_is_too_long_and_says_so(caplog):
    pairs = {EN_DE: [*make_pairs({EN_DE: 5})[EN_DE], SentencePair("one " * 30, "eins", *EN_DE)]}
    ((_, first), (_, second)) = eval_batches(pairs, small_tokenizer(), **EVAL)
    assert len(texts(first)) + len(texts(second)) == 5
    assert "1 of 6 sentence pairs are left out" in caplog.text


def test_evaluation_without_data_is_an_error_at_the_call():
    with pytest.raises(UserError, match="got none for en-fr"):
        eval_batches({EN_FR: []}, small_tokenizer(), **EVAL)
    with pytest.raises(UserError, match=r"got \(2, 20\), too short for all of 3 pairs of en-de"):
        eval_batches(make_pairs({EN_DE: 3}), small_tokenizer(), **{**EVAL, "source_length": 2})
