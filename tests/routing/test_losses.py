from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing import RoutingPlan
from moe.routing.losses import (
    adapted_weight,
    balance_loss,
    cv_squared,
    cv_squared_loss,
    mean_entropy_loss,
    router_entropy_loss,
)
from tests import oracle, oracle_losses
from tests.routing.compiled import top2

G, S, E, K = 3, 7, 5, 2
SCOPES = ["group", "sequence", "global"]
# Row 1 spans groups 0 and 1, row 3 is padding alone, row 5 follows an id that is not used.
SEQUENCE_GS = np.array([[0, 0, 0, 0, 1, 1, 1], [1, 1, 2, 2, 2, 3, 3], [5, 5, 5, 5, 5, 5, 5]])
MASK_GS = np.array([[1, 1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]], bool)
LOGITS_GSE = np.random.default_rng(0).normal(size=(G, S, E)).astype(np.float32)


def make_plan(logits_GSE, mask_GS=MASK_GS, expert_GSK=None, assigned_GSK=None) -> RoutingPlan:
    """A plan of the given choices; by default a policy has given up about every third second one."""
    rng = np.random.default_rng(1)
    num_groups, num_tokens, num_experts = logits_GSE.shape
    if expert_GSK is None:
        ranked_GSE = np.argsort(rng.random((num_groups, num_tokens, num_experts)), axis=-1)
        expert_GSK = ranked_GSE[..., :K].astype(np.int32)
    if assigned_GSK is None:
        assigned_GSK = mask_GS[..., None] & (rng.random(expert_GSK.shape) > [0, 0.35])
    return RoutingPlan(
        expert_GSK=jnp.asarray(expert_GSK),
        slot_GSK=jnp.zeros(expert_GSK.shape, jnp.int32),
        gate_GSK=jnp.ones(expert_GSK.shape),
        assigned_GSK=jnp.asarray(assigned_GSK),
        kept_GSK=jnp.zeros(expert_GSK.shape, bool),
        token_mask_GS=jnp.asarray(mask_GS),
        probs_GSE=jax.nn.softmax(logits_GSE, axis=-1),
        aux_loss=jnp.zeros(()),
        z_loss=jnp.zeros(()),
        capacity=1,
    )


def balance(logits_GSE, plan, **options):
    """`balance_loss` as a function of the logits."""
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    return balance_loss(dataclasses.replace(plan, probs_GSE=probs_GSE), **options)


def of_probs(loss):
    """A loss of probabilities as a function of the logits."""
    return lambda logits, *args, **options: loss(jax.nn.softmax(logits, -1), *args, **options)


def assert_same(function, expected, logits_GSE=LOGITS_GSE):
    """Value and gradient by the logits are the oracle's."""
    value, gradient_GSE = jax.jit(jax.value_and_grad(function))(jnp.asarray(logits_GSE))
    logits_GSE = logits_GSE.astype(np.float64)
    # A softmax and sums of at most 21 float32 numbers: some units in the seventh digit.
    np.testing.assert_allclose(value, expected(logits_GSE), rtol=3e-6, atol=1e-7)
    of_oracle_GSE = oracle.gradient(expected, logits_GSE)
    np.testing.assert_allclose(gradient_GSE, of_oracle_GSE, rtol=3e-5, atol=3e-7)


@pytest.mark.parametrize("over", SCOPES)
@pytest.mark.parametrize("choices", ["first", "all"])
def test_the_balance_loss_is_the_oracles_in_value_and_gradient(choices, over):
    plan = make_plan(LOGITS_GSE)
    counted = slice(1) if choices == "first" else slice(None)
    assert_same(
        partial(balance, plan=plan, choices=choices, over=over, sequence_GS=SEQUENCE_GS),
        lambda logits_GSE: oracle_losses.balance(
            oracle.softmax(logits_GSE),
            np.asarray(plan.expert_GSK)[..., counted],
            np.asarray(plan.assigned_GSK)[..., counted],
            over=over,
            sequence_GS=SEQUENCE_GS,
        ),
    )


def test_a_share_of_a_larger_batch_takes_the_place_of_the_calls_own():
    plan, count_E = make_plan(LOGITS_GSE), np.array([7, 0, 2, 3, 1])
    choices = np.asarray(plan.expert_GSK), np.asarray(plan.assigned_GSK)
    assert_same(
        partial(balance, plan=plan, choices="all", over="global", share_E=jnp.asarray(count_E)),
        lambda logits_GSE: oracle_losses.balance(
            oracle.softmax(logits_GSE), *choices, over="global", share_E=count_E
        ),
    )


@pytest.mark.parametrize("over", SCOPES)
def test_the_other_losses_are_the_oracles_in_value_and_gradient(over):
    scope = {"over": over, "sequence_GS": SEQUENCE_GS}
    for ours, loops, options in (
        (cv_squared_loss, oracle_losses.cv_squared, scope),
        (mean_entropy_loss, oracle_losses.mean_entropy, scope),
        (router_entropy_loss, oracle_losses.entropy, {}),
    ):
        assert_same(
            lambda logits, loss=ours, more=options: of_probs(loss)(logits, MASK_GS, **more),
            lambda logits, loss=loops, more=options: loss(oracle.softmax(logits), MASK_GS, **more),
        )


