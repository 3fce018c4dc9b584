"""NLLB-MoE: its router and its experts joined by a right loop, and what its own layer does instead."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from moe.convert import read_layer, read_rule
from moe.layers import Top2
from tests.parity.compare import (
    CLOSE,
    check_balance_loss,
    check_choices,
    check_values_and_gradients,
    limited,
    outputs,
    routing,
    tokens,
)

pytestmark = pytest.mark.parity
NUM_TOKENS = 3 * 13  # one group: the peer queues the tokens of the whole batch together
# 8 slots of 39 tokens: evaluation keeps ceil(0.2 * 39) = 8 where a balanced load would be 16.
FEW = {"moe_eval_capacity_token_fraction": 0.2}
CAPACITY = 8


def settings(config: dict) -> dict:
    """Our rule for the peer's configuration."""
    rule = read_rule(config, family="nllb-moe")
    if "moe_eval_capacity_token_fraction" in config:
        rule = limited(rule, capacity=CAPACITY, group_size=NUM_TOKENS, num_choices=2)
    return {"router": rule, "group_size": NUM_TOKENS}


CONFIGS = {
    "dropless": {},
    "limited": FEW,
    "limited, normalised before": FEW | {"normalize_router_prob_before_dropping": True},
    "limited, by priority": FEW | {"batch_prioritized_routing": True},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_outputs_and_gradients_are_those_of_the_corrected_peer(peers, config):
    check_values_and_gradients(
        peers.corrected_nllb(**config), family="nllb-moe", x_BLM=tokens(), **settings(config)
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_same_tokens_reach_the_same_experts(peers, config):
    peer, x_BLM = peers.nllb(**config), tokens()
    layer = read_layer(peer.tensors(), family="nllb-moe", **settings(config))
    peer_weights_TE = peer.weights_TE(x_BLM)
    drops = (peer_weights_TE > 0).sum() < 2 * NUM_TOKENS
    assert drops == ("moe_eval_capacity_token_fraction" in config)
    check_choices(peer_weights_TE, routing(layer, x_BLM))


def test_padding_takes_no_slot_in_either(peers):
    x_BLM, mask_BL = tokens(), np.ones((3, 13), bool)
    mask_BL[:, :4] = False
    peer = peers.corrected_nllb(padding_BL=~mask_BL, **FEW)
    check_values_and_gradients(
        peer, family="nllb-moe", x_BLM=x_BLM, mask_BL=mask_BL, **settings(FEW)
    )


def test_shipped_layer_sends_every_token_to_experts_one_and_zero(peers):
    # transformers 5.23.0 takes the one-hot of a mask of zeros and ones instead of expert numbers.
    # When this fails the peer was corrected: compare with it directly and drop the corrected loop.
    peer, x_BLM = peers.nllb(), tokens()
    weights_TE = peer.weights_TE(x_BLM)
    first_T1 = weights_TE.max(axis=1, keepdims=True)
    said = [peers.nllb_expert(peer, e, x_BLM.reshape(NUM_TOKENS, -1)) for e in (0, 1)]
    wrong_TM = first_T1 * said[1] + (1 - first_T1) * said[0]
    np.testing.assert_allclose(peer(x_BLM).reshape(NUM_TOKENS, -1), wrong_TM, **CLOSE)

    _, of_weights = peer.gradients(x_BLM, np.ones_like(x_BLM))
    touched = {name.split(".")[1] for name, value in of_weights.items() if value.any()}
    assert touched == {"expert_0", "expert_1", "classifier"}
    y_BLM = outputs(read_layer(peer.tensors(), family="nllb-moe", **settings({})), x_BLM)
    assert np.abs(np.asarray(y_BLM) - peer(x_BLM)).max() > 0.1


def test_output_masking_means_the_same_in_evaluation_but_not_in_training(peers):
    x_BLM, rate = tokens(), 0.2
    evaluation = peers.nllb_masking_factors(x_BLM, rate=rate, training=False)
    np.testing.assert_allclose(evaluation, 0.8, rtol=1e-5)
    tensors = peers.nllb().tensors()
    dropless = dataclasses.replace(read_rule({}, family="nllb-moe"), capacity_factor=None)
    masking, plain = (
        read_layer(tensors, family="nllb-moe", router=dropless, output_masking=each)
        for each in (rate, 0.0)
    )
    np.testing.assert_allclose(outputs(masking, x_BLM), 0.8 * outputs(plain, x_BLM), **CLOSE)
    # In training it masks single numbers and scales up the rest; we mask what an expert said, whole.
    training = peers.nllb_masking_factors(x_BLM, rate=rate, training=True)
    assert set(np.unique(np.round(training, 4))) == {0, 1.25}
    gates_GSK = routing(masking, x_BLM, key=jax.random.key(0)).gate_GSK
    unmasked_GSK = routing(plain, x_BLM, key=jax.random.key(0)).gate_GSK
    assert set(np.unique(np.round(gates_GSK / unmasked_GSK, 4))) == {0, 1}


def test_peer_trains_with_the_capacity_of_its_last_evaluation(peers):
    peer = peers.nllb(expert_capacity=64, **FEW)
    assert peers.nllb_capacity(peer, tokens(), training=True) == 64
    assert peers.nllb_capacity(peer, tokens(), training=False) == CAPACITY
    assert peers.nllb_capacity(peer, tokens(), training=True) == CAPACITY  # 64 is forgotten


def test_peer_tosses_for_the_second_expert_with_its_probability_not_its_gate(peers):
    # Ten equal experts: probability 0.1, gate 0.5. The paper keeps with min(1, 2 * 0.5), always.
    kept = peers.nllb_kept_second_choices(num_tokens=2003, num_experts=10, capacity=2003)
    assert kept / 2003 == pytest.approx(0.2, abs=0.05)  # 5 deviations of sqrt(0.2 * 0.8 / 2003)
    plan = Top2(second_policy="random", capacity_factor=10)(
        np.zeros((1, 2003, 10), np.float32), key=jax.random.key(0)
    )
    assert np.asarray(plan.assigned_GSK)[..., 1].all()


def test_second_choice_that_lost_the_toss_takes_no_slot_in_the_peer(peers):
    # About 400 win the toss. Were the losers counted, only winners among the first 101 tokens had a
    # slot, about 20. So it is slot_rule="code", which is our rule for the family.
    kept = peers.nllb_kept_second_choices(num_tokens=2003, num_experts=10, capacity=101)
    assert kept == 101
    assert read_rule({}, family="nllb-moe").slot_rule == "code"


def test_balance_loss_of_the_peer_is_twice_ours_over_both_choices(peers):
    check_balance_loss(
        peers.nllb(), peers, family="nllb-moe", num_choices=2, rule=read_rule({}, family="nllb-moe")
    )


def test_z_loss_weight_of_the_peer_changes_nothing(peers):
    assert peers.nllb_model_loss(z_weight=0.0) == peers.nllb_model_loss(z_weight=1e6)
