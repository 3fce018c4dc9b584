"""The two worked examples of the routing semantics, every cell, and what the losses mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.routing.compiled import top2

PROBS_A = np.array(
    [
        [0.7, 0.2, 0.1],
        [0.6, 0.3, 0.1],
        [0.5, 0.1, 0.4],
        [0.2, 0.7, 0.1],
        [0.1, 0.3, 0.6],
        [0.4, 0.35, 0.25],
    ]
)
LOGITS_B = np.array(
    [[2, 1, 0], [2.5, 0, 1], [1.5, 1.4, 0], [3, 0.5, 1], [0, 2, 1], [1, 0, 0.9]], np.float32
)


def plan_a(**options):
    logits_GSE = jnp.log(jnp.asarray(PROBS_A, jnp.float32))[None]
    return top2(logits_GSE, capacity=2, second_policy="all", **options)


def plan_b(**options):
    return top2(jnp.asarray(LOGITS_B)[None], capacity=2, second_policy="all", **options)


def load_by_expert(mask_GSK, plan, choice: int) -> list[int]:
    experts = np.asarray(plan.expert_GSK)[..., choice][np.asarray(mask_GSK)[..., choice]]
    return np.bincount(experts, minlength=3).tolist()


def cells(plan) -> list[dict[int, float]]:
    """Per token of the only group: the weight of each expert that it reaches."""
    combine_SEC = np.asarray(plan.combine_GSEC())[0]
    dispatch_SEC = np.asarray(plan.dispatch_GSEC())[0]
    assert dispatch_SEC.dtype == bool
    return [
        {int(e): float(combine_EC[e].sum()) for e in np.flatnonzero(dispatch_EC.any(axis=1))}
        for combine_EC, dispatch_EC in zip(combine_SEC, dispatch_SEC, strict=True)
    ]


def assert_cells(plan, expected: list[dict[int, float]]) -> None:
    assert len(expected) == 6
    for token, (ours, theirs) in enumerate(zip(cells(plan), expected, strict=True)):
        assert ours == pytest.approx(theirs, abs=1e-6), f"token {token}"


# Example A. Kept in the cells are: first choices of tokens 0, 1 (expert 0), 3 (expert 1) and
# 4 (expert 2); second choices of token 0 (expert 1) and of token 2 (expert 2).
CELLS_A = [{0: 7 / 9, 1: 2 / 9}, {0: 6 / 9}, {2: 4 / 9}, {1: 7 / 9}, {2: 6 / 9}, {}]


@pytest.mark.parametrize(
    ("options", "first_wanted", "first_kept", "second_wanted", "second_kept", "cells", "aux"),
    [
        # share (4, 1, 1)/6, mean probability (2.5, 1.95, 1.55)/6
        pytest.param(
            {}, [4, 1, 1], [2, 1, 1], [1, 4, 1], [0, 1, 1], CELLS_A, 1.125, id="as published"
        ),
        pytest.param(
            {"renormalize_after_drop": True},
            *([4, 1, 1], [2, 1, 1], [1, 4, 1], [0, 1, 1]),
            [{0: 7 / 9, 1: 2 / 9}, {0: 1}, {2: 1}, {1: 1}, {2: 1}, {}],
            1.125,
            id="renormalised",
        ),
        # share (3, 1, 1)/5, mean probability (.42, .32, .26)
        pytest.param(
            {"token_mask_GS": np.array([[True, True, True, True, True, False]])},
            *([3, 1, 1], [2, 1, 1], [1, 3, 1], [0, 1, 1], CELLS_A, 1.104),
            id="last token is padding",
        ),
        # Tokens 0 to 3 count: share (3, 1, 0)/4, mean probability (.5, .325, .175).
        pytest.param(
            {"importance_GS": np.array([[1, 1, 1, 1, 0.5, 0]], np.float32)},
            *([3, 1, 0], [2, 1, 0], [1, 2, 2], [0, 1, 2]),
            [{0: 7 / 9, 1: 2 / 9}, {0: 6 / 9}, {2: 4 / 9}, {1: 7 / 9}, {2: 1}, {}],
            1.36875,
            id="importance",
        ),
    ],
)
def test_worked_example_a(
    options, first_wanted, first_kept, second_wanted, second_kept, cells, aux
):
    plan = plan_a(**options)
    assert load_by_expert(plan.assigned_GSK, plan, 0) == first_wanted
    assert load_by_expert(plan.kept_GSK, plan, 0) == first_kept
    assert load_by_expert(plan.assigned_GSK, plan, 1) == second_wanted
    assert load_by_expert(plan.kept_GSK, plan, 1) == second_kept
    assert_cells(plan, cells)
    assert plan.aux_loss == pytest.approx(aux, abs=1e-6)


@pytest.mark.parametrize(
    ("renormalize_after_drop", "row_sums"),
    [(False, [1, 0.6667, 0.4444, 0.7778, 0.6667, 0]), (True, [1, 1, 1, 1, 1, 0])],
)
def test_combine_rows_of_example_a_sum_to_the_weight_that_was_not_dropped(
    renormalize_after_drop, row_sums
):
    plan = plan_a(renormalize_after_drop=renormalize_after_drop)
    np.testing.assert_allclose(plan.combine_GSEC()[0].sum((1, 2)), row_sums, atol=5e-5)


def test_slots_of_example_a_are_counted_in_token_order_first_choices_first():
    plan = plan_a()
    occupant = {
        (int(plan.expert_GSK[0, s, k]), int(plan.slot_GSK[0, s, k])): (int(s), int(k))
        for s, k in np.argwhere(np.asarray(plan.kept_GSK[0]))
    }
    # (expert, slot): (token, choice); a second choice starts after the kept first choices.
    assert occupant == {
        (0, 0): (0, 0),
        (0, 1): (1, 0),
        (1, 0): (3, 0),
        (1, 1): (0, 1),
        (2, 0): (4, 0),
        (2, 1): (2, 1),
    }


T0, T1, T3 = {0: 0.731059, 1: 0.268941}, {0: 0.817574, 2: 0.182426}, {0: 0.880797, 2: 0.119203}


@pytest.mark.parametrize(
    ("renormalize_after_drop", "batch_priority", "expected"),
    [
        pytest.param(True, False, [T0, T1, {}, {2: 1}, {1: 1}, {}], id="after the drop"),
        pytest.param(
            *(False, False, [T0, T1, {}, {2: 0.119203}, {1: 0.731059}, {}]), id="before the drop"
        ),
        pytest.param(True, True, [{1: 1}, T1, {}, T3, {1: 1}, {}], id="after, by priority"),
        pytest.param(
            *(False, True, [{1: 0.268941}, T1, {}, T3, {1: 0.731059}, {}]), id="before, by priority"
        ),
    ],
)
def test_worked_example_b(renormalize_after_drop, batch_priority, expected):
    plan = plan_b(renormalize_after_drop=renormalize_after_drop, batch_priority=batch_priority)
    assert_cells(plan, expected)
    assert plan.aux_loss == pytest.approx(1.490935, abs=2e-6)
    assert plan.z_loss == pytest.approx(6.311128, abs=5e-6)


def test_the_oracle_itself_gives_the_worked_examples():
    plan = oracle.top2(np.log(PROBS_A)[None], capacity=2)
    assert plan.aux_loss == pytest.approx(1.125, abs=1e-12)
    np.testing.assert_allclose(
        plan.gate_GSK.sum(-1)[0], np.array([9, 6, 4, 7, 6, 0]) / 9, atol=1e-12
    )
    plan = oracle.top2(LOGITS_B[None], capacity=2, batch_priority=True)
    assert plan.aux_loss == pytest.approx(1.490935, abs=1e-6)
    assert plan.z_loss == pytest.approx(6.311128, abs=1e-6)
    np.testing.assert_allclose(plan.gate_GSK[0, :, 0], [0, T1[0], 0, T3[0], 0.731059, 0], atol=1e-6)
    np.testing.assert_allclose(plan.gate_GSK[0, :, 1], [T0[1], T1[2], 0, T3[2], 0, 0], atol=1e-6)


def test_aux_loss_is_1_at_balance():
    # Every token has its own favourite, so share and mean probability are both 1/5.
    logits_GSE = np.stack([np.roll([3.0, 1, 0, -1, 0], s) for s in range(5)])[None]
    assert top2(logits_GSE, capacity=2, second_policy="all").aux_loss == pytest.approx(1, abs=1e-6)


def test_aux_loss_is_the_number_of_experts_at_collapse():
    logits_GSE = np.tile(np.array([0.0, 0, 60, 0, 0]), (1, 5, 1))
    assert top2(logits_GSE, capacity=2, second_policy="all").aux_loss == pytest.approx(5, abs=1e-5)


def test_aux_loss_is_the_mean_of_the_groups_and_not_the_loss_of_their_mean():
    # Each group collapses onto its own expert: 5 each, although together they look balanced.
    logits_GSE = 60.0 * np.eye(5)[:, None, :].repeat(7, axis=1)
    assert top2(logits_GSE, capacity=2, second_policy="all").aux_loss == pytest.approx(5, abs=1e-5)


def test_z_loss_is_the_mean_over_tokens_whatever_the_group():
    # One real token in the first group, two in the second: (1 + 4 + 9) / 3.
    logsumexp_GS = np.array([[1.0, 50, 50], [2, 3, 50]])
    logits_GSE = np.log(PROBS_A[None, :3].repeat(2, axis=0)) + logsumexp_GS[..., None]
    mask_GS = np.array([[True, False, False], [True, True, False]])
    plan = top2(logits_GSE, capacity=2, second_policy="all", token_mask_GS=mask_GS)
    assert plan.z_loss == pytest.approx(14 / 3, rel=1e-6)


def slot_rule_example(slot_rule: str):
    # Token 0 gives its second expert up (2*g2 is 4e-9), token 1 certainly wants it (2*g2 is 1):
    # both seconds are expert 1, which has a single slot and is nobody's first choice.
    logits_GSE = jnp.array([[[30.0, 10, 0], [3, 3, 0]]])
    return top2(logits_GSE, capacity=1, key=jax.random.key(0), slot_rule=slot_rule)


def test_by_the_rule_of_the_code_a_second_choice_given_up_takes_no_slot():
    plan = slot_rule_example("code")
    assert plan.assigned_GSK.tolist() == [[[True, False], [True, True]]]
    assert plan.kept_GSK.tolist() == [[[True, False], [False, True]]]
    assert plan.slot_GSK[0, 1, 1] == 0
    np.testing.assert_allclose(plan.gate_GSK, [[[1, 0], [0, 0.5]]], atol=1e-6)


def test_by_the_rule_of_the_paper_a_second_choice_given_up_still_takes_its_slot():
    plan = slot_rule_example("paper")
    assert plan.assigned_GSK.tolist() == [[[True, False], [True, True]]]
    assert plan.kept_GSK.tolist() == [[[True, False], [False, False]]]
    np.testing.assert_allclose(plan.gate_GSK, [[[1, 0], [0, 0]]], atol=1e-6)