def test_worked_example_b_over_first_and_over_both_choices():
    logits_SE = [[2, 1, 0], [2.5, 0, 1], [1.5, 1.4, 0], [3, 0.5, 1], [0, 2, 1], [1, 0, 0.9]]
    plan = top2(jnp.array([logits_SE]), capacity=2, second_policy="all")
    np.testing.assert_allclose(balance_loss(plan), 1.490935, rtol=1e-6)
    np.testing.assert_allclose(balance_loss(plan), plan.aux_loss, rtol=1e-6)
    np.testing.assert_allclose(balance_loss(plan, choices="all"), 1.067725, rtol=1e-6)


def even_plan() -> RoutingPlan:
    """Every expert is first and second choice of one token of each group; probabilities are even."""
    first_S = np.arange(E)
    expert_GSK = np.broadcast_to(np.stack([first_S, (first_S + 1) % E], -1), (G, E, K))
    mask_GS = np.ones((G, E), bool)
    return make_plan(np.zeros((G, E, E)), mask_GS, expert_GSK, np.ones((G, E, K), bool))


def collapsed_plan() -> RoutingPlan:
    """Every token chooses experts 0 and 1 and gives 0 all its probability."""
    expert_GSK = np.broadcast_to([0, 1], (G, E, K))
    mask_GS = np.ones((G, E), bool)
    logits_GSE = np.zeros((G, E, E)) + 1e4 * np.eye(E)[0]
    return make_plan(logits_GSE, mask_GS, expert_GSK, np.ones((G, E, K), bool))


@pytest.mark.parametrize("over", SCOPES)
def test_every_loss_is_what_it_says_at_balance_and_at_collapse(over):
    scope = {"over": over, "sequence_GS": np.arange(G * E).reshape(G, E) // 5}
    even, collapsed = even_plan(), collapsed_plan()
    for choices, at_collapse in (("first", E), ("all", E / K)):
        np.testing.assert_allclose(balance_loss(even, choices=choices, **scope), 1, rtol=1e-6)
        found = balance_loss(collapsed, choices=choices, **scope)
        np.testing.assert_allclose(found, at_collapse, rtol=1e-6)
    for loss, at_collapse in ((cv_squared_loss, E - 1), (mean_entropy_loss, np.log(E))):
        # Differences of numbers near 1 and log E.
        assert abs(float(loss(even.probs_GSE, even.token_mask_GS, **scope))) < 1e-6
        found = loss(collapsed.probs_GSE, collapsed.token_mask_GS, **scope)
        np.testing.assert_allclose(found, at_collapse, rtol=1e-6)


def test_the_entropy_loss_tells_decided_from_undecided_tokens():
    even, collapsed = even_plan(), collapsed_plan()
    np.testing.assert_allclose(
        router_entropy_loss(even.probs_GSE, even.token_mask_GS), np.log(E), rtol=1e-6
    )
    assert float(router_entropy_loss(collapsed.probs_GSE, collapsed.token_mask_GS)) == 0


def test_k_experts_that_share_everything_have_a_squared_variation_of_e_over_k_minus_1():
    np.testing.assert_allclose(cv_squared(jnp.array([3.0, 3, 0, 0, 0])), E / 2 - 1, rtol=1e-6)
    np.testing.assert_allclose(cv_squared(jnp.array([[0.0] * 5, [2.0] * 5])), [0, 0], atol=1e-6)


@jax.jit
def losses_of(plan: RoutingPlan, sequence_GS) -> dict[str, jax.Array]:
    found = {"entropy": router_entropy_loss(plan.probs_GSE, plan.token_mask_GS)}
    for over in SCOPES:
        scope = {"over": over, "sequence_GS": sequence_GS}
        for choices in ("first", "all"):
            found[f"{choices} {over}"] = balance_loss(plan, choices=choices, **scope)
        for loss in (cv_squared_loss, mean_entropy_loss):
            found[f"{loss.__name__} {over}"] = loss(plan.probs_GSE, plan.token_mask_GS, **scope)
    return found


@jax.jit
@jax.grad
def gradient_of_all(probs_GSE, token_mask_GS):
    return sum(
        loss(probs_GSE, token_mask_GS)
        for loss in (cv_squared_loss, mean_entropy_loss, router_entropy_loss)
    )


def test_padding_and_groups_of_padding_change_no_loss_whatever_they_hold():
    plan = make_plan(LOGITS_GSE)
    expected = losses_of(plan, SEQUENCE_GS)

    def padded(x, value):
        return jnp.pad(x, ((0, 1), (0, 2), *((0, 0),) * (x.ndim - 2)), constant_values=value)

    probs_GSE = jnp.where(MASK_GS[..., None], plan.probs_GSE, jnp.nan)
    changed = dataclasses.replace(
        plan,
        probs_GSE=padded(probs_GSE, jnp.nan),
        expert_GSK=padded(plan.expert_GSK, 2),
        assigned_GSK=padded(plan.assigned_GSK, False),
        token_mask_GS=padded(plan.token_mask_GS, False),
    )
    for name, found in losses_of(changed, padded(jnp.asarray(SEQUENCE_GS), -3)).items():
        # The same numbers, summed in another order.
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, err_msg=name)


