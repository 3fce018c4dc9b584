"""Gate conventions, limits by groups of experts, two-level logits, and input jitter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.routing.group_limit import limited_to_groups
from moe.routing.top1 import jittered
from moe.routing.top_k import top_k
from moe.routing.two_level import two_level_logits
from tests.oracle import softmax
from tests.oracle_token_choice import eligible

route = jax.jit(top_k, static_argnames=("num_choices", "capacity", "gates"))
limit = jax.jit(
    limited_to_groups,
    static_argnames=("num_choices", "num_expert_groups", "num_kept_groups", "group_score"),
)
LOG = np.log(np.array([[[0.5, 0.3, 0.1, 0.1]]], np.float32))


@pytest.mark.parametrize(
    ("gates", "expected_K"),
    [
        ("softmax_then_top_k", [0.5, 0.3]),
        ("renormalized", [0.625, 0.375]),  # 5/8 and 3/8
        ("softmax_over_selected", [0.625, 0.375]),
    ],
)
def test_the_gates_of_each_convention(gates, expected_K):
    plan = route(LOG, num_choices=2, capacity=1, gates=gates)
    np.testing.assert_allclose(plan.gate_GSK[0, 0], expected_K, rtol=1e-6)
    assert plan.expert_GSK[0, 0].tolist() == [0, 1]


def test_the_last_two_conventions_are_one_function_but_for_underflow():
    logits_GSE = jnp.array([[[2.0, 0.5, 0, -1], [95.0, 0, 0, 0]]])
    renormalized, over_selected = (
        route(logits_GSE, num_choices=2, capacity=2, gates=gates).gate_GSK[0]
        for gates in ("renormalized", "softmax_over_selected")
    )
    np.testing.assert_allclose(renormalized[0], over_selected[0], rtol=1e-6)
    # exp(-95) is below the smallest normal float32, which computers take for 0.
    np.testing.assert_allclose(renormalized[1], over_selected[1], atol=1e-37)


@pytest.mark.parametrize(
    ("score", "kept"),
    # Best expert of each pair: 9, 8, 7. Sums of two: 9, 15, 13.
    [("max", [0, 1, 2, 3]), ("top2_sum", [2, 3, 4, 5])],
)
def test_only_the_experts_of_the_best_groups_stay(score, kept):
    scores_GSE = jnp.array([[[9.0, 0, 7, 8, 6, 7]]])
    limited_GSE = limit(
        scores_GSE, num_choices=2, num_expert_groups=3, num_kept_groups=2, group_score=score
    )
    assert np.flatnonzero(np.isfinite(limited_GSE[0, 0])).tolist() == kept
    np.testing.assert_array_equal(
        limited_GSE[0, 0, np.array(kept)], scores_GSE[0, 0, np.array(kept)]
    )


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    num_kept_groups=st.integers(1, 3),
    group_score=st.sampled_from(["max", "top2_sum"]),
)
def test_the_groups_kept_are_the_oracles_even_with_ties(seed, num_kept_groups, group_score):
    scores_GSE = np.random.default_rng(seed).integers(-3, 3, (2, 5, 9)).astype(np.float32)
    limited_GSE = limit(
        scores_GSE,
        num_choices=2,
        num_expert_groups=3,
        num_kept_groups=num_kept_groups,
        group_score=group_score,
    )
    for g, s in np.ndindex(2, 5):
        allowed = eligible(scores_GSE[g, s], 3, num_kept_groups, group_score)
        assert set(np.flatnonzero(np.isfinite(limited_GSE[g, s]))) == allowed


def test_two_level_probabilities_are_products_of_the_two_gates():
    rng = np.random.default_rng(0)
    outer_GSA, inner_GSE = rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 3, 10))
    logits_GSE = two_level_logits(jnp.float32(outer_GSA), jnp.float32(inner_GSE))
    inner_GSAe = softmax(inner_GSE.reshape(2, 3, 2, 5))
    expected_GSE = (softmax(outer_GSA)[..., None] * inner_GSAe).reshape(2, 3, 10)
    np.testing.assert_allclose(jax.nn.softmax(logits_GSE), expected_GSE, rtol=1e-5)
    total_GS = jax.nn.logsumexp(logits_GSE, axis=-1)  # the outer gate's: the z-loss sees it
    np.testing.assert_allclose(total_GS, np.log(np.exp(outer_GSA).sum(-1)), rtol=1e-5, atol=1e-6)


def test_jitter_multiplies_each_number_by_its_own_draw_within_the_bounds():
    x_GSM = jnp.full((2, 7, 500), 3, jnp.bfloat16)
    noise_GSM = np.asarray(jittered(x_GSM, 0.1, key=jax.random.key(0))) / 3
    assert noise_GSM.dtype == np.float32
    assert noise_GSM.min() >= 0.9 and noise_GSM.max() < 1.1
    # Uniform on an interval of 0.2: mean 1, deviation 0.2 / sqrt(12); five deviations of each mean.
    assert abs(noise_GSM.mean() - 1) < 5 * 0.0577 / np.sqrt(7000)
    assert abs(noise_GSM.std() - 0.0577) < 0.002
    assert len(np.unique(noise_GSM)) > 6000


def test_no_jitter_is_the_identity_and_needs_no_key():
    x_GSM = jnp.ones((1, 2, 3), jnp.bfloat16)
    assert jittered(x_GSM, 0.0) is x_GSM
