"""Sinkhorn: a balanced assignment in training, plain top-k in evaluation."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing import sinkhorn
from moe.routing.sinkhorn import transport_plan
from tests import oracle
from tests import oracle_other_routers as others

G, S, E, C = 3, 13, 5, 4
N = 8  # iterations

route = jax.jit(sinkhorn, static_argnames=("capacity", "num_choices", "num_iterations", "gating"))
transport = jax.jit(transport_plan, static_argnames="num_iterations")


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits with a favourite, and a mask that leaves one group without tokens in some cases."""
    rng = np.random.default_rng(seed)
    logits_GSE = rng.normal([2, 0, 1, 0, -1], 2, size=(G, S, E)).astype(np.float32)
    mask_GS = rng.random((G, S)) < 0.8
    mask_GS[1] &= seed % 2 == 0
    return logits_GSE, mask_GS


@pytest.mark.parametrize("num_iterations", [1, 3, 20])
def test_the_transport_plan_is_the_oracles(num_iterations):
    logits_GSE, mask_GS = random_case(0)
    found = np.exp(transport(logits_GSE, mask_GS, num_iterations=num_iterations))
    for g in range(G):
        real = mask_GS[g]
        expected = others.transport(logits_GSE[g, real], num_iterations)
        # Rounding of logarithms of size 10.
        np.testing.assert_allclose(found[g, real], expected, rtol=3e-5, atol=1e-7)


def test_rows_sum_to_1_and_columns_converge_to_an_equal_share():
    logits_GSE, mask_GS = random_case(0)
    errors = []
    for num_iterations in (1, 8, 64):
        plan_GSE = np.exp(transport(logits_GSE, mask_GS, num_iterations=num_iterations))
        np.testing.assert_allclose(plan_GSE.sum(-1), 1, rtol=1e-5)
        column_GE = (plan_GSE * mask_GS[..., None]).sum(1)
        share_G1 = mask_GS.sum(1, keepdims=True) / E
        errors.append(np.abs(column_GE / share_G1 - 1).max())
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 0.05 and errors[2] < 1e-4


def test_logits_of_a_hundred_and_impossible_experts_stay_finite():
    logits_GSE, mask_GS = random_case(1)
    logits_GSE = logits_GSE * 100
    logits_GSE[0, :, 2] = -np.inf
    plan_GSE = np.exp(transport(logits_GSE, mask_GS, num_iterations=N))
    assert np.isfinite(plan_GSE).all()
    assert not plan_GSE[0, :, 2].any()