def test_a_batch_of_padding_costs_nothing_and_has_no_gradient():
    plan = make_plan(LOGITS_GSE, np.zeros((G, S), bool))
    assert all(float(loss) == 0 for loss in losses_of(plan, SEQUENCE_GS).values())
    np.testing.assert_array_equal(gradient_of_all(plan.probs_GSE, plan.token_mask_GS), 0)


def test_the_mean_over_equal_microbatches_is_the_loss_of_the_batch():
    logits_GSE = np.random.default_rng(3).normal(size=(4, S, E)).astype(np.float32)
    whole = make_plan(logits_GSE, np.ones((4, S), bool))
    sequence_GS = np.broadcast_to(np.arange(4)[:, None], (4, S))  # a row is a group
    halves = [jax.tree.map(lambda x, i=i: x[i : i + 2] if x.ndim else x, whole) for i in (0, 2)]
    of_halves = [losses_of(half, sequence_GS[:2]) for half in halves]
    for name, expected in losses_of(whole, sequence_GS).items():
        if "global" not in name:
            mean = (of_halves[0][name] + of_halves[1][name]) / 2
            np.testing.assert_allclose(mean, expected, rtol=2e-6, err_msg=name)

    # One share for the whole batch: "global" is linear then, in value and in gradient.
    shared = {"choices": "all", "over": "global", "share_E": whole.load().assigned_E}
    of_batch = jax.jit(jax.value_and_grad(partial(balance, choices="all", over="global")))
    of_half = jax.jit(jax.value_and_grad(partial(balance, **shared)))
    expected, gradient_GSE = of_batch(logits_GSE, whole)
    pieces = [of_half(logits_GSE[:2], halves[0]), of_half(logits_GSE[2:], halves[1])]
    np.testing.assert_allclose((pieces[0][0] + pieces[1][0]) / 2, expected, rtol=2e-6)
    in_pieces_GSE = np.concatenate([gradient_GSE for _, gradient_GSE in pieces]) / 2
    np.testing.assert_allclose(in_pieces_GSE, gradient_GSE, rtol=1e-5, atol=1e-8)


def test_probabilities_that_underflowed_have_a_finite_gradient():
    plan = collapsed_plan()
    assert float(plan.probs_GSE.min()) == 0
    assert np.isfinite(gradient_of_all(plan.probs_GSE, plan.token_mask_GS)).all()


def test_an_adapted_weight_brings_the_drop_rate_into_its_band():
    adapt = jax.jit(partial(adapted_weight, low=0.05, high=0.1, step=1.1))
    for weight in (1e-4, 1.0):
        for _ in range(200):
            drop_rate = 0.3 / (1 + 100 * weight)  # a larger weight drops less
            weight = float(adapt(weight, drop_rate))
        assert 0.05 <= 0.3 / (1 + 100 * weight) <= 0.1


@pytest.mark.parametrize(
    ("weight", "drop_rate", "expected"),
    [
        (0.5, 0.11, 0.6),
        (0.6, 0.04, 0.5),
        (0.5, 0.05, 0.5),
        (0.5, 0.1, 0.5),
        (0.5, np.nan, 0.5),
        (0.9, 1.0, 1.0),
        (0.011, 0.0, 0.01),
    ],
)
def test_an_adapted_weight_moves_by_a_step_within_its_bounds(weight, drop_rate, expected):
    found = adapted_weight(weight, drop_rate, low=0.05, high=0.1, step=1.2, least=0.01, most=1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choices": "some"}, "choices must be one of .* got 'some'"),
        ({"over": "batch"}, "over must be one of .* got 'batch'"),
        ({"over": "sequence"}, r"sequence_GS must have the shape .* got None, .* \(3, 7\)"),
        (
            {"over": "sequence", "sequence_GS": np.zeros((3, 8), int)},
            r"sequence_GS must have the shape .* got \(3, 8\), .* \(3, 7\)",
        ),
        ({"share_E": jnp.ones(E)}, r"share_E must .* got \(5,\) with E=5 and over='group'"),
        (
            {"share_E": jnp.ones(4), "over": "global"},
            r"share_E must .* got \(4,\) with E=5 and over='global'",
        ),
    ],
)
def test_malformed_balance_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        balance_loss(make_plan(LOGITS_GSE), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.2, "high": 0.1}, "low and high must .* got low=0.2, high=0.1"),
        ({"low": 0.0, "high": 1.1}, "low and high must .* got low=0.0, high=1.1"),
        ({"low": 0.0, "high": 0.1, "step": 1.0}, "step must be above 1: got 1.0"),
        ({"low": 0.0, "high": 0.1, "least": 0.0}, "least and most must .* got least=0.0, most=1.0"),
    ],
)
def test_a_malformed_band_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        adapted_weight(0.1, 0.1, **options)
