"""`top2` beside the oracle on random groups: decisions, gates, losses and their gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moe import routing
from tests import oracle
from tests.routing.compiled import assert_same_plan, top2

G, S, E, C = 3, 13, 5, 4  # 26 choices for 20 slots in each group, so some are always dropped


def random_case(seed: int, *, partly_important: bool):
    """Logits, token mask and importance of three groups; in some cases a group is all padding."""
    rng = np.random.default_rng(seed)
    favour_E = [2, 0, 1, 0, -1]  # so that first choices alone overfill an expert
    logits_GSE = rng.normal(favour_E, 2, size=(G, S, E)).astype(np.float32)
    levels = [0, 0.3, 1] if partly_important else [0, 1]
    odds = [0.1, 0.2, 0.7] if partly_important else [0.1, 0.9]
    importance_GS = rng.choice(levels, p=odds, size=(G, S)).astype(np.float32)
    mask_GS = rng.random((G, S)) < 0.9
    mask_GS[1] &= seed % 2 == 0
    return logits_GSE, mask_GS, importance_GS


def expected_plan(plan, logits_GSE, policy: str, **options):
    """The oracle's plan, told what the product drew at random."""
    second_wanted_GS = second_expert_GS = None
    if policy in ("random", "none"):
        second_wanted_GS = np.asarray(plan.assigned_GSK)[..., 1]
    if policy == "none":
        assert not second_wanted_GS.any()
    if policy == "sampling":
        second_expert_GS = np.asarray(plan.expert_GSK)[..., 1]
    return oracle.top2(
        logits_GSE, second_wanted_GS=second_wanted_GS, second_expert_GS=second_expert_GS, **options
    )


@pytest.mark.parametrize(
    ("policy", "slot_rule", "renormalize_after_drop", "batch_priority"),
    [
        ("all", "code", False, False),
        ("all", "code", True, True),
        ("all", "paper", False, True),
        ("random", "code", False, False),
        ("random", "code", True, False),
        ("random", "paper", False, False),
        ("random", "paper", True, True),
        ("sampling", "code", False, False),
        ("sampling", "paper", True, True),
        ("none", "code", False, False),
        ("none", "paper", False, True),
    ],
)
def test_plan_and_its_gradient_are_the_oracles(
    policy, slot_rule, renormalize_after_drop, batch_priority
):
    options = {
        "capacity": C,
        "slot_rule": slot_rule,
        "renormalize_after_drop": renormalize_after_drop,
        "batch_priority": batch_priority,
    }
    weight_GSK = np.random.default_rng(0).normal(size=(G, S, 2))

    @partial(jax.value_and_grad, has_aux=True)
    def objective(logits_GSE, key, mask_GS, importance_GS):
        plan = routing.top2(
            logits_GSE,
            second_policy=policy,
            key=key,
            token_mask_GS=mask_GS,
            importance_GS=importance_GS,
            **options,
        )
        return jnp.sum(weight_GSK * plan.gate_GSK) + plan.aux_loss + 0.1 * plan.z_loss, plan

    objective = jax.jit(objective)
    for seed in range(3):
        logits_GSE, mask_GS, importance_GS = random_case(seed, partly_important=policy != "none")
        (_, plan), grad_GSE = objective(logits_GSE, jax.random.key(seed), mask_GS, importance_GS)
        masks = {"token_mask_GS": mask_GS, "importance_GS": importance_GS}
        expected = expected_plan(plan, logits_GSE, policy, **options, **masks)
        assert_same_plan(plan, expected)

        def frozen_objective(logits_GSE, choices=expected.choices):
            gate_GSK = oracle.gates(
                oracle.softmax(logits_GSE), choices, renormalize_after_drop=renormalize_after_drop
            )
            aux_loss = oracle.aux_loss(oracle.softmax(logits_GSE), choices.importance_GS)
            z_loss = oracle.z_loss(logits_GSE, choices.importance_GS)
            return np.sum(weight_GSK * gate_GSK) + aux_loss + 0.1 * z_loss

        expected_GSE = oracle.gradient(frozen_objective, logits_GSE)
        # Sums of terms of size 1 that partly cancel: absolute float32 rounding.
        np.testing.assert_allclose(grad_GSE, expected_GSE, rtol=1e-5, atol=1e-6)


