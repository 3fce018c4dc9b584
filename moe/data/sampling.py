"""How often each language is drawn: temperature sampling, for the tokenizer and for training."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import grain
import numpy as np

from moe.data.pairs import Pairs, SentencePair
from moe.errors import UserError

_SLOTS = 8192  # positions after which the order of directions repeats


def temperature_weights(counts: Sequence[int], temperature: float) -> np.ndarray:
    """Shares that lift rare languages above their part of the data.

    Args:
      counts: examples of each language or direction, at least 1.
      temperature: T in p_i ~ n_i^(1/T). T=1 is proportional to the data; T -> infinity is uniform.

    Returns:
      float64 probabilities summing to 1: counts (1, 16) give (1/17, 16/17) at T=1, (1/5, 4/5) at
      T=2 and (1/3, 2/3) at T=4.

    Source: Arivazhagan et al. 2019 (arXiv:1907.05019), section 4.1, who train with T=5.
    """
    powers = np.asarray(counts, np.float64) ** (1.0 / temperature)
    return powers / powers.sum()


class DirectionOrder(grain.transforms.DatasetSelectionMap):
    """Says which direction stands at each position of the endless training stream.

    A pattern of about 8192 positions, in which each direction has its share (at least one, exact to
    half a position), is shuffled once and repeated. Any position is found without reading those
    before it, and because the pattern is shuffled, every n-th position of the stream, which is what
    one process or worker reads, is the same mixture; `grain.MapDataset.mix` alternates regularly,
    so that of two equal directions each of two processes would see one.

    Args:
      weights: share of each direction, summing to 1.
      seed: decides the pattern.
    """

    def __init__(self, weights: np.ndarray, *, seed: int):
        slots_of = np.maximum(1, np.rint(weights * _SLOTS)).astype(int)
        pattern = np.random.default_rng(seed).permutation(
            np.repeat(np.arange(len(weights)), slots_of)
        )
        occurrence = np.empty_like(pattern)  # the how-manieth of its direction in the pattern
        for direction, slots in enumerate(slots_of):
            occurrence[pattern == direction] = np.arange(slots)
        # Plain lists: three times as fast as numpy to read one item from.
        self._slots_of = slots_of.tolist()
        self._pattern, self._occurrence = pattern.tolist(), occurrence.tolist()

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        cycle, slot = divmod(index, len(self._pattern))
        direction = self._pattern[slot]
        return direction, cycle * self._slots_of[direction] + self._occurrence[slot]


def require_pairs(pairs: Pairs) -> None:
    """Raises UserError unless there is a direction, and a pair in every direction."""
    if not pairs:
        raise UserError(
            "pairs must hold at least one direction: got none. "
            "Check the data source, its split and its languages."
        )
    if empty := [str(direction) for direction, examples in pairs.items() if not len(examples)]:
        raise UserError(
            f"pairs must hold at least one pair in every direction: got none for "
            f"{', '.join(empty)}. Add data for it or leave the language out."
        )


def sample_texts(pairs: Pairs, *, num_texts: int, temperature: float, seed: int) -> Iterator[str]:
    """Single sentences of all languages in temperature proportion, to train a tokenizer on.

    Each language's texts are the source sides and the target sides written in it. A language with
    fewer texts than its share gives some of them again, which keeps the proportions exact.

    Args:
      num_texts: how many to draw, up to rounding; no more than there are.
      temperature: as in `temperature_weights`, over languages.
      seed: decides which texts are drawn.
    """
    require_pairs(pairs)
    columns: dict[str, list[_Column]] = defaultdict(list)
    for direction, examples in pairs.items():
        columns[direction.source_lang].append((examples, "source"))
        columns[direction.target_lang].append((examples, "target"))
    counts = [sum(len(examples) for examples, _ in columns[lang]) for lang in sorted(columns)]
    shares = temperature_weights(counts, temperature) * min(num_texts, sum(counts))
    rng = np.random.default_rng(seed)
    for lang, count, share in zip(sorted(columns), counts, shares, strict=True):
        wanted = max(1, round(share))
        drawn = rng.choice(count, min(wanted, count), replace=False)
        yield from _texts(columns[lang], np.resize(drawn, wanted))


_Column = tuple[Sequence[SentencePair], Literal["source", "target"]]


def _texts(columns: list[_Column], indices: np.ndarray) -> Iterator[str]:
    """The texts at these indices of the columns laid end to end."""
    ends = np.cumsum([len(examples) for examples, _ in columns])
    for index in indices:
        column = int(np.searchsorted(ends, index, side="right"))
        examples, side = columns[column]
        yield getattr(examples[int(index - ends[column]) + len(examples)], side)
