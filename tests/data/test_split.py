"""Which sentence belongs to which split."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.pairs import Direction, SentencePair, language_tag, normalise
from moe.data.split import near_duplicates, split_of, split_texts

FRACTIONS = {"validation_fraction": 0.2, "test_fraction": 0.3}
WORDS = [
    "turn",
    "lamp",
    "garden",
    "window",
    "open",
    "close",
    "water",
    "slow",
    "price",
    "number",
    "yellow",
    "morning",
]
SENTENCES = [f"the {a} {b} {c}" for a in "pqrst" for b in "uvwxy" for c in ("sun", "moon", "star")]


def test_split_shares_follow_the_fractions():
    texts = [f"sentence number {i} of many" for i in range(4000)]
    counts = Counter(split_of(text, **FRACTIONS) for text in texts)
    # Three standard deviations of a binomial count: 3 * sqrt(4000 * 0.3 * 0.7) = 87.
    assert abs(counts["test"] - 1200) < 87
    assert abs(counts["validation"] - 800) < 87


def test_split_is_the_same_on_every_machine():
    # sha256("close the door please") begins with 0x65ba, and 0x65ba / 0x10000 = 0.397.
    text = "Close the door, please!"
    assert split_of(text, test_fraction=0.40, validation_fraction=0.0) == "test"
    assert split_of(text, test_fraction=0.39, validation_fraction=0.1) == "validation"
    assert split_of(text, test_fraction=0.30, validation_fraction=0.09) == "train"


@given(st.sampled_from(SENTENCES), st.sampled_from(["{}!", "«{}»", "  {}  ", "{}…"]))
def test_case_space_and_punctuation_do_not_change_the_split(sentence, form):
    changed = form.format(sentence.upper().replace(" ", "   "))
    assert normalise(changed) == normalise(sentence)
    assert split_of(changed, **FRACTIONS) == split_of(sentence, **FRACTIONS)


@pytest.mark.parametrize("text", ["Off", "Turn on", "今日は", "...", ""])
def test_short_text_is_always_trained_on(text):
    assert split_of(text, validation_fraction=0.5, test_fraction=0.5) == "train"


def test_long_text_without_spaces_can_be_held_out():
    assert split_of("このデバイスは設定済みです", validation_fraction=0, test_fraction=1) == "test"


def test_text_of_punctuation_alone_keeps_apart():
    assert normalise("...") != normalise("!?")


@pytest.mark.parametrize(
    "text",
    [
        "connect the device to your network!",  # case and punctuation only
        "Connect the device to your 2 network.",  # and digits
        "Please connect the device to your network before you go on with the set-up",  # contains it
        "Connect the device to our network",  # most of the character 4-grams
    ],
)
def test_near_duplicate_of_a_held_out_sentence_is_found(text):
    assert near_duplicates([text], ["Connect the device to your network"]) == {text}


@pytest.mark.parametrize(
    "text",
    [
        "Connect",
        "The device has lost its network",
        "Your password is too short",
        "Set a name for the device; it will be shown in the list of all that is in your network",
    ],
)
def test_sentence_with_a_few_words_in_common_is_no_near_duplicate(text):
    assert near_duplicates([text], ["Connect the device to your network"]) == set()


def test_short_strings_differing_in_a_number_are_near_duplicates():
    assert near_duplicates(["Zone 7"], ["Zone 12"]) == {"Zone 7"}


def test_half_of_the_character_grams_is_enough_and_less_is_not():
    # "abcdefg" has the 4-grams abcd bcde cdef defg. "abcdeXX" shares 2 of 4, "abcdXXX" 1 of 4.
    assert near_duplicates(["abcdexx", "abcdxxx"], ["abcdefg"]) == {"abcdexx"}


@given(st.lists(st.sampled_from(SENTENCES), max_size=40), st.lists(st.sampled_from(SENTENCES)))
def test_near_duplicates_match_the_definition_computed_pair_by_pair(texts, held_out):
    def grams(units):
        return {tuple(units[i : i + 4]) for i in range(len(units) - 3)}

    def alike(text, held):
        words, held_words = grams(text.split()), grams(held.split())
        letters, held_letters = grams(text), grams(held)
        shared = len(letters & held_letters)
        return (
            text == held
            or (bool(held_words) and len(words & held_words) >= len(held_words) / 2)
            or shared >= max(len(letters), len(held_letters)) / 2
        )

    expected = {text for text in texts if any(alike(text, held) for held in held_out)}
    assert near_duplicates(texts, held_out) == expected


def test_no_held_out_sentence_is_given_away_by_an_earlier_split():
    rng = random.Random(0)
    texts = [" ".join(rng.choices(SENTENCES[0].split() + WORDS, k=5)) for _ in range(2000)]
    splits = split_texts(texts, validation_fraction=0.02, test_fraction=0.02)
    by_split = {name: [t for t, s in splits.items() if s == name] for name in set(splits.values())}
    assert set(by_split) == {"train", "validation", "test"}
    assert not near_duplicates(by_split["train"], by_split["test"] + by_split["validation"])
    assert not near_duplicates(by_split["validation"], by_split["test"])
    assert len(splits) < len(set(texts))


def test_fractions_of_zero_keep_everything_for_training():
    splits = split_texts(SENTENCES, validation_fraction=0, test_fraction=0)
    assert splits == dict.fromkeys(SENTENCES, "train")


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("de", "de"),
        ("pt_BR", "pt-BR"),
        ("pt-br", "pt-BR"),
        ("zh_Hans", "zh-Hans"),
        ("zh_CN", "zh-Hans"),
        ("zh-tw", "zh-Hant"),
        ("es-419", "es-419"),
        ("sr@latin", "sr-Latn"),
        ("sr_Latn", "sr-Latn"),
        ("is_IS", "is"),
        ("iw", "he"),
    ],
)
def test_language_names_of_all_sources_have_one_form(name, tag):
    assert language_tag(name) == tag
    assert language_tag(tag) == tag


def test_direction_reads_as_its_two_languages():
    pair = SentencePair("Hello", "Hallo", "en", "de")
    assert str(pair.direction) == "en-de"
    assert pair.reverse == SentencePair("Hallo", "Hello", "de", "en")
    assert pair.reverse.direction == pair.direction.reverse == Direction("de", "en")
    assert pair.key == pair.reverse.key == "Hello"
