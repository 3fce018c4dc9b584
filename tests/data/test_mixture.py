"""The training stream: what is in it, and that it can be left and taken up again."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest

from moe.data.mixture import MixtureConfig, train_batches
from moe.data.packing import Batch
from moe.data.pairs import SentencePair
from moe.errors import UserError
from tests.data.small_mixture import (
    DE_EN,
    EN_DE,
    EN_FR,
    make_pairs,
    small_tokenizer,
    texts,
)

PAIRS = make_pairs({EN_DE: 160, DE_EN: 160, EN_FR: 40})
CONFIG = MixtureConfig(batch_size=6, source_length=31, target_length=29)


def batches_of(num_batches, config=CONFIG, pairs=PAIRS, **arguments):
    iterator = train_batches(pairs, small_tokenizer(), config, **{"seed": 0, **arguments})
    batches = list(itertools.islice(iterator, num_batches))
    iterator.close()
    return batches


def assert_equal(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        for array, same in zip(batch, other, strict=True):
            np.testing.assert_array_equal(array, same)


@pytest.mark.parametrize(("num_workers", "starts"), [(0, (0, 1, 4, 9)), (2, (4,))])
def test_a_resumed_run_sees_the_batches_it_would_have_seen(num_workers, starts):
    config = dataclasses.replace(CONFIG, num_workers=num_workers)
    iterator = train_batches(PAIRS, small_tokenizer(), config, seed=7)
    batches, states = [], []
    for _ in range(10):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    iterator.close()
    assert sum(len(texts(batch)) for batch in batches) > 3 * 40  # into another epoch of en-fr
    for start in starts:
        resumed = train_batches(PAIRS, small_tokenizer(), config, seed=7)
        resumed.set_state(json.loads(states[start]))
        assert json.dumps(resumed.get_state()) == states[start]
        assert_equal(list(itertools.islice(resumed, 10 - start)), batches[start:])
        resumed.close()


def test_a_running_iterator_can_be_set_back():
    iterator = train_batches(PAIRS, small_tokenizer(), CONFIG, seed=7)
    next(iterator)
    state = iterator.get_state()
    first = list(itertools.islice(iterator, 5))
    iterator.set_state(state)
    assert_equal(list(itertools.islice(iterator, 5)), first)


def test_one_seed_is_one_stream():
    assert_equal(batches_of(5, seed=1), batches_of(5, seed=1))
    assert not np.array_equal(
        batches_of(1, seed=1)[0].source_BL, batches_of(1, seed=2)[0].source_BL
    )


def test_the_order_of_the_directions_does_not_matter():
    assert_equal(batches_of(3, pairs=dict(reversed(PAIRS.items()))), batches_of(3))


def test_one_worker_makes_the_batches_that_none_makes():
    one = dataclasses.replace(CONFIG, num_workers=1)
    assert_equal(batches_of(4, one), batches_of(4))


def test_encoding_at_every_access_gives_the_same_batches():
    lazy = dataclasses.replace(CONFIG, max_pairs_in_memory=359)
    assert_equal(batches_of(20, lazy), batches_of(20))


def test_what_is_too_long_is_skipped_when_met():
    long = [SentencePair("one " * 30, "eins", *EN_DE)] * 30
    pairs = {EN_DE: [*make_pairs({EN_DE: 30})[EN_DE], *long]}
    lazy = dataclasses.replace(CONFIG, max_pairs_in_memory=0)
    seen = {text for batch in batches_of(8, lazy, pairs) for text in texts(batch)}
    assert seen == {(pair.source, pair.target) for pair in pairs[EN_DE][:30]}


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_shards_share_an_epoch_and_nothing_twice(shards):
    pairs = make_pairs({EN_DE: 72})
    config = dataclasses.replace(CONFIG, batch_size=12, pack=False, shards=shards)
    rows = np.arange(12).reshape(shards, -1)
    shares = [
        [text for batch in batches_of(6, config, pairs, rows=r) for text in texts(batch)]
        for r in rows  # 6 batches an epoch
    ]
    assert [len(share) for share in shares] == [72 // shards] * shards
    together = Counter(itertools.chain.from_iterable(shares))
    assert together == Counter((pair.source, pair.target) for pair in pairs[EN_DE])


@pytest.mark.parametrize("rows", [[0, 1], [2, 3, 4], [0, 5], [1, 2], [5]])
def test_some_rows_are_those_of_the_whole_batches(rows):
    config = dataclasses.replace(CONFIG, shards=3)
    whole = [Batch(*(array[rows] for array in batch)) for batch in batches_of(4, config)]
    assert_equal(batches_of(4, config, rows=rows), whole)


def test_a_resumed_run_may_be_read_by_any_number_of_readers():
    """Four readers go on as one, as two and as three, from the union of what each knows."""
    config = dataclasses.replace(CONFIG, batch_size=12, shards=4)

    def readers(count):
        for rows in np.arange(12).reshape(count, -1):
            yield rows, train_batches(PAIRS, small_tokenizer(), config, seed=0, rows=rows)

    whole = batches_of(5, config)
    state = {}
    for _, iterator in readers(4):
        assert len(list(itertools.islice(iterator, 2))) == 2
        state |= json.loads(json.dumps(iterator.get_state()))
    for count in (1, 2, 3):
        for rows, iterator in readers(count):
            iterator.set_state(state)
            expected = [Batch(*(array[rows] for array in batch)) for batch in whole[2:]]
            assert_equal(list(itertools.islice(iterator, 3)), expected)


@pytest.mark.parametrize(("saved", "shards"), [(1, 2), (3, 2), (2, 1), (2, 3)])
def test_a_state_of_another_number_of_shards_is_refused(saved, shards):
    def iterator_of(shards):
        config = dataclasses.replace(CONFIG, shards=shards)
        return train_batches(PAIRS, small_tokenizer(), config, seed=0)

    state = iterator_of(saved).get_state()
    names = ", ".join(map(str, range(saved)))
    message = (
        f"of as many shards as are read: got the positions of {names} for mixture.shards={shards}"
    )
    with pytest.raises(UserError, match=message):
        iterator_of(shards).set_state(state)


@pytest.mark.parametrize("shards", [0, 4])
def test_shards_that_do_not_divide_the_rows_are_an_error(shards):
    with pytest.raises(UserError, match=f"got shards={shards}, batch_size=6"):
        dataclasses.replace(CONFIG, shards=shards)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 1 / 10), (2.0, 1 / 4), (1e9, 1 / 2)])
def test_directions_are_drawn_by_temperature(temperature, expected):
    pairs = make_pairs({EN_DE: 90, EN_FR: 10})
    config = dataclasses.replace(CONFIG, temperature=temperature)
    tag = small_tokenizer().tag_id("fr")
    drawn = [
        source == tag
        for batch in batches_of(60, config, pairs)
        for source in batch.source_BL[
            (batch.source_positions_BL == 0) & (batch.source_segments_BL > 0)
        ]
    ]
    assert len(drawn) > 1000
    # The order is shuffled: 1000 throws of p = 1/2 have a standard deviation of 0.016.
    assert abs(np.mean(drawn) - expected) < 0.05


def test_without_packing_a_row_is_one_pair():
    (batch,) = batches_of(1, dataclasses.replace(CONFIG, pack=False))
    assert batch.source_segments_BL.max(1).tolist() == [1] * 6
    (packed,) = batches_of(1)
    assert packed.source_segments_BL.max(1).min() > 1


def test_no_data_is_an_error():
    with pytest.raises(UserError, match="at least one direction: got none"):
        batches_of(1, pairs={})
    with pytest.raises(UserError, match="got none for de-en"):
        batches_of(1, pairs={**PAIRS, DE_EN: []})


def test_lengths_that_hold_no_pair_are_an_error():
    pairs = {EN_DE: PAIRS[EN_DE][10:]}  # from "one nought": tag, two pieces, eos
    with pytest.raises(UserError, match=r"got \(3, 29\), too short for all of 150 pairs of en-de"):
        batches_of(1, dataclasses.replace(CONFIG, source_length=3), pairs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("batch_size", 0),
        ("source_length", 2),
        ("target_length", 1),
        ("num_workers", -1),
        ("prefetch_batches", 0),
        ("max_pairs_in_memory", -1),
    ],
)
def test_an_impossible_setting_is_an_error(field, value):
    with pytest.raises(UserError, match=f"{field} must be .*: got {value}"):
        MixtureConfig(**{field: value})
