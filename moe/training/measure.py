"""Loss and expert load of a trained model on given batches, on one device or on many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from moe.data import Batch, Direction
from moe.models import Stats, Transformer, fit_groups
from moe.sharding import num_shards, replicate
from moe.training.hosts import compiled_by_all
from moe.training.step import make_eval_step


class Measured(NamedTuple):
    """What a batch of one direction gave: summed loss in nats, real target tokens, expert load."""

    direction: Direction
    loss: float
    num_tokens: int
    stats: Stats


def measure(model: Transformer, batches: Iterable[tuple[Direction, Batch]]) -> Iterator[Measured]:
    """Deterministic, dropless and without label smoothing, on the mesh in force.

    Rows are split over the devices, filled up with empty rows, which count nowhere. Each token's
    experts are those of a single device, so counts are equal; sums are so up to their order.

    Args:
      model: placed on that mesh; the size of its groups may change.
      batches: of one shape; of several processes all give the same and get the same.
    """
    step = None
    for direction, batch in batches:
        batch = _fill_up(batch, num_shards("batch"))
        if step is None:
            lengths = batch.source_BL.shape[1], batch.target_in_BL.shape[1]
            fit_groups(model, len(batch.source_BL) * math.gcd(*lengths))
            graph, params = nnx.split(model)
            step = _whole_everywhere(make_eval_step(graph))
        loss, num_tokens, stats = jax.device_get(step(params, batch))
        yield Measured(direction, float(loss), int(num_tokens), stats)


def _fill_up(batch: Batch, num_devices: int) -> Batch:
    missing = -len(batch.source_BL) % num_devices
    return Batch(*(np.pad(array_BL, ((0, missing), (0, 0))) for array_BL in batch))


def _whole_everywhere(step):
    """The step, whose results every process can read."""
    return compiled_by_all(jax.jit(lambda *given: jax.tree.map(replicate, step(*given))))
