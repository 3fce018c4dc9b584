"""Beam search against loops in numpy and against all sequences there are."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.decoding import SearchConfig, beam_search
from moe.errors import UserError

BOS, EOS, VOCAB = 1, 2, 5


class PrefixModel:
    """Logits depend on the whole prefix, which the cache holds: a wrong parent shows."""

    def __init__(self, seed: int, *, batch_size: int, max_length: int, eos_bias: float = 0.0):
        rng = np.random.default_rng(seed)
        self.weights_BSVV = rng.normal(size=(batch_size, max_length, VOCAB, VOCAB)) * 1.5
        self.weights_BSVV = self.weights_BSVV.astype(np.float32)
        self.weights_BSVV[..., EOS] += eos_bias

    def log_probs_V(self, sentence: int, prefix: tuple[int, ...]) -> np.ndarray:
        fed = (BOS, *prefix)
        logits_V = sum(self.weights_BSVV[sentence, s, token] for s, token in enumerate(fed))
        return logits_V - np.log(np.exp(logits_V).sum())

    def search(self, config: SearchConfig, limits: list[int] | None = None):
        batch_size, max_length = self.weights_BSVV.shape[:2]
        limits_B = jnp.asarray(limits or [max_length] * batch_size)
        return search_prefix_model(jnp.asarray(self.weights_BSVV), limits_B, config)


@functools.partial(jax.jit, static_argnums=2)
def search_prefix_model(weights_BSVV, limits_B, config: SearchConfig):
    weights_NSVV = jnp.repeat(weights_BSVV, config.beam_size, axis=0)
    num_rows, max_length = weights_NSVV.shape[:2]
    positions_S = jnp.arange(max_length)

    def step_fn(token_N, step, prefix_NS):
        prefix_NS = prefix_NS.at[:, step].set(token_N)
        logits_NSV = weights_NSVV[jnp.arange(num_rows)[:, None], positions_S, prefix_NS]
        return jnp.where((positions_S <= step)[:, None], logits_NSV, 0).sum(axis=1), prefix_NS

    prefix_NS = jnp.zeros((num_rows, max_length), jnp.int32)
    return beam_search(
        step_fn, prefix_NS, limits_B, config, reorder_fn=lambda rows, parent_N: rows[parent_N]
    )


def penalised(log_prob: float, length: int, alpha: float) -> float:
    return log_prob / ((5 + length) / 6) ** alpha


def texts(hypotheses, sentence: int) -> list[tuple[int, ...]]:
    """The found sequences, best first, without the empty places."""
    tokens, scores, lengths = (np.asarray(field)[sentence] for field in hypotheses)
    found = zip(tokens, scores, lengths, strict=True)
    return [tuple(t[:n].tolist()) for t, score, n in found if np.isfinite(score)]


def search_with_loops(model: PrefixModel, sentence: int, config: SearchConfig, limit: int):
    """The rules of the docstring, one hypothesis at a time, and without stopping early."""
    live, ended = [((), 0.0)], []
    for length in range(1, limit + 1):
        grown = [
            ((*prefix, token), total + log_prob)
            for prefix, total in live
            for token, log_prob in enumerate(model.log_probs_V(sentence, prefix))
        ]
        kept = sorted(grown, key=lambda pair: -pair[1])[: config.beam_size]
        alpha = config.length_penalty
        ended += [(p, penalised(total, length, alpha)) for p, total in kept if p[-1] == EOS]
        live = [pair for pair in kept if pair[0][-1] != EOS]
    cut = [(prefix, penalised(total, limit, config.length_penalty)) for prefix, total in live]
    ended.sort(key=lambda pair: -pair[1])
    return (ended + cut)[: config.num_best]


def config(**fields) -> SearchConfig:
    return SearchConfig(**{"bos_id": BOS, "eos_id": EOS, "max_length": 7} | fields)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.3])
@pytest.mark.parametrize("beam_size, num_best", [(1, 1), (2, 1), (3, 3), (7, 2)])
def test_search_equals_loops_that_never_stop_early(beam_size, num_best, alpha):
    limits = [7, 3, 6, 1, 7, 5]
    settings = config(beam_size=beam_size, num_best=num_best, length_penalty=alpha)
    for seed in range(5):
        model = PrefixModel(seed, batch_size=6, max_length=7, eos_bias=[-2.0, 0.0, 1.0][seed % 3])
        found = model.search(settings, limits)
        for sentence, limit in enumerate(limits):
            expected = search_with_loops(model, sentence, settings, limit)
            assert texts(found, sentence) == [tokens for tokens, _ in expected]
            scores = np.asarray(found.scores_BK)[sentence, : len(expected)]
            np.testing.assert_allclose(scores, [s for _, s in expected], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_beam_wide_enough_finds_the_best_of_all_sequences(alpha):
    length, num_best = 4, 6
    # 4 tokens that do not end: 4**3 live hypotheses before the last step, 5 continuations each.
    settings = config(
        beam_size=4**3 * 5, num_best=num_best, length_penalty=alpha, max_length=length
    )
    model = PrefixModel(11, batch_size=3, max_length=length)
    found = model.search(settings)
    others = [token for token in range(VOCAB) if token != EOS]
    for sentence in range(3):
        scored = []
        for n in range(length):
            for prefix in itertools.product(others, repeat=n):
                whole = (*prefix, EOS)
                log_prob = sum(
                    model.log_probs_V(sentence, whole[:i])[whole[i]] for i in range(n + 1)
                )
                scored.append((penalised(log_prob, n + 1, alpha), whole))
        scored.sort(reverse=True)
        assert texts(found, sentence) == [whole for _, whole in scored[:num_best]]


def test_beam_of_one_is_greedy_search():
    model = PrefixModel(3, batch_size=8, max_length=7)
    found = model.search(config(beam_size=1))
    for sentence in range(8):
        prefix: tuple[int, ...] = ()
        while len(prefix) < 7 and EOS not in prefix:
            prefix = (*prefix, int(np.argmax(model.log_probs_V(sentence, prefix))))
        assert texts(found, sentence) == [prefix]


def search_chain(next_probs: dict[int, dict[int, float]], settings: SearchConfig):
    """Searches a chain in which the next token depends on the last one only."""
    probs_VV = np.full((VOCAB, VOCAB), 1e-9, np.float32)
    for token, probs in next_probs.items():
        probs_VV[token, list(probs)] = list(probs.values())
    table_VV = jnp.log(jnp.asarray(probs_VV))
    return beam_search(
        lambda token_N, step, cache: (table_VV[token_N], cache),
        (),
        jnp.array([settings.max_length]),
        settings,
        reorder_fn=lambda cache, _: cache,
    )


def test_beam_finds_what_greedy_search_misses():
    # Greedy takes 3 (0.6) and ends with 0.6 * 0.5; by 4 it is 0.4 * 1.
    chain = {BOS: {3: 0.6, 4: 0.4}, 3: {EOS: 0.5, 0: 0.5}, 4: {EOS: 1.0}, 0: {EOS: 1.0}}
    assert texts(search_chain(chain, config(beam_size=1)), 0)[0][0] == 3
    found = search_chain(chain, config(beam_size=2, length_penalty=0.0))
    assert texts(found, 0) == [(4, EOS)]
    np.testing.assert_allclose(found.scores_BK, [[np.log(0.4)]], rtol=1e-5)


def test_length_penalty_prefers_the_longer_of_near_equals():
    # eos at once: log 0.4 = -0.916. By 3 and 4: log(0.6 * 0.64) = -0.957; with alpha 1 that is
    # over (5 + 3) / 6 = 1.333 and becomes -0.718, while one token is over 1.
    chain = {BOS: {EOS: 0.4, 3: 0.6}, 3: {4: 0.64, 0: 0.36}, 4: {EOS: 1.0}, 0: {EOS: 1.0}}
    short = search_chain(chain, config(beam_size=3, length_penalty=0.0))
    long = search_chain(chain, config(beam_size=3, length_penalty=1.0))
    assert (texts(short, 0), texts(long, 0)) == ([(EOS,)], [(3, 4, EOS)])
    np.testing.assert_allclose(long.scores_BK, [[np.log(0.6 * 0.64) / (8 / 6)]], rtol=1e-5)


def test_sentence_does_not_depend_on_its_neighbours():
    settings = config(beam_size=3)
    model = PrefixModel(5, batch_size=5, max_length=7)
    together = model.search(settings, [7, 7, 2, 0, 7])
    alone = PrefixModel(5, batch_size=5, max_length=7)
    alone.weights_BSVV = model.weights_BSVV[4:]
    assert texts(together, 4) == texts(alone.search(settings, [7]), 0)


def test_padding_row_is_empty_and_costs_no_step():
    calls = []
    model = PrefixModel(1, batch_size=3, max_length=7)
    found = model.search(config(beam_size=2), [0, 0, 0])
    assert np.asarray(found.lengths_BK).tolist() == [[0], [0], [0]]

    def step_fn(token_N, step, cache):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.zeros((2, VOCAB)), cache

    beam_search(step_fn, (), jnp.array([0]), config(beam_size=2), reorder_fn=lambda cache, _: cache)
    jax.effects_barrier()
    assert calls == []


def test_loop_stops_when_no_live_hypothesis_can_win():
    steps = []

    def step_fn(token_N, step, cache):
        jax.debug.callback(lambda s: steps.append(int(s)), step, ordered=True)
        # eos 0.9 and four others of 0.025: the best live hypothesis after one step has log
        # probability -3.7, which even the penalty of 100 tokens, (105 / 6)**0.2 = 1.8, leaves at
        # -2.1, below the -0.1 of ending at once.
        return jnp.log(jnp.array([0.025, 0.025, 0.9, 0.025, 0.025]))[None].repeat(4, 0), cache

    settings = config(beam_size=4, max_length=100, length_penalty=0.2)
    found = beam_search(step_fn, (), jnp.array([100]), settings, reorder_fn=lambda cache, _: cache)
    jax.effects_barrier()
    assert steps == [0]
    assert texts(found, 0) == [(EOS,)]


def test_hypothesis_without_end_is_cut_at_the_limit():
    model = PrefixModel(2, batch_size=2, max_length=7, eos_bias=-100.0)
    found = model.search(config(beam_size=3, num_best=2), [4, 7])
    assert np.asarray(found.lengths_BK).tolist() == [[4, 4], [7, 7]]
    assert all(EOS not in text for sentence in range(2) for text in texts(found, sentence))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_best": 5, "beam_size": 4}, "num_best=5, beam_size=4"),
        ({"beam_size": 0}, "beam_size=0"),
        ({"length_penalty": -0.1}, "got -0.1"),
        ({"max_length": 0}, "got 0"),
    ],
)
def test_impossible_settings_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        config(**fields)
