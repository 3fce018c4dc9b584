"""Beam search over one padded batch with the translation Transformer, compiled once a shape."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from moe.decoding.search import Hypotheses, SearchConfig, beam_search
from moe.models import DecodeCache


@functools.partial(jax.jit, static_argnames=("graph", "config"))
def search_batch(
    graph: nnx.GraphDef,
    state: nnx.State,
    source_BL: jax.Array,
    source_lengths_B: jax.Array,
    limits_B: jax.Array,
    *,
    config: SearchConfig,
) -> Hypotheses:
    """The best translations of each source.

    Args:
      graph, state: a `Transformer`, as `nnx.split` gives it: split once for many batches.
      source_BL: one sentence a row: language tag, pieces, eos, then padding.
      source_lengths_B: tokens of each source; 0 for a padding row.
      limits_B: most target tokens of each row; 0 for a padding row.
      config: of the search.

    Returns:
      `config.num_best` hypotheses a row; see `beam_search`.
    """
    model = nnx.merge(graph, state)
    positions_BL = jnp.broadcast_to(jnp.arange(source_BL.shape[1]), source_BL.shape)
    segments_BL = (positions_BL < source_lengths_B[:, None]).astype(jnp.int32)
    memory_BTM, _ = model.encode(source_BL, segments_BL, positions_BL)
    cache = model.start_decoding(
        memory_BTM, segments_BL, max_length=config.max_length, source_BT=source_BL
    )
    cache = _repeat(cache, config.beam_size)
    return beam_search(model.decode_step, cache, limits_B, config, reorder_fn=_reorder)


def _repeat(cache: DecodeCache, beam_size: int) -> DecodeCache:
    """One row for each hypothesis in place of one for each sentence."""
    own, memory = jax.tree.map(
        lambda leaf_YBTND: jnp.repeat(leaf_YBTND, beam_size, axis=1), (cache.own, cache.memory)
    )
    mask_BT, task_B = jax.tree.map(
        lambda leaf_B: jnp.repeat(leaf_B, beam_size, axis=0), (cache.source_mask_BT, cache.task_B)
    )
    return DecodeCache(own=own, memory=memory, source_mask_BT=mask_BT, task_B=task_B)


def _reorder(cache: DecodeCache, parent_B: jax.Array) -> DecodeCache:
    """Each hypothesis goes on from its parent's tokens; the source is that of all its siblings."""
    own = jax.tree.map(lambda leaf_YBTND: jnp.take(leaf_YBTND, parent_B, axis=1), cache.own)
    return dataclasses.replace(cache, own=own)
