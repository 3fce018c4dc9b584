"""Beam search as one compiled loop over a step function; greedy search is its beam of one.

The search knows neither the model nor text: it sees logits, token ids and a cache that it hands
back. `moe.decoding.translate` puts the translation Transformer and the tokenizer around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe.decoding.rows import on_own_rows
from moe.errors import UserError

Cache = Any  # any pytree of arrays; only the two functions below look inside
StepFn = Callable[[jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]
ReorderFn = Callable[[Cache, jax.Array], Cache]


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What the search looks for.

    `max_length` counts tokens, the end token included, and is the T of the result. The
    `length_penalty` is GNMT's alpha: 0 compares sums of log probabilities, which favours short
    hypotheses; 1 nearly compares means. `num_best` is how many hypotheses each sentence gets.
    """

    bos_id: int
    eos_id: int
    max_length: int
    beam_size: int = 4
    length_penalty: float = 0.6
    num_best: int = 1

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise UserError(f"max_length must be positive: got {self.max_length}. Raise it.")
        if self.length_penalty < 0:  # the stop rule needs a penalty that grows with the length
            raise UserError(
                f"length_penalty must be at least 0: got {self.length_penalty}. "
                "Use 0 for no normalisation."
            )
        if not 1 <= self.num_best <= self.beam_size:
            raise UserError(
                f"num_best must be in [1, beam_size]: got num_best={self.num_best}, "
                f"beam_size={self.beam_size}. Raise beam_size."
            )


class Hypotheses(NamedTuple):
    """Token sequences of each sentence, best first; K is `num_best`.

    `lengths_BK` counts tokens with the end token, and what follows in `tokens_BKT` is without
    meaning. `scores_BK` is the float32 log probability over the length penalty, -inf where a
    sentence has fewer than K hypotheses.
    """

    tokens_BKT: jax.Array
    scores_BK: jax.Array
    lengths_BK: jax.Array


class _Beams(NamedTuple):
    """The state of the loop. `live_BKS` starts with bos, so S = max_length + 1."""

    length: jax.Array  # tokens each live hypothesis has so far
    live_BKS: jax.Array
    log_prob_BK: jax.Array  # of the live hypotheses; -inf where there is none
    ended: Hypotheses  # the best that reached eos
    running_B: jax.Array
    cache: Cache


def length_penalty(length: jax.Array, alpha: float) -> jax.Array:
    """Divides a log probability so that long and short hypotheses can be compared.

    ((5 + length) / 6) ** alpha: 1 for one token; for 7 tokens and alpha 1, 2.

    Source: Wu et al. 2016 (arXiv:1609.08144), equation 14, lp(Y).
    """
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(
    step_fn: StepFn,
    cache: Cache,
    limits_B: jax.Array,
    config: SearchConfig,
    *,
    reorder_fn: ReorderFn,
) -> Hypotheses:
    """Finds the most probable token sequences of each sentence, as one `jax.lax.while_loop`.

    Every step keeps the `beam_size` best continuations of a sentence's live hypotheses. Those
    that end with eos leave the beam; the others live on. A sentence is finished when no live
    hypothesis can still beat the worst of its `num_best` ended ones, whatever follows, or at its
    limit; the loop ends with the last sentence. With `beam_size=1` this is greedy search.

    Args:
      step_fn: `(token_N, step, cache) -> (logits_NV, cache)`, with N = B * beam_size rows ordered
        by sentence, and `step` the int32 position of the token, from 0 (bos) on.
      cache: what `step_fn` remembers, for N rows.
      limits_B: most tokens, eos included, a sentence may have; 0 for a padding row, which is
        finished from the start. At most `config.max_length`.
      config: see `SearchConfig`.
      reorder_fn: `(cache, parent_N) -> cache` whose row n is the given cache's row `parent_N[n]`;
        a parent is a row of the same sentence. Not called with `beam_size=1`.

    Returns:
      `num_best` hypotheses a sentence, those that ended before those that were cut at the limit
      (whose last token is therefore not eos).

    Source: Wu et al. 2016, section 7, without its coverage penalty and its pruning by score
    differences, and with a stop rule that is exact for the ended hypotheses rather than a margin.
    As in Sutskever et al. 2014 (arXiv:1409.3215), an ended hypothesis leaves the beam; the next
    step fills the beam again.
    """
    batch_size, beam_size = limits_B.shape[0], config.beam_size
    limits_B = jnp.minimum(limits_B, config.max_length)

    def advance(beams: _Beams) -> _Beams:
        token_N = jax.lax.dynamic_index_in_dim(
            beams.live_BKS, beams.length, axis=2, keepdims=False
        ).reshape(-1)
        logits_NV, cache = step_fn(token_N, beams.length, beams.cache)
        logits_BKV = logits_NV.reshape(batch_size, beam_size, -1)
        continued = on_own_rows(_continue, in_dims=(0, 0), out_dim=0)
        parent_BK, token_BK, log_prob_BK = continued(beams.log_prob_BK, logits_BKV)
        if beam_size > 1:
            first_row_B1 = jnp.arange(batch_size)[:, None] * beam_size
            cache = reorder_fn(cache, (first_row_B1 + parent_BK).reshape(-1))
        live_BKS = jnp.take_along_axis(beams.live_BKS, parent_BK[:, :, None], axis=1)
        live_BKS = jax.lax.dynamic_update_index_in_dim(live_BKS, token_BK, beams.length + 1, axis=2)
        return _retire(beams, live_BKS, log_prob_BK, cache, limits_B, config)

    beams = _start(batch_size, cache, limits_B, config)
    beams = jax.lax.while_loop(lambda beams: beams.running_B.any(), advance, beams)
    return _best(beams, limits_B, config.length_penalty)


