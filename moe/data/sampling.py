"""How often each language is drawn: temperature sampling, for the tokenizer and for training."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
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
    logits = np.log(counts) / temperature
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


class ExampleOrder(grain.transforms.DatasetSelectionMap):
    """Says which example of which direction stands at each position of the endless stream.

    Each direction's examples are shuffled anew every epoch and come once each in it. Which
    direction is next is a pattern of about 8192 positions, in which each has its share (exact to
    half a position, at least one), shuffled once and repeated. So every n-th position of the
    stream, which is what one process or worker reads, is the same mixture; `grain.MapDataset.mix`
    alternates regularly, and each of two processes would see one of two equal directions.

    Any position is found without those before it, in about a microsecond and 4 bytes an example.
    Grain's own shuffle needs no memory but 10 ms to find one of 10 examples and 0.6 ms of 100.

    Args:
      counts: examples of each direction, at least 1.
      temperature: as in `temperature_weights`.
      seed: decides the pattern and the shuffles; not negative.
    """

    def __init__(self, counts: Sequence[int], *, temperature: float, seed: int):
        slots_of = np.rint(temperature_weights(counts, temperature) * _SLOTS).astype(int).clip(1)
        pattern = np.repeat(np.arange(len(counts)), slots_of)
        np.random.default_rng(seed).shuffle(pattern)
        nth = np.empty_like(pattern)  # how many of the same direction stand before, in the pattern
        nth[np.argsort(pattern, kind="stable")] = np.concatenate([*map(np.arange, slots_of)])
        # Lists, because reading one item takes a third of the time that numpy takes.
        self._pattern, self._nth = pattern.tolist(), nth.tolist()
        self._slots_of, self._counts = slots_of.tolist(), list(counts)
        self._seed = seed
        self._epochs: list[tuple[int, np.ndarray]] = [(-1, np.empty(0))] * len(counts)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        cycle, slot = divmod(index, len(self._pattern))
        direction = self._pattern[slot]
        drawn = cycle * self._slots_of[direction] + self._nth[slot]
        epoch, place = divmod(drawn, self._counts[direction])
        return direction, int(self._shuffled(direction, epoch)[place])

    def _shuffled(self, direction: int, epoch: int) -> np.ndarray:
        """The order of one direction in one epoch; the last one asked for is kept."""
        kept_epoch, order = self._epochs[direction]
        if epoch != kept_epoch:
            rng = np.random.default_rng([self._seed, direction, epoch])
            order = rng.permutation(np.arange(self._counts[direction], dtype=np.uint32))
            self._epochs[direction] = (epoch, order)
        return order


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


Side = Literal["source", "target"]


def sample_texts(
    pairs: Pairs,
    *,
    num_texts: int,
    temperature: float,
    seed: int,
    sides: Collection[Side] = ("source", "target"),
) -> Iterator[str]:
    """Single sentences of all languages in temperature proportion, to train a tokenizer on.

    Each language's texts are the source sides and the target sides written in it. A language with
    fewer texts than its share gives some of them again, which keeps the proportions exact.

    Args:
      num_texts: how many to draw, up to rounding; no more than there are.
      temperature: as in `temperature_weights`, over languages.
      seed: decides which texts are drawn.
      sides: of the pairs that are drawn from.
    """
    require_pairs(pairs)
    columns: dict[str, list[_Column]] = defaultdict(list)
    for direction in sorted(pairs):
        for side in sides:
            columns[getattr(direction, f"{side}_lang")].append((pairs[direction], side))
    counts = [sum(len(examples) for examples, _ in columns[lang]) for lang in sorted(columns)]
    shares = temperature_weights(counts, temperature) * min(num_texts, sum(counts))
    rng = np.random.default_rng(seed)
    for lang, count, share in zip(sorted(columns), counts, shares, strict=True):
        wanted = max(1, round(share))
        drawn = rng.choice(count, min(wanted, count), replace=False)
        yield from _texts(columns[lang], np.resize(drawn, wanted))


_Column = tuple[Sequence[SentencePair], Side]


def _texts(columns: list[_Column], indices: np.ndarray) -> Iterator[str]:
    """The texts at these indices of the columns laid end to end."""
    ends = np.cumsum([len(examples) for examples, _ in columns])
    for index in indices:
        column = int(np.searchsorted(ends, index, side="right"))
        examples, side = columns[column]
        yield getattr(examples[int(index - ends[column]) + len(examples)], side)
