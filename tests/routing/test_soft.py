"""Soft MoE: weights of mixtures, both ways, beside loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing import einsum_combine, einsum_dispatch, soft_logits, soft_moe
from tests import oracle
from tests import oracle_other_routers as others

G, S, E, C, M = 2, 7, 3, 2, 5
RNG = np.random.default_rng(0)
X, PHI, SCALE = RNG.normal(size=(G, S, M)), RNG.normal(size=(M, E, C)), 2.5
MASK = np.array([[True, True, False, True, True, False, True], [True] * 6 + [False]])
FACTOR_E = np.array([1.0, -2.0, 3.0])  # expert e returns its input times this, squared


def layer(x_GSM, phi_MEC, scale, mask_GS):
    plan = soft_moe(soft_logits(x_GSM, phi_MEC, scale, mask_GS), mask_GS)
    return einsum_combine(plan, (einsum_dispatch(plan, x_GSM) * FACTOR_E[:, None, None]) ** 2)


def expected_layer(x_GSM, phi_MEC, scale, mask_GS):
    weights = others.soft_weights(others.soft_logits(x_GSM, phi_MEC, scale), mask_GS)
    return others.soft_layer(x_GSM, *weights, lambda e, x_M: (x_M * FACTOR_E[e]) ** 2)


jit_layer = jax.jit(layer)
plan_of = jax.jit(soft_moe)


def single(*arrays):
    return tuple(np.asarray(array, np.float32) for array in arrays)


def test_the_weights_and_what_they_mix_are_the_oracles():
    logits_GSEC = others.soft_logits(X, PHI, SCALE)
    found = soft_logits(*single(X, PHI, SCALE), MASK)
    # Sums of M products of size 1.
    np.testing.assert_allclose(np.asarray(found)[MASK], logits_GSEC[MASK], rtol=1e-5, atol=1e-6)
    plan = plan_of(*single(logits_GSEC), MASK)
    dispatch_GSEC, combine_GSEC = others.soft_weights(logits_GSEC, MASK)
    np.testing.assert_allclose(plan.dispatch_GSEC(), dispatch_GSEC, rtol=3e-6)
    np.testing.assert_allclose(plan.combine_GSEC(), combine_GSEC, rtol=3e-6)
    y_GSM = jit_layer(*single(X, PHI, SCALE), MASK)
    np.testing.assert_allclose(y_GSM, expected_layer(X, PHI, SCALE, MASK), rtol=1e-5, atol=1e-6)


def test_gradients_of_tokens_slots_and_scale_are_the_oracles():
    weight_GSM = RNG.normal(size=(G, S, M))
    arguments = (X, PHI, np.float64(SCALE))

    def objective(*arguments):
        return jnp.sum(weight_GSM * layer(*arguments, MASK))

    found = jax.jit(jax.grad(objective, argnums=(0, 1, 2)))(*single(*arguments))
    for i, grad in enumerate(found):

        def of_one(value, i=i):
            moved = [*arguments[:i], value, *arguments[i + 1 :]]
            moved[2] = moved[2][()]
            return np.sum(weight_GSM * expected_layer(*moved, MASK))

        # Sums of a few hundred products of size 1: absolute float32 rounding.
        np.testing.assert_allclose(
            grad, oracle.gradient(of_one, arguments[i]), rtol=1e-4, atol=1e-4
        )


def test_slots_sum_to_1_over_real_tokens_and_tokens_over_slots():
    plan = plan_of(*single(others.soft_logits(X, PHI, 40.0)), MASK)
    np.testing.assert_allclose(plan.dispatch_GSEC().sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(plan.combine_GSEC().sum((2, 3)), MASK, rtol=1e-6)
    assert not np.asarray(plan.dispatch_GSEC())[~MASK].any()
    assert plan.aux_loss == plan.z_loss == 0


def test_equal_logits_mix_the_mean():
    plan = plan_of(np.zeros((G, S, E, C), np.float32), MASK)
    x_GECM = einsum_dispatch(plan, jnp.asarray(X, jnp.float32))
    mean_GM = [X[g][MASK[g]].mean(0) for g in range(G)]
    for g in range(G):
        np.testing.assert_allclose(
            x_GECM[g], np.broadcast_to(mean_GM[g], (E, C, M)), rtol=1e-5, atol=1e-6
        )


def test_padding_changes_nothing_be_it_not_a_number():
    x_GSM, phi_MEC, scale = single(X, PHI, SCALE)
    y_GSM = jit_layer(x_GSM, phi_MEC, scale, np.ones((G, S), bool))
    longer = np.full((G, 2 * S, M), np.nan, np.float32)
    longer[:, 1::2] = x_GSM
    mask_GS = np.tile(np.arange(2 * S) % 2 == 1, (G, 1))
    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(layer(*a, mask_GS)), argnums=(0, 1, 2)))
    padded = jit_layer(longer, phi_MEC, scale, mask_GS)
    # Another length is another order of summation, no more.
    np.testing.assert_allclose(padded[:, 1::2], y_GSM, rtol=1e-5, atol=1e-6)
    assert not np.asarray(padded)[:, ::2].any()
    assert all(np.isfinite(grad).all() for grad in gradient(longer, phi_MEC, scale))


def test_a_group_of_padding_gives_zeros_and_takes_no_slot():
    mask_GS = np.array([[True] * S, [False] * S])
    y_GSM = np.asarray(jit_layer(*single(X, PHI, SCALE), mask_GS))
    assert y_GSM[0].any() and not y_GSM[1].any()
    load = plan_of(np.zeros((G, S, E, C), np.float32), mask_GS).load()
    assert int(load.num_tokens) == S


def test_groups_do_not_see_one_another():
    x_GSM, phi_MEC, scale = single(X, PHI, SCALE)
    changed = np.stack([x_GSM[0], 3 - x_GSM[1]])
    y_GSM, other = (jit_layer(x, phi_MEC, scale, MASK) for x in (x_GSM, changed))
    np.testing.assert_array_equal(y_GSM[0], other[0])


def test_permuting_the_experts_permutes_the_plan():
    order = [2, 0, 1]
    logits_GSEC = single(others.soft_logits(X, PHI, SCALE))[0]
    plan, permuted = plan_of(logits_GSEC, MASK), plan_of(logits_GSEC[:, :, order], MASK)
    # Sums over experts run in another order: the last digit may differ.
    for weights, moved in (
        (plan.dispatch_GSEC(), permuted.dispatch_GSEC()),
        (plan.combine_GSEC(), permuted.combine_GSEC()),
    ):
        np.testing.assert_allclose(weights[:, :, order], moved, rtol=1e-6)


def test_the_load_says_how_much_tokens_listen_to_each_expert():
    logits_GSEC = np.zeros((G, S, E, C), np.float32)
    logits_GSEC[:, :, 1] = np.log(2)  # an expert's weight in a token: 1, 2, 1 quarters
    load = plan_of(logits_GSEC, MASK).load()
    np.testing.assert_allclose(load.mean_prob_E, [0.25, 0.5, 0.25], rtol=1e-6)
    assert load.entropy == pytest.approx(1.5 * np.log(2), rel=1e-6)
    assert int(load.num_tokens) == MASK.sum()
    assert not load.dropped_E.any() and len(set(np.asarray(load.assigned_E).tolist())) == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_fewer_tokens_than_slots_is_no_special_case(num_tokens):
    x_GSM = X[:, :num_tokens]
    mask_GS = np.ones(x_GSM.shape[:2], bool)
    found = jit_layer(*single(x_GSM, PHI, SCALE), mask_GS)
    expected = expected_layer(x_GSM, PHI, SCALE, mask_GS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_earlier_outputs_depend_on_later_tokens():
    x_GSM, phi_MEC, scale = single(X, PHI, SCALE)
    mask_GS = np.ones((G, S), bool)
    first = jax.jit(jax.grad(lambda x: jnp.sum(layer(x, phi_MEC, scale, mask_GS)[:, 0])))
    grad_GSM = first(x_GSM)
    assert (np.abs(grad_GSM[:, 1:]).max(-1) > 1e-3).all()


@pytest.mark.parametrize(
    ("shape", "mask_GS", "words"),
    [
        pytest.param((G, S, E), None, ["logits_GSEC", "(2, 7, 3)"], id="no slots"),
        pytest.param((G, S, 1, C), None, ["logits_GSEC", "(2, 7, 1, 2)"], id="one expert"),
        pytest.param((G, S, E, C), MASK.T, ["token_mask_GS", "(7, 2)", "(2, 7"], id="mask's shape"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(shape, mask_GS, words):
    with pytest.raises(UserError) as error:
        soft_moe(np.zeros(shape, np.float32), mask_GS)
    for word in words:
        assert word in str(error.value)
