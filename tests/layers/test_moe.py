from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import MoE, Top2

B, L, M, H, E = 3, 7, 11, 13, 5


def make_layer(**options) -> MoE:
    return MoE(M, H, E, **options, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def x_BLM():
    return jax.random.normal(jax.random.key(1), (B, L, M))


def dense_mixture(layer: MoE, x_BLM) -> np.ndarray:
    """Every token through every expert, in numpy: what ample capacity must equal."""
    x_TM = np.asarray(x_BLM, np.float64).reshape(-1, M)
    logits_TE = x_TM @ np.asarray(layer.router.kernel_ME[...], np.float64)
    probs_TE = np.exp(logits_TE - logits_TE.max(1, keepdims=True))
    probs_TE /= probs_TE.sum(1, keepdims=True)
    y_TM = np.zeros_like(x_TM)
    for t, probs_E in enumerate(probs_TE):
        best = np.argsort(-probs_E, kind="stable")[:2]
        for e in best:
            h_H = np.maximum(x_TM[t] @ np.asarray(layer.experts.wi_EMH[...][e], np.float64), 0)
            out_M = h_H @ np.asarray(layer.experts.wo_EHM[...][e], np.float64)
            y_TM[t] += probs_E[e] / probs_E[best].sum() * out_M
    return y_TM.reshape(x_BLM.shape)


@pytest.mark.parametrize("dispatch", ["gather", "einsum", "sorted"])
def test_evaluation_is_the_weighted_sum_of_the_two_best_experts(x_BLM, dispatch):
    layer = make_layer(dispatch=dispatch)
    y_BLM, stats = layer(x_BLM)
    # float32 sums of 11 and 13 products against float64.
    np.testing.assert_allclose(y_BLM, dense_mixture(layer, x_BLM), rtol=1e-4, atol=1e-5)
    assert int(stats.dropped_E.sum()) == 0
    assert int(stats.assigned_E.sum()) == 2 * B * L
    assert int(stats.num_tokens) == B * L


def test_a_token_in_evaluation_does_not_depend_on_its_neighbours(x_BLM):
    layer = make_layer()
    y_BLM, _ = layer(x_BLM)
    alone_BLM, _ = layer(x_BLM[1:2, 3:4])
    np.testing.assert_allclose(alone_BLM[0, 0], y_BLM[1, 3], rtol=1e-5, atol=1e-6)


def test_tokens_are_grouped_in_order_and_groups_do_not_see_one_another(x_BLM):
    layer = make_layer(group_size=6, router=Top2(capacity_factor=0.5, min_capacity=1))
    key = jax.random.key(0)
    y_BLM, _ = layer(x_BLM, key=key)
    changed_BLM = x_BLM.at[2, 6].set(100.0)  # token 20 of 21: in the last group, 18..20
    z_BLM, _ = layer(changed_BLM, key=key)
    first_groups = np.asarray(y_BLM).reshape(-1, M)[:18], np.asarray(z_BLM).reshape(-1, M)[:18]
    np.testing.assert_array_equal(*first_groups)


def test_padding_changes_no_number(x_BLM):
    layer = make_layer(router=Top2(second_policy="all", capacity_factor=0.6))
    key = jax.random.key(0)
    # Both calls are one group whose capacity is that of 2 x 21 tokens.
    layer.group_size = 42
    mask_BL = jnp.concatenate([jnp.ones((B, L), bool), jnp.zeros((B, L), bool)])
    noise_BLM = 10 * jax.random.normal(jax.random.key(5), x_BLM.shape)
    y_BLM, stats = layer(jnp.concatenate([x_BLM, noise_BLM]), mask_BL, key)
    z_BLM, others = layer(jnp.concatenate([x_BLM, -noise_BLM]), mask_BL, key)
    np.testing.assert_array_equal(y_BLM[:B], z_BLM[:B])
    np.testing.assert_array_equal(y_BLM[B:], 0)
    jax.tree.map(np.testing.assert_array_equal, stats, others)
    assert int(stats.num_tokens) == B * L


def test_a_captured_plan_replays_the_same_output_and_its_gates_take_the_gradient(x_BLM):
    layer = make_layer(router=Top2(capacity_factor=0.7))
    layer.set_attributes(capture_plan=True)
    y_BLM, stats = layer(x_BLM, key=jax.random.key(3))
    again_BLM, _ = layer(x_BLM, plan=stats.plan)
    np.testing.assert_array_equal(y_BLM, again_BLM)
    other_BLM, _ = layer(2 * x_BLM, plan=stats.plan)
    assert not np.allclose(other_BLM, y_BLM)
    np.testing.assert_array_equal(layer.route(x_BLM).expert_GSK, layer(x_BLM)[1].plan.expert_GSK)


def test_a_plan_of_another_shape_is_refused(x_BLM):
    layer = make_layer()
    plan = layer.route(x_BLM[:1])
    with pytest.raises(UserError, match=r"plan must be of as many .* got \(1, 7\).*\(1, 21\)"):
        layer(x_BLM, plan=plan)


def test_overflowing_tokens_are_counted(x_BLM):
    layer = make_layer(router=Top2(capacity_factor=0.1, min_capacity=1, second_policy="all"))
    _, stats = layer(x_BLM, key=jax.random.key(0))
    # ceil(0.1 * 21 * 2 / 5) = 1 slot an expert.
    np.testing.assert_array_equal(stats.kept_E, np.minimum(stats.assigned_E, 1))
    np.testing.assert_array_equal(stats.dropped_E, stats.assigned_E - stats.kept_E)
    assert int(stats.dropped_E.sum()) >= 2 * 21 - 5


def test_bfloat16_tokens_are_routed_in_float32(x_BLM):
    layer = make_layer(dtype=jnp.bfloat16)
    y_BLM, stats = layer(x_BLM.astype(jnp.bfloat16))
    assert y_BLM.dtype == jnp.bfloat16
    assert stats.aux_loss.dtype == jnp.float32
    rounded_BLM = x_BLM.astype(jnp.bfloat16).astype(jnp.float32)
    exact_BLM, exact = make_layer()(rounded_BLM)
    np.testing.assert_array_equal(stats.assigned_E, exact.assigned_E)
    # bfloat16 keeps 8 bits: two products in a row are good to about 2 %.
    np.testing.assert_allclose(y_BLM.astype(jnp.float32), exact_BLM, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 1}, "num_experts must be at least 2: got 1"),
        ({"dispatch": "magic"}, "dispatch must be one of .* got 'magic'"),
        ({"group_size": 0}, "group_size must be at least 1: got 0"),
    ],
)
def test_malformed_layers_are_refused(options, message):
    arguments = {"num_experts": E} | options
    with pytest.raises(UserError, match=message):
        MoE(M, H, arguments.pop("num_experts"), **arguments, rngs=nnx.Rngs(0))


def test_a_mask_of_another_shape_is_refused(x_BLM):
    with pytest.raises(
        UserError, match=r"token_mask_BL must have the shape of the tokens: got \(3, 8\)"
    ):
        make_layer()(x_BLM, jnp.ones((B, L + 1), bool))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor must be positive.*: got 0.0"),
        ({"eval_capacity_factor": -1.0}, "eval_capacity_factor must be positive.*: got -1.0"),
        ({"min_capacity": 0}, "min_capacity must be at least 1: got 0"),
        ({"second_policy": "maybe"}, "second_policy must be one of .* got 'maybe'"),
        ({"slot_rule": "mine"}, "slot_rule must be one of .* got 'mine'"),
    ],
)
def test_malformed_rules_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Top2(**options)
