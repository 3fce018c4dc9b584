"""Sentence pairs as token ids: a whole direction in memory, or each pair when it is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from moe.data.pairs import Direction, Pairs, SentencePair
from moe.data.sampling import require_pairs
from moe.data.tokenizer import Tokenizer
from moe.errors import UserError

# {"source": tag + pieces + eos, "target": pieces + eos}, each a one-dimensional integer array.
Example: TypeAlias = dict[str, np.ndarray]

_CHUNK = 16_384  # pairs encoded at once: bounds the Python lists alive at a time
_PROBES = 1000  # pairs of a direction looked at before it is read lazily


class PairEncoder:
    """Turns pairs of one direction into examples; one that is too long becomes None.

    Too long a pair is dropped, not cut: half a sentence would teach the model to stop early.

    Args:
      source_length: most source tokens, counting the language tag and eos.
      target_length: most target tokens, counting eos.
    """

    def __init__(
        self, tokenizer: Tokenizer, direction: Direction, *, source_length: int, target_length: int
    ):
        self._tokenizer = tokenizer
        self._tag_id = tokenizer.tag_id(direction.target_lang)
        self._source_length, self._target_length = source_length, target_length
        self._dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32

    def __call__(self, pairs: Sequence[SentencePair]) -> list[Example | None]:
        """The example of each pair, in their order."""
        sources = self._tokenizer.encode_batch([pair.source for pair in pairs])
        targets = self._tokenizer.encode_batch([pair.target for pair in pairs])
        return [self._example(*sides) for sides in zip(sources, targets, strict=True)]

    def _example(self, source: list[int], target: list[int]) -> Example | None:
        if len(source) + 2 > self._source_length or len(target) + 1 > self._target_length:
            return None
        eos = self._tokenizer.eos_id
        return {
            "source": np.array([self._tag_id, *source, eos], self._dtype),
            "target": np.array([*target, eos], self._dtype),
        }


class EncodedPairs:
    """The examples of one direction in memory: 2 bytes a token, and none that is too long.

    Attributes:
      num_dropped: how many pairs were too long.
    """

    def __init__(self, encoder: PairEncoder, pairs: Sequence[SentencePair]):
        sources, targets = _TokenLists(), _TokenLists()
        for start in range(0, len(pairs), _CHUNK):
            chunk = [pairs[i] for i in range(start, min(start + _CHUNK, len(pairs)))]
            kept = [example for example in encoder(chunk) if example]
            sources.append([example["source"] for example in kept])
            targets.append([example["target"] for example in kept])
        self._sources, self._targets = sources.joined(), targets.joined()
        self.num_dropped = len(pairs) - len(self)

    def __len__(self) -> int:
        return len(self._sources[1]) - 1

    def __getitem__(self, index: int) -> Example:
        return {"source": _slice(self._sources, index), "target": _slice(self._targets, index)}
