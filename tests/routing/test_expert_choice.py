"""Expert choice: every expert has the same load, whatever the tokens want."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import routing
from moe.errors import UserError
from moe.routing import expert_choice
from tests import oracle
from tests import oracle_other_routers as others

G, S, E = 3, 11, 5

route = jax.jit(expert_choice, static_argnames="capacity")


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits with a favourite, and a mask that leaves one group without tokens in some cases."""
    rng = np.random.default_rng(seed)
    logits_GSE = rng.normal([2, 0, 1, 0, -1], 2, size=(G, S, E)).astype(np.float32)
    mask_GS = rng.random((G, S)) < 0.7
    mask_GS[1] &= seed % 2 == 0
    return logits_GSE, mask_GS


@pytest.mark.parametrize("capacity", [1, 4, S])
def test_plan_and_its_gradient_are_the_oracles(capacity):
    weight_GSK = np.random.default_rng(9).normal(size=(G, S, E))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def objective(logits_GSE, mask_GS):
        plan = expert_choice(logits_GSE, capacity=capacity, token_mask_GS=mask_GS)
        return jnp.sum(weight_GSK * plan.gate_GSK) + 0.1 * plan.z_loss, plan

    for seed in range(3):
        logits_GSE, mask_GS = random_case(seed)
        (_, plan), grad_GSE = objective(logits_GSE, mask_GS)
        probs_GSE = oracle.softmax(logits_GSE.astype(np.float64))
        picked_GSE, slot_GSE = others.picks(probs_GSE, mask_GS, capacity)
        np.testing.assert_array_equal(plan.expert_GSK, np.broadcast_to(np.arange(E), (G, S, E)))
        np.testing.assert_array_equal(plan.assigned_GSK, picked_GSE)
        np.testing.assert_array_equal(plan.kept_GSK, picked_GSE)
        np.testing.assert_array_equal(np.asarray(plan.slot_GSK)[picked_GSE], slot_GSE[picked_GSE])
        np.testing.assert_allclose(plan.gate_GSK, probs_GSE * picked_GSE, rtol=3e-6, atol=1e-7)
        assert plan.aux_loss == 0 and plan.capacity == capacity

        def frozen_objective(logits_GSE, picked_GSE=picked_GSE, mask_GS=mask_GS):
            gate_GSE = oracle.softmax(logits_GSE) * picked_GSE
            return np.sum(weight_GSK * gate_GSE) + 0.1 * oracle.z_loss(logits_GSE, mask_GS)

        # Sums of terms of size 1 that partly cancel: absolute float32 rounding.
        expected_GSE = oracle.gradient(frozen_objective, logits_GSE)
        np.testing.assert_allclose(grad_GSE, expected_GSE, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capacity", [1, 4, S, S + 6])
def test_every_expert_has_the_same_load_and_a_slot_one_token(capacity):
    for seed in range(4):
        logits_GSE, mask_GS = random_case(seed)
        plan = route(logits_GSE, capacity=capacity, token_mask_GS=mask_GS)
        count_GE = np.asarray(plan.kept_GSK).sum(1)
        each_G = np.minimum(capacity, mask_GS.sum(1))
        np.testing.assert_array_equal(count_GE, np.broadcast_to(each_G[:, None], (G, E)))
        assert not np.asarray(plan.kept_GSK)[~mask_GS].any()
        held_GEC = np.asarray(plan.dispatch_GSEC()).sum(1)
        # Filled from the front, one token each.
        full_C = np.arange(plan.capacity) < each_G[:, None]
        np.testing.assert_array_equal(held_GEC, np.broadcast_to(full_C[:, None], held_GEC.shape))
        load = plan.load()
        np.testing.assert_array_equal(load.assigned_E, np.full(E, each_G.sum()))
        assert not load.dropped_E.any() and int(load.num_tokens) == mask_GS.sum()


def test_tokens_that_nobody_picked_are_counted_padding_is_not():
    logits_GSE = np.zeros((1, 7, 3), np.float32)
    mask_GS = np.array([[False, True, True, True, True, True, True]])
    # All tokens are alike, so all experts pick the earliest two: four of six have none.
    plan = route(logits_GSE, capacity=2, token_mask_GS=mask_GS)
    assert np.asarray(plan.kept_GSK).any(-1).tolist() == [[False, True, True] + [False] * 4]
    assert int(plan.load().num_unrouted) == 4
    np.testing.assert_allclose(plan.gate_GSK[0, 1], 1 / 3, rtol=1e-6)


def test_a_real_token_of_probability_zero_comes_before_padding():
    logits_GSE = np.full((1, 5, 2), -1000, np.float32)
    logits_GSE[..., 0] = 1000  # expert 1 has probability exactly 0
    mask_GS = np.array([[False, True, False, True, False]])
    plan = route(logits_GSE, capacity=3, token_mask_GS=mask_GS)
    np.testing.assert_array_equal(plan.kept_GSK, np.repeat(mask_GS[..., None], 2, -1))


def test_padding_changes_nothing_be_it_not_a_number():
    logits_GSE, _ = random_case(0)
    plan = route(logits_GSE, capacity=4)
    longer = np.full((G, 2 * S, E), np.nan, np.float32)
    longer[:, 1::2] = logits_GSE
    mask_GS = np.tile(np.arange(2 * S) % 2 == 1, (G, 1))
    padded = route(longer, capacity=4, token_mask_GS=mask_GS)
    for field in ["slot_GSK", "gate_GSK", "kept_GSK", "probs_GSE"]:
        np.testing.assert_array_equal(getattr(padded, field)[:, 1::2], getattr(plan, field))
    np.testing.assert_allclose(padded.z_loss, plan.z_loss, rtol=1e-6)
    assert not padded.gate_GSK[:, ::2].any() and not padded.kept_GSK[:, ::2].any()


def test_groups_do_not_see_one_another():
    (logits_GSE, _), (others_GSE, _) = random_case(0), random_case(1)
    changed = route(np.stack([logits_GSE[0], *others_GSE[1:]]), capacity=4)
    plan = route(logits_GSE, capacity=4)
    for field in ["slot_GSK", "gate_GSK", "kept_GSK"]:
        np.testing.assert_array_equal(getattr(changed, field)[0], getattr(plan, field)[0])


def test_permuting_the_experts_permutes_the_plan():
    logits_GSE, mask_GS = random_case(2)
    order = np.array([3, 1, 4, 0, 2])
    plan = route(logits_GSE, capacity=4, token_mask_GS=mask_GS)
    permuted = route(logits_GSE[..., order], capacity=4, token_mask_GS=mask_GS)
    np.testing.assert_array_equal(permuted.kept_GSK, plan.kept_GSK[..., order])
    np.testing.assert_array_equal(permuted.slot_GSK, plan.slot_GSK[..., order])
    # Sums over experts run in another order: the last digit may differ.
    np.testing.assert_allclose(permuted.gate_GSK, plan.gate_GSK[..., order], rtol=1e-6)


def test_a_later_token_takes_the_place_of_an_earlier_one():
    logits_GSE, _ = random_case(0)
    changed = logits_GSE.copy()
    changed[:, -1] = [30, 0, 0, 0, 0]  # the last token is made for expert 0
    plan, other = (route(x_GSE, capacity=1) for x_GSE in (logits_GSE, changed))
    assert not plan.kept_GSK[:, -1, 0].any() and other.kept_GSK[:, -1, 0].all()
    assert plan.kept_GSK[:, :-1, 0].any(1).all() and not other.kept_GSK[:, :-1, 0].any()


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_fewer_tokens_than_experts_are_all_picked_by_some(num_tokens):
    logits_GSE = np.random.default_rng(0).normal(size=(1, num_tokens, 13)).astype(np.float32)
    plan = route(logits_GSE, capacity=1)
    np.testing.assert_array_equal(np.asarray(plan.kept_GSK).sum(1), 1)  # one token an expert
    assert int(route(logits_GSE, capacity=num_tokens).load().num_unrouted) == 0


def test_the_index_back_ends_agree_with_the_einsums_in_value_and_gradient():
    rng = np.random.default_rng(3)
    logits_GSE, mask_GS = random_case(0)
    x_GSM, weight_GSM = rng.normal(size=(2, G, S, 7)).astype(np.float32)
    scale_E = np.arange(1, E + 1, dtype=np.float32)

    def through_slots(dispatch, combine, plan, x_GSM):
        return combine(plan, dispatch(plan, x_GSM) * scale_E[:, None, None])

    def through_rows(plan, x_GSM):
        x_RM, group_sizes_E = routing.sorted_dispatch(plan, x_GSM)
        scale_R = jnp.repeat(scale_E, group_sizes_E, total_repeat_length=len(x_RM))
        return routing.sorted_combine(plan, x_RM * scale_R[:, None])

    found = []
    for layer in (
        partial(through_slots, routing.einsum_dispatch, routing.einsum_combine),
        partial(through_slots, routing.gather_dispatch, routing.gather_combine),
        through_rows,
    ):

        def objective(logits_GSE, x_GSM, layer=layer):
            plan = expert_choice(logits_GSE, capacity=4, token_mask_GS=mask_GS)
            return jnp.sum(weight_GSM * layer(plan, x_GSM))

        found.append(jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))(logits_GSE, x_GSM))
    for other in found[1:]:
        for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(other), strict=True):
            # The same sums in another order.
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        pytest.param((2, 3, 1), {}, ["logits_GSE", "(2, 3, 1)"], id="one expert"),
        pytest.param((3, 5), {}, ["logits_GSE", "(3, 5)"], id="no groups"),
        pytest.param((2, 3, 5), {"capacity": 0}, ["capacity", "0"], id="no capacity"),
        pytest.param(
            (2, 3, 5),
            {"token_mask_GS": np.ones((3, 2), bool)},
            ["token_mask_GS", "(3, 2)", "(2, 3"],
            id="mask's shape",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(shape, options, words):
    with pytest.raises(UserError) as error:
        expert_choice(np.zeros(shape, np.float32), **({"capacity": 2} | options))
    for word in words:
        assert word in str(error.value)
