"""The nearest training sentence against a loop over all of them."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from moe.data.pairs import normalise
from moe.evaluation import NearestSentence, baselines

WORDS = [
    "turn",
    "on",
    "the",
    "light",
    "living",
    "room",
    "delete",
    "page",
    "Benutzer",
    "passwort",
    "ungültig",
    "温度",
    "センサー",
]


def some_sentences(num: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(num)]


def trigrams(text: str) -> Counter[str]:
    padded = f" {normalise(text)} "
    return Counter(padded[i : i + 3] for i in range(len(padded) - 2))


def test_nearest_is_that_of_a_loop_over_all_training_sentences():
    sources, queries = some_sentences(60, seed=0), some_sentences(25, seed=1)
    frequency = Counter(gram for source in sources for gram in trigrams(source))

    def vector(text):
        return {
            gram: count * (1 + math.log(len(sources) / frequency[gram]))
            for gram, count in trigrams(text).items()
            if gram in frequency
        }

    def cosine(a, b):
        dot = sum(weight * b.get(gram, 0.0) for gram, weight in a.items())
        norms = [math.sqrt(sum(weight**2 for weight in v.values())) for v in (a, b)]
        return dot / (norms[0] * norms[1])

    nearest = NearestSentence(sources, sources)
    for query, answer in zip(queries, nearest(queries), strict=True):
        best = max(cosine(vector(query), vector(source)) for source in sources)
        assert cosine(vector(query), vector(answer)) == pytest.approx(best, rel=1e-5)


def test_identical_source_goes_before_one_that_only_looks_the_same():
    nearest = NearestSentence(["delete page", "Delete page!", "Delete page!"], ["a", "b", "c"])
    assert nearest(["Delete page!", "DELETE page"]) == ["b", "a"]


def test_sentences_are_answered_alike_in_parts(monkeypatch):
    sources, queries = some_sentences(40, seed=2), some_sentences(9, seed=3)
    at_once = NearestSentence(sources, sources)(queries)
    monkeypatch.setattr(baselines, "_CELLS", 80)  # two at a time
    assert NearestSentence(sources, sources)(queries) == at_once


def test_nothing_to_learn_from_or_nothing_in_common_is_no_error():
    assert NearestSentence([], [])(["a"]) == [""]
    assert NearestSentence(["abc"], ["x"])(["qqq", ""]) == ["x", "x"]
    assert NearestSentence(["abc"], ["x"])([]) == []
