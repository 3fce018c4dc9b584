from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import FeedForward, MoE, Top2
from moe.layers.shared import ConditionalMoE, ResidualMoE, SharedExperts
from moe.sharding import MeshConfig, make_mesh, shardings
from tests import oracle

B, L, M, H, E = 2, 3, 5, 7, 3
MASK_BL = np.array([[1, 1, 0], [1, 1, 1]], bool)
MARK_BLM = np.random.default_rng(2).normal(size=(B, L, M))
KINDS = ["shared", "gated", "residual", "conditional"]
MAKE = {
    "shared": SharedExperts,
    "gated": lambda *parts, rngs: SharedExperts(*parts, gated=True, rngs=rngs),
    "residual": ResidualMoE,
    "conditional": ConditionalMoE,
}


def make_layer(kind: str, **options):
    rngs = nnx.Rngs(0)
    routed = MoE(M, H, E, router=Top2(), rngs=rngs)
    # Wider than an expert, so that the two cannot be mixed up.
    return MAKE[kind](routed, FeedForward(M, 2 * H, rngs=rngs), rngs=rngs, **options)


def nested_layer(num_experts: int, dtype=None) -> SharedExperts:
    """All three around one MoE layer, since each is called like one."""
    rngs = nnx.Rngs(0)

    def dense():
        return FeedForward(M, 2 * H, dtype=dtype, rngs=rngs)

    layer = MoE(M, H, num_experts, router=Top2(), group_size=L, dtype=dtype, rngs=rngs)
    layer = ResidualMoE(layer, dense(), rngs=rngs)
    layer = ConditionalMoE(layer, dense(), gate_dropout=0.2, rngs=rngs)
    return SharedExperts(layer, dense(), gated=True, rngs=rngs)


@functools.cache
def compiled(kind: str):
    """A layer, and its gradients, output and statistics for (params, tokens, mask, mark)."""
    layer = make_layer(kind)
    graph, params = nnx.split(layer)

    def loss(params, x_BLM):
        y_BLM, stats = nnx.merge(graph, params)(x_BLM, MASK_BL)
        return jnp.sum(y_BLM * MARK_BLM) + stats.budget_loss, (y_BLM, stats)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    return layer, lambda x_BLM: gradient(params, x_BLM)


def weights_of(layer) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return {".".join(path): np.asarray(value[...], np.float64) for path, value in flat}


@pytest.fixture(scope="module")
def x_BLM():
    return jax.random.normal(jax.random.key(1), (B, L, M))


def ffn(x, weights):
    return oracle.relu(x @ weights["ffn.wi_MH"]) @ weights["ffn.wo_HM"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def joined(kind, x_BLM, weights, choices, budget=0.8):
    """Output and budget loss, token by token; analytic. Tokens of padding stay zero."""
    routed_BLM = oracle.moe_layer(
        x_BLM.reshape(1, -1, M),
        weights["moe.router.kernel_ME"],
        weights["moe.experts.wi_EMH"],
        weights["moe.experts.wo_EHM"],
        choices,
    ).reshape(x_BLM.shape)
    y_BLM, misses = np.zeros(x_BLM.shape, complex), []
    for b, s in np.argwhere(MASK_BL):
        x, routed, dense = x_BLM[b, s], routed_BLM[b, s], ffn(x_BLM[b, s], weights)
        if kind == "shared":
            y_BLM[b, s] = routed + dense
        elif kind == "gated":
            y_BLM[b, s] = routed + sigmoid(x @ weights["gate_M1"]) * dense
        elif kind == "residual":
            mix_2 = oracle.softmax(x @ weights["mix_M2"] + weights["mix_bias_2"])
            y_BLM[b, s] = mix_2[0] * routed + mix_2[1] * dense
        else:
            gate = sigmoid(x @ weights["gate_M1"] + weights["gate_bias_1"])[0]
            y_BLM[b, s] = (1 - gate) * dense + gate * routed
            misses.append(gate - budget if gate.real > budget else budget - gate)
    return y_BLM, sum(misses) / len(misses) if misses else 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_formula_token_by_token(kind, x_BLM):
    layer, gradient = compiled(kind)
    (by_params, by_x_BLM), (y_BLM, stats) = gradient(x_BLM)

    weights, x_BLM = weights_of(layer), np.asarray(x_BLM, np.float64)
    logits_GSE = (x_BLM @ weights["moe.router.kernel_ME"]).reshape(1, B * L, E)
    choices = oracle.choose(logits_GSE, capacity=B * L, token_mask_GS=MASK_BL.reshape(1, -1))
    expected_BLM, expected_loss = joined(kind, x_BLM, weights, choices)
    # float32 sums of up to 14 products against float64.
    np.testing.assert_allclose(y_BLM, expected_BLM, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats.budget_loss, expected_loss, rtol=1e-5)

    def marked(name, value):
        of = weights if name is None else weights | {name: value}
        y_BLM, budget_loss = joined(kind, value if name is None else x_BLM, of, choices)
        return (y_BLM * MARK_BLM).sum() + budget_loss

    found = {".".join(path): value[...] for path, value in nnx.to_flat_state(by_params)}
    for name, gradient in found.items():
        if "experts" not in name:  # those of `MoE` have tests of their own
            expected = oracle.gradient(lambda value, name=name: marked(name, value), weights[name])
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    expected_BLM = oracle.gradient(lambda value: marked(None, value), x_BLM)
    np.testing.assert_allclose(by_x_BLM, expected_BLM, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_counts_nowhere_whatever_it_holds(kind, x_BLM):
    _, gradient = compiled(kind)
    expected = gradient(x_BLM)
    found = gradient(jnp.where(MASK_BL[..., None], x_BLM, 1e6))
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    (_, by_x_BLM), (y_BLM, _) = found
    np.testing.assert_array_equal(y_BLM[~MASK_BL], 0)
    np.testing.assert_array_equal(by_x_BLM[~MASK_BL], 0)


def test_eight_devices_give_the_numbers_of_one():
    graph, params = nnx.split(nested_layer(8))
    x_BLM = jax.random.normal(jax.random.key(3), (16, L, M))

    def loss(params, x_BLM):
        y_BLM, stats = nnx.merge(graph, params)(x_BLM, key=jax.random.key(5))
        return jnp.mean(y_BLM**2) + stats.aux_loss + stats.budget_loss, y_BLM

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    expected = step(params, x_BLM)
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "expert")))
        placed = jax.device_put(params, shardings(params, mesh)), jax.device_put(x_BLM, rows)
        found = step(*placed)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Sums over tokens are split over devices: float32 rounding in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_tokens_keep_their_type_and_a_plan_can_be_replayed(x_BLM):
    layer = nested_layer(E, jnp.bfloat16)
    layer.set_attributes(capture_plan=True)
    run = jax.jit(layer)
    y_BLM, stats = run(x_BLM.astype(jnp.bfloat16))
    assert y_BLM.dtype == jnp.bfloat16
    again_BLM, _ = run(x_BLM.astype(jnp.bfloat16), plan=stats.plan)
    np.testing.assert_array_equal(y_BLM, again_BLM)


