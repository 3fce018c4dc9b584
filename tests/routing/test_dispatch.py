"""The dispatch back-ends beside the oracle and beside each other, in values and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import routing
from tests import oracle
from tests.routing.compiled import top2

G, S, E, C, M, H = 3, 13, 5, 4, 11, 7

SLOT_BACK_ENDS = {
    "einsum": (routing.einsum_dispatch, routing.einsum_combine),
    "gather": (routing.gather_dispatch, routing.gather_combine),
}
each_slot_back_end = pytest.mark.parametrize("back_end", SLOT_BACK_ENDS)
each_back_end = pytest.mark.parametrize("back_end", [*SLOT_BACK_ENDS, "sorted"])


@dataclass(frozen=True)
class Case:
    """Weights and tokens of a small layer, its plan, and the oracle's opinion of the plan."""

    x_GSM: np.ndarray
    router_ME: np.ndarray
    wi_EMH: np.ndarray
    wo_EHM: np.ndarray
    masks: dict[str, np.ndarray]
    plan: routing.RoutingPlan
    expected: oracle.Plan


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.default_rng(0)
    x_GSM, router_ME, wi_EMH, wo_EHM = (
        rng.normal(scale=scale, size=shape).astype(np.float32)
        for scale, shape in [(1, (G, S, M)), (0.6, (M, E)), (0.3, (E, M, H)), (0.4, (E, H, M))]
    )
    masks = {
        "token_mask_GS": rng.random((G, S)) < 0.9,
        "importance_GS": rng.choice([0.5, 1], p=[0.2, 0.8], size=(G, S)).astype(np.float32),
    }
    logits_GSE = x_GSM @ router_ME
    plan = top2(logits_GSE, capacity=C, second_policy="all", **masks)
    expected = oracle.top2(logits_GSE, capacity=C, **masks)
    dropped = expected.choices.assigned_GSK & ~expected.choices.kept_GSK
    assert dropped.any()
    assert not expected.choices.kept_GSK.any(-1).all()
    return Case(x_GSM, router_ME, wi_EMH, wo_EHM, masks, plan, expected)


def moe_layer(back_end: str, x_GSM, router_ME, wi_EMH, wo_EHM, *, capacity=C, **options):
    """Algorithm 2 of the paper, from the functions under test."""
    plan = routing.top2(x_GSM @ router_ME, capacity=capacity, second_policy="all", **options)
    if back_end == "sorted":
        x_RM, group_sizes_E = routing.sorted_dispatch(plan, x_GSM)
        h_RH = jax.nn.relu(routing.grouped_product(x_RM, wi_EMH, group_sizes_E))
        return routing.sorted_combine(plan, routing.grouped_product(h_RH, wo_EHM, group_sizes_E))
    dispatch, combine = SLOT_BACK_ENDS[back_end]
    h_GECH = jax.nn.relu(jnp.einsum("GECM,EMH->GECH", dispatch(plan, x_GSM), wi_EMH))
    return combine(plan, jnp.einsum("GECH,EHM->GECM", h_GECH, wo_EHM))


@each_slot_back_end
def test_dispatch_puts_each_token_into_its_slot_and_zeros_elsewhere(back_end, case):
    x_GECM = jax.jit(SLOT_BACK_ENDS[back_end][0])(case.plan, case.x_GSM)
    # A copy, not a computation: equal to the last bit.
    np.testing.assert_array_equal(x_GECM, oracle.dispatch(case.x_GSM, case.expected.choices, E))


@each_slot_back_end
def test_combine_weighs_what_the_slots_hold(back_end, case):
    y_GECM = np.random.default_rng(1).normal(size=(G, E, C, M)).astype(np.float32)
    y_GSM = jax.jit(SLOT_BACK_ENDS[back_end][1])(case.plan, y_GECM)
    expected_GSM = oracle.combine(y_GECM, case.expected.choices, case.expected.gate_GSK)
    np.testing.assert_allclose(y_GSM, expected_GSM, rtol=1e-5, atol=1e-6)
    assert not y_GSM[~np.asarray(case.plan.kept_GSK).any(-1)].any()


@each_back_end
@pytest.mark.parametrize("renormalize_after_drop", [False, True])
def test_layer_and_all_its_gradients_are_the_oracles(back_end, case, renormalize_after_drop):
    weight_GSM = np.random.default_rng(2).normal(size=(G, S, M))
    arguments = (case.x_GSM, case.router_ME, case.wi_EMH, case.wo_EHM)

    def objective(*arguments):
        y_GSM = moe_layer(
            back_end, *arguments, renormalize_after_drop=renormalize_after_drop, **case.masks
        )
        return jnp.sum(weight_GSM * y_GSM), y_GSM

    grads, y_GSM = jax.jit(jax.grad(objective, argnums=(0, 1, 2, 3), has_aux=True))(*arguments)

    def expected_layer(*arguments):
        return oracle.moe_layer(
            *arguments, case.expected.choices, renormalize_after_drop=renormalize_after_drop
        )

    exact = [np.asarray(argument, np.float64) for argument in arguments]
    # Dot products of 11 and 7 terms of size 1 in float32.
    np.testing.assert_allclose(y_GSM, expected_layer(*exact), rtol=1e-5, atol=2e-6)
    for position, grad in enumerate(grads):
        expected_grad = oracle.gradient(
            lambda value, position=position: np.sum(
                weight_GSM * expected_layer(*exact[:position], value, *exact[position + 1 :])
            ),
            exact[position],
        )
        np.testing.assert_allclose(grad, expected_grad, rtol=2e-5, atol=1e-5)