@pytest.mark.parametrize(
    ("gating", "num_choices", "num_iterations"),
    [("sigmoid", 1, N), ("softmax", 2, N), ("sigmoid", 2, 0), ("softmax", 5, 1)],
)
def test_plan_and_its_gradient_are_the_oracles(gating, num_choices, num_iterations):
    weight_GSK = np.random.default_rng(9).normal(size=(G, S, num_choices))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def objective(logits_GSE, mask_GS):
        plan = sinkhorn(
            logits_GSE,
            capacity=C,
            num_choices=num_choices,
            num_iterations=num_iterations,
            gating=gating,
            token_mask_GS=mask_GS,
        )
        return jnp.sum(weight_GSK * plan.gate_GSK) + 0.1 * plan.z_loss, plan

    for seed in range(3):
        logits_GSE, mask_GS = random_case(seed)
        (_, plan), grad_GSE = objective(logits_GSE, mask_GS)
        expert_GSK = others.assigned_experts(logits_GSE, mask_GS, num_choices, num_iterations)
        slot_GSK, kept_GSK = others.queue(expert_GSK, mask_GS, C)
        np.testing.assert_array_equal(np.asarray(plan.expert_GSK)[mask_GS], expert_GSK[mask_GS])
        np.testing.assert_array_equal(np.asarray(plan.slot_GSK)[mask_GS], slot_GSK[mask_GS])
        np.testing.assert_array_equal(plan.kept_GSK, kept_GSK)

        def gates(logits_GSE, expert_GSK=expert_GSK, kept_GSK=kept_GSK):
            function = oracle.softmax if gating == "softmax" else others.sigmoid
            return np.take_along_axis(function(logits_GSE), expert_GSK, -1) * kept_GSK

        # An exponential, a sum and a quotient: a few units in the seventh digit.
        expected_GSK = gates(logits_GSE.astype(np.float64))
        np.testing.assert_allclose(plan.gate_GSK, expected_GSK, rtol=3e-6, atol=1e-7)
        assert plan.aux_loss == 0

        def frozen_objective(logits_GSE, gates=gates, mask_GS=mask_GS):
            z_loss = oracle.z_loss(logits_GSE, mask_GS)
            return np.sum(weight_GSK * gates(logits_GSE)) + 0.1 * z_loss

        # Sums of terms of size 1 that partly cancel: absolute float32 rounding.
        expected_GSE = oracle.gradient(frozen_objective, logits_GSE)
        np.testing.assert_allclose(grad_GSE, expected_GSE, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_loads_differ_by_a_tenth_where_greedy_ones_differ_by_more_than_their_mean(spread):
    rng = np.random.default_rng(5)
    favour_E = rng.normal(size=8)
    logits_GSE = (spread * (rng.normal(size=(4, 256, 8)) + favour_E)).astype(np.float32)

    def coefficient_of_variation(num_iterations):
        plan = route(logits_GSE, capacity=256, num_iterations=num_iterations)
        load_GE = np.stack([np.bincount(e, minlength=8) for e in plan.expert_GSK[..., 0]])
        return (load_GE.std(1) / load_GE.mean(1)).max()

    # The transport plan is balanced, its largest entries only nearly: tokens alike go together.
    assert coefficient_of_variation(0) > 0.8
    assert coefficient_of_variation(N) < 0.2


def test_padding_changes_nothing_be_it_not_a_number():
    logits_GSE, _ = random_case(0)
    plan = route(logits_GSE, capacity=C, num_iterations=N)
    longer = np.full((G, 2 * S, E), np.nan, np.float32)
    longer[:, 1::2] = logits_GSE
    mask_GS = np.tile(np.arange(2 * S) % 2 == 1, (G, 1))
    padded = route(longer, capacity=C, num_iterations=N, token_mask_GS=mask_GS)
    for field in ["expert_GSK", "slot_GSK", "kept_GSK"]:
        np.testing.assert_array_equal(getattr(padded, field)[:, 1::2], getattr(plan, field))
    np.testing.assert_allclose(padded.gate_GSK[:, 1::2], plan.gate_GSK, rtol=1e-6)
    np.testing.assert_allclose(padded.z_loss, plan.z_loss, rtol=1e-6)
    assert not padded.assigned_GSK[:, ::2].any() and not padded.gate_GSK[:, ::2].any()


def test_groups_do_not_see_one_another():
    (logits_GSE, _), (others_GSE, _) = random_case(0), random_case(1)
    plan = route(logits_GSE, capacity=C, num_iterations=N)
    mixed_GSE = np.stack([logits_GSE[0], *others_GSE[1:]])
    changed = route(mixed_GSE, capacity=C, num_iterations=N)
    for field in ["expert_GSK", "slot_GSK", "gate_GSK", "kept_GSK"]:
        np.testing.assert_array_equal(getattr(changed, field)[0], getattr(plan, field)[0])


def test_permuting_the_experts_permutes_the_plan():
    logits_GSE, mask_GS = random_case(2)
    order = np.array([3, 1, 4, 0, 2])
    plan, permuted = (
        route(x_GSE, capacity=C, num_choices=2, num_iterations=N, token_mask_GS=mask_GS)
        for x_GSE in (logits_GSE, logits_GSE[..., order])
    )
    np.testing.assert_array_equal(
        order[np.asarray(permuted.expert_GSK)][mask_GS], np.asarray(plan.expert_GSK)[mask_GS]
    )
    np.testing.assert_array_equal(permuted.kept_GSK, plan.kept_GSK)
    np.testing.assert_allclose(permuted.gate_GSK, plan.gate_GSK, rtol=1e-6)


def test_a_slot_holds_at_most_one_token():
    for seed in range(4):
        logits_GSE, mask_GS = random_case(seed)
        plan = route(logits_GSE, capacity=C, num_choices=2, num_iterations=N, token_mask_GS=mask_GS)
        assert np.asarray(plan.dispatch_GSEC()).sum(1).max() <= 1


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("num_iterations", [0, N])
def test_fewer_tokens_than_experts_find_their_slots(num_tokens, num_iterations):
    logits_GSE = np.random.default_rng(0).normal(size=(1, num_tokens, 13)).astype(np.float32)
    plan = route(logits_GSE, capacity=num_tokens, num_choices=2, num_iterations=num_iterations)
    assert plan.kept_GSK.all()
    if num_iterations == 0:
        best_GSK = np.argsort(-logits_GSE, axis=-1)[..., :2]
        np.testing.assert_array_equal(plan.expert_GSK, best_GSK)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"num_choices": 6}, ["num_choices=6", "num_experts=5"], id="K > E"),
        pytest.param({"capacity": 0}, ["capacity", "0"], id="no capacity"),
        pytest.param({"num_iterations": -1}, ["num_iterations", "-1"], id="no iterations"),
        pytest.param({"gating": "tanh"}, ["gating", "tanh", "sigmoid"], id="unknown gating"),
        pytest.param(
            {"token_mask_GS": np.ones((13, 3), bool)},
            ["token_mask_GS", "(13, 3)", "(3, 13"],
            id="mask's shape",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(options, words):
    logits_GSE, _ = random_case(0)
    with pytest.raises(UserError) as error:
        sinkhorn(logits_GSE, **({"capacity": C, "num_iterations": N} | options))
    for word in words:
        assert word in str(error.value)
