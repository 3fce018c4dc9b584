"""Parity with Optax, whose rules take a parameter for one matrix, on the matrices one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe.sharding import param
from moe.training.by_matrix import scale_by_adafactor, scale_by_trust_ratio
from moe.training.optimizer import OptimizerConfig, make_optimizer

RATE = 0.01
CONFIG = {"learning_rate": RATE, "schedule": "constant", "warmup_steps": 1, "clip_norm": 1e9}


def arrays(seed: int):
    """Two layers of three experts and two norms; gradients of another size for each matrix."""
    draw = np.random.default_rng(seed).standard_normal
    sizes_YE11 = np.exp(draw((2, 3, 1, 1), np.float32))
    return draw((2, 3, 131, 137), np.float32) * sizes_YE11, draw((2, 7), np.float32)


def named(wi_YEMH, scale_YM) -> nnx.State:
    wi_YEMH = param(jnp.asarray(wi_YEMH), "layers", "experts", "model", "hidden")
    return nnx.State({"wi_YEMH": wi_YEMH, "scale": nnx.Param(jnp.asarray(scale_YM))})


def run(optimizer, params, gradients):
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


# Optax's Adafactor has no cap on its decay, which is 1 - 3**-0.8 < 0.98 in the third step. Our
# schedule's learning rate is 0 in the first step; so is Optax's here.
PEERS = {
    "adafactor": lambda: optax.adafactor(
        lambda step: RATE * (step > 0), multiply_by_parameter_scale=False
    ),
    "lamb": lambda: optax.lamb(lambda step: RATE * (step > 0), b1=0.9, b2=0.98),
    "sgd": lambda: optax.sgd(lambda step: RATE * (step > 0), momentum=0.9),
}


@pytest.mark.parametrize("name", PEERS)
def test_layers_and_experts_are_updated_like_parameters_of_their_own(name):
    first, gradients = arrays(0), [arrays(seed) for seed in (1, 2, 3)]
    ours = make_optimizer(OptimizerConfig(name=name, **CONFIG), 10)
    found = run(ours, named(*first), [named(*gradient) for gradient in gradients])

    def apart(wi_YEMH, scale_YM):
        return [matrix for layer in wi_YEMH for matrix in layer], list(scale_YM)

    matrices, vectors = run(PEERS[name](), apart(*first), [apart(*each) for each in gradients])
    # Means and norms are summed in another order: float32 rounding.
    close = {"rtol": 2e-5, "atol": 1e-6}
    np.testing.assert_allclose(
        found["wi_YEMH"][...].reshape(6, 131, 137), np.stack(matrices), **close
    )
    np.testing.assert_allclose(found["scale"][...], np.stack(vectors), **close)


def test_the_decay_of_adafactor_rises_to_its_cap():
    rule = scale_by_adafactor(max_decay=0.3)
    params = {"vector": jnp.zeros(1)}
    state = rule.init(params)
    means = []
    for gradient in (1.0, 2.0, 3.0):
        _, state = rule.update({"vector": jnp.full(1, gradient)}, state, params)
        means.append(float(state.slots["vector"][0][0]))
    # 1 - 1**-0.8 = 0; 1 - 2**-0.8 = 0.43 and 1 - 3**-0.8 = 0.58 are above 0.3.
    np.testing.assert_allclose(means, [1, 0.3 * 1 + 0.7 * 4, 0.3 * 3.1 + 0.7 * 9], rtol=1e-6)


def test_slots_of_adafactor_keep_the_names_of_their_dimensions():
    state = scale_by_adafactor(max_decay=0.98).init(named(*arrays(0)))
    rows, columns = state.slots["wi_YEMH"]
    assert rows.get_metadata()["out_sharding"] == ("layers", "experts", "model")
    assert columns.get_metadata()["out_sharding"] == ("layers", "experts", "hidden")
    assert (rows.shape, columns.shape) == ((2, 3, 131), (2, 3, 137))
    assert [slot.shape for slot in state.slots["scale"]] == [(2, 7)]


def test_a_matrix_of_zeros_has_the_trust_ratio_one():
    rule = scale_by_trust_ratio()
    params = named(np.zeros((2, 1, 3, 5)), [[3.0, 4.0], [0.0, 0.0]])
    updates, _ = rule.update(
        named(np.ones((2, 1, 3, 5)), np.full((2, 2), 2.0)), rule.init(params), params
    )
    np.testing.assert_array_equal(updates["wi_YEMH"][...], 1)
    # |(3, 4)| / |(2, 2)| = 5 / sqrt(8), times 2; a norm of zeros is left alone.
    np.testing.assert_allclose(updates["scale"][...], [[5 / 2**0.5] * 2, [2, 2]], rtol=1e-6)
