"""A few numbered sentences in three languages, and a tokenizer for them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from moe.data.packing import Batch
from moe.data.pairs import Direction, Pairs, SentencePair
from moe.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

EN_DE, DE_EN, EN_FR = Direction("en", "de"), Direction("de", "en"), Direction("en", "fr")
_DIGITS = {
    "en": "nought one two three four five six seven eight nine",
    "de": "null eins zwei drei vier fünf sechs sieben acht neun",
    "fr": "zéro un deux trois quatre cinq six sept huit neuf",
}


def sentence(number: int, language: str) -> str:
    """`sentence(407, "de")` is "vier null sieben": every number is another sentence."""
    words = _DIGITS[language].split()
    return " ".join(words[int(digit)] for digit in str(number))


def make_pairs(counts: Mapping[Direction, int]) -> Pairs:
    """So many pairs a direction, numbered from 0."""
    return {
        direction: [
            SentencePair(*(sentence(number, language) for language in direction), *direction)
            for number in range(count)
        ]
        for direction, count in counts.items()
    }


@functools.cache
def small_tokenizer() -> Tokenizer:
    pairs = make_pairs({EN_DE: 500, DE_EN: 500, EN_FR: 500})
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer(
            pairs, TokenizerConfig(vocab_size=310), temperature=1.0, path=Path(folder, "model")
        )


def unpack(batch: Batch) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Source, target_in and target_out of every sentence pair of a batch, found by its loops."""
    for row in range(len(batch.source_BL)):
        for segment in range(1, batch.source_segments_BL[row].max() + 1):
            at_source = np.flatnonzero(batch.source_segments_BL[row] == segment)
            at_target = np.flatnonzero(batch.target_segments_BL[row] == segment)
            for at, positions in (
                (at_source, batch.source_positions_BL[row]),
                (at_target, batch.target_positions_BL[row]),
            ):
                assert positions[at].tolist() == list(range(len(at)))
                assert at.tolist() == list(range(at[0], at[0] + len(at)))
            yield (
                batch.source_BL[row][at_source].tolist(),
                batch.target_in_BL[row][at_target].tolist(),
                batch.target_out_BL[row][at_target].tolist(),
            )


def texts(batch: Batch) -> list[tuple[str, str]]:
    """Source and target text of every pair of a batch, in the order of the rows."""
    decode = small_tokenizer().decode
    return [(decode(source), decode(target_out)) for source, _, target_out in unpack(batch)]