@each_back_end
def test_ample_capacity_is_the_dense_weighted_sum(back_end, case):
    arguments = (case.x_GSM, case.router_ME, case.wi_EMH, case.wo_EHM)
    y_GSM = jax.jit(partial(moe_layer, back_end, capacity=S))(*arguments)
    probs_GSE = oracle.softmax(case.x_GSM @ case.router_ME)
    h_GSEH = np.maximum(np.einsum("GSM,EMH->GSEH", case.x_GSM, case.wi_EMH), 0)
    y_GSEM = np.einsum("GSEH,EHM->GSEM", h_GSEH, case.wo_EHM)
    gate_GSE = np.where(probs_GSE >= np.sort(probs_GSE)[..., -2:-1], probs_GSE, 0)
    gate_GSE /= gate_GSE.sum(-1, keepdims=True)
    expected_GSM = np.einsum("GSE,GSEM->GSM", gate_GSE, y_GSEM)
    np.testing.assert_allclose(y_GSM, expected_GSM, rtol=1e-5, atol=2e-6)


def test_back_ends_agree_under_vmap_and_jit(case):
    rng = np.random.default_rng(3)
    x_BGSM = rng.normal(size=(2, G, S, M)).astype(np.float32)
    weights = (case.router_ME, case.wi_EMH, case.wo_EHM)

    def value_and_grads(back_end):
        def objective(x_BGSM, *weights):
            layer = jax.vmap(lambda x_GSM: moe_layer(back_end, x_GSM, *weights))
            y_BGSM = layer(x_BGSM)
            return jnp.sum(y_BGSM**2), y_BGSM

        return jax.jit(jax.grad(objective, argnums=(0, 1, 2, 3), has_aux=True))(x_BGSM, *weights)

    einsum, gather = value_and_grads("einsum"), value_and_grads("gather")
    for ours, theirs in zip(jax.tree.leaves(einsum), jax.tree.leaves(gather), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    # Under vmap as without.
    np.testing.assert_allclose(
        gather[1][1],
        jax.jit(partial(moe_layer, "gather"))(x_BGSM[1], *weights),
        rtol=1e-5,
        atol=2e-6,
    )


@each_slot_back_end
def test_bfloat16_tokens_are_dispatched_unchanged_and_combined_in_bfloat16(back_end, case):
    dispatch, combine = SLOT_BACK_ENDS[back_end]
    x_GSM = jnp.asarray(case.x_GSM, jnp.bfloat16)
    x_GECM = jax.jit(dispatch)(case.plan, x_GSM)
    assert x_GECM.dtype == jnp.bfloat16
    exact_GECM = oracle.dispatch(
        np.asarray(x_GSM, np.float64), case.expected.choices, num_experts=E
    )
    np.testing.assert_array_equal(x_GECM.astype(jnp.float32), exact_GECM)
    y_GSM = jax.jit(combine)(case.plan, x_GECM)
    assert y_GSM.dtype == jnp.bfloat16
    expected_GSM = oracle.combine(exact_GECM, case.expected.choices, case.expected.gate_GSK)
    # A gate, a product and a sum, each rounded to 8 bits at worst.
    np.testing.assert_allclose(y_GSM.astype(jnp.float32), expected_GSM, rtol=0, atol=0.03)


@pytest.mark.parametrize("index_back_end", ["gather", "sorted"])
def test_gradients_of_bfloat16_tokens_agree_between_back_ends(case, index_back_end):
    def grads(back_end):
        def objective(x_GSM, logits_GSE):
            plan = routing.top2(logits_GSE, capacity=C, second_policy="all", **case.masks)
            if back_end == "sorted":
                y_GSM = routing.sorted_combine(plan, 2 * routing.sorted_dispatch(plan, x_GSM)[0])
            else:
                dispatch, combine = SLOT_BACK_ENDS[back_end]
                y_GSM = combine(plan, 2 * dispatch(plan, x_GSM))
            return jnp.sum(y_GSM.astype(jnp.float32) ** 2)

        x_GSM = jnp.asarray(case.x_GSM, jnp.bfloat16)
        return jax.jit(jax.grad(objective, argnums=(0, 1)))(x_GSM, case.x_GSM @ case.router_ME)

    for ours, theirs in zip(grads("einsum"), grads(index_back_end), strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        # Both round to 8 bits here and there: 2 % of the largest.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02 * np.abs(ours).max())


@each_slot_back_end
def test_a_token_that_lost_its_first_expert_still_sends_gradient_through_the_second(back_end):
    # Both tokens prefer expert 0, which has one slot; token 1 keeps expert 1 with gate 0.4.
    logits_GSE = jnp.log(jnp.array([[[0.6, 0.1, 0.3], [0.6, 0.4, 1e-9]]]))
    dispatch, combine = SLOT_BACK_ENDS[back_end]

    def output_of_token_1(x_GSM):
        plan = routing.top2(logits_GSE, capacity=1, second_policy="all")
        return combine(plan, dispatch(plan, x_GSM))[0, 1].sum()

    grad_GSM = jax.jit(jax.grad(output_of_token_1))(jnp.ones((1, 2, 3)))
    np.testing.assert_allclose(grad_GSM, [[[0, 0, 0], [0.4, 0.4, 0.4]]], rtol=1e-5)


@each_slot_back_end
def test_an_underflowed_gate_still_gives_its_slot_the_token(back_end):
    plan = top2(np.array([[[200.0, 50, 0]]]), capacity=1, second_policy="all")
    x_GECM = SLOT_BACK_ENDS[back_end][0](plan, jnp.full((1, 1, 2), 3.0))
    assert x_GECM.tolist() == [[[[3, 3]], [[3, 3]], [[0, 0]]]]


def all_shapes(jaxpr) -> set[tuple[int, ...]]:
    """The shape of every array that a traced function computes, in inner functions too."""
    shapes = set()
    for equation in jaxpr.eqns:
        shapes |= {variable.aval.shape for variable in equation.outvars}
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                shapes |= all_shapes(inner)
    return shapes


@pytest.mark.parametrize(
    ("back_end", "is_dense"), [("einsum", True), ("gather", False), ("sorted", False)]
)
def test_only_the_einsum_back_end_builds_an_array_over_tokens_experts_and_slots(back_end, is_dense):
    # Sizes for which tokens * experts * slots of a single group (13 * 5 * 7) exceed every array
    # that is allowed, the largest being the choices (3 * 13 * 2 * 5); hence one channel.
    x_GSM, router_ME = jnp.ones((G, S, 1)), jnp.ones((1, E))
    wi_EMH, wo_EHM = jnp.ones((E, 1, 1)), jnp.ones((E, 1, 1))

    def objective(*arguments):
        return moe_layer(back_end, *arguments, capacity=7).sum()

    step = jax.value_and_grad(objective, argnums=(0, 1, 2, 3))
    shapes = all_shapes(jax.make_jaxpr(step)(x_GSM, router_ME, wi_EMH, wo_EHM).jaxpr)
    assert (G, S, E) in shapes
    dense = {shape for shape in shapes if np.prod(shape) >= S * E * 7}
    assert bool(dense) == is_dense, dense


def test_sorted_dispatch_gives_each_expert_its_kept_tokens_in_order(case):
    x_RM, group_sizes_E = jax.jit(routing.sorted_dispatch)(case.plan, case.x_GSM)
    choices = case.expected.choices
    rows = [
        case.x_GSM[g, s]
        for e in range(E)
        for g, s, k in np.ndindex(G, S, 2)
        if choices.kept_GSK[g, s, k] and choices.expert_GSK[g, s, k] == e
    ]
    np.testing.assert_array_equal(group_sizes_E, case.plan.load().kept_E)
    np.testing.assert_array_equal(x_RM[: len(rows)], rows)
    assert len(rows) < len(x_RM) == G * S * 2
    assert not x_RM[len(rows) :].any()


@pytest.mark.parametrize(
    ("back_end", "is_dense"), [("einsum", True), ("gather", False), ("sorted", False)]
)
def test_the_compiled_step_of_an_index_back_end_needs_memory_for_the_rows_alone(back_end, is_dense):
    """Dropless, where C = S and the one-hot tensors of the einsum form are largest."""
    tokens, experts, width = 128, 32, 3
    x_GSM, router_ME = jnp.ones((1, tokens, width)), jnp.ones((width, experts))
    weights = jnp.ones((experts, width, width)), jnp.ones((experts, width, width))

    def objective(*arguments):
        return moe_layer(back_end, *arguments, capacity=tokens).sum()

    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2, 3)))
    used = step.lower(x_GSM, router_ME, *weights).compile().memory_analysis().temp_size_in_bytes
    one_hot = tokens * experts * tokens * 4  # one float32 tensor of S * E * C: 2 MiB
    # Slots of the gather form: E * S * M in and out of two products, their gradients, the indices.
    assert (used > one_hot) if is_dense else (used < one_hot / 2), used
