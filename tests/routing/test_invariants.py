"""What holds for every routing, whatever the logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moe import routing
from tests.routing.compiled import top2

G, S, E, C = 2, 11, 5, 3  # 22 choices for 15 slots in each group

any_logits = hnp.arrays(
    np.float32, (G, S, E), elements=st.one_of(st.floats(-20, 20, width=32), st.integers(-2, 2))
)
any_mask = hnp.arrays(bool, (G, S), elements=st.sampled_from([True, True, True, False]))
any_seed = st.integers(0, 2**31 - 1)
few_examples = settings(max_examples=40, deadline=None)


def normal_logits(seed: int) -> np.ndarray:
    """Logits without ties, for properties that a tie would rightly break."""
    return np.random.default_rng(seed).normal(scale=2, size=(G, S, E)).astype(np.float32)


def occupied_GEC(plan) -> np.ndarray:
    """How many tokens each slot holds, from the indices."""
    count_GEC = np.zeros((G, E, C), int)
    for g, s, k in np.argwhere(np.asarray(plan.kept_GSK)):
        count_GEC[g, int(plan.expert_GSK[g, s, k]), int(plan.slot_GSK[g, s, k])] += 1
    return count_GEC


def count_GE(plan, mask_GSK) -> np.ndarray:
    """Choices of each expert where the mask is True."""
    expert_GSK = np.asarray(plan.expert_GSK)
    return np.stack(
        [np.bincount(expert_GSK[g][np.asarray(mask_GSK)[g]], minlength=E) for g in range(G)]
    )


@few_examples
@given(logits_GSE=any_logits, mask_GS=any_mask)
def test_every_slot_holds_at_most_one_token_and_none_is_wasted(logits_GSE, mask_GS):
    plan = top2(logits_GSE, capacity=C, second_policy="all", token_mask_GS=mask_GS)
    kept_GSK = np.asarray(plan.kept_GSK)
    slot_GSK = np.asarray(plan.slot_GSK)[kept_GSK]
    assert ((slot_GSK >= 0) & (slot_GSK < C)).all()
    assert (occupied_GEC(plan) <= 1).all()
    # An expert drops a choice only when all its slots are taken.
    wanted_GE = count_GE(plan, plan.assigned_GSK)
    np.testing.assert_array_equal(count_GE(plan, kept_GSK), np.minimum(wanted_GE, C))


@few_examples
@given(logits_GSE=any_logits, mask_GS=any_mask, seed=any_seed)
def test_a_choice_is_assigned_before_it_is_kept_and_dropped_choices_weigh_nothing(
    logits_GSE, mask_GS, seed
):
    plan = top2(
        logits_GSE, capacity=C, slot_rule="paper", token_mask_GS=mask_GS, key=jax.random.key(seed)
    )
    kept_GSK, assigned_GSK = np.asarray(plan.kept_GSK), np.asarray(plan.assigned_GSK)
    assert not (kept_GSK & ~assigned_GSK).any()
    assert not (assigned_GSK & ~mask_GS[..., None]).any()
    np.testing.assert_array_equal(assigned_GSK[..., 0], mask_GS)
    assert (np.asarray(plan.gate_GSK)[~kept_GSK] == 0).all()
    assert (occupied_GEC(plan) <= 1).all()
    assert (np.asarray(plan.expert_GSK[..., 0]) != plan.expert_GSK[..., 1])[mask_GS].all()


@few_examples
@given(logits_GSE=any_logits, mask_GS=any_mask)
def test_a_row_of_combine_sums_to_the_gates_kept_and_to_1_when_nothing_was_dropped(
    logits_GSE, mask_GS
):
    plan = top2(logits_GSE, capacity=C, second_policy="all", token_mask_GS=mask_GS)
    row_GS = np.asarray(plan.combine_GSEC().sum((2, 3)))
    np.testing.assert_allclose(row_GS, np.asarray(plan.gate_GSK).sum(-1), rtol=1e-6)
    assert (row_GS <= 1 + 1e-6).all()
    np.testing.assert_allclose(row_GS[np.asarray(plan.kept_GSK).all(-1)], 1, rtol=1e-6)
    assert (row_GS[~mask_GS] == 0).all()
    # Every kept choice is one cell of dispatch, in its expert's column.
    dispatch_GSEC = np.asarray(plan.dispatch_GSEC())
    assert dispatch_GSEC.sum() == np.asarray(plan.kept_GSK).sum()
    np.testing.assert_array_equal(dispatch_GSEC.sum(1), occupied_GEC(plan))


@few_examples
@given(logits_GSE=any_logits, mask_GS=any_mask)
def test_renormalised_rows_sum_to_1_unless_both_choices_were_dropped(logits_GSE, mask_GS):
    plan = top2(
        logits_GSE,
        capacity=C,
        second_policy="all",
        token_mask_GS=mask_GS,
        renormalize_after_drop=True,
    )
    any_kept_GS = np.asarray(plan.kept_GSK).any(-1)
    np.testing.assert_allclose(np.asarray(plan.gate_GSK).sum(-1), any_kept_GS, rtol=1e-6)


@few_examples
@given(seed=any_seed, other_seed=any_seed)
def test_groups_do_not_see_one_another(seed, other_seed):
    logits_GSE, key = normal_logits(seed), jax.random.key(0)
    changed_GSE = np.stack([logits_GSE[0], normal_logits(other_seed)[1]])
    plans = [top2(x_GSE, capacity=C, key=key) for x_GSE in (logits_GSE, changed_GSE)]
    for field in ["expert_GSK", "slot_GSK", "gate_GSK", "kept_GSK", "assigned_GSK", "probs_GSE"]:
        ours, theirs = (np.asarray(getattr(plan, field)[0]) for plan in plans)
        np.testing.assert_array_equal(ours, theirs, err_msg=field)


@few_examples
@given(seed=any_seed, order=st.permutations(range(E)))
def test_permuting_the_experts_permutes_the_plan(seed, order):
    logits_GSE, order = normal_logits(seed), np.array(order)
    plan = top2(logits_GSE, capacity=C, second_policy="all")
    permuted = top2(logits_GSE[..., order], capacity=C, second_policy="all")
    np.testing.assert_array_equal(order[np.asarray(permuted.expert_GSK)], plan.expert_GSK)
    np.testing.assert_array_equal(permuted.slot_GSK, plan.slot_GSK)
    np.testing.assert_array_equal(permuted.kept_GSK, plan.kept_GSK)
    # Sums over experts run in another order: the last digit may differ.
    np.testing.assert_allclose(permuted.gate_GSK, plan.gate_GSK, rtol=1e-5)
    np.testing.assert_allclose(permuted.aux_loss, plan.aux_loss, rtol=1e-5)
    np.testing.assert_allclose(permuted.z_loss, plan.z_loss, rtol=1e-5)


PADDED_S = 16  # eleven tokens and five of padding


def pad(logits_GSE, real_S):
    """The same tokens in longer groups, at the positions `real_S`, with wild logits between."""
    padded_GSE = np.full((G, PADDED_S, E), 40, np.float32)
    padded_GSE[..., 3] = 90  # as an attractive first choice as can be
    padded_GSE[:, real_S] = logits_GSE
    mask_GS = np.zeros((G, PADDED_S), bool)
    mask_GS[:, real_S] = True
    return padded_GSE, mask_GS


@few_examples
@given(
    logits_GSE=any_logits,
    real=st.sets(st.integers(0, PADDED_S - 1), min_size=S, max_size=S),
    by_importance=st.booleans(),
)
def test_padding_changes_no_number_wherever_it_stands(logits_GSE, real, by_importance):
    real_S = np.array(sorted(real))
    plan = top2(logits_GSE, capacity=C, second_policy="all")
    padded_GSE, mask_GS = pad(logits_GSE, real_S)
    mask = {"importance_GS": mask_GS.astype(np.float32)} if by_importance else {}
    mask = mask or {"token_mask_GS": mask_GS}
    padded = top2(padded_GSE, capacity=C, second_policy="all", **mask)
    for field in ["assigned_GSK", "kept_GSK", "expert_GSK", "slot_GSK"]:
        np.testing.assert_array_equal(getattr(padded, field)[:, real_S], getattr(plan, field))
    for field in ["assigned_GSK", "kept_GSK", "gate_GSK"]:
        assert not np.asarray(getattr(padded, field))[~mask_GS].any()
    # Another length is another order of summation, no more.
    np.testing.assert_allclose(padded.gate_GSK[:, real_S], plan.gate_GSK, rtol=3e-6)
    np.testing.assert_allclose(padded.aux_loss, plan.aux_loss, rtol=3e-6)
    np.testing.assert_allclose(padded.z_loss, plan.z_loss, rtol=3e-6, atol=1e-6)


def test_a_whole_group_of_padding_changes_no_number():
    logits_GSE = normal_logits(0)
    plan = top2(logits_GSE, capacity=C, second_policy="all")
    padded_GSE = np.concatenate([logits_GSE[:1], np.full((1, S, E), 7.0), logits_GSE[1:]])
    mask_GS = np.array([True, False, True])[:, None].repeat(S, axis=1)
    padded = top2(padded_GSE, capacity=C, second_policy="all", token_mask_GS=mask_GS)
    np.testing.assert_allclose(padded.gate_GSK[::2], plan.gate_GSK, rtol=1e-6)
    np.testing.assert_allclose(padded.aux_loss, plan.aux_loss, rtol=1e-6)
    np.testing.assert_allclose(padded.z_loss, plan.z_loss, rtol=1e-6)
    assert not padded.assigned_GSK[1].any()


def test_padding_draws_no_chance_away_from_the_tokens():
    logits_GSE, key = normal_logits(1), jax.random.key(4)
    mask_GS = np.arange(G * S).reshape(G, S) % 3 != 0
    plan, masked = (
        top2(logits_GSE, capacity=C, slot_rule="paper", token_mask_GS=mask, key=key)
        for mask in (np.ones((G, S), bool), mask_GS)
    )
    assert 0 < plan.assigned_GSK[..., 1].sum() < G * S
    np.testing.assert_array_equal(masked.assigned_GSK, plan.assigned_GSK & mask_GS[..., None])


@few_examples
@given(seed=any_seed)
def test_by_priority_the_surest_tokens_keep_their_first_choice(seed):
    plan = top2(normal_logits(seed), capacity=C, second_policy="all", batch_priority=True)
    top_GS = np.asarray(plan.probs_GSE).max(-1)
    first_GS, kept_GS = np.asarray(plan.expert_GSK)[..., 0], np.asarray(plan.kept_GSK)[..., 0]
    for g, e in np.ndindex(G, E):
        wanting_S = first_GS[g] == e
        kept = top_GS[g][wanting_S & kept_GS[g]]
        dropped = top_GS[g][wanting_S & ~kept_GS[g]]
        assert len(kept) == min(C, wanting_S.sum())
        assert not len(dropped) or kept.min() > dropped.max()


@few_examples
@given(seed=any_seed)
def test_the_order_of_the_tokens_does_not_matter_by_priority(seed):
    logits_GSE = normal_logits(seed)
    order_S = np.random.default_rng(seed).permutation(S)
    plan = top2(logits_GSE, capacity=C, second_policy="all", batch_priority=True)
    shuffled = top2(logits_GSE[:, order_S], capacity=C, second_policy="all", batch_priority=True)
    for field in ["expert_GSK", "slot_GSK", "kept_GSK"]:
        np.testing.assert_array_equal(getattr(shuffled, field), getattr(plan, field)[:, order_S])


def test_equal_priority_is_settled_by_token_order():
    logits_GSE = np.tile(np.array([3.0, 1, 0], np.float32), (1, 7, 1))
    plan = top2(logits_GSE, capacity=2, second_policy="all", batch_priority=True)
    assert plan.kept_GSK[0].tolist() == [[True, True]] * 2 + [[False, False]] * 5
    assert plan.slot_GSK[0, :2].tolist() == [[0, 0], [1, 1]]


def test_ties_go_to_the_lower_expert_index():
    logits_GSE = np.array([[[0, 0, 0, 0], [1, 2, 2, 2], [0, 5, 0, 0], [5, 5, 6, 5]]], np.float32)
    plan = top2(logits_GSE, capacity=4, second_policy="all")
    assert plan.expert_GSK[0].tolist() == [[0, 1], [1, 2], [1, 0], [2, 0]]


def test_bfloat16_logits_are_routed_in_float32():
    logits_GSE = jnp.asarray(normal_logits(0), jnp.bfloat16)
    plan = top2(logits_GSE, capacity=C, second_policy="all")
    exact = top2(logits_GSE.astype(jnp.float32), capacity=C, second_policy="all")
    for field in ["probs_GSE", "gate_GSK", "aux_loss", "z_loss", "expert_GSK", "slot_GSK"]:
        ours, theirs = getattr(plan, field), getattr(exact, field)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, err_msg=field)
    assert plan.gate_GSK.dtype == jnp.float32


def test_slots_are_counted_exactly_beyond_what_bfloat16_can_count():
    logits_GSE = jnp.tile(jnp.array([2, 1, 0], jnp.bfloat16), (1, 601, 1))
    plan = top2(logits_GSE, capacity=599, second_policy="all")
    for k in range(2):
        assert plan.slot_GSK[0, :599, k].tolist() == list(range(599))
        assert plan.kept_GSK[0, :, k].tolist() == [True] * 599 + [False] * 2


def test_a_gate_that_underflows_keeps_its_token_in_dispatch():
    logits_GSE = np.array([[[200.0, 50, 0]]], np.float32)  # exp(-150) is 0 in float32
    plan = top2(logits_GSE, capacity=1, second_policy="all")
    assert plan.gate_GSK[0, 0].tolist() == [1, 0]
    assert plan.expert_GSK[0, 0].tolist() == [0, 1]
    assert plan.kept_GSK.all()
    assert plan.dispatch_GSEC()[0, 0, :, 0].tolist() == [True, True, False]


def finite_gradient(logits_GSE, **options):
    """The plan, and the gradient of everything differentiable in it, both checked to be finite."""

    def objective(logits_GSE):
        plan = top2(logits_GSE, second_policy="all", **options)
        return jnp.sum(plan.gate_GSK[..., 0]) + plan.aux_loss + plan.z_loss, plan

    gradient = jax.jit(jax.grad(objective, has_aux=True))
    grad_GSE, plan = gradient(jnp.asarray(logits_GSE, jnp.float32))
    for array in [grad_GSE, plan.gate_GSK, plan.probs_GSE, plan.aux_loss, plan.z_loss]:
        assert np.isfinite(array).all()
    return plan, grad_GSE


def test_extreme_logits_give_finite_numbers_and_gradients():
    logits_GSE = np.array([[[1e4, 0, -1e4], [-1e4, 1e4, 0], [1e4, 0, 0], [0, 0, 0]]])
    for renormalize in (False, True):
        # Token 2 loses its first choice, and the gate of its second is 0: no 0/0.
        finite_gradient(logits_GSE, capacity=1, renormalize_after_drop=renormalize)


def test_a_batch_of_padding_alone_has_no_load_no_loss_and_no_gradient():
    mask_GS = np.zeros((G, S), bool)
    for renormalize in (False, True):
        plan, grad_GSE = finite_gradient(
            normal_logits(0), capacity=C, token_mask_GS=mask_GS, renormalize_after_drop=renormalize
        )
        assert not plan.assigned_GSK.any()
        assert plan.aux_loss == 0
        assert plan.z_loss == 0
        assert not grad_GSE.any()


def test_padding_receives_no_gradient():
    mask_GS = np.arange(S) % 2 == 0
    mask_GS = np.stack([mask_GS, ~mask_GS])
    _, grad_GSE = finite_gradient(normal_logits(0), capacity=C, token_mask_GS=mask_GS)
    np.testing.assert_array_equal(np.any(np.asarray(grad_GSE) != 0, axis=-1), mask_GS)


def test_the_gradient_of_one_groups_gates_stays_in_the_group():
    def gates_of_the_first_group(logits_GSE):
        plan = top2(logits_GSE, capacity=C, second_policy="all")
        return jnp.sum(plan.gate_GSK[0, :, 0])

    grad_GSE = jax.jit(jax.grad(gates_of_the_first_group))(normal_logits(0))
    assert grad_GSE[0].any()
    assert not grad_GSE[1].any()


def test_the_gradient_of_the_aux_loss_takes_the_shares_as_constants():
    logits_GSE = jnp.asarray(normal_logits(3))
    share_GE = np.stack(
        [np.bincount(logits_SE.argmax(-1), minlength=E) / S for logits_SE in logits_GSE]
    )

    def with_constant_shares(logits_GSE):
        mean_prob_GE = jax.nn.softmax(logits_GSE).mean(1)
        return jnp.mean(E * jnp.sum(share_GE * mean_prob_GE, -1))

    def aux_loss(logits_GSE):
        return top2(logits_GSE, capacity=C, second_policy="all").aux_loss

    ours, expected = (jax.jit(jax.grad(f))(logits_GSE) for f in (aux_loss, with_constant_shares))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-8)
    assert np.abs(ours).max() > 1e-3


def test_the_losses_are_taken_before_capacity_policy_and_chance():
    logits_GSE = normal_logits(0)
    ample = top2(logits_GSE, capacity=S, second_policy="all")
    tight = top2(logits_GSE, capacity=1, second_policy="none")
    assert not tight.kept_GSK[..., 0].all()
    assert ample.aux_loss == tight.aux_loss
    assert ample.z_loss == tight.z_loss


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_what_padding_holds_does_not_matter_were_it_nan(dispatch):
    mask_GS = jnp.array([[True, True, False, True]])
    logits_GSE = jnp.array([[[1.0, 2, 3], [3, 1, 2], [0, 0, 0], [2, 3, 1]]])
    x_GSM = jnp.arange(8.0).reshape(1, 4, 2)
    send = {"einsum": routing.einsum_dispatch, "gather": routing.gather_dispatch}[dispatch]

    def slots(padding):
        poisoned_GSE = jnp.where(mask_GS[..., None], logits_GSE, padding)
        plan = routing.top2(poisoned_GSE, capacity=2, second_policy="all", token_mask_GS=mask_GS)
        x_GECM = send(plan, jnp.where(mask_GS[..., None], x_GSM, padding))
        return plan.gate_GSK, plan.aux_loss, plan.z_loss, plan.load(), x_GECM

    for clean, poisoned in zip(
        jax.tree.leaves(slots(0.0)), jax.tree.leaves(slots(jnp.nan)), strict=True
    ):
        np.testing.assert_array_equal(clean, poisoned)


def test_the_second_choice_is_another_expert_even_where_all_others_are_impossible():
    logits_GSE = jnp.array([[[0.0, -jnp.inf, -jnp.inf]]])
    plan = routing.top2(logits_GSE, capacity=1, second_policy="all")
    assert plan.expert_GSK[0, 0].tolist() == [0, 1]
    assert plan.gate_GSK[0, 0].tolist() == [1.0, 0.0]


def test_a_token_of_partial_importance_keeps_its_one_choice_under_every_policy():
    logits_GSE = jnp.array([[[1.0, 2, 0]]])
    for policy in ("none", "all", "random", "sampling"):
        plan = routing.top2(
            logits_GSE,
            capacity=1,
            second_policy=policy,
            key=jax.random.key(0),
            importance_GS=jnp.array([[0.5]]),
        )
        assert plan.kept_GSK[0, 0].tolist() == [False, True]
        assert int(plan.expert_GSK[0, 0, 1]) == 1
        assert plan.gate_GSK[0, 0].tolist() == [0.0, 1.0]
