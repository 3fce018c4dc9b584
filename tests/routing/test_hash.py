"""Hash routing: the expert is a fixed function of the token id."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing import hash_routing
from moe.routing.by_id import hashed_experts
from tests import oracle_other_routers as oracle

G, S, E, C = 3, 11, 5, 3
IDS = np.random.default_rng(0).integers(0, 31, (G, S)).astype(np.int32)
MASK = np.random.default_rng(1).random((G, S)) < 0.8

route = jax.jit(
    partial(hash_routing, num_experts=E),
    static_argnames=("num_experts", "capacity", "num_choices", "hashing", "seed"),
)


@pytest.mark.parametrize(
    ("num_experts", "num_choices", "seed"), [(5, 2, 0), (7, 7, 11), (2, 1, -3)]
)
def test_random_experts_are_the_oracles_for_any_integer(num_experts, num_choices, seed):
    ids_GS = np.array([[0, 1, 2, 31999, 250_000, 2**31 - 1, -1, -(2**31)]], np.int32)
    found = hashed_experts(jnp.asarray(ids_GS), num_experts, num_choices=num_choices, seed=seed)
    expected = [oracle.hashed_experts(int(i), num_experts, num_choices, seed) for i in ids_GS[0]]
    assert np.asarray(found)[0].tolist() == expected
    for experts in expected:
        assert len(set(experts)) == num_choices


def test_modulo_experts_follow_one_another():
    ids_GS = jnp.array([[0, 1, 4, 7, -1]])
    found = hashed_experts(ids_GS, 5, num_choices=2, hashing="modulo", seed=1)
    assert np.asarray(found)[0].tolist() == [[1, 2], [2, 3], [0, 1], [3, 4], [0, 1]]


@pytest.mark.parametrize("hashing", ["random", "modulo"])
def test_every_expert_gets_as_many_ids(hashing):
    # 10,007 ids on 7 experts: 1430 each; a binomial count has standard deviation 35.
    ids_GS = jnp.arange(10_007)[None]
    count_E = np.bincount(np.ravel(hashed_experts(ids_GS, 7, hashing=hashing)), minlength=7)
    assert np.abs(count_E - 10_007 / 7).max() < (5 * 35 if hashing == "random" else 1)


def test_one_more_expert_takes_ids_from_all_and_moves_no_other():
    ids_GS = jnp.arange(10_007)[None]
    before, after = (np.ravel(hashed_experts(ids_GS, n)) for n in (7, 8))
    moved = before != after
    assert (after[moved] == 7).all()
    assert moved.mean() == pytest.approx(1 / 8, abs=0.02)  # six standard deviations


def test_another_seed_is_another_assignment():
    ids_GS = jnp.arange(10_007)[None]
    one, other = (np.ravel(hashed_experts(ids_GS, 7, seed=seed)) for seed in (0, 1))
    # Independent: a seventh agree by chance.
    assert (one == other).mean() == pytest.approx(1 / 7, abs=0.02)


@pytest.mark.parametrize("num_choices", [1, 2, 5])
def test_the_plan_queues_the_hashed_experts_in_token_order(num_choices):
    plan = route(IDS, capacity=C, num_choices=num_choices, token_mask_GS=MASK)
    expert_GSK = np.array(
        [[oracle.hashed_experts(int(i), E, num_choices, 0) for i in ids_S] for ids_S in IDS]
    )
    slot_GSK, kept_GSK = oracle.queue(expert_GSK, MASK, C)
    assert not kept_GSK.all() and (MASK.sum() * num_choices > kept_GSK.sum() or num_choices == 1)
    np.testing.assert_array_equal(plan.expert_GSK, expert_GSK)
    np.testing.assert_array_equal(plan.assigned_GSK, np.repeat(MASK[..., None], num_choices, -1))
    np.testing.assert_array_equal(plan.kept_GSK, kept_GSK)
    np.testing.assert_array_equal(np.asarray(plan.slot_GSK)[kept_GSK], slot_GSK[kept_GSK])
    np.testing.assert_allclose(plan.gate_GSK, kept_GSK / num_choices, rtol=1e-7)
    share_GSE = np.zeros((G, S, E))
    np.put_along_axis(share_GSE, expert_GSK, 1 / num_choices, -1)
    share_GSE[~MASK] = 1 / E
    np.testing.assert_allclose(plan.probs_GSE, share_GSE, rtol=1e-6)
    assert plan.aux_loss == plan.z_loss == 0


def test_a_token_goes_to_the_same_experts_wherever_it_stands():
    order_S = np.random.default_rng(2).permutation(S)
    plan = route(IDS, capacity=S, num_choices=2)
    shuffled = route(IDS[::-1, order_S], capacity=S, num_choices=2)
    np.testing.assert_array_equal(plan.expert_GSK[::-1, order_S], shuffled.expert_GSK)
    assert plan.kept_GSK.all()


def test_padding_changes_nothing_whatever_its_id():
    plan = route(IDS, capacity=C)
    longer = np.full((G, 2 * S), 17, np.int32)
    longer[:, 1::2] = IDS
    mask_GS = np.tile(np.arange(2 * S) % 2 == 1, (G, 1))
    padded = route(longer, capacity=C, token_mask_GS=mask_GS)
    for field in ["expert_GSK", "slot_GSK", "gate_GSK", "kept_GSK", "probs_GSE"]:
        np.testing.assert_array_equal(getattr(padded, field)[:, 1::2], getattr(plan, field))
    assert not padded.assigned_GSK[:, ::2].any() and not padded.gate_GSK[:, ::2].any()
    np.testing.assert_array_equal(padded.load().assigned_E, plan.load().assigned_E)


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_fewer_tokens_than_experts_find_their_slots(num_tokens):
    ids_GS = IDS[:1, :num_tokens]
    plan = route(ids_GS, num_experts=13, capacity=num_tokens, num_choices=3)
    assert plan.kept_GSK.all()
    np.testing.assert_allclose(plan.combine_GSEC().sum((2, 3)), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("ids_GS", "options", "words"),
    [
        pytest.param(None, {}, ["ids", "None", "ids_BL"], id="no ids"),
        pytest.param(
            IDS * 1.0, {}, ["ids_GS", "float64", "(3, 11)"], id="ids that are not integers"
        ),
        pytest.param(IDS[0], {}, ["ids_GS", "(11,)"], id="ids that are not grouped"),
        pytest.param(IDS, {"num_choices": 6}, ["num_choices=6", "num_experts=5"], id="K > E"),
        pytest.param(IDS, {"num_choices": 0}, ["num_choices=0"], id="K = 0"),
        pytest.param(IDS, {"capacity": 0}, ["capacity", "0"], id="no capacity"),
        pytest.param(IDS, {"hashing": "md5"}, ["hashing", "md5", "modulo"], id="unknown hashing"),
        pytest.param(
            IDS,
            {"token_mask_GS": MASK.T},
            ["token_mask_GS", "(11, 3)", "(3, 11"],
            id="mask's shape",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(ids_GS, options, words):
    with pytest.raises(UserError) as error:
        hash_routing(ids_GS, **({"num_experts": E, "capacity": C} | options))
    for word in words:
        assert word in str(error.value)
