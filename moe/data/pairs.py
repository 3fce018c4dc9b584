"""What every data source yields: sentence pairs with language tags."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, overload

Split: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Direction(NamedTuple):
    """Which language is translated into which; `str(direction)` reads "en-de"."""

    source_lang: str
    target_lang: str

    def __str__(self) -> str:
        return f"{self.source_lang}-{self.target_lang}"

    @property
    def reverse(self) -> Direction:
        """The same two languages the other way round."""
        return Direction(self.target_lang, self.source_lang)


@dataclass(frozen=True, slots=True)
class SentencePair:
    """A sentence, its translation, and the BCP-47 tags of the two languages."""

    source: str
    target: str
    source_lang: str
    target_lang: str

    @property
    def direction(self) -> Direction:
        """The direction this pair belongs to."""
        return Direction(self.source_lang, self.target_lang)

    @property
    def reverse(self) -> SentencePair:
        """The same pair read the other way round."""
        return SentencePair(self.target, self.source, self.target_lang, self.source_lang)

    @property
    def key(self) -> str:
        """The side whose hash decides the split: the English one, or else the source."""
        return self.target if self.target_lang == "en" else self.source


Pairs: TypeAlias = Mapping[Direction, Sequence[SentencePair]]


@dataclass(frozen=True, slots=True)
class AlignedTexts(Sequence[SentencePair]):
    """The pairs of one direction kept as two columns of text.

    Both directions of a language share their columns, and no object per pair is kept: the default
    data set has half a million pairs.
    """

    direction: Direction
    sources: Sequence[str]
    targets: Sequence[str]

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, index: int) -> SentencePair: ...
    @overload
    def __getitem__(self, index: slice) -> AlignedTexts: ...
    def __getitem__(self, index: int | slice) -> SentencePair | AlignedTexts:
        if isinstance(index, slice):
            return AlignedTexts(self.direction, self.sources[index], self.targets[index])
        return SentencePair(self.sources[index], self.targets[index], *self.direction)


_NOT_WORD = re.compile(r"[\W_]+")


def normalise(text: str) -> str:
    """The form in which two sentences count as the same one, for hashing and comparing.

    Compatibility characters unified (NFKC), case folded, every run of white space and punctuation
    one space: `"Hello,  World!"` and `"hello world"` are the same sentence. Text of punctuation
    alone keeps it, so that two different such texts stay different.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _NOT_WORD.sub(" ", folded).strip() or folded.strip()


# Tags under which some catalogues file a language that others file under the plain name: the
# region says nothing (it is where the language is at home), or the tag is an old one.
_ALIASES = {
    "az-AZ": "az",
    "he-IL": "he",
    "hr-HR": "hr",
    "id-ID": "id",
    "in": "id",
    "is-IS": "is",
    "iw": "he",
    "nb-NO": "nb",
    "no": "nb",
    "pt-PT": "pt",
    "sk-SK": "sk",
    "tr-TR": "tr",
    "zh-CN": "zh-Hans",
    "zh-SG": "zh-Hans",
    "zh-HK": "zh-Hant",
    "zh-TW": "zh-Hant",
}
_SCRIPTS = {"latin": "Latn", "cyrillic": "Cyrl", "arabic": "Arab", "devanagari": "Deva"}


def language_tag(name: str) -> str:
    """The one BCP-47 form of a language's name in a file: `zh_Hans`, `zh_CN` -> `zh-Hans`.

    Subtags are joined by "-" and cased as the standard recommends (`pt_br` -> `pt-BR`), gettext's
    script modifiers become subtags (`sr@latin` -> `sr-Latn`), and a region that only repeats where
    the language is at home goes (`is_IS` -> `is`). A tag of any other form is returned as it is.
    """
    base, _, modifier = name.strip().partition("@")
    language, *subtags = re.split("[-_]", base)
    cased = [sub.title() if len(sub) == 4 else sub.upper() for sub in subtags]
    if modifier:
        cased.insert(0, _SCRIPTS.get(modifier.lower(), modifier.lower()))
    tag = "-".join([language.lower(), *cased])
    return _ALIASES.get(tag, tag)
