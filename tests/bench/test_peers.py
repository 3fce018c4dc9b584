"""The peers are what the table says they are. Needs torch and transformers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe.bench.config import PEERS
from tests.bench.small import WORKLOAD

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

from moe.bench import hugging_face, torch_layers  # noqa: E402
from moe.bench.worker import measure_section  # noqa: E402

SMALL = dataclasses.replace(WORKLOAD, tokens=29, d_model=12, d_hidden=20, num_experts=5)


def top2(arrays):
    """Experts and normalised gates of every token, in loops: [[(expert, gate), (expert, gate)]]."""
    chosen = []
    for x_M in arrays.x_NM.astype(np.float64):
        logits_E = x_M @ arrays.kernel_ME
        probs_E = np.exp(logits_E - logits_E.max())
        best = np.argsort(-probs_E)[:2]
        chosen.append([(int(e), probs_E[e] / probs_E[best].sum()) for e in best])
    return chosen


def layer_of(build):
    """The layer that a case was made of, and what it says on the workload's tokens."""
    caught = {}

    def catch(name, layer, workload, **settings):
        caught["layer"] = layer
        return torch_layers.torch_case(name, layer, workload, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face, "torch_case", catch)
        case = build(SMALL)
    return caught["layer"], case.forward()[0].numpy(), case


def nllb_in_loops(layer):
    arrays = SMALL.arrays()
    weights = {name: w.detach().double().numpy() for name, w in layer.named_parameters()}
    y_NM = np.zeros(arrays.x_NM.shape)
    for n, choices in enumerate(top2(arrays)):
        for e, gate in choices:
            of = f"experts.expert_{e}."
            h_H = np.maximum(
                weights[of + "fc1.weight"] @ arrays.x_NM[n] + weights[of + "fc1.bias"], 0
            )
            y_NM[n] += gate * (weights[of + "fc2.weight"] @ h_H + weights[of + "fc2.bias"])
    return y_NM


def test_the_corrected_nllb_layer_equals_its_loops():
    layer, y_NM, case = layer_of(hugging_face.CASES["nllb-corrected"])
    # Sums of 20 float32 products of order 1: 1e-5 is 100 roundings.
    np.testing.assert_allclose(y_NM, nllb_in_loops(layer), atol=1e-5)
    assert case.computed() == 1


def test_the_shipped_nllb_layer_does_not():
    layer, y_NM, case = layer_of(hugging_face.CASES["nllb-shipped"])
    assert np.abs(y_NM - nllb_in_loops(layer)).max() > 0.1
    # Expert 1 is given all first choices, expert 0 every other pair: right only by chance.
    right = sum(
        (i == 0) == (e == 1) and e < 2 for c in top2(SMALL.arrays()) for i, (e, _) in enumerate(c)
    )
    assert case.computed() == right / (2 * 29)
    gradients = dict(zip((n for n, _ in layer.named_parameters()), case.train(), strict=False))
    assert gradients["experts.expert_0.fc1.weight"] is not None
    assert gradients["experts.expert_2.fc1.weight"] is None


def test_drops_of_a_peer_are_counted():
    layer, _, _ = layer_of(hugging_face.CASES["switch"])
    layer.router.expert_capacity = 4
    first = [choices[0][0] for choices in top2(SMALL.arrays())]
    kept = sum(min(first.count(e), 4) for e in range(5))
    assert kept < 29
    assert hugging_face.computed_share(layer, SMALL, num_choices=1) == kept / 29


def test_the_layer_on_torchs_grouped_product_equals_its_loops():
    layer = torch_layers.GroupedMoE(SMALL)
    arrays = SMALL.arrays()
    torch_layers.torch_case("grouped", layer, SMALL, note="", router=layer.kernel_ME)
    y_NM = layer(torch.as_tensor(arrays.x_NM)[None])[0].detach().numpy()
    wi_EMH, wo_EHM = (w.detach().double().numpy() for w in (layer.wi_EMH, layer.wo_EHM))
    expected_NM = [
        sum(gate * (np.maximum(x_M @ wi_EMH[e], 0) @ wo_EHM[e]) for e, gate in choices)
        for x_M, choices in zip(arrays.x_NM, top2(arrays), strict=True)
    ]
    np.testing.assert_allclose(y_NM, expected_NM, atol=1e-5)  # as above


def test_every_peer_is_timed_and_drops_nothing_it_can_keep():
    names = [name for peers in PEERS.values() for name in peers]
    measured = measure_section(SMALL, names=["moe-auto", *names], rounds=1)
    for row in measured.rows:
        assert row.forward and row.train and row.memory_bytes is not None, row
        assert measured.eff(row, "train") > 0
        assert row.computed == 1 or row.name == "nllb-shipped" or row.name.startswith("dense"), row
    mixtral = next(row for row in measured.rows if row.name == "mixtral-grouped")
    assert measured.reference(mixtral).name == "dense-torch-swiglu"


def test_decoding_and_bfloat16_work_for_every_peer():
    workload = dataclasses.replace(SMALL, training=False, dtype="bfloat16", d_model=16, d_hidden=32)
    names = [name for peers in PEERS.values() for name in peers]
    for row in measure_section(workload, names=names, rounds=1).rows:
        assert row.forward and row.train is None, row


def test_the_shipped_layer_is_left_out_where_it_would_take_hours():
    workload = dataclasses.replace(SMALL, tokens=4096, num_experts=128)
    (row,) = measure_section(workload, names=["nllb-shipped"], rounds=1).rows
    assert row.note == ("not measured: computes all 524,288 token-expert pairs, on experts 0 and 1")


def test_the_names_of_the_peers_are_those_of_their_rooms():
    assert {
        "torch": tuple(torch_layers.CASES),
        "transformers": tuple(hugging_face.CASES),
    } == PEERS
