"""Evaluation with translators whose quality is known."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from moe.data.pairs import Direction, SentencePair
from moe.errors import UserError
from moe.evaluation import EvaluationConfig, evaluate, table

EN_DE, DE_EN, EN_JA = Direction("en", "de"), Direction("de", "en"), Direction("en", "ja")
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def pairs(direction: Direction, start: int, stop: int) -> list[SentencePair]:
    """Every sentence and its translation are different and five words long."""
    found = []
    for number in range(start, stop):
        words = [NUMBERS[int(digit)] for digit in f"{number:05}"]
        english, other = " ".join(words), " ".join(word[::-1] + "o" for word in words)
        texts = (english, other) if direction.source_lang == "en" else (other, english)
        found.append(SentencePair(*texts, *direction))
    return found


TRAIN = {EN_DE: pairs(EN_DE, 0, 50), DE_EN: pairs(DE_EN, 0, 50), EN_JA: pairs(EN_JA, 0, 20)}
TEST = {
    EN_DE: pairs(EN_DE, 90, 120),
    DE_EN: pairs(DE_EN, 90, 120),
    EN_JA: pairs(EN_JA, 100, 110),
    Direction("ja", "en"): [],
}
REFERENCES = {(p.source, p.target_lang): p.target for test in TEST.values() for p in test}
CONFIG = EvaluationConfig(limit=12, high_resource=50, mid_resource=30, num_samples=2)


def perfect(sentences, target_langs):
    return [REFERENCES[key] for key in zip(sentences, target_langs, strict=True)]


def copying(sentences, target_langs):
    return list(sentences)


def test_perfect_translator_scores_100_and_a_copying_one_equals_the_copy_baseline():
    for row in evaluate(perfect, TRAIN, TEST, config=CONFIG).directions:
        assert (row.scores["model"].bleu, row.scores["model"].chrf) == pytest.approx((100, 100))
        assert row.scores["copy"].chrf < row.scores["nearest"].chrf < 99
    for row in evaluate(copying, TRAIN, TEST, config=CONFIG).directions:
        assert row.scores["model"] == row.scores["copy"]


def test_everything_is_decoded_in_one_call_and_only_once():
    calls = []

    def counting(sentences, target_langs):
        calls.append(list(zip(sentences, target_langs, strict=True)))
        return copying(sentences, target_langs)

    evaluate(counting, TRAIN, TEST, config=CONFIG)
    assert len(calls) == 1
    assert len(set(calls[0])) == len(calls[0]) == 12 + 12 + 10  # the last has only 10


def test_sentences_are_chosen_by_their_text_and_not_by_their_place():
    seen = []

    def remembering(sentences, target_langs):
        seen.append(list(sentences))
        return copying(sentences, target_langs)

    config = EvaluationConfig(limit=5, directions=("en-de",))
    evaluate(remembering, TRAIN, TEST, config=config)
    evaluate(remembering, TRAIN, TEST | {EN_DE: TEST[EN_DE][::-1]}, config=config)
    assert seen[0] == seen[1]
    assert seen[0] != [pair.source for pair in TEST[EN_DE][:5]]
    # The other direction is measured on the same English sentences.
    backwards = EvaluationConfig(limit=5, directions=("de-en",), num_samples=5)
    [row] = evaluate(copying, TRAIN, TEST, config=backwards).directions
    assert [sample.reference for sample in row.samples] == seen[0]


def test_averages_are_over_directions_of_a_resource_and_a_side():
    result = evaluate(copying, TRAIN, TEST, config=CONFIG)
    chrf = {row.direction: row.scores["nearest"].chrf for row in result.directions}
    assert {row.direction: row.resource for row in result.directions} == {
        "de-en": "high",
        "en-de": "high",
        "en-ja": "low",
    }
    means = {(a.resource, a.side): a.scores["nearest"].chrf for a in result.averages}
    assert means == {
        ("all", "all"): pytest.approx(sum(chrf.values()) / 3),
        ("all", "into en"): pytest.approx(chrf["de-en"]),
        ("all", "out of en"): pytest.approx((chrf["en-de"] + chrf["en-ja"]) / 2),
        ("high", "all"): pytest.approx((chrf["de-en"] + chrf["en-de"]) / 2),
        ("high", "into en"): pytest.approx(chrf["de-en"]),
        ("high", "out of en"): pytest.approx(chrf["en-de"]),
        ("low", "all"): pytest.approx(chrf["en-ja"]),
        ("low", "out of en"): pytest.approx(chrf["en-ja"]),
    }


def test_result_survives_json_and_is_shown_in_80_columns():
    result = evaluate(perfect, TRAIN, TEST, config=CONFIG)
    read = json.loads(json.dumps(result.as_json(), ensure_ascii=False))
    assert read["config"]["high_resource"] == 50
    row = next(row for row in read["directions"] if row["direction"] == "en-ja")
    assert row["scores"]["model"]["bleu"] == pytest.approx(100)
    assert row["num_training_pairs"] == 20 and row["num_sentences"] == 10
    assert "tok:char" in row["signatures"]["bleu"]
    assert len(row["samples"]) == 2 and row["samples"][0].keys() == {
        "source",
        "reference",
        "output",
    }
    assert read["without_test_sentences"] == ["ja-en"]

    console = Console(width=80, file=io.StringIO())
    console.print(table(result))
    text = console.file.getvalue()
    assert "…" not in text
    for part in (
        "en-ja",
        "100.0",
        "tok:13a",
        "tok:char",
        "nw:2",
        "from 50",
        "no test sentences: ja-en",
    ):
        assert part in text


def test_direction_without_test_sentences_is_named():
    config = EvaluationConfig(directions=("en-de", "ja-en", "en-xx"))
    with pytest.raises(
        UserError, match=r"got none for ja-en, en-xx\. Choose of: de-en, en-de, en-ja"
    ):
        evaluate(copying, TRAIN, TEST, config=config)
    with pytest.raises(UserError, match="got none for any"):
        evaluate(copying, TRAIN, {EN_DE: []}, config=EvaluationConfig())


def test_direction_without_training_pairs_is_low_resource():
    [row] = evaluate(copying, {}, TEST, config=EvaluationConfig(directions=("en-de",))).directions
    assert (row.resource, row.num_training_pairs) == ("low", 0)
    assert row.scores["nearest"].chrf == 0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"limit": 0}, "limit must be at least 1: got 0"),
        ({"mid_resource": 9, "high_resource": 5}, "mid_resource=9, high_resource=5"),
    ],
)
def test_impossible_config_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        EvaluationConfig(**fields)
