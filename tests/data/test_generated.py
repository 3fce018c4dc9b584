"""The invented languages."""

from __future__ import annotations

import pytest

from moe.data.generated import (
    ADJECTIVES,
    ADVERBS,
    GRAMMARS,
    NOUNS,
    PREPOSITIONS,
    VERBS,
    Generated,
    NounPhrase,
    Sentence,
    in_english,
    in_language,
    sample_sentences,
)
from moe.data.pairs import Direction
from moe.errors import UserError

SENTENCE = Sentence(
    subject=NounPhrase("cat", plural=True, definite=True, adjective="big"),
    verb="follow",
    past=True,
    adverb="often",
    object=NounPhrase("dog", plural=False, definite=False, adjective=None),
    place=("near", NounPhrase("lamp", plural=False, definite=True, adjective="red")),
)


def test_a_sentence_is_said_in_english():
    assert in_english(SENTENCE) == "the big cats followed a dog near the red lamp often"


def test_verb_agrees_with_its_subject_in_the_present():
    present = SENTENCE._replace(past=False, place=None, adverb=None)
    one = present._replace(subject=NounPhrase("king", False, True, None))
    assert in_english(present) == "the big cats follow a dog"
    assert in_english(one) == "the king follows a dog"


@pytest.mark.parametrize(
    ("lang", "expected"),
    [
        # In qaa b becomes d, c f, d g ... and a e, e i, i o, o u: big doj, cat few, dog guj.
        # The verb is last, the place before its postposition.
        ("qaa", "doj fewlerna gujmu hunnuzdi tig neprna qiet uhwiq"),
        # follow-ed, cat-s-the big, dog-object, near lamp-the red, often
        ("qab", "qawwajak nogimha mur paret ziod woxbha dip aqgiz"),
        # cat-s-the big, follow-ed, dog-object, near lamp-the red, often
        ("qac", "vinosel tez xyffyqib wyzan hail figjel law yxnah"),
        # dog-object, follow-ed, big cat-s-the, red lamp-the near, often
        ("qad", "jelsel keqqecrem gyl huzkunta woj qurtta souw ekzos"),
    ],
)
def test_a_sentence_is_said_in_each_invented_language(lang, expected):
    assert in_language(SENTENCE, GRAMMARS[lang]) == expected


@pytest.mark.parametrize("lang", GRAMMARS)
def test_letters_are_exchanged_one_for_one(lang):
    grammar = GRAMMARS[lang]
    assert sorted(grammar.consonants) == sorted("bcdfghjklmnpqrstvwxz")
    assert sorted(grammar.vowels) == sorted("aeiouy")


@pytest.mark.parametrize("lang", GRAMMARS)
def test_no_two_words_of_a_language_coincide(lang):
    grammar = GRAMMARS[lang]
    plural, definite, accusative, past = grammar.suffixes
    letters = str.maketrans("bcdfghjklmnpqrstvwxzaeiouy", grammar.consonants + grammar.vowels)
    words = [
        noun.translate(letters) + plural * p + definite * d + accusative * a
        for noun in NOUNS.split()
        for p in (0, 1)
        for d in (0, 1)
        for a in (0, 1)
    ]
    words += [verb.translate(letters) + past * p for verb in VERBS.split() for p in (0, 1)]
    words += [w.translate(letters) for w in f"{ADJECTIVES} {ADVERBS} {PREPOSITIONS}".split()]
    assert len(set(words)) == len(words)


def test_every_sentence_has_one_translation_and_back():
    sentences = sample_sentences(3000, seed=1)
    assert len({in_english(sentence) for sentence in sentences}) == 3000
    for grammar in GRAMMARS.values():
        assert len({in_language(sentence, grammar) for sentence in sentences}) == 3000


def test_same_seed_same_corpus_other_seed_another():
    first, again, other = (Generated(sentences=50, seed=seed) for seed in (3, 3, 4))
    direction = Direction("en", "qab")
    assert list(first.pairs("train")[direction]) == list(again.pairs("train")[direction])
    assert list(first.pairs("train")[direction]) != list(other.pairs("train")[direction])


def test_each_english_sentence_is_in_one_split_in_all_languages():
    source = Generated(sentences=400)
    held = {}
    for split in ("train", "validation", "test"):
        pairs = source.pairs(split)
        assert {str(d) for d in pairs} == {f"en-{x}" for x in GRAMMARS} | {
            f"{x}-en" for x in GRAMMARS
        }
        english = {pair.source for pair in pairs[Direction("en", "qaa")]}
        for lang in GRAMMARS:
            assert {pair.source for pair in pairs[Direction("en", lang)]} == english
            assert {pair.target for pair in pairs[Direction(lang, "en")]} == english
        held[split] = english
    assert sum(map(len, held.values())) == len(set.union(*held.values())) == 400
    assert all(held.values())


def test_languages_choose_among_the_invented_ones():
    pairs = Generated(sentences=50, languages=("qac",)).pairs("train")
    assert {str(direction) for direction in pairs} == {"en-qac", "qac-en"}
    with pytest.raises(UserError, match=r"got de\. There are qaa, qab, qac, qad"):
        Generated(sentences=50, languages=("de", "qac")).pairs("train")


def test_a_corpus_without_sentences_is_refused():
    with pytest.raises(UserError, match="sentences must be at least 1: got 0"):
        Generated(sentences=0)