def test_without_mask_or_importance_every_token_counts_fully():
    logits_GSE, _, _ = random_case(0, partly_important=False)
    plan = top2(logits_GSE, capacity=C, second_policy="all")
    assert plan.assigned_GSK.all()
    assert_same_plan(plan, oracle.top2(logits_GSE, capacity=C))
    assert (plan.num_experts, plan.capacity) == (E, C)


def test_random_is_the_default_policy_and_the_codes_the_default_slot_rule():
    logits_GSE, _, _ = random_case(0, partly_important=False)
    key = jax.random.key(0)
    named = top2(logits_GSE, capacity=C, second_policy="random", slot_rule="code", key=key)
    assert not named.assigned_GSK.all()
    unnamed = top2(logits_GSE, capacity=C, key=key)
    for field in ["assigned_GSK", "kept_GSK", "gate_GSK"]:
        np.testing.assert_array_equal(getattr(named, field), getattr(unnamed, field))


def test_one_token_and_two_experts_is_the_smallest_routing():
    logits_GSE = np.array([[[0.5, -1]]], np.float32)
    plan = top2(logits_GSE, capacity=1, second_policy="all")
    assert_same_plan(plan, oracle.top2(logits_GSE, capacity=1))


@settings(max_examples=50, deadline=None)
@given(
    quarters_GSE=hnp.arrays(np.int8, (2, 7, 3), elements=st.integers(-6, 6)),
    importance_GS=hnp.arrays(np.float32, (2, 7), elements=st.sampled_from([0, 0.5, 1, 1])),
)
def test_plan_is_the_oracles_with_ties_everywhere(quarters_GSE, importance_GS):
    logits_GSE = quarters_GSE.astype(np.float32) / 4
    plan = top2(logits_GSE, capacity=3, second_policy="all", importance_GS=importance_GS)
    assert_same_plan(plan, oracle.top2(logits_GSE, capacity=3, importance_GS=importance_GS))


def test_dense_views_hold_each_kept_choice_in_its_cell_and_nothing_else():
    logits_GSE, mask_GS, importance_GS = random_case(2, partly_important=True)
    masks = {"token_mask_GS": mask_GS, "importance_GS": importance_GS}
    plan = top2(logits_GSE, capacity=C, second_policy="all", **masks)
    expected = oracle.top2(logits_GSE, capacity=C, **masks)
    combine_GSEC = np.zeros((G, S, E, C))
    dispatch_GSEC = np.zeros((G, S, E, C), bool)
    for g, s, k in np.argwhere(expected.choices.kept_GSK):
        cell = g, s, expected.choices.expert_GSK[g, s, k], expected.choices.slot_GSK[g, s, k]
        combine_GSEC[cell] = expected.gate_GSK[g, s, k]
        dispatch_GSEC[cell] = True
    assert plan.combine_GSEC().dtype == jnp.float32
    assert plan.dispatch_GSEC().dtype == jnp.bool
    np.testing.assert_array_equal(plan.dispatch_GSEC(), dispatch_GSEC)
    np.testing.assert_allclose(plan.combine_GSEC(), combine_GSEC, rtol=3e-6)


def test_load_counts_the_choices_of_each_expert_over_real_tokens():
    logits_GSE, mask_GS, importance_GS = random_case(2, partly_important=True)
    masks = {"token_mask_GS": mask_GS, "importance_GS": importance_GS}
    load = top2(logits_GSE, capacity=C, second_policy="all", **masks).load()
    expected = oracle.top2(logits_GSE, capacity=C, **masks)
    choices = expected.choices
    assigned_E, kept_E = (
        np.bincount(choices.expert_GSK[mask_GSK], minlength=E)
        for mask_GSK in (choices.assigned_GSK, choices.kept_GSK)
    )
    assert (assigned_E > kept_E).any()
    np.testing.assert_array_equal(load.assigned_E, assigned_E)
    np.testing.assert_array_equal(load.kept_E, kept_E)
    np.testing.assert_array_equal(load.dropped_E, assigned_E - kept_E)
    real_probs_TE = expected.probs_GSE[choices.importance_GS > 0]
    assert load.num_tokens == len(real_probs_TE)
    np.testing.assert_allclose(load.mean_prob_E, real_probs_TE.mean(0), rtol=3e-6)
    entropy_T = -(real_probs_TE * np.log(real_probs_TE)).sum(1)
    np.testing.assert_allclose(load.entropy, entropy_T.mean(), rtol=3e-6)
