"""Scores against numbers worked out by hand, and the choice of tokenizer."""

from __future__ import annotations

import math

import pytest

from moe.evaluation.metrics import Scores, score, signatures


def test_bleu_of_a_sentence_one_word_short_is_worked_out_by_hand():
    # 4 of 4 words, 3 of 3 pairs, 2 of 2 triples and 1 of 1 quadruple match: precision 1. The
    # brevity penalty of 4 words for 5 is exp(1 - 5/4).
    found = score(["a b c d"], ["a b c d e"], target_lang="de")
    assert found.bleu == pytest.approx(100 * math.exp(1 - 5 / 4))


def test_chrf_of_one_character_is_worked_out_by_hand():
    # Orders with n-grams on both sides: characters 1 (1 of 2 match) and 2 (0 of 1), words 1 (0 of
    # 1); precision = recall = (1/2 + 0 + 0) / 3, and so is F.
    found = score(["ab"], ["ac"], target_lang="de")
    assert found.chrf == pytest.approx(100 / 6)


def test_equal_texts_score_100_in_languages_without_spaces():
    for language in ("ja", "zh-Hans", "ko", "th", "de"):
        text = "これは短い文です" if language != "de" else "dies ist ein kurzer Satz"
        found = score([text], [text], target_lang=language)
        assert (found.bleu, found.chrf) == pytest.approx((100, 100))


@pytest.mark.parametrize(
    "language, tokenizer",
    [
        ("de", "13a"),
        ("zh-Hans", "zh"),
        ("zh-Hant", "zh"),
        ("ja", "char"),
        ("ko", "char"),
        ("th", "char"),
    ],
)
def test_signature_names_the_tokenizer_of_the_language(language, tokenizer):
    found = signatures(language)
    assert f"|tok:{tokenizer}|" in found["bleu"]
    assert "|nc:6|nw:2|" in found["chrf"] and "nrefs:1" in found["chrf"]


def test_mean_counts_each_direction_once():
    assert Scores.mean([Scores(10, 30), Scores(20, 50)]) == Scores(15, 40)
