"""One comparison for all families: our layer against a peer's, in values, gradients and choices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe.convert import read_layer, write_layer

NUM_EXPERTS, D_MODEL = 5, 7
# Both sides are float32 and add the same products (13 at most, then 2 or 3 experts) in another
# order: the largest difference seen is 3e-7 of the largest value (8e-6 of 37, a weight gradient).
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def tokens(rows: int = 3, length: int = 13, seed: int = 1) -> np.ndarray:
    """x_BLM with unit variance."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, length, D_MODEL)).astype(np.float32)


def limited(rule, *, capacity: int, group_size: int, num_choices: int):
    """The rule with room for exactly `capacity` tokens of a group in an expert, also in evaluation."""
    factor = capacity * NUM_EXPERTS / (group_size * num_choices)
    return dataclasses.replace(
        rule, capacity_factor=factor, eval_capacity_factor=factor, min_capacity=1
    )


@nnx.jit
def outputs(layer, *args, **named):
    """y_BLM of a layer of ours, called with the arguments."""
    return layer(*args, **named)[0]


@nnx.jit
def routing(layer, *args, **named):
    """The plan of the same call."""
    return getattr(layer, "moe", layer).route(*args, **named)


def check_values_and_gradients(peer, *, family: str, x_BLM: np.ndarray, mask_BL=None, **settings):
    """Asserts equal outputs, and gradients of a random projection of them, weights by name."""
    layer = read_layer(peer.tensors(), family=family, **settings)
    cotangent_BLM = np.random.default_rng(2).normal(size=x_BLM.shape).astype(np.float32)

    def projected(layer, x_BLM):
        y_BLM, _ = layer(x_BLM, mask_BL)
        return jnp.sum(y_BLM * cotangent_BLM), y_BLM

    grad = nnx.jit(nnx.value_and_grad(projected, argnums=(0, 1), has_aux=True))
    (_, y_BLM), (of_weights, of_x_BLM) = grad(layer, jnp.asarray(x_BLM))
    np.testing.assert_allclose(y_BLM, peer(x_BLM), **CLOSE)

    peer_of_x_BLM, peer_of_weights = peer.gradients(x_BLM, cotangent_BLM)
    np.testing.assert_allclose(of_x_BLM, peer_of_x_BLM, **CLOSE)
    # Gradients have the form of the layer: exported, they carry the peer's names.
    nnx.update(layer, of_weights)
    ours = write_layer(layer, family=family, fused="experts.gate_up_proj" in peer_of_weights)
    assert ours.keys() == peer_of_weights.keys()
    for name, gradient in peer_of_weights.items():
        np.testing.assert_allclose(ours[name], gradient, **CLOSE, err_msg=name)


def weights_TE(plan) -> np.ndarray:
    """The weight each token gives each expert, 0 where it is not sent: choices and drops in one."""
    chosen_GSKE = jax.nn.one_hot(plan.expert_GSK, plan.num_experts)
    weights_GSE = jnp.sum(plan.gate_GSK[..., None] * chosen_GSKE, axis=2)
    return np.asarray(weights_GSE).reshape(-1, plan.num_experts)


def check_choices(peer_weights_TE: np.ndarray, plan) -> None:
    """Asserts that both send the same tokens to the same experts with the same weights."""
    ours_TE = weights_TE(plan)
    np.testing.assert_array_equal(ours_TE > 0, peer_weights_TE > 0)
    np.testing.assert_allclose(ours_TE, peer_weights_TE, **CLOSE)


def check_balance_loss(peer, peers, *, family: str, num_choices: int, rule) -> None:
    """Asserts that the peer's loss of one layer is K times ours over all choices of all tokens."""
    x_BLM, mask_BL = tokens(), np.arange(13) < np.array([[13], [5], [9]])
    rule = dataclasses.replace(rule, balance="all", balance_over="global")
    layer = read_layer(peer.tensors(), family=family, router=rule, group_size=13)
    ours = routing(layer, x_BLM, mask_BL).aux_loss
    logits_TE = peers.logits_TE(peer, x_BLM)
    theirs = peers.top_k_balance_loss(family, [logits_TE], num_choices, mask_BL)
    np.testing.assert_allclose(num_choices * ours, theirs, rtol=1e-5)
