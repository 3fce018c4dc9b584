"""Switch Transformers: the layer as Hugging Face runs it, and where we differ on purpose."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from moe.convert import read_layer, read_rule
from moe.layers import Top1
from tests.parity.compare import (
    CLOSE,
    NUM_EXPERTS,
    check_choices,
    check_values_and_gradients,
    limited,
    outputs,
    routing,
    tokens,
)

pytestmark = pytest.mark.parity
LENGTH = 13


def settings(capacity: int | None) -> dict:
    """The peer's group is one sequence; `capacity` its `expert_capacity`, None enough for all."""
    rule = Top1()
    if capacity is not None:
        rule = limited(rule, capacity=capacity, group_size=LENGTH, num_choices=1)
    return {"router": rule, "group_size": LENGTH}


@pytest.mark.parametrize("capacity", [None, 2])
def test_outputs_and_gradients_are_the_peers(peers, capacity):
    peer = peers.switch(capacity=capacity or LENGTH)
    check_values_and_gradients(peer, family="switch", x_BLM=tokens(), **settings(capacity))


@pytest.mark.parametrize("capacity", [None, 2])
def test_the_same_tokens_reach_the_same_experts(peers, capacity):
    peer, x_BLM = peers.switch(capacity=capacity or LENGTH), tokens()
    layer = read_layer(peer.tensors(), family="switch", **settings(capacity))
    peer_weights_TE = peer.weights_TE(x_BLM)
    assert (peer_weights_TE.max(axis=1) == 0).any() == (capacity is not None)  # dropped tokens
    check_choices(peer_weights_TE, routing(layer, x_BLM))


def test_losses_of_one_layer_are_the_peers(peers):
    peer, x_BLM = peers.switch(capacity=2), tokens()
    plan = routing(read_layer(peer.tensors(), family="switch", **settings(2)), x_BLM)
    logits_BLE = peers.logits_TE(peer, x_BLM).reshape(3, LENGTH, NUM_EXPERTS)
    balance, z = peers.switch_losses([logits_BLE])
    np.testing.assert_allclose(plan.aux_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(plan.z_loss, z, rtol=1e-5)


def test_peer_adds_up_layers_before_it_judges_their_balance(peers):
    # Two layers of two experts, the first sends all tokens to expert 0, the second to expert 1.
    collapsed_BLE = np.broadcast_to(np.array([50.0, 0.0], np.float32), (3, LENGTH, 2))
    peer_loss, _ = peers.switch_losses([collapsed_BLE, collapsed_BLE[..., ::-1]])
    np.testing.assert_allclose(peer_loss, 1, rtol=1e-6)  # 1 is perfect balance
    each = [Top1()(logits_BLE).aux_loss for logits_BLE in (collapsed_BLE, collapsed_BLE[..., ::-1])]
    np.testing.assert_allclose(each, [2, 2], rtol=1e-6)  # E is collapse


def test_peer_leaves_out_the_losses_when_every_layer_is_sparse(peers):
    assert min(peers.switch_model_losses(sparse_step=2)) > 0.9  # 1 is balance
    assert peers.switch_model_losses(sparse_step=1) == (0, 0)


def test_jitter_reaches_the_experts_of_the_peer_and_not_ours(peers):
    noise, x_BLM = 0.3, tokens()
    peer = peers.switch(capacity=LENGTH, router_jitter_noise=noise)
    # The router multiplies its input in place: in float32 that is the array the experts read.
    changed_BLM = peers.input_after_training_step(peer, x_BLM) != x_BLM
    assert changed_BLM.mean() > 0.99

    rule = read_rule({"router_jitter_noise": noise}, family="switch")
    layer = read_layer(peer.tensors(), family="switch", router=rule)
    key = jax.random.key(0)
    noisy = routing(layer, x_BLM, key=key)
    assert np.abs(noisy.probs_GSE - routing(layer, x_BLM).probs_GSE).max() > 0.01
    # The same choices and gates, with no noise anywhere: the experts said the same.
    forced_BLM = outputs(layer, x_BLM, plan=noisy)
    np.testing.assert_allclose(outputs(layer, x_BLM, key=key), forced_BLM, **CLOSE)


def test_padding_takes_a_slot_from_a_real_token_in_the_peer_and_not_in_ours(peers):
    # A row of one token, repeated: all want one expert, which has a single slot.
    x_BLM = np.repeat(tokens(rows=1, length=1), LENGTH, axis=1)
    mask_BL = np.arange(LENGTH)[None] > 0  # the first is padding
    peer = peers.switch(capacity=1, router_ignore_padding_tokens=True)  # which nothing reads
    layer = read_layer(peer.tensors(), family="switch", **settings(1))
    kept_by_peer_T = peer.weights_TE(x_BLM).max(axis=1) > 0
    kept_by_us_T = np.asarray(routing(layer, x_BLM, mask_BL).kept_GSK)[0, :, 0]
    np.testing.assert_array_equal(np.flatnonzero(kept_by_peer_T), [0])
    np.testing.assert_array_equal(np.flatnonzero(kept_by_us_T), [1])
