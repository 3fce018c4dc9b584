"""The training stream: directions mixed by temperature, packed, batched, and restartable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import grain
from absl import flags

from moe.data.examples import EncodedPairs, LazyPairs, as_dataset, encode_pairs
from moe.data.packing import BatchShape, PackedBatches
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
      pack: put several pairs into a row; otherwise a row is one pair and mostly padding.
      num_workers: processes that make batches; 0 makes them in a thread of the training process.
        With 2 or more the batches differ from those of 0 and 1, as each packs its own share.
      prefetch_batches: batches made ahead (by each worker), so that training does not wait.
      max_pairs_in_memory: up to so many pairs are tokenised once at the start, at about 50 bytes
        each; more are tokenised whenever they are read.
    """

    temperature: float = 5.0
    batch_size: int = 64
    source_length: int = 64
    target_length: int = 64
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
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator:
    """Training batches without end, the same for the same arguments.

    Each direction's pairs are shuffled anew every epoch; directions alternate by temperature; of
    that one stream each process reads every `process_count`-th example, packs and batches it.

    `get_state()` gives a dict that `json.dumps` takes, and after `set_state` on an iterator of the
    same arguments the batches go on exactly as they would have; a state of another `num_workers`
    is not accepted. Call `close()` at the end if there are workers.

    Args:
      pairs: text by direction.
      seed: decides every order; not negative.
      process_index: which share of the stream, below process_count.
      process_count: number of processes that train together; must divide `batch_size`.

    Returns:
      A Grain iterator over `Batch` with `batch_size / process_count` rows.

    Raises:
      UserError: no data, a direction in which no pair fits, a language without a tag, or a
        batch_size that does not divide.
    """
    if config.batch_size % process_count:
        raise UserError(
            "batch_size must be a multiple of the number of processes: got "
            f"batch_size={config.batch_size}, process_count={process_count}. Change batch_size."
        )
    examples = encode_pairs(
        pairs,
        tokenizer,
        source_length=config.source_length,
        target_length=config.target_length,
        in_memory=sum(map(len, pairs.values())) <= config.max_pairs_in_memory,
    )
    stream = example_stream(examples, temperature=config.temperature, seed=seed)
    shape = BatchShape(
        num_rows=config.batch_size // process_count,
        source_length=config.source_length,
        target_length=config.target_length,
        max_per_row=config.source_length if config.pack else 1,
    )
    batches = PackedBatches(stream[process_index::process_count], shape, bos_id=tokenizer.bos_id)
    return iter(_prefetch(batches, config))


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
