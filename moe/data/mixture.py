"""The training stream: directions mixed by temperature, packed, batched, and restartable."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from absl import flags

from moe.data.examples import EncodedPairs, LazyPairs, as_dataset, encode_pairs
from moe.data.packing import Batch, BatchShape, PackedBatches
from moe.data.pairs import Direction, Pairs
from moe.data.sampling import ExampleOrder
from moe.data.tokenizer import Tokenizer
from moe.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """How sentence pairs become training batches.

    Attributes:
      temperature: T of p ~ n^(1/T) over directions of n pairs. 1 is proportional to the data, and
        the larger T, the closer to uniform.
      batch_size: rows of a batch over all processes.
      source_length: tokens of a source row; a longer pair is left out.
      target_length: tokens of a target row; a longer pair is left out.
      shards: parts of the stream, each of which fills its own rows of every batch; a process reads
        only the shards that its rows are of. None is 1, or the number of processes that a run is
        begun with. It decides the batches; the number of processes does not.
      pack: put several pairs into a row; otherwise a row is one pair and mostly padding.
      num_workers: processes that make the batches of a shard; 0 makes them in a thread of the
        training process. With 2 or more the batches differ from those of 0 and 1, as each packs its
        own share.
      prefetch_batches: batches made ahead (by each worker), so that training does not wait.
      max_pairs_in_memory: up to so many pairs are tokenised once at the start, at about 50 bytes
        each; more are tokenised whenever they are read.
    """

    temperature: float = 5.0
    batch_size: int = 64
    source_length: int = 64
    target_length: int = 64
    shards: int | None = None
    pack: bool = True
    num_workers: int = 0
    prefetch_batches: int = 4
    max_pairs_in_memory: int = 5_000_000

    def __post_init__(self):
        least = {
            "batch_size": 1,
            "source_length": 3,  # tag, a piece, eos
            "target_length": 2,  # a piece, eos
            "num_workers": 0,
            "prefetch_batches": 1,
            "max_pairs_in_memory": 0,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UserError(
                    f"{name} must be at least {minimum}: got {getattr(self, name)}. Raise {name}."
                )
        if self.shards is not None and (self.shards < 1 or self.batch_size % self.shards):
            raise UserError(
                f"shards must be at least 1 and divide batch_size: got shards={self.shards}, "
                f"batch_size={self.batch_size}. Change --mixture.shards."
            )
        if not self.temperature > 0 or math.isnan(self.temperature):
            raise UserError(
                f"temperature must be positive: got {self.temperature}. "
                "Use 1 to sample in proportion to the data, 5 to favour rare languages."
            )


def train_batches(
    pairs: Pairs,
    tokenizer: Tokenizer,
    config: MixtureConfig,
    *,
    seed: int,
    rows: Sequence[int] | None = None,
) -> TrainBatches:
    """Training batches without end, the same for the same arguments.

    Each direction's pairs are shuffled anew every epoch; directions alternate by temperature; of
    that one stream each of N shards takes every N-th example and packs it into its share of the
    rows. Rows 0 to B/N - 1 of a batch are of shard 0, and so on.

    Args:
      pairs: text by direction.
      seed: decides every order; not negative.
      rows: those wanted of each batch, in increasing order; None is all. Only the shards that they
        are of are read.

    Returns:
      An iterator over `Batch` with the wanted rows.

    Raises:
      UserError: no data, a direction in which no pair fits, or a language without a tag.
    """
    examples = encode_pairs(
        pairs,
        tokenizer,
        source_length=config.source_length,
        target_length=config.target_length,
        in_memory=sum(map(len, pairs.values())) <= config.max_pairs_in_memory,
    )
    stream = example_stream(examples, temperature=config.temperature, seed=seed)
    num_shards = config.shards or 1
    shape = BatchShape(
        num_rows=config.batch_size // num_shards,
        source_length=config.source_length,
        target_length=config.target_length,
        max_per_row=config.source_length if config.pack else 1,
    )
    wanted = np.arange(config.batch_size) if rows is None else np.asarray(rows)
    names, place = np.unique(wanted // shape.num_rows, return_inverse=True)
    shards = {}
    for shard in names.tolist():
        packed = PackedBatches(stream[shard::num_shards], shape, bos_id=tokenizer.bos_id)
        shards[shard] = iter(_prefetch(packed, config))
    return TrainBatches(shards, place * shape.num_rows + wanted % shape.num_rows, num_shards)


class TrainBatches(Iterator[Batch]):
    """The wanted rows of the batches that some of `num_shards` shards make, restartable.

    Of the rows of those shards, laid end to end, a batch has those numbered `rows`.

    `get_state()` is a dict that `json.dumps` takes: where each shard read here stands. After
    `set_state` on an iterator of the same arguments the batches go on exactly as they would have.
    `set_state` also takes the union of such dicts over processes that read other shards, so that a
    run can go on with other rows; but not one of another `num_workers`. Call `close()` at the end if
    there are workers.
    """

    def __init__(
        self, shards: Mapping[int, grain.DatasetIterator], rows: np.ndarray, num_shards: int
    ):
        self._shards, self._rows, self._num_shards = shards, rows, num_shards

    def __next__(self) -> Batch:
        batches = [next(shard) for shard in self._shards.values()]
        return Batch(*(np.concatenate(arrays)[self._rows] for arrays in zip(*batches, strict=True)))

    def get_state(self) -> dict[str, Any]:
        """Where the shards stand, by shard."""
        return {str(name): shard.get_state() for name, shard in self._shards.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`.

        Raises:
          UserError: it lacks a shard that is read here, or is of another number of shards.
        """
        there_are = {str(name) for name in range(self._num_shards)}
        if not {str(name) for name in self._shards} <= state.keys() <= there_are:
            raise UserError(
                f"data state must be of as many shards as are read: got the positions of "
                f"{', '.join(sorted(state))} for mixture.shards={self._num_shards}. Take the shards of "
                "the run that saved it (its config.json), or begin a new run."
            )
        for name, shard in self._shards.items():
            shard.set_state(state[str(name)])

    def close(self) -> None:
        """Ends workers."""
        for shard in self._shards.values():
            if hasattr(shard, "close"):
                shard.close()


def example_stream(
    examples: Mapping[Direction, EncodedPairs | LazyPairs], *, temperature: float, seed: int
) -> grain.MapDataset:
    """The endless stream of examples that all processes share; any position can be read."""
    counts = [len(of_direction) for of_direction in examples.values()]
    order = ExampleOrder(counts, temperature=temperature, seed=seed)
    datasets = [as_dataset(of_direction) for of_direction in examples.values()]
    return grain.MapDataset.select_from_datasets(datasets, order)


def _prefetch(batches: grain.IterDataset, config: MixtureConfig) -> grain.IterDataset:
    """Makes batches ahead of time, in worker processes or in a thread."""
    if config.num_workers == 0:
        return grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=config.prefetch_batches
        )
    if not flags.FLAGS.is_parsed():  # Grain's workers read its flags: google/grain issue 1355
        flags.FLAGS.mark_as_parsed()
    return batches.mp_prefetch(
        grain.MultiprocessingOptions(
            num_workers=config.num_workers, per_worker_buffer_size=config.prefetch_batches
        )
    )
