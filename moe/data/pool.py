"""One pool of sentence pairs, divided into splits and directions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TypeAlias

from moe.data.pairs import SPLITS, AlignedTexts, Direction, Pairs, SentencePair, Split, language_tag
from moe.data.split import split_texts
from moe.errors import UserError

_Columns: TypeAlias = dict[Direction, tuple[list[str], list[str]]]


@dataclass(frozen=True, kw_only=True)
class PooledSource(ABC):
    """A source whose pairs come without splits: files of one's own, and generated text.

    The split of a pair follows from a hash of its English side (of its source side, where neither
    is English), and training pairs too like a held-out sentence are left out: see `split_texts`.
    Text and splits are made at the first call of `pairs` and kept.

    Attributes:
      languages: the languages wanted beside English; empty for all there are.
      both_directions: also read every pair the other way round.
      validation_fraction: share of the sentences for validation, in [0, 1). Of millions of pairs a
        thousandth is enough, and the search for near-duplicates is then fast.
      test_fraction: share of the sentences for the test, in [0, 1).
    """

    languages: tuple[str, ...] = ()
    both_directions: bool = True
    validation_fraction: float = 0.02
    test_fraction: float = 0.02

    def __post_init__(self):
        held_out = (self.validation_fraction, self.test_fraction)
        if min(held_out) < 0 or sum(held_out) >= 1:
            raise UserError(
                "validation_fraction and test_fraction must be at least 0 and leave some training "
                f"data: got {held_out[0]} and {held_out[1]}. Lower them to, say, 0.02 each."
            )

    def pairs(self, split: Split) -> Pairs:
        """The pairs of one split by direction; a direction without any is not in the mapping."""
        return self._divided[split]

    @abstractmethod
    def _rows(self) -> Iterator[SentencePair]:
        """Every pair there is, in the order of the source."""

    @abstractmethod
    def _place(self) -> str:
        """Where the pairs come from, for messages."""

    def _split_keys(self, keys: Iterable[str]) -> Mapping[str, Split]:
        return split_texts(
            keys, validation_fraction=self.validation_fraction, test_fraction=self.test_fraction
        )

    @cached_property
    def _divided(self) -> Mapping[Split, Pairs]:
        columns: _Columns = {}
        for row in self._rows():
            if self.both_directions and row.direction != _forward(row.direction):
                row = row.reverse
            sources, targets = columns.setdefault(row.direction, ([], []))
            sources.append(row.source)
            targets.append(row.target)
        if not columns:
            raise UserError(
                f"{self._place()} must hold at least one sentence pair: got none. "
                "Check that the path names the right file."
            )
        directions = wanted_directions(columns, self.languages, self._place())
        return self._divide({direction: columns[direction] for direction in directions})

    def _divide(self, columns: _Columns) -> Mapping[Split, Pairs]:
        keys = {
            direction: columns[direction][direction.target_lang == "en"] for direction in columns
        }
        split_of_key = self._split_keys(key for column in keys.values() for key in column)
        divided: dict[Split, dict[Direction, AlignedTexts]] = {split: {} for split in SPLITS}
        for (direction, sides), split in product(columns.items(), SPLITS):
            numbers = [i for i, key in enumerate(keys[direction]) if split_of_key.get(key) == split]
            if numbers:
                texts = [[side[i] for i in numbers] for side in sides]
                divided[split][direction] = AlignedTexts(direction, *texts)
                if self.both_directions:
                    back = direction.reverse
                    divided[split][back] = AlignedTexts(back, *texts[::-1])
        return divided


def _forward(direction: Direction) -> Direction:
    """Of a direction and its reverse, the one out of English or first in the alphabet."""
    return min(direction, direction.reverse, key=lambda d: (d.source_lang != "en", d.source_lang))


def wanted_directions(
    directions: Iterable[Direction], languages: Iterable[str], place: str
) -> list[Direction]:
    """Those of the directions whose languages beside English are all wanted.

    Raises:
      UserError: for a wanted language that no direction has.
    """
    directions = list(directions)
    known = {lang for direction in directions for lang in direction} - {"en"}
    wanted = {language_tag(lang) for lang in languages} or known
    if unknown := sorted(wanted - known):
        raise UserError(
            f"languages must be among those of {place}: got {', '.join(unknown)}. "
            f"There are {', '.join(sorted(known))}."
        )
    return [direction for direction in directions if set(direction) - {"en"} <= wanted]
