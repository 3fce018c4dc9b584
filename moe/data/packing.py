"""Short sentence pairs side by side in the rows of a batch, told apart by segment ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from moe.data.examples import Example, as_dataset, encode_pairs
from moe.data.pairs import Direction, Pairs
from moe.data.tokenizer import Tokenizer

_OPEN_ROWS = 64  # rows looked through for room; bounds the time an example takes


class Batch(NamedTuple):
    """Rows of one or more sentence pairs: int32, padding 0; source L and target L may differ.

    A source is [tag, pieces, eos]; target_in is [bos, pieces] and target_out [pieces, eos]. Segment
    ids are 0 for padding and 1, 2, .. for the pairs of a row, the same on both sides; positions
    begin at 0 in each segment.
    """

    source_BL: np.ndarray
    source_segments_BL: np.ndarray
    source_positions_BL: np.ndarray
    target_in_BL: np.ndarray
    target_out_BL: np.ndarray
    target_segments_BL: np.ndarray
    target_positions_BL: np.ndarray


class BatchShape(NamedTuple):
    """What a batch has room for; `max_per_row` is the most pairs in a row."""

    num_rows: int
    source_length: int
    target_length: int
    max_per_row: int


class PackedBatches(grain.IterDataset):
    """Packs a stream of examples into batches, first-fit.

    An example goes into the first row that has room for it on both sides; one that fits into none
    begins the next batch. Nothing is held back from one batch to the next, so the iterator's state
    is that of the stream. The last batch of a finite stream is filled up with empty rows.

    grain.experimental.FirstFitPackIterDataset packs alike, but takes 40 microseconds a sentence
    where this takes 5: on two cores that would be time lost to training.

    Args:
      stream: dataset of `Example`, none of them longer than a row.
      shape: of every batch.
      bos_id: what begins the decoder's input.
    """

    def __init__(self, stream: grain.MapDataset, shape: BatchShape, *, bos_id: int):
        # Reading takes microseconds: threads for it, Grain's default, would only cost time.
        no_threads = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        super().__init__(stream.to_iter_dataset(no_threads))
        self._shape, self._bos_id = shape, bos_id

    def __iter__(self) -> grain.DatasetIterator:
        return _PackingIterator(self._parent.__iter__(), self._shape, self._bos_id)


class _PackingIterator(grain.DatasetIterator):
    def __init__(self, examples: grain.DatasetIterator, shape: BatchShape, bos_id: int):
        super().__init__(examples)
        self._shape, self._bos_id = shape, bos_id

    def __next__(self) -> Batch:
        filler = _RowFiller(self._shape)
        while True:
            before = self._parent.get_state()
            example = next(self._parent, None)
            if example is None:
                break
            if not filler.add(example):
                self._parent.set_state(before)  # to be read again, for the next batch
                break
        if not filler.rows:
            raise StopIteration
        return make_batch(filler.rows, self._shape, bos_id=self._bos_id)

    def get_state(self) -> dict[str, Any]:
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state)


class _RowFiller:
    """The rows of a batch while they are filled."""

    def __init__(self, shape: BatchShape):
        self.rows: list[list[Example]] = []
        self._free: list[tuple[int, int, int]] = []  # of each row: source, target, pairs
        self._shape = shape

    def add(self, example: Example) -> bool:
        """Puts the example into the first row with room, or returns False."""
        source, target = len(example["source"]), len(example["target"])
        begun = len(self.rows)
        for row in range(max(0, begun - _OPEN_ROWS), begun):
            free_source, free_target, free_pairs = self._free[row]
            if source <= free_source and target <= free_target and free_pairs:
                self.rows[row].append(example)
                self._free[row] = (free_source - source, free_target - target, free_pairs - 1)
                return True
        if begun == self._shape.num_rows:
            return False
        _, source_length, target_length, max_per_row = self._shape
        self.rows.append([example])
        self._free.append((source_length - source, target_length - target, max_per_row - 1))
        return True


def make_batch(rows: Sequence[Sequence[Example]], shape: BatchShape, *, bos_id: int) -> Batch:
    """Lays out the examples of each row; rows missing from `shape` are left empty."""
    rows = [*rows, *[()] * (shape.num_rows - len(rows))]
    source = _lay_out(rows, "source", shape.source_length)
    target_out_BL, segments_BL, positions_BL = _lay_out(rows, "target", shape.target_length)
    target_in_BL = np.roll(target_out_BL, 1, axis=1)
    target_in_BL[positions_BL == 0] = bos_id
    target_in_BL[segments_BL == 0] = 0
    return Batch(*source, target_in_BL, target_out_BL, segments_BL, positions_BL)


def _lay_out(
    rows: Sequence[Sequence[Example]], side: str, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, segment ids and positions [B, L] of one side."""
    sentences = [example[side] for row in rows for example in row]
    num_tokens = np.array([len(sentence) for sentence in sentences])
    per_row = [len(row) for row in rows]
    filled_B = np.bincount(np.repeat(np.arange(len(rows)), per_row), num_tokens, len(rows))
    real_BL = np.arange(length) < filled_B[:, None]
    # Numpy visits the True places row by row, which is the order of the sentences end to end.
    tokens_BL, segments_BL, positions_BL = np.zeros((3, len(rows), length), np.int32)
    tokens_BL[real_BL] = np.concatenate(sentences)
    segments = np.concatenate([np.arange(1, count + 1) for count in per_row])
    segments_BL[real_BL] = np.repeat(segments, num_tokens)
    starts = np.cumsum(num_tokens) - num_tokens
    positions_BL[real_BL] = np.arange(num_tokens.sum()) - np.repeat(starts, num_tokens)
    return tokens_BL, segments_BL, positions_BL


def eval_batches(
    pairs: Pairs,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    source_length: int,
    target_length: int,
    pack: bool = False,
) -> Iterator[tuple[Direction, Batch]]:
    """Every pair once, for a validation loss by direction.

    Directions come in alphabetical order. A batch holds pairs of one of them, in their order and one
    a row unless packed; its last batch is filled up with empty rows. Pairs that are too long are
    left out, with a warning that counts them.

    Raises:
      UserError: there is no direction, or one without a pair that fits; at the call.
    """
    encoded = encode_pairs(
        pairs, tokenizer, source_length=source_length, target_length=target_length
    )
    shape = BatchShape(batch_size, source_length, target_length, source_length if pack else 1)
    return (
        (direction, batch)
        for direction, examples in encoded.items()
        for batch in PackedBatches(as_dataset(examples), shape, bos_id=tokenizer.bos_id)
    )
