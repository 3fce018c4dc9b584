"""Mixtral and the Qwen blocks: top-k without capacity, SwiGLU, a shared expert."""

from __future__ import annotations

import numpy as np
import pytest

from moe.convert import read_layer, read_rule, read_tensors, write_layer
from tests.parity.compare import (
    CLOSE,
    check_balance_loss,
    check_choices,
    check_values_and_gradients,
    outputs,
    routing,
    tokens,
)

pytestmark = pytest.mark.parity

# Peer's function and settings, family.
BLOCKS = {
    "mixtral": ("mixtral", {}),
    "mixtral, 3 experts": ("mixtral", {"num_choices": 3}),
    "qwen2-moe": ("qwen2", {}),
    "qwen2-moe, normalised": ("qwen2", {"norm_topk_prob": True}),
    "qwen3-moe": ("qwen3", {}),
    "qwen3-moe, as it is": ("qwen3", {"norm_topk_prob": False}),
}


@pytest.fixture(params=BLOCKS)
def block(request, peers):
    """(peer, family, our rule for its configuration)."""
    family = request.param.partition(",")[0]
    function, settings = BLOCKS[request.param]
    peer = getattr(peers, function)(**settings)
    config = {
        "num_experts_per_tok": peer.module.gate.top_k,
        "norm_topk_prob": getattr(peer.module.gate, "norm_topk_prob", True),
    }
    return peer, family, read_rule(config, family=family)


def test_outputs_and_gradients_are_the_peers(block):
    peer, family, rule = block
    check_values_and_gradients(peer, family=family, x_BLM=tokens(), router=rule)


def test_the_same_tokens_reach_the_same_experts(block):
    peer, family, rule = block
    layer = read_layer(peer.tensors(), family=family, router=rule)
    x_BLM = tokens()
    check_choices(peer.weights_TE(x_BLM), routing(layer, x_BLM))


def test_balance_loss_of_the_peer_is_k_times_ours_over_all_choices(block, peers):
    peer, family, rule = block
    check_balance_loss(peer, peers, family=family, num_choices=rule.num_choices, rule=rule)


@pytest.mark.parametrize("family", ["nllb-moe", "mixtral", "qwen2-moe", "qwen3-moe"])
def test_peer_adds_up_layers_before_it_judges_their_balance(peers, family):
    # Two layers of two experts, the first sends all tokens to expert 0, the second to expert 1.
    collapsed_TE = np.tile(np.array([50.0, 0.0], np.float32), (6, 1))
    layers, mask_BL = [collapsed_TE, collapsed_TE[:, ::-1].copy()], np.ones((2, 3), bool)
    assert peers.top_k_balance_loss(family, layers[:1], 1, mask_BL) == pytest.approx(2)  # collapse
    assert peers.top_k_balance_loss(family, layers, 1, mask_BL) == pytest.approx(1)  # balance


def test_jitter_of_mixtral_reaches_its_experts(peers):
    peer, x_BLM = peers.mixtral(jitter=0.3), tokens()
    assert (peers.input_after_training_step(peer, x_BLM) != x_BLM).mean() > 0.99


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe"),
        ("qwen2-moe", "model.layers.0.mlp"),
        ("qwen3-moe", "model.layers.0.mlp"),
    ],
)
def test_layer_of_a_saved_checkpoint_is_the_one_in_memory(peers, family, prefix, tmp_path):
    peer, config = peers.save_model(family, tmp_path)
    rule = read_rule(config, family=family)
    on_disk = read_tensors(tmp_path, prefix=prefix)
    layer = read_layer(on_disk, family=family, prefix=prefix, router=rule)
    in_memory = read_layer(peer.tensors(), family=family, router=rule)

    x_BLM = np.random.default_rng(4).normal(size=(2, 5, 8)).astype(np.float32)
    y_BLM = outputs(layer, x_BLM)
    np.testing.assert_array_equal(y_BLM, outputs(in_memory, x_BLM))
    np.testing.assert_allclose(y_BLM, peer(x_BLM), **CLOSE)

    for source, written in (
        (on_disk, write_layer(in_memory, family=family, prefix=prefix)),
        (peer.tensors(), write_layer(layer, family=family, fused=True)),
    ):
        assert written.keys() == source.keys()
        for name, value in source.items():
            np.testing.assert_array_equal(written[name], value, err_msg=name)
