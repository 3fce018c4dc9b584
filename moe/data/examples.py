"""Sentence pairs as token ids: a direction encoded at once, or each pair when it is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import grain
import numpy as np

from moe.data.pairs import Direction, Pairs, SentencePair
from moe.data.sampling import require_pairs
from moe.data.tokenizer import Tokenizer
from moe.errors import UserError

# {"source": tag + pieces + eos, "target": pieces + eos}, each a one-dimensional integer array.
Example: TypeAlias = dict[str, np.ndarray]
_SIDES = ("source", "target")

_CHUNK = 16_384  # pairs encoded at once: bounds the Python objects alive at a time
_PROBES = 256  # pairs looked at before a direction is read lazily

_log = logging.getLogger(__name__)


class PairEncoder:
    """Turns pairs of one direction into examples; one that is too long becomes None.

    Too long a pair is dropped, not cut: half a sentence would teach the model to stop early.

    Args:
      direction: of the pairs; its target language is the tag that begins the source.
      source_length: most source tokens, counting the tag and eos.
      target_length: most target tokens, counting eos.
    """

    def __init__(
        self, direction: Direction, tokenizer: Tokenizer, *, source_length: int, target_length: int
    ):
        self.direction = direction
        self.lengths = (source_length, target_length)
        self._tokenizer = tokenizer
        self._tag_id = tokenizer.source.tag_id(direction.target_lang)
        num_ids = max(tokenizer.vocab_size, tokenizer.source.vocab_size)
        self._dtype = np.uint16 if num_ids <= 2**16 else np.int32

    def __call__(self, pairs: Sequence[SentencePair]) -> list[Example | None]:
        """The example of each pair, in their order."""
        sources = self._tokenizer.source.encode_batch([pair.source for pair in pairs])
        targets = self._tokenizer.encode_batch([pair.target for pair in pairs])
        return [self._example(*sides) for sides in zip(sources, targets, strict=True)]

    def _example(self, source: list[int], target: list[int]) -> Example | None:
        source_length, target_length = self.lengths
        if len(source) + 2 > source_length or len(target) + 1 > target_length:
            return None
        eos = self._tokenizer.eos_id
        return {
            "source": np.array([self._tag_id, *source, eos], self._dtype),
            "target": np.array([*target, eos], self._dtype),
        }

    def too_long(self, num_pairs: int) -> UserError:
        """The error for a direction of which no pair fits."""
        return UserError(
            "source_length, target_length must hold at least one pair of every direction: got "
            f"{self.lengths}, too short for all of {num_pairs} pairs of {self.direction}. "
            "Raise them or shorten the sentences."
        )


class EncodedPairs:
    """The examples of one direction in memory, at 2 bytes a token, without those too long."""

    def __init__(self, encoder: PairEncoder, pairs: Sequence[SentencePair]):
        tokens: dict[str, list[np.ndarray]] = {side: [] for side in _SIDES}
        lengths: dict[str, list[int]] = {side: [0] for side in _SIDES}
        for start in range(0, len(pairs), _CHUNK):
            chunk = [pairs[i] for i in range(start, min(start + _CHUNK, len(pairs)))]
            kept = [example for example in encoder(chunk) if example]
            for side in _SIDES if kept else ():
                tokens[side].append(np.concatenate([example[side] for example in kept]))
                lengths[side].extend(len(example[side]) for example in kept)
        if not tokens["source"]:
            raise encoder.too_long(len(pairs))
        self._tokens = {side: np.concatenate(tokens[side]) for side in _SIDES}
        self._offsets = {side: np.cumsum(lengths[side]) for side in _SIDES}

    def __len__(self) -> int:
        return len(self._offsets["source"]) - 1

    def __getitem__(self, index: int) -> Example:
        example = {}
        for side in _SIDES:
            start, end = self._offsets[side][index : index + 2]
            example[side] = self._tokens[side][start:end]
        return example


class LazyPairs:
    """The examples of one direction, encoded anew at each access; None where one is too long."""

    def __init__(self, encoder: PairEncoder, pairs: Sequence[SentencePair]):
        self._encoder, self._pairs = encoder, pairs
        # The pipeline skips what is too long, and would skip for ever if everything were.
        probes = [pairs[i] for i in range(0, len(pairs), max(1, len(pairs) // _PROBES))]
        if not any(encoder(probes)):
            raise encoder.too_long(len(probes))

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Example | None:
        return self._encoder([self._pairs[index]])[0]


def encode_pairs(
    pairs: Pairs,
    tokenizer: Tokenizer,
    *,
    source_length: int,
    target_length: int,
    in_memory: bool = True,
) -> dict[Direction, EncodedPairs | LazyPairs]:
    """The examples of every direction; warns, with their number, of pairs left out as too long.

    Directions come in alphabetical order: the training stream numbers them, and must not depend on
    the order in which a source lists them.

    With `in_memory=False` nothing is kept, and what is too long is skipped when it is met,
    uncounted.

    Raises:
      UserError: there is no pair, or in some direction none that fits, or a language has no tag.
    """
    require_pairs(pairs)
    examples_of = EncodedPairs if in_memory else LazyPairs
    encoded = {}
    for direction in sorted(pairs):
        encoder = PairEncoder(
            direction, tokenizer, source_length=source_length, target_length=target_length
        )
        encoded[direction] = examples_of(encoder, pairs[direction])
    total = sum(map(len, pairs.values()))
    if dropped := total - sum(map(len, encoded.values())):
        _log.warning(
            "%d of %d sentence pairs are left out: longer than %d source or %d target tokens.",
            *(dropped, total, source_length, target_length),
        )
    return encoded


def as_dataset(examples: EncodedPairs | LazyPairs) -> grain.MapDataset:
    """The examples in their order as a Grain dataset, None among them where one is too long."""
    # `MapDataset.source` would measure the bytes of each, in three times the time of reading it.
    return grain.MapDataset.range(len(examples)).map(examples.__getitem__)