def _start(batch_size: int, cache: Cache, limits_B: jax.Array, config: SearchConfig) -> _Beams:
    live_BKS = jnp.full(
        (batch_size, config.beam_size, config.max_length + 1), config.eos_id, jnp.int32
    )
    # One hypothesis is alive at the start: several equal ones would fill the beam with copies.
    log_prob_K = jnp.where(jnp.arange(config.beam_size) == 0, 0.0, -jnp.inf)
    none = Hypotheses(
        live_BKS[:, : config.num_best, 1:],
        jnp.full((batch_size, config.num_best), -jnp.inf),
        jnp.zeros((batch_size, config.num_best), jnp.int32),
    )
    return _Beams(
        length=jnp.int32(0),
        live_BKS=live_BKS.at[:, :, 0].set(config.bos_id),
        log_prob_BK=jnp.tile(log_prob_K, (batch_size, 1)),
        ended=none,
        running_B=limits_B > 0,
        cache=cache,
    )


def _continue(
    log_prob_BK: jax.Array, logits_BKV: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The beam_size best continuations: parent, token and log probability, best first."""
    batch_size, beam_size, vocab_size = logits_BKV.shape
    per_beam = min(beam_size, vocab_size)  # no beam can give more than K of the K best
    logits_BKV = logits_BKV.astype(jnp.float32)
    top_BKJ, token_BKJ = jax.lax.top_k(logits_BKV, per_beam)
    offset_BK = log_prob_BK - jax.nn.logsumexp(logits_BKV, axis=-1)
    top_BJ = (top_BKJ + offset_BK[:, :, None]).reshape(batch_size, -1)
    best_BK, choice_BK = jax.lax.top_k(top_BJ, beam_size)
    token_BK = jnp.take_along_axis(token_BKJ.reshape(batch_size, -1), choice_BK, axis=1)
    return choice_BK // per_beam, token_BK, best_BK


def _retire(
    old: _Beams,
    live_BKS: jax.Array,
    log_prob_BK: jax.Array,
    cache: Cache,
    limits_B: jax.Array,
    config: SearchConfig,
) -> _Beams:
    """Moves hypotheses that reached eos out of the beam, and stops finished sentences."""
    length, alpha = old.length + 1, config.length_penalty
    token_BK = jax.lax.dynamic_index_in_dim(live_BKS, length, axis=2, keepdims=False)
    is_end_BK = token_BK == config.eos_id
    score_BK = log_prob_BK / length_penalty(length, alpha)
    score_BK = jnp.where(is_end_BK & old.running_B[:, None], score_BK, -jnp.inf)
    length_BK = jnp.full(score_BK.shape, length, jnp.int32)
    merge = on_own_rows(_merge, in_dims=(0, 0), out_dim=0)
    ended = merge(old.ended, Hypotheses(live_BKS[:, :, 1:], score_BK, length_BK))
    # A finished sentence stays as it is: its beams at the limit are its second-best answer.
    live_BKS = jnp.where(old.running_B[:, None, None], live_BKS, old.live_BKS)
    log_prob_BK = jnp.where(is_end_BK, -jnp.inf, log_prob_BK)
    log_prob_BK = jnp.where(old.running_B[:, None], log_prob_BK, old.log_prob_BK)
    # Log probabilities only fall and the penalty only grows: no live hypothesis can end better.
    bound_B = log_prob_BK.max(axis=1) / length_penalty(limits_B, alpha)
    can_win_B = bound_B > ended.scores_BK.min(axis=1)
    running_B = old.running_B & can_win_B & (length < limits_B)
    return _Beams(length, live_BKS, log_prob_BK, ended, running_B, cache)


def _merge(ended: Hypotheses, new: Hypotheses) -> Hypotheses:
    """The num_best of the ended hypotheses and the new ones; of equals, the older."""
    both = _concatenate(ended, new)
    _, index_BK = jax.lax.top_k(both.scores_BK, ended.scores_BK.shape[1])
    return _take(both, index_BK)


def _best(beams: _Beams, limits_B: jax.Array, alpha: float) -> Hypotheses:
    """The ended hypotheses, and after them, where some are missing, those cut at the limit."""
    ended, num_best = beams.ended, beams.ended.scores_BK.shape[1]
    score_BK = beams.log_prob_BK / length_penalty(limits_B, alpha)[:, None]
    length_BK = jnp.broadcast_to(limits_B[:, None], score_BK.shape)
    both = _concatenate(ended, Hypotheses(beams.live_BKS[:, :, 1:], score_BK, length_BK))
    has_not_ended = jnp.isneginf(both.scores_BK).at[:, num_best:].set(True)
    index_BK = jnp.lexsort((-both.scores_BK, has_not_ended), axis=-1)
    return _take(both, index_BK[:, :num_best])


def _concatenate(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    return Hypotheses(*(jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)))


def _take(hypotheses: Hypotheses, index_BK: jax.Array) -> Hypotheses:
    tokens_BKT, scores_BK, lengths_BK = hypotheses
    return Hypotheses(
        jnp.take_along_axis(tokens_BKT, index_BK[:, :, None], axis=1),
        jnp.take_along_axis(scores_BK, index_BK, axis=1),
        jnp.take_along_axis(lengths_BK, index_BK, axis=1),
    )
