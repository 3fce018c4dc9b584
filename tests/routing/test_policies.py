"""What the second-choice policies draw: right on average, the same for the same key."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.routing.compiled import top2

PROBS_E = np.array([0.12, 0.5, 0.08, 0.25, 0.05], np.float32)


def two_experts(g2: float, num_tokens: int):
    """A group whose tokens all have the normalised second gate `g2`."""
    return np.log(np.tile([[1 - g2, g2]], (num_tokens, 1)))


def assert_rate(hits, probability: float) -> None:
    """Within 4 standard errors: by chance one seed in 16,000 fails, and the seed is fixed."""
    standard_error = np.sqrt(probability * (1 - probability) / hits.size)
    assert abs(hits.mean() - probability) <= 4 * standard_error + 1e-9


def test_random_keeps_the_second_expert_with_probability_twice_its_gate():
    gates, num_tokens = [0.01, 0.05, 0.125, 0.25, 0.4, 0.5], 3001
    logits_GSE = np.stack([two_experts(g2, num_tokens) for g2 in gates])
    plan = top2(logits_GSE, capacity=num_tokens, key=jax.random.key(11))
    assert plan.assigned_GSK[..., 0].all()
    for group, g2 in enumerate(gates):
        assert_rate(np.asarray(plan.assigned_GSK[group, :, 1]), min(1, 2 * g2))
    # Ample capacity: the policy alone decides, and leaves the first gate as it was.
    np.testing.assert_array_equal(plan.kept_GSK, plan.assigned_GSK)
    np.testing.assert_allclose(plan.gate_GSK[:, 0, 0], 1 - np.array(gates), rtol=1e-5)
    np.testing.assert_allclose(
        plan.gate_GSK[..., 1], plan.kept_GSK[..., 1] * np.array(gates)[:, None], rtol=1e-5
    )


def test_random_draws_are_independent_of_the_token_and_its_neighbour():
    logits_GSE = np.tile(two_experts(0.25, 3001), (6, 1, 1))
    plan = top2(logits_GSE, capacity=3001, key=jax.random.key(3))
    kept_GS = np.asarray(plan.kept_GSK[..., 1])
    assert_rate(kept_GS[:, :1500], 0.5)
    assert_rate(kept_GS[:, 1500:], 0.5)
    assert_rate(kept_GS[:, 1:] & kept_GS[:, :-1], 0.25)
    assert_rate(kept_GS[1:] & kept_GS[:-1], 0.25)


def test_sampling_draws_the_second_expert_from_the_probabilities_without_the_first():
    num_tokens = 4001
    logits_GSE = np.tile(np.log(PROBS_E), (1, num_tokens, 1))
    plan = top2(logits_GSE, capacity=num_tokens, second_policy="sampling", key=jax.random.key(5))
    assert plan.assigned_GSK.all()
    first_S, second_S = np.asarray(plan.expert_GSK[0]).T
    assert (first_S == 1).all()
    for e in range(5):
        assert_rate(second_S == e, 0.0 if e == 1 else PROBS_E[e] / 0.5)
    # Gates are normalised over the expert drawn, not over the second best.
    p2_S = PROBS_E[second_S]
    np.testing.assert_allclose(plan.gate_GSK[0, :, 1], p2_S / (0.5 + p2_S), rtol=1e-5)


def test_sampling_never_picks_the_first_expert_even_when_the_others_have_no_probability():
    logits_GSE = np.tile(np.array([0, 200.0, 0, 0, 0]), (1, 4001, 1))
    plan = top2(logits_GSE, capacity=4001, second_policy="sampling", key=jax.random.key(6))
    assert (plan.expert_GSK[..., 0] == 1).all()
    second_S = np.asarray(plan.expert_GSK[0, :, 1])
    assert_rate(second_S == 1, 0.0)
    assert_rate(second_S == 4, 0.25)


@pytest.mark.parametrize("policy", ["random", "sampling"])
def test_same_key_same_plan_another_key_another_plan(policy):
    logits_GSE = np.random.default_rng(0).normal(size=(3, 13, 5))
    plans = [
        top2(logits_GSE, capacity=4, second_policy=policy, key=jax.random.key(seed))
        for seed in (0, 0, 1)
    ]
    same, other = (
        all(
            np.array_equal(getattr(plans[0], field), getattr(plan, field))
            for field in ["expert_GSK", "assigned_GSK", "kept_GSK", "gate_GSK"]
        )
        for plan in plans[1:]
    )
    assert same
    assert not other
    # Chance reaches the second choices only: first choices and losses are the same.
    np.testing.assert_array_equal(plans[0].kept_GSK[..., 0], plans[2].kept_GSK[..., 0])
    assert plans[0].aux_loss == plans[2].aux_loss
    assert plans[0].z_loss == plans[2].z_loss


@pytest.mark.parametrize("policy", ["random", "sampling"])
def test_groups_with_the_same_logits_draw_differently(policy):
    logits_GSE = np.tile(np.log(PROBS_E), (3, 13, 1))
    plan = top2(logits_GSE, capacity=4, second_policy=policy, key=jax.random.key(0))
    draws = plan.assigned_GSK if policy == "random" else plan.expert_GSK
    first, second, third = np.asarray(draws[..., 1])
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)
    assert not np.array_equal(first, third)


def test_none_is_the_first_expert_with_its_normalised_gate():
    logits_GSE = np.tile(np.log(PROBS_E), (1, 13, 1))
    plan = top2(logits_GSE, capacity=13, second_policy="none")
    assert plan.kept_GSK[..., 0].all()
    assert not plan.assigned_GSK[..., 1].any()
    np.testing.assert_allclose(plan.gate_GSK[..., 0], 0.5 / 0.75, rtol=1e-6)


def test_random_never_gives_up_the_one_choice_of_a_token_of_little_importance():
    logits_GSE = two_experts(0.01, 501)[None]
    importance_GS = np.full((1, 501), 0.5, np.float32)
    plan = top2(logits_GSE, capacity=501, key=jax.random.key(0), importance_GS=importance_GS)
    assert not plan.assigned_GSK[..., 0].any()
    assert plan.kept_GSK[..., 1].all()
    assert (plan.expert_GSK[..., 1] == 0).all()
    assert (plan.gate_GSK[..., 1] == 1).all()
