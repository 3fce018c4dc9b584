"""The token-choice rules as layers: training and evaluation, jitter, noise, and the biases."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import MoE
from moe.layers.routers import (
    NoisyTopK,
    RouterBias,
    SigmoidTopK,
    Top1,
    Top2,
    TopK,
    TwoLevel,
    update_router_biases,
)
from moe.routing import ExpertLoad
from tests.oracle import softmax

G, S, M, H, E = 2, 7, 11, 13, 6
RULES = {
    "top1": Top1(),
    "top_k": TopK(num_choices=3, num_expert_groups=3, num_kept_groups=2),
    "noisy": NoisyTopK(),
    "sigmoid": SigmoidTopK(num_choices=3, scale=2.5, num_expert_groups=3, num_kept_groups=2),
    "two_level": TwoLevel(num_expert_groups=3),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def x_GSM():
    return jax.random.normal(jax.random.key(1), (G, S, M))


def router_of(rule, **changes):
    return dataclasses.replace(rule, **changes).router(M, E, rngs=nnx.Rngs(0))


def load_of(assigned) -> ExpertLoad:
    """A load of which only the choices of each expert are read."""
    zeros = dict.fromkeys(ExpertLoad.__dataclass_fields__, jnp.zeros(()))
    return ExpertLoad(**(zeros | {"assigned_E": jnp.array(assigned)}))


@every_rule
def test_training_has_limited_capacity_and_evaluation_none(rule, x_GSM):
    router = router_of(rule, capacity_factor=0.5, min_capacity=1)
    training, evaluation = nnx.jit(lambda r, x: (r(x, key=KEY), r(x)))(router, x_GSM)
    num_choices = training.expert_GSK.shape[-1]
    assert training.capacity == -(-S * num_choices // (2 * E))  # ceil(0.5 * S * K / E)
    assert not training.kept_GSK.all()
    assert evaluation.capacity == S
    assert evaluation.kept_GSK.all()


@every_rule
def test_a_layer_routes_a_single_token_among_more_experts_as_it_would_among_others(rule, x_GSM):
    layer = MoE(M, H, E, router=rule, group_size=S, dispatch="gather", rngs=nnx.Rngs(0))
    run = nnx.jit(lambda layer, x_BLM: layer(x_BLM)[0])
    y_GSM, alone_GSM = run(layer, x_GSM), run(layer, x_GSM[1:, 3:4])
    np.testing.assert_allclose(alone_GSM[0, 0], y_GSM[1, 3], rtol=1e-4, atol=1e-5)


@every_rule
def test_a_rule_is_a_value_that_says_its_kind(rule):
    assert hash(rule) == hash(dataclasses.replace(rule))
    assert rule.causal_safe
    with pytest.raises(UserError, match=f"kind must be '{rule.kind}' .*'hash'"):
        dataclasses.replace(rule, kind="hash")


@every_rule
def test_jitter_changes_what_the_router_sees_in_training_alone(rule, x_GSM):
    def probs(router, x_GSM):
        return router(x_GSM, key=KEY).probs_GSE, router(x_GSM).probs_GSE

    plain, plain_evaluation = nnx.jit(probs)(router_of(rule), x_GSM)
    training, evaluation = nnx.jit(probs)(router_of(rule, jitter=0.1), x_GSM)
    assert (np.abs(training - plain) > 1e-4).any()
    np.testing.assert_array_equal(evaluation, plain_evaluation)


def test_jitter_never_reaches_the_experts(x_GSM):
    # One expert by a clear margin with the gate 1: whatever the router sees, the output is its.
    rule = TopK(num_choices=1, capacity_factor=None)
    plain, jittery = (
        MoE(
            M,
            H,
            E,
            router=dataclasses.replace(rule, jitter=jitter),
            dispatch="gather",
            rngs=nnx.Rngs(0),
        )
        for jitter in (0.0, 0.5)
    )
    x_GSM = jnp.abs(x_GSM)
    for layer in (plain, jittery):
        layer.router.kernel_ME[...] = jnp.zeros((M, E)).at[:, 2].set(1.0)
    run = nnx.jit(lambda layer, x_BLM: layer(x_BLM, key=KEY))
    (y_GSM, _), (jittered_GSM, stats) = run(plain, x_GSM), run(jittery, x_GSM)
    assert int(stats.assigned_E[2]) == G * S
    np.testing.assert_array_equal(jittered_GSM, y_GSM)


def test_noise_is_of_training_alone_and_its_kernel_starts_at_zero(x_GSM):
    router = router_of(NoisyTopK())
    np.testing.assert_array_equal(router.noise_kernel_ME[...], np.zeros((M, E)))
    keys = None, KEY, jax.random.key(1)
    plans = nnx.jit(lambda r, x_GSM: [r(x_GSM, key=key) for key in keys])(router, x_GSM)
    assert (plans[1].probs_GSE != plans[2].probs_GSE).all()
    logits_GSE = np.asarray(x_GSM) @ np.asarray(router.kernel_ME[...])
    np.testing.assert_allclose(plans[0].probs_GSE, softmax(logits_GSE), rtol=1e-4, atol=1e-6)


def test_every_kernel_learns_and_the_bias_does_not(x_GSM):
    for rule in RULES.values():
        graph, params = nnx.split(router_of(rule))

        def loss(params, graph=graph):
            plan = nnx.merge(graph, params)(x_GSM, key=KEY)
            return jnp.sum(plan.gate_GSK[..., 0]) + plan.aux_loss

        gradients = jax.jit(jax.grad(loss))(params)
        for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
            is_bias = "bias_E" in jax.tree_util.keystr(path)
            assert bool((gradient != 0).any()) != is_bias, path


def test_biases_move_by_the_load_of_their_own_layer_from_what_routed_the_step():
    params = nnx.state(router_of(SigmoidTopK(bias_rate=0.01)))
    load = load_of([5, 0, 1, 2, 2, 2])  # mean 2
    decayed = jax.tree.map(lambda x: 0.5 * x + 1, params)  # as an optimizer may do to all it holds
    moved = update_router_biases(decayed, params, load)
    np.testing.assert_allclose(moved["bias_E"][...], [-0.01, 0.01, 0.01, 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(moved["kernel_ME"][...], decayed["kernel_ME"][...])


def test_stacked_layers_of_two_stacks_each_move_by_their_own_load():
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack(rngs):
        return SigmoidTopK(bias_rate=0.5).router(M, 3, rngs=rngs)

    stacked = nnx.state(stack(nnx.Rngs(0).split(2)))
    params = nnx.State({"encoder": stacked, "decoder": stacked})
    bias = params["encoder"]["bias_E"]
    assert isinstance(bias, RouterBias)
    assert not isinstance(bias, nnx.Param)
    assert bias.get_metadata()["out_sharding"] == ("layers", None)
    loads = {"encoder": load_of([[3, 0, 0], [2, 2, 2]]), "decoder": load_of([[0, 1, 2], [0, 4, 8]])}
    moved = update_router_biases(params, params, loads)
    np.testing.assert_array_equal(moved["encoder"]["bias_E"][...], [[-0.5, 0.5, 0.5], [0, 0, 0]])
    np.testing.assert_array_equal(moved["decoder"]["bias_E"][...], [[0.5, 0, -0.5], [0.5, 0, -0.5]])


def test_a_model_without_biases_is_left_as_it_is(x_GSM):
    params = nnx.state(router_of(Top2()))
    jax.tree.map(np.testing.assert_array_equal, update_router_biases(params, params, {}), params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(num_choices=0), "num_choices must be at least 1: got 0"),
        (lambda: TopK(gates="sum"), "gates must be one of .*'sum'"),
        (lambda: TopK(num_expert_groups=0), "num_expert_groups must be at least 1: got 0"),
        (lambda: TopK(num_kept_groups=0), "num_kept_groups must be at least 1: got 0"),
        (lambda: TopK(group_score="mean"), "group_score must be one of .*'mean'"),
        (lambda: Top1(jitter=1.0), r"jitter must be in \[0, 1\): got 1.0"),
        (lambda: Top2(jitter=-0.5), r"jitter must be in \[0, 1\): got -0.5"),
        (lambda: NoisyTopK(num_choices=0), "num_choices must be at least 1: got 0"),
        (lambda: NoisyTopK(balance="all"), "balance must be left at 'first' in NoisyTopK.*'all'"),
        (lambda: SigmoidTopK(scale=0.0), "scale must be positive: got 0.0"),
        (lambda: SigmoidTopK(bias_rate=-1.0), "bias_rate must not be negative: got -1.0"),
        (lambda: TwoLevel(num_expert_groups=1), "num_expert_groups must be at least 2: got 1"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(make, message):
    with pytest.raises(UserError, match=message):
        make()
