"""Sigmoid scores, the selection bias and how it moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from moe.routing.sigmoid_top_k import sigmoid_top_k, updated_bias

route = jax.jit(
    sigmoid_top_k,
    static_argnames=("num_choices", "capacity", "scale", "renormalize_after_drop"),
)
LOGITS = np.log(np.array([[[9, 4, 1, 0.25]]], np.float32))  # sigmoid: 0.9, 0.8, 0.5, 0.2


def test_the_bias_chooses_and_the_scores_without_it_weigh():
    plain = route(LOGITS, jnp.zeros(4), num_choices=2, capacity=1)
    assert plain.expert_GSK[0, 0].tolist() == [0, 1]
    np.testing.assert_allclose(plain.gate_GSK[0, 0], [0.9 / 1.7, 0.8 / 1.7], rtol=1e-6)
    # 0.9, 0.4, 0.5, 0.8 with the bias: expert 3 comes second, with a weight from its score of 0.2.
    biased = route(LOGITS, jnp.array([0, -0.4, 0, 0.6]), num_choices=2, capacity=1, scale=2.5)
    assert biased.expert_GSK[0, 0].tolist() == [0, 3]
    np.testing.assert_allclose(biased.gate_GSK[0, 0], [2.5 * 0.9 / 1.1, 2.5 * 0.2 / 1.1], rtol=1e-6)
    for plan in (plain, biased):
        np.testing.assert_allclose(plan.probs_GSE[0, 0], np.array([9, 8, 5, 2]) / 24, rtol=1e-6)


def test_scores_that_underflow_still_share_the_weight():
    plan = route(jnp.full((1, 1, 3), -200.0), jnp.zeros(3), num_choices=2, capacity=1)
    assert plan.gate_GSK[0, 0].tolist() == [0.5, 0.5]


def test_the_gates_sum_to_the_scale_also_when_renormalised_after_a_drop():
    plan = route(
        np.tile(LOGITS, (1, 3, 1)),
        jnp.zeros(4),
        num_choices=2,
        capacity=2,
        scale=2.5,
        renormalize_after_drop=True,
    )
    np.testing.assert_allclose(plan.gate_GSK.sum(-1)[0], [2.5, 2.5, 0], rtol=1e-6)


def test_the_bias_rises_below_the_mean_load_falls_above_it_and_rests_at_it():
    bias_YE = jnp.array([[0.5, 0, -0.5], [0, 0, 1]])
    assigned_YE = jnp.array([[7, 1, 1], [4, 4, 4]])  # means 3 and 4
    moved_YE = updated_bias(bias_YE, assigned_YE, 0.01)
    np.testing.assert_allclose(moved_YE, [[0.49, 0.01, -0.49], [0, 0, 1]], rtol=1e-6)
    # 2 is above a mean of 5 / 3, 1 below: integers that a whole division would call equal.
    moved_E = updated_bias(jnp.zeros(3), jnp.array([2, 2, 1]), 0.01)
    np.testing.assert_allclose(moved_E, [-0.01, -0.01, 0.01], rtol=1e-6)
    np.testing.assert_array_equal(
        updated_bias(bias_YE[0], jnp.zeros(3, jnp.int32), 1.0), bias_YE[0]
    )


def test_the_bias_balances_a_router_that_all_tokens_send_to_the_same_experts():
    rng = np.random.default_rng(0)
    logits_GSE = jnp.float32(rng.normal([3, 2, 1, 0, 0, 0, 0], 1, size=(2, 100, 7)))

    @jax.jit
    def step(bias_E, _):
        load = route(logits_GSE, bias_E, num_choices=2, capacity=100).load()
        return updated_bias(bias_E, load.assigned_E, 0.003), load.assigned_E

    _, assigned_NE = jax.lax.scan(step, jnp.zeros(7), length=400)
    mean = 2 * 200 / 7
    assert assigned_NE[0].max() > 2.5 * mean
    assert assigned_NE[-1].max() < 1.1 * mean
