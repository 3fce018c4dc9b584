"""Task routing: all tokens of a task go to the same experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing import task_routing
from tests import oracle

G, S, E, C, TASKS = 2, 11, 5, 4, 3
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, TASKS, (G, S)).astype(np.int32)
MASK = RNG.random((G, S)) < 0.8
TABLE = RNG.normal(size=(TASKS, E)).astype(np.float32)

route = jax.jit(task_routing, static_argnames=("capacity", "num_choices"))


def test_plan_and_its_gradient_are_those_of_top2_on_the_rows_of_the_table():
    weight_GSK = RNG.normal(size=(G, S, 2))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def objective(table_task_E):
        plan = task_routing(IDS, table_task_E, capacity=C, token_mask_GS=MASK)
        return jnp.sum(weight_GSK * plan.gate_GSK) + plan.aux_loss + 0.1 * plan.z_loss, plan

    (_, plan), grad_task_E = objective(TABLE)
    expected = oracle.top2(TABLE[IDS], capacity=C, token_mask_GS=MASK)
    choices = expected.choices
    assert choices.assigned_GSK.sum() > choices.kept_GSK.sum()
    np.testing.assert_array_equal(plan.assigned_GSK, choices.assigned_GSK)
    np.testing.assert_array_equal(plan.kept_GSK, choices.kept_GSK)
    np.testing.assert_array_equal(
        np.asarray(plan.expert_GSK)[MASK], np.asarray(choices.expert_GSK)[MASK]
    )
    np.testing.assert_array_equal(np.asarray(plan.slot_GSK)[MASK], choices.slot_GSK[MASK])
    np.testing.assert_allclose(plan.gate_GSK, expected.gate_GSK, rtol=3e-6)

    def frozen_objective(table_task_E):
        logits_GSE = table_task_E[IDS]
        probs_GSE = oracle.softmax(logits_GSE)
        aux_loss = oracle.aux_loss(probs_GSE, choices.importance_GS)
        z_loss = oracle.z_loss(logits_GSE, choices.importance_GS)
        return np.sum(weight_GSK * oracle.gates(probs_GSE, choices)) + aux_loss + 0.1 * z_loss

    # Sums of terms of size 1 that partly cancel: absolute float32 rounding.
    expected_task_E = oracle.gradient(frozen_objective, TABLE)
    np.testing.assert_allclose(grad_task_E, expected_task_E, rtol=1e-5, atol=2e-6)


def test_all_tokens_of_a_task_have_the_same_experts_and_gates():
    plan = route(IDS, TABLE, capacity=S, num_choices=3)
    for task in range(TASKS):
        for field in [plan.expert_GSK, plan.gate_GSK]:
            rows = np.asarray(field)[task == IDS]
            np.testing.assert_array_equal(rows, np.broadcast_to(rows[0], rows.shape))
    np.testing.assert_allclose(plan.gate_GSK.sum(-1), 1, rtol=1e-6)


def test_with_one_choice_the_gate_is_the_probability_so_that_it_learns():
    def mean_gate(table_task_E):
        return jnp.mean(task_routing(IDS, table_task_E, capacity=S, num_choices=1).gate_GSK)

    plan = route(IDS, TABLE, capacity=S, num_choices=1)
    np.testing.assert_allclose(plan.gate_GSK[..., 0], oracle.softmax(TABLE[IDS]).max(-1), rtol=3e-6)
    assert np.abs(jax.jit(jax.grad(mean_gate))(TABLE)).max() > 0.01


def test_a_task_that_fills_a_group_fills_its_experts_alone():
    one_task = np.zeros((1, S), np.int32)
    plan = route(one_task, TABLE, capacity=C)
    # Two experts of four slots for eleven tokens: 14 of 22 choices are dropped.
    assert int(plan.load().dropped_E.sum()) == 22 - 2 * C


def test_permuting_the_experts_permutes_the_plan():
    order = np.array([3, 1, 4, 0, 2])
    plan, permuted = (route(IDS, table, capacity=C) for table in (TABLE, TABLE[:, order]))
    np.testing.assert_array_equal(order[np.asarray(permuted.expert_GSK)], plan.expert_GSK)
    np.testing.assert_array_equal(permuted.slot_GSK, plan.slot_GSK)
    # Sums over experts run in another order: the last digit may differ.
    np.testing.assert_allclose(permuted.gate_GSK, plan.gate_GSK, rtol=1e-6)
    np.testing.assert_allclose(permuted.aux_loss, plan.aux_loss, rtol=1e-6)


def test_padding_changes_nothing_and_may_have_any_id():
    plan = route(IDS, TABLE, capacity=C)
    longer = np.full((G, 2 * S), -77, np.int32)
    longer[:, 1::2] = IDS
    mask_GS = np.tile(np.arange(2 * S) % 2 == 1, (G, 1))
    padded = task_routing(longer, TABLE, capacity=C, token_mask_GS=mask_GS)
    for field in ["expert_GSK", "slot_GSK", "kept_GSK"]:
        np.testing.assert_array_equal(getattr(padded, field)[:, 1::2], getattr(plan, field))
    # Another length is another order of summation, no more.
    np.testing.assert_allclose(padded.gate_GSK[:, 1::2], plan.gate_GSK, rtol=1e-6)
    np.testing.assert_allclose(padded.aux_loss, plan.aux_loss, rtol=1e-6)
    np.testing.assert_allclose(padded.z_loss, plan.z_loss, rtol=1e-6)
    assert not padded.gate_GSK[:, ::2].any() and not padded.assigned_GSK[:, ::2].any()


@pytest.mark.parametrize("wrong", [-1, TASKS])
def test_an_unknown_task_is_an_error_where_it_can_be_seen_and_not_a_number_where_it_cannot(wrong):
    ids_GS = IDS.copy()
    ids_GS[1, 2] = wrong
    with pytest.raises(UserError, match=rf"got .*{wrong}.*num_tasks=3"):
        task_routing(ids_GS, TABLE, capacity=S)
    gate_GSK = np.asarray(route(ids_GS, TABLE, capacity=S).gate_GSK)
    unknown_GS = np.isnan(gate_GSK).any(-1)
    assert unknown_GS[1, 2] and unknown_GS.sum() == 1


@pytest.mark.parametrize("num_tokens", [1, 3, 7])
def test_fewer_tokens_than_experts_find_their_slots(num_tokens):
    table_task_E = np.random.default_rng(1).normal(size=(TASKS, 13)).astype(np.float32)
    plan = route(IDS[:1, :num_tokens], table_task_E, capacity=num_tokens)
    assert plan.kept_GSK.all()
    np.testing.assert_allclose(plan.combine_GSEC().sum((2, 3)), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("ids_GS", "table", "options", "words"),
    [
        pytest.param(None, TABLE, {}, ["ids", "None", "ids_BL"], id="no ids"),
        pytest.param(IDS * 1.0, TABLE, {}, ["ids_GS", "float64"], id="ids that are not integers"),
        pytest.param(IDS, TABLE[0], {}, ["logits_task_E", "(5,)"], id="not a table"),
        pytest.param(
            IDS, TABLE, {"num_choices": 6}, ["num_choices=6", "num_experts=5"], id="K > E"
        ),
        pytest.param(IDS, TABLE, {"capacity": 0}, ["capacity", "0"], id="no capacity"),
        pytest.param(
            *(IDS, TABLE, {"token_mask_GS": MASK.T}, ["token_mask_GS", "(11, 2)"]),
            id="mask's shape",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(ids_GS, table, options, words):
    with pytest.raises(UserError) as error:
        task_routing(ids_GS, table, **({"capacity": C} | options))
    for word in words:
        assert word in str(error.value)
