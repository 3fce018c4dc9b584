"""Beam search over one padded batch with the translation Transformer, compiled once a shape.

On a mesh (`jax.set_mesh`) rows are split over its devices: each searches for its own, beside experts
that may be anywhere.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from moe.decoding.rows import on_own_rows
from moe.decoding.search import Hypotheses, SearchConfig, beam_search
from moe.models import DecodeCache, fit_groups
from moe.sharding import constrain, replicate

_CACHE_DIMS = (None, "batch", None, "heads", None)  # YBTND


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

    On a mesh every device gets as many rows, and cuts groups of its own tokens alone: it computes what
    a single device would with these rows.

    Args:
      graph, state: a `Transformer`, as `nnx.split` gives it: split once for many batches.
      source_BL: one sentence a row: language tag, pieces, eos, then padding.
      source_lengths_B: tokens of each source; 0 for a padding row.
      limits_B: most target tokens of each row; 0 for a padding row.
      config: of the search.

    Returns:
      `config.num_best` hypotheses a row, whole on every device; see `beam_search`.
    """
    source_BL = constrain(source_BL, "batch", None)
    limits_B = constrain(limits_B, "batch")
    model = _merged(graph, state, source_BL.size)
    positions_BL = jnp.broadcast_to(jnp.arange(source_BL.shape[1]), source_BL.shape)
    segments_BL = (positions_BL < source_lengths_B[:, None]).astype(jnp.int32)
    memory_BTM, _ = model.encode(source_BL, segments_BL, positions_BL)
    cache = model.start_decoding(
        memory_BTM, segments_BL, max_length=config.max_length, source_BT=source_BL
    )
    cache = _repeat(cache, config.beam_size)
    decoder = _merged(graph, state, len(source_BL) * config.beam_size)
    found = beam_search(decoder.decode_step, cache, limits_B, config, reorder_fn=_reorder)
    return jax.tree.map(replicate, found)


def _merged(graph: nnx.GraphDef, state: nnx.State, num_tokens: int):
    """The model, to be called with so many tokens."""
    model = nnx.merge(graph, state)
    fit_groups(model, num_tokens)
    return model


def _repeat(cache: DecodeCache, beam_size: int) -> DecodeCache:
    """One row for each hypothesis in place of one for each sentence."""

    def rows(leaf_YBTND):
        return constrain(jnp.repeat(leaf_YBTND, beam_size, axis=1), *_CACHE_DIMS)

    own, memory = jax.tree.map(rows, (cache.own, cache.memory))
    mask_BT, task_B = jax.tree.map(
        lambda leaf_B: jnp.repeat(leaf_B, beam_size, axis=0), (cache.source_mask_BT, cache.task_B)
    )
    return DecodeCache(own=own, memory=memory, source_mask_BT=mask_BT, task_B=task_B)


def _reorder(cache: DecodeCache, parent_B: jax.Array) -> DecodeCache:
    """Each hypothesis goes on from its parent's tokens; the source is that of all its siblings."""
    row_B = jnp.arange(len(parent_B))

    def take(own, parent_B, row_B):
        # Siblings are neighbours, so the parent is as near where a device has only its own rows.
        here_B = jnp.arange(len(row_B)) + parent_B - row_B
        return jax.tree.map(lambda leaf_YBTND: jnp.take(leaf_YBTND, here_B, axis=1), own)

    take = on_own_rows(take, in_dims=(1, 0, 0), out_dim=1)
    return dataclasses.replace(cache, own=take(cache.own, parent_B, row_B))