@pytest.fixture(scope="module")
def conditional():
    """(gate, tokens, key) -> output and statistics; the experts say nothing, so y = (1 - g) FFN(x)."""
    layer = make_layer("conditional", gate_dropout=0.25)
    layer.gate_M1[...] = jnp.zeros((M, 1))
    layer.moe.experts.wo_EHM[...] = jnp.zeros((E, H, M))

    graph, params = nnx.split(layer)

    @jax.jit
    def run(params, gate, x_BLM, key=None):
        layer = nnx.merge(graph, params)
        layer.gate_bias_1[...] = jnp.log(gate / (1 - gate))[None]
        y_BLM, stats = layer(x_BLM, None, key)
        return y_BLM, stats.budget_loss, layer.ffn(x_BLM)

    return lambda gate, *arguments: run(params, jnp.float32(gate), *arguments)


@pytest.mark.parametrize(("gate", "loss"), [(0.8, 0.0), (0.5, 0.3), (0.999999, 0.2)])
def test_the_budget_loss_is_how_far_the_gates_are_from_the_budget(x_BLM, conditional, gate, loss):
    y_BLM, budget_loss, dense_BLM = conditional(gate, x_BLM)
    np.testing.assert_allclose(budget_loss, loss, atol=2e-6)
    assert budget_loss.dtype == jnp.float32
    np.testing.assert_allclose(y_BLM, (1 - gate) * dense_BLM, rtol=1e-4, atol=1e-6)


def test_gate_dropout_sends_a_share_of_tokens_to_the_ffn_alone(conditional):
    x_BLM = jax.random.normal(jax.random.key(1), (100, L, M))
    y_BLM, budget_loss, dense_BLM = conditional(0.6, x_BLM, jax.random.key(0))
    dropped_BL = np.isclose(y_BLM, dense_BLM, rtol=1e-4, atol=1e-6).all(-1)
    kept_BL = np.isclose(y_BLM, 0.4 * dense_BLM, rtol=1e-4, atol=1e-6).all(-1)
    assert (dropped_BL ^ kept_BL).all()
    # 300 tokens: the standard deviation of the share is 0.025.
    assert abs(dropped_BL.mean() - 0.25) < 0.1
    np.testing.assert_allclose(budget_loss, 0.2, atol=1e-6)  # of the gates before any dropout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1.1}, r"budget must be in \[0, 1\]: got 1.1"),
        ({"gate_dropout": 1.0}, r"gate_dropout must be in \[0, 1\): got 1.0"),
    ],
)
def test_malformed_conditional_layers_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make_layer("conditional", **options)


def test_a_mask_of_another_shape_is_refused(x_BLM):
    with pytest.raises(UserError, match=r"token_mask_BL must have .* got \(2, 4\)"):
        jax.eval_shape(make_layer("shared"), x_BLM, np.ones((B, L + 1), bool))
