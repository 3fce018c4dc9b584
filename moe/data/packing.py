"""Several short sentence pairs in one row, with segment ids, and rows in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import grain
import numpy as np

from moe.data.examples import EncodedPairs, Example, LazyPairs, encode_pairs
from moe.data.pairs import Direction, Pairs
from moe.data.tokenizer import Tokenizer


class Batch(NamedTuple):
    """Rows of one or more sentence pairs; int32, the source L and the target L may differ.

    A source is [tag, pieces, eos]; target_in is [bos, pieces] and target_out [pieces, eos]. Segment
    ids are 0 for padding and 1, 2, .. for the pairs of a row, alike on both sides; positions begin
    at 0 in each segment. Padding is 0 everywhere.
    """

    source_BL: np.ndarray
    source_segments_BL: np.ndarray
    source_positions_BL: np.ndarray
    target_in_BL: np.ndarray
    target_out_BL: np.ndarray
    target_segments_BL: np.ndarray
    target_positions_BL: np.ndarray


def pack_examples(
    examples: grain.IterDataset,
    *,
    source_length: int,
    target_length: int,
    num_bins: int,
    max_per_row: int | None,
    seed: int,
) -> grain.IterDataset:
    """Fills rows first-fit: an example goes into the first open row that has room on both sides.

    When one fits nowhere, all `num_bins` open rows are given out, in shuffled order (the last ones
    are emptier), and new ones begun. With `max_per_row=1` each row is one sentence pair.
    """
    return grain.experimental.FirstFitPackIterDataset(
        examples,
        length_struct={"source": source_length, "target": target_length},
        num_packing_bins=num_bins,
        max_sequences_per_bin=max_per_row,
        seed=seed,
    )


class BatchMaker:
    """Makes a Batch of packed rows, adding the decoder's input: the target, one step later."""

    def __init__(self, tokenizer: Tokenizer):
        self._bos_id = tokenizer.bos_id

    def __call__(self, rows: Mapping[str, np.ndarray]) -> Batch:
        """`rows`: what `pack_examples` yields, stacked."""
        target_out_BL = rows["target"].astype(np.int32)
        segments_BL, positions_BL = rows["target_segment_ids"], rows["target_positions"]
        target_in_BL = np.roll(target_out_BL, 1, axis=1)
        target_in_BL[positions_BL == 0] = self._bos_id
        target_in_BL[segments_BL == 0] = 0
        return Batch(
            rows["source"].astype(np.int32),
            rows["source_segment_ids"],
            rows["source_positions"],
            target_in_BL,
            target_out_BL,
            segments_BL,
            positions_BL,
        )


def eval_batches(
    pairs: Pairs,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    source_length: int,
    target_length: int,
) -> Iterator[tuple[Direction, Batch]]:
    """Every pair once, one a row and in order, for a validation loss by direction.

    A batch is of one direction; rows missing in its last batch are padding. Pairs that are too long
    are left out, with a warning that counts them.

    Raises:
      UserError: no direction, or one without a pair that fits. Raised at the call.
    """
    encoded = encode_pairs(
        pairs, tokenizer, source_length=source_length, target_length=target_length
    )
    make_batch = BatchMaker(tokenizer)
    return (
        (direction, make_batch(_rows(chunk, batch_size, source_length, target_length)))
        for direction, examples in encoded.items()
        for chunk in _chunks(examples, batch_size)
    )


def _chunks(examples: EncodedPairs | LazyPairs, size: int) -> Iterator[list[Example]]:
    for start in range(0, len(examples), size):
        indices = range(start, min(start + size, len(examples)))
        yield [example for i in indices if (example := examples[i])]


def _rows(
    examples: Sequence[Example], batch_size: int, source_length: int, target_length: int
) -> dict[str, np.ndarray]:
    """One example a row, in the form in which packed rows come."""
    rows = {}
    for side, length in (("source", source_length), ("target", target_length)):
        tokens_BL = np.zeros((batch_size, length), np.int32)
        segments_BL = np.zeros((batch_size, length), np.int32)
        for row, example in enumerate(examples):
            tokens_BL[row, : len(example[side])] = example[side]
            segments_BL[row, : len(example[side])] = 1
        rows[side], rows[f"{side}_segment_ids"] = tokens_BL, segments_BL
        rows[f"{side}_positions"] = np.arange(length, dtype=np.int32) * segments_BL
    return rows
