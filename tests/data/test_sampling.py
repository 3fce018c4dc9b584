"""Temperature sampling and the order of the training stream."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.pairs import Direction, SentencePair
from moe.data.sampling import ExampleOrder, require_pairs, sample_texts, temperature_weights
from moe.errors import UserError


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, (1 / 17, 16 / 17)),
        (2.0, (1 / 5, 4 / 5)),
        (4.0, (1 / 3, 2 / 3)),
        (np.inf, (0.5, 0.5)),
        (1e-4, (0.0, 1.0)),
    ],
)
def test_temperature_lifts_the_rare_language(temperature, expected):
    # 16^(1/1) = 16, 16^(1/2) = 4, 16^(1/4) = 2, 16^0 = 1, each beside 1
    np.testing.assert_allclose(temperature_weights([1, 16], temperature), expected, rtol=1e-12)


def test_a_direction_comes_as_often_as_its_weight():
    order = ExampleOrder([300, 100], temperature=1.0, seed=0)
    drawn = Counter(order[i][0] for i in range(8192))
    assert drawn == {0: 6144, 1: 2048}  # 8192 positions in the proportion 3 : 1


def test_even_a_tiny_share_gets_a_position():
    order = ExampleOrder([1, 10**6], temperature=1.0, seed=0)
    assert Counter(order[i][0] for i in range(8193)) == {0: 1, 1: 8192}


@pytest.mark.parametrize("num_processes", [2, 4, 8])
def test_every_nth_position_is_the_same_mixture(num_processes):
    order = ExampleOrder([50, 50], temperature=1.0, seed=3)
    for process in range(num_processes):
        share = np.mean([order[i][0] for i in range(process, 8192, num_processes)])
        # 1024 or more coin throws: the standard deviation of the share is below 0.016
        assert abs(share - 0.5) < 0.06


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    temperature=st.floats(1, 10),
    seed=st.integers(0, 2**32),
)
def test_every_example_comes_once_an_epoch(counts, temperature, seed):
    order = ExampleOrder(counts, temperature=temperature, seed=seed)
    seen: dict[int, list[int]] = {direction: [] for direction in range(len(counts))}
    for position in range(2000):
        direction, example = order[position]
        seen[direction].append(example)
    for direction, count in enumerate(counts):
        for start in range(0, len(seen[direction]) - count + 1, count):
            assert sorted(seen[direction][start : start + count]) == list(range(count))


def test_epochs_directions_and_seeds_are_shuffled_differently():
    def epochs(seed):
        order = ExampleOrder([97, 97], temperature=1.0, seed=seed)
        drawn = [order[i] for i in range(8192)]
        of = [[example for d, example in drawn if d == direction] for direction in (0, 1)]
        return [tuple(examples[e * 97 : (e + 1) * 97]) for examples in of for e in (0, 1)]

    assert len({*epochs(0), *epochs(1)}) == 8
    assert epochs(0) == epochs(0)


def test_any_position_is_found_alone():
    order = ExampleOrder([7, 11, 30], temperature=2.0, seed=5)
    in_turn = [order[i] for i in range(300)]
    fresh = ExampleOrder([7, 11, 30], temperature=2.0, seed=5)
    assert [fresh[i] for i in reversed(range(300))] == in_turn[::-1]


def _pairs(counts):
    return {
        direction: [SentencePair(f"{s}{i}", f"{t}{i}", s, t) for i in range(count)]
        for direction, count in counts.items()
        for s, t in [direction]
    }


def test_sampled_texts_have_the_temperature_proportions():
    # German has 1600 texts, French 100, English the other sides of both: 1700.
    pairs = _pairs({Direction("en", "de"): 1600, Direction("fr", "en"): 100})
    drawn = list(sample_texts(pairs, num_texts=1000, temperature=2.0, seed=0))
    # 1600^.5 : 1700^.5 : 100^.5 = 40 : 41.23 : 10 of 91.23
    assert Counter(text[:2] for text in drawn) == {"de": 438, "en": 452, "fr": 110}
    # French gives all of its 100, and 10 of them twice
    assert Counter(Counter(t for t in drawn if t[:2] == "fr").values()) == {1: 90, 2: 10}
    assert {text for text in drawn if text[:2] == "de"} <= {f"de{i}" for i in range(1600)}


def test_sampled_texts_are_all_the_texts_where_few():
    pairs = _pairs({Direction("en", "de"): 3, Direction("de", "en"): 2})
    drawn = sample_texts(pairs, num_texts=1000, temperature=1.0, seed=0)
    assert sorted(drawn) == sorted(f"{lang}{i}" for lang in ("de", "en") for i in (0, 0, 1, 1, 2))


def test_sampled_texts_may_be_of_one_side():
    pairs = _pairs({Direction("en", "de"): 3, Direction("fr", "en"): 2})
    options = {"num_texts": 1000, "temperature": 1.0, "seed": 0}
    assert sorted(sample_texts(pairs, sides=["source"], **options)) == [
        *("en0", "en1", "en2"),
        *("fr0", "fr1"),
    ]


def test_sampled_texts_depend_on_the_seed_alone():
    pairs = _pairs({Direction("en", "de"): 100})
    first, again, other = (
        list(sample_texts(pairs, num_texts=20, temperature=1.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_no_pairs_is_an_error():
    with pytest.raises(UserError, match="at least one direction: got none"):
        require_pairs({})


def test_a_direction_without_pairs_is_named():
    pairs = _pairs({Direction("en", "de"): 1, Direction("en", "fr"): 0})
    with pytest.raises(UserError, match="every direction: got none for en-fr"):
        require_pairs(pairs)
