"""A small corpus made on the spot: a little English and languages invented from it.

Tests train on it without a download, and because every sentence has exactly one translation they
can assert that something was learned.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moe.data.pairs import SentencePair, Split
from moe.data.pool import PooledSource
from moe.data.split import split_of
from moe.errors import UserError

NOUNS = (
    "cat dog bird king doctor river garden lamp boat farmer tree stone window teacher girl horse"
)
ADJECTIVES = "big red small quiet happy green tall young"
VERBS = "follow paint help call want clean pull visit need open"
ADVERBS = "slowly often today again"
PREPOSITIONS = "near behind under with"


class NounPhrase(NamedTuple):
    """`the big cats`: definite, plural, with an adjective or without."""

    noun: str
    plural: bool
    definite: bool
    adjective: str | None


class Sentence(NamedTuple):
    """`the king often helped a cat near the river`, before it is put in the words of a language."""

    subject: NounPhrase
    verb: str
    past: bool
    adverb: str | None
    object: NounPhrase
    place: tuple[str, NounPhrase] | None


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """How an invented language differs from English.

    Attributes:
      order: of subject, verb and object, for example "SOV".
      adjective_after: the adjective follows its noun.
      adposition_after: the preposition becomes a postposition.
      suffixes: what the grammar appends: plural, definite, object and past, in this order.
      consonants: what the letters bcdfghjklmnpqrstvwxz become in the stems.
      vowels: what the letters aeiouy become in the stems.
    """

    order: str
    adjective_after: bool
    adposition_after: bool
    suffixes: tuple[str, str, str, str]
    consonants: str
    vowels: str


# Tags from the range of ISO 639 that is free for private use.
GRAMMARS = {
    "qaa": Grammar(
        order="SOV",
        adjective_after=False,
        adposition_after=True,
        suffixes=("ler", "na", "mu", "di"),
        consonants="dfghjklmnpqrstvwxzbc",
        vowels="eiouya",
    ),
    "qab": Grammar(
        order="VSO",
        adjective_after=True,
        adposition_after=False,
        suffixes=("im", "ha", "et", "ak"),
        consonants="mnpqrstvwxzbcdfghjkl",
        vowels="oiuaye",
    ),
    "qac": Grammar(
        order="SVO",
        adjective_after=True,
        adposition_after=False,
        suffixes=("os", "el", "an", "ib"),
        consonants="tvwxzbcdfghjklmnpqrs",
        vowels="iaeyou",
    ),
    "qad": Grammar(
        order="OVS",
        adjective_after=False,
        adposition_after=True,
        suffixes=("kun", "ta", "sel", "rem"),
        consonants="ghjklmnpqrstvwxzbcdf",
        vowels="uoyeia",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Generated(PooledSource):
    """Sentences of a small English grammar with their translations into invented languages.

    qaa puts the verb last, qab first, qac keeps the English order but for adjectives, qad begins
    with the object. Each replaces the letters of every stem by its own and marks plural,
    definiteness, object and tense by its own suffixes.

    Attributes:
      sentences: how many different English sentences, at least 1.
      seed: which ones.
    """

    validation_fraction: float = 0.05
    test_fraction: float = 0.05
    sentences: int = 2000
    seed: int = 0
    kind: Literal["generated"] = "generated"

    def __post_init__(self):
        super().__post_init__()
        if self.sentences < 1:
            raise UserError(f"sentences must be at least 1: got {self.sentences}. Ask for more.")

    def _place(self) -> str:
        return "the generated corpus"

    def _rows(self) -> Iterator[SentencePair]:
        for sentence in sample_sentences(self.sentences, self.seed):
            english = in_english(sentence)
            for lang, grammar in GRAMMARS.items():
                yield SentencePair(english, in_language(sentence, grammar), "en", lang)

    def _split_keys(self, keys: Iterable[str]) -> Mapping[str, Split]:
        # Sentences of one small grammar are all alike: without near-duplicates none would be left.
        return {
            key: split_of(
                key,
                validation_fraction=self.validation_fraction,
                test_fraction=self.test_fraction,
            )
            for key in keys
        }


def sample_sentences(count: int, seed: int) -> list[Sentence]:
    """Different sentences of the grammar, drawn at random; it has more than 10**10."""
    rng = random.Random(seed)
    sentences: dict[Sentence, None] = {}
    while len(sentences) < count:
        sentences[_sample_sentence(rng)] = None
    return list(sentences)


def _sample_sentence(rng: random.Random) -> Sentence:
    def maybe(words: str, probability: float) -> str | None:
        return rng.choice(words.split()) if rng.random() < probability else None

    def noun_phrase() -> NounPhrase:
        noun, plural, definite = rng.choice(NOUNS.split()), rng.random() < 0.4, rng.random() < 0.6
        return NounPhrase(noun, plural, definite, maybe(ADJECTIVES, 0.4))

    preposition = maybe(PREPOSITIONS, 0.3)
    return Sentence(
        subject=noun_phrase(),
        verb=rng.choice(VERBS.split()),
        past=rng.random() < 0.5,
        adverb=maybe(ADVERBS, 0.3),
        object=noun_phrase(),
        place=(preposition, noun_phrase()) if preposition else None,
    )


def in_english(sentence: Sentence) -> str:
    """The sentence in English: `some big cats follow the dog near a tree often`."""

    def noun_phrase(phrase: NounPhrase) -> list[str]:
        article = "the" if phrase.definite else "some" if phrase.plural else "a"
        return [article, phrase.adjective or "", phrase.noun + "s" * phrase.plural]

    ending = "ed" if sentence.past else "" if sentence.subject.plural else "s"
    words = [*noun_phrase(sentence.subject), sentence.verb + ending, *noun_phrase(sentence.object)]
    if sentence.place:
        words += [sentence.place[0], *noun_phrase(sentence.place[1])]
    return " ".join(filter(None, [*words, sentence.adverb]))


def in_language(sentence: Sentence, grammar: Grammar) -> str:
    """The same sentence in an invented language; the place and the adverb come last as well."""
    cipher = str.maketrans("bcdfghjklmnpqrstvwxzaeiouy", grammar.consonants + grammar.vowels)
    plural, definite, accusative, past = grammar.suffixes

    def noun_phrase(phrase: NounPhrase, case: str = "") -> list[str]:
        noun = phrase.noun.translate(cipher) + plural * phrase.plural + definite * phrase.definite
        words = [(phrase.adjective or "").translate(cipher), noun + case]
        return words[::-1] if grammar.adjective_after else words

    parts = {
        "S": noun_phrase(sentence.subject),
        "V": [sentence.verb.translate(cipher) + past * sentence.past],
        "O": noun_phrase(sentence.object, accusative),
    }
    words = [word for role in grammar.order for word in parts[role]]
    if sentence.place:
        adposition = [sentence.place[0].translate(cipher)]
        phrase = noun_phrase(sentence.place[1])
        words += phrase + adposition if grammar.adposition_after else adposition + phrase
    return " ".join(filter(None, [*words, (sentence.adverb or "").translate(cipher)]))
