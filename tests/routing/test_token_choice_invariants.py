"""What holds for every token-choice router, whatever the logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moe import routing
from tests.routing.token_routers import METHODS, route

G, S, E, K, C = 2, 7, 5, 3, 2  # 21 choices (7 of top-1) for 10 slots in each group
every_method = pytest.mark.parametrize("method", METHODS)
few_examples = settings(max_examples=15, deadline=None)
any_logits = hnp.arrays(
    np.float32, (G, S, E), elements=st.one_of(st.floats(-20, 20, width=32), st.integers(-2, 2))
)
any_mask = hnp.arrays(bool, (G, S), elements=st.sampled_from([True, True, True, False]))


def normal_logits(seed: int = 0, shape=(G, S, E)) -> np.ndarray:
    """Logits without ties, for properties that a tie would rightly break."""
    return np.random.default_rng(seed).normal(scale=2, size=shape).astype(np.float32)


@every_method
@few_examples
@given(logits_GSE=any_logits, mask_GS=any_mask)
def test_a_slot_holds_at_most_one_token_and_none_is_wasted(method, logits_GSE, mask_GS):
    plan = route(method, logits_GSE, num_choices=K, capacity=C, token_mask_GS=mask_GS)
    expert_GSK, slot_GSK = np.asarray(plan.expert_GSK), np.asarray(plan.slot_GSK)
    held_GEC, wanted_GE = np.zeros((G, E, C), int), np.zeros((G, E), int)
    for g, s, k in np.argwhere(plan.assigned_GSK):
        wanted_GE[g, expert_GSK[g, s, k]] += 1
    for g, s, k in np.argwhere(plan.kept_GSK):
        held_GEC[g, expert_GSK[g, s, k], slot_GSK[g, s, k]] += 1
    assert held_GEC.max(initial=0) <= 1
    np.testing.assert_array_equal(held_GEC.sum(-1), np.minimum(wanted_GE, C))
    np.testing.assert_array_equal(
        plan.assigned_GSK, np.broadcast_to(mask_GS[..., None], slot_GSK.shape)
    )
    for experts_K in expert_GSK.reshape(G * S, -1):
        assert len(set(experts_K.tolist())) == len(experts_K)
    assert (np.asarray(plan.gate_GSK)[~np.asarray(plan.kept_GSK)] == 0).all()


@every_method
def test_padding_changes_no_number_wherever_it_stands_and_whatever_it_holds(method):
    logits_GSE, real_S = normal_logits(), np.array([1, 2, 4, 5, 6, 8, 10])
    padded_GSE = np.full((G, 11, E), np.nan, np.float32)
    padded_GSE[:, real_S] = logits_GSE
    mask_GS = np.isfinite(padded_GSE[..., 0])
    plan = route(method, logits_GSE, capacity=C)
    padded = route(method, padded_GSE, capacity=C, token_mask_GS=mask_GS)
    for name in ("expert_GSK", "slot_GSK", "assigned_GSK", "kept_GSK"):
        np.testing.assert_array_equal(getattr(padded, name)[:, real_S], getattr(plan, name))
    assert not np.asarray(padded.assigned_GSK)[~mask_GS].any()
    # Another length is another order of summation, no more.
    np.testing.assert_allclose(padded.gate_GSK[:, real_S], plan.gate_GSK, rtol=3e-6)
    for name in ("aux_loss", "z_loss"):
        np.testing.assert_allclose(getattr(padded, name), getattr(plan, name), rtol=1e-5)


@every_method
@few_examples
@given(seed=st.integers(0, 99), order=st.permutations(range(E)))
def test_permuting_the_experts_permutes_the_plan(method, seed, order):
    logits_GSE, order = normal_logits(seed), np.array(order)
    bias_E = np.linspace(-0.5, 0.5, E, dtype=np.float32)
    plan = route(method, logits_GSE, capacity=C, bias_E=bias_E)
    permuted = route(method, logits_GSE[..., order], capacity=C, bias_E=bias_E[order])
    np.testing.assert_array_equal(order[np.asarray(permuted.expert_GSK)], plan.expert_GSK)
    np.testing.assert_array_equal(permuted.slot_GSK, plan.slot_GSK)
    # Sums over experts run in another order: the last digits may differ.
    for name in ("gate_GSK", "aux_loss", "z_loss"):
        np.testing.assert_allclose(getattr(permuted, name), getattr(plan, name), rtol=1e-5)


@every_method
def test_groups_do_not_see_one_another(method):
    logits_GSE = normal_logits()
    changed_GSE = np.stack([logits_GSE[0], normal_logits(1)[1]])
    plans = [route(method, x_GSE, capacity=C) for x_GSE in (logits_GSE, changed_GSE)]
    assert (plans[0].expert_GSK[1] != plans[1].expert_GSK[1]).any()
    for name in ("expert_GSK", "slot_GSK", "gate_GSK", "kept_GSK", "probs_GSE"):
        ours, theirs = (getattr(plan, name)[0] for plan in plans)
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@jax.jit
def _through_experts(plan, x_GSM, factor_E):
    x_GECM = routing.gather_dispatch(plan, x_GSM)
    return routing.gather_combine(plan, x_GECM * factor_E[:, None, None])


@every_method
@pytest.mark.parametrize("num_tokens", [2, 7])
def test_ample_capacity_is_the_dense_weighted_sum_with_fewer_tokens_than_experts(
    method, num_tokens
):
    logits_GSE = normal_logits(shape=(1, num_tokens, 11))
    x_GSM = normal_logits(1, shape=(1, num_tokens, 3))
    factor_E = np.arange(1.0, 12, dtype=np.float32)  # expert e multiplies by e + 1

    plan = route(method, logits_GSE, capacity=num_tokens)
    assert plan.kept_GSK.all()
    y_GSM = _through_experts(plan, x_GSM, factor_E)
    factor_GSK = factor_E[np.asarray(plan.expert_GSK)]
    dense_GSM = x_GSM * (np.asarray(plan.gate_GSK) * factor_GSK).sum(-1)[..., None]
    np.testing.assert_allclose(y_GSM, dense_GSM, rtol=1e-5, atol=1e-6)  # three terms of float32
    token_S = [route(method, logits_GSE[:, s : s + 1], capacity=1) for s in range(num_tokens)]
    for s, alone in enumerate(token_S):
        np.testing.assert_array_equal(alone.expert_GSK[0, 0], plan.expert_GSK[0, s])
        np.testing.assert_allclose(alone.gate_GSK[0, 0], plan.gate_GSK[0, s], rtol=1e-6)


@every_method
def test_by_priority_the_order_of_tokens_does_not_matter(method):
    logits_GSE, order_S = normal_logits(), np.array([3, 1, 6, 0, 5, 2, 4])
    plan = route(method, logits_GSE, capacity=C, batch_priority=True)
    shuffled = route(method, logits_GSE[:, order_S], capacity=C, batch_priority=True)
    for name in ("expert_GSK", "slot_GSK", "kept_GSK"):
        ours, theirs = getattr(plan, name), getattr(shuffled, name)
        np.testing.assert_array_equal(ours[:, order_S], theirs)


@every_method
def test_extreme_logits_and_a_batch_of_padding_give_finite_gradients(method):
    logits_GSE = jnp.array([[[200.0, 0, -200, -200, 0], [-200, 200, 0, 0, -200], [0] * 5]])

    def total(logits_GSE, mask_GS):
        plan = route(method, logits_GSE, capacity=1, token_mask_GS=mask_GS)
        return jnp.sum(plan.gate_GSK[..., 0]) + plan.aux_loss + plan.z_loss, plan

    gradient = jax.jit(jax.grad(total, has_aux=True))
    for mask_GS in (np.ones((1, 3), bool), np.zeros((1, 3), bool)):
        gradient_GSE, plan = gradient(logits_GSE, mask_GS)
        for array in (gradient_GSE, plan.gate_GSK, plan.probs_GSE, plan.aux_loss, plan.z_loss):
            assert np.isfinite(array).all()
    assert plan.aux_loss == 0
    assert not gradient_GSE.any()


@every_method
def test_bfloat16_logits_are_routed_in_float32(method):
    logits_GSE = jnp.asarray(normal_logits(), jnp.bfloat16)
    plan = route(method, logits_GSE, capacity=C)
    exact = route(method, logits_GSE.astype(jnp.float32), capacity=C)
    for name in ("probs_GSE", "gate_GSK", "aux_loss", "z_loss", "expert_GSK", "slot_GSK"):
        ours, theirs = getattr(plan, name), getattr(exact, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
