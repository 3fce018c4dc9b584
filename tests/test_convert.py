"""Weights by name, without the peers: round trips and what malformed tensors are told."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.convert import read_layer, read_rule, read_tensors, write_layer
from moe.errors import UserError
from moe.layers import MoE, SharedExperts, SigmoidTopK, Top1, Top2

E, M, H, SHARED_H = 3, 5, 7, 11
ROUTER = {"gate.weight": (E, M)}
CLASSIFIER = {"router.classifier.weight": (E, M)}
FUSED = {"experts.gate_up_proj": (E, 2 * H, M), "experts.down_proj": (E, M, H)}
SHARED = {
    "shared_expert.gate_proj.weight": (SHARED_H, M),
    "shared_expert.up_proj.weight": (SHARED_H, M),
    "shared_expert.down_proj.weight": (M, SHARED_H),
    "shared_expert_gate.weight": (1, M),
}


def of_experts(template: str, **shapes) -> dict[str, tuple[int, ...]]:
    return {
        template.format(
            e=e, name=name.replace("_weight", ".weight").replace("_bias", ".bias")
        ): shape
        for e in range(E)
        for name, shape in shapes.items()
    }


QWEN = ROUTER | of_experts(
    "experts.{e}.{name}", gate_proj_weight=(H, M), up_proj_weight=(H, M), down_proj_weight=(M, H)
)
# As published: (family, names and shapes).
LAYOUTS = {
    "switch": CLASSIFIER
    | of_experts("experts.expert_{e}.{name}", wi_weight=(H, M), wo_weight=(M, H)),
    "nllb-moe": CLASSIFIER
    | of_experts(
        "experts.expert_{e}.{name}",
        fc1_weight=(H, M),
        fc1_bias=(H,),
        fc2_weight=(M, H),
        fc2_bias=(M,),
    ),
    "mixtral": ROUTER
    | of_experts("experts.{e}.{name}", w1_weight=(H, M), w2_weight=(M, H), w3_weight=(H, M)),
    "qwen2-moe": QWEN | SHARED,
    "qwen3-moe": QWEN,
}
FUSED_LAYOUTS = {
    "mixtral": ROUTER | FUSED,
    "qwen2-moe": ROUTER | FUSED | SHARED,
    "qwen3-moe": ROUTER | FUSED,
}


def random(shapes, dtype="float32", prefix="") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {prefix + name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16", jnp.bfloat16])
@pytest.mark.parametrize("family", LAYOUTS)
def test_weights_come_back_to_the_bit_under_their_names(family, dtype):
    tensors = random(LAYOUTS[family], dtype, prefix="layers.1.mlp.")
    layer = read_layer(tensors, family=family, prefix="layers.1.mlp")
    assert_same(write_layer(layer, family=family, prefix="layers.1.mlp."), tensors)


@pytest.mark.parametrize("family", FUSED_LAYOUTS)
def test_fused_experts_are_the_same_layer(family):
    fused = random(FUSED_LAYOUTS[family])
    layer = read_layer(fused, family=family)
    assert_same(write_layer(layer, family=family, fused=True), fused)
    single = write_layer(layer, family=family)
    assert {name: value.shape for name, value in single.items()} == LAYOUTS[family]
    assert_same(write_layer(read_layer(single, family=family), family=family, fused=True), fused)


def test_every_matrix_lands_in_its_place():
    tensors = random(LAYOUTS["nllb-moe"])
    layer = read_layer(tensors, family="nllb-moe")
    expert = {name: tensors[f"experts.expert_2.{name}"] for name in ("fc1.weight", "fc2.bias")}
    np.testing.assert_array_equal(layer.experts.wi_EMH[2], expert["fc1.weight"].T)
    np.testing.assert_array_equal(layer.experts.bo_EM[2], expert["fc2.bias"])
    gated = random(LAYOUTS["mixtral"])
    layer = read_layer(gated, family="mixtral")
    np.testing.assert_array_equal(layer.experts.wg_EMH[1], gated["experts.1.w1.weight"].T)
    np.testing.assert_array_equal(layer.experts.wi_EMH[1], gated["experts.1.w3.weight"].T)
    np.testing.assert_array_equal(layer.experts.wo_EHM[1], gated["experts.1.w2.weight"].T)


def test_a_layer_that_was_made_here_can_be_exported_and_read_again():
    layer = MoE(M, H, E, gated=True, rngs=nnx.Rngs(0))
    tensors = write_layer(layer, family="mixtral")
    again = read_layer(tensors, family="mixtral")
    np.testing.assert_array_equal(again.experts.wg_EMH[...], layer.experts.wg_EMH[...])
    np.testing.assert_array_equal(again.router.kernel_ME[...], layer.router.kernel_ME[...])
    assert_same(write_layer(again, family="mixtral"), tensors)


def test_only_qwen2_has_a_shared_expert():
    layers = {family: read_layer(random(LAYOUTS[family]), family=family) for family in LAYOUTS}
    shared = {family for family, layer in layers.items() if isinstance(layer, SharedExperts)}
    assert shared == {"qwen2-moe"}


def test_rule_follows_the_configuration():
    top_k = {"num_experts_per_tok": 6}
    assert read_rule(top_k, family="mixtral").num_choices == 6
    assert read_rule({}, family="mixtral").gates == "renormalized"
    for family in ("qwen2-moe", "qwen3-moe"):
        as_it_is = read_rule(top_k | {"norm_topk_prob": False}, family=family)
        normalized = read_rule(top_k | {"norm_topk_prob": True}, family=family)
        assert (as_it_is.gates, normalized.gates) == ("softmax_then_top_k", "renormalized")
        assert as_it_is.num_choices == 6
        assert as_it_is.capacity_factor is None  # dropless in training too
    nllb = read_rule(
        {"normalize_router_prob_before_dropping": True, "batch_prioritized_routing": True},
        family="nllb-moe",
    )
    assert isinstance(nllb, Top2)
    assert nllb.batch_priority
    assert not nllb.renormalize_after_drop
    switch = read_rule({"router_jitter_noise": 0.25}, family="switch")
    assert switch == dataclasses.replace(Top1(), jitter=0.25)


def test_tensors_are_read_from_one_file_or_several(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = random(LAYOUTS["mixtral"], jnp.bfloat16, prefix="layers.0.moe.")
    other = {"layers.0.norm": np.ones(3, np.float32)}
    halves = list(tensors.items())[:4], list(tensors.items())[4:]
    for number, half in enumerate(halves):
        safetensors.save_file(dict(half) | other, tmp_path / f"part-{number}.safetensors")
    assert_same(read_tensors(tmp_path, prefix="layers.0.moe"), tensors)
    first = read_tensors(tmp_path / "part-0.safetensors")
    assert_same(first, dict(halves[0]) | other)
    with pytest.raises(UserError, match=r"prefix must start some name in .*: got 'layers\.1'"):
        read_tensors(tmp_path, prefix="layers.1")
    with pytest.raises(UserError, match=r"path must be a safetensors file .*: got .*nowhere"):
        read_tensors(tmp_path / "nowhere")


def without(tensors, *names):
    return {name: value for name, value in tensors.items() if name not in names}


MISSING = r"tensors must hold the whole layer: got {} \(missing\)"


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mixtral", lambda t: without(t, "gate.weight"), MISSING.format("gate.weight")),
        ("switch", lambda t: {}, MISSING.format("router.classifier.weight")),
        (
            "mixtral",
            lambda t: without(t, "experts.2.w2.weight"),
            MISSING.format("experts.2.w2.weight"),
        ),
        (
            "qwen2-moe",
            lambda t: without(t, "shared_expert_gate.weight"),
            MISSING.format("shared_expert_gate.weight"),
        ),
        (
            "nllb-moe",
            lambda t: t | {"router.classifier.bias": np.zeros(E, np.float32)},
            r"nothing but the layer: got router.classifier.bias \(\(3,\)\)",
        ),
        (
            "nllb-moe",
            lambda t: t | {"experts.expert_1.fc1.bias": np.zeros(H + 1, np.float32)},
            r"sizes .*: got experts.expert_1.fc1.bias \(\(8,\), not \(7,\)\)",
        ),
        (
            "qwen2-moe",
            lambda t: t | {"shared_expert.down_proj.weight": np.zeros((SHARED_H, M), np.float32)},
            r"got shared_expert.down_proj.weight \(\(11, 5\), not \(5, 11\)\)",
        ),
        (
            "switch",
            lambda t: t | {"router.classifier.weight": np.zeros(M, np.float32)},
            r"got router.classifier.weight \(\(5,\), not a matrix\)",
        ),
        (
            "switch",
            lambda t: t | {"experts.expert_0.wo.weight": np.zeros((M, H), np.int8)},
            r"float32.*: got experts.expert_0.wo.weight \(int8\)",
        ),
    ],
)
def test_malformed_tensors_are_named(family, change, message):
    with pytest.raises(UserError, match=message):
        read_layer(change(random(LAYOUTS[family])), family=family)


def test_malformed_fused_experts_are_named():
    tensors = random(FUSED_LAYOUTS["mixtral"])
    with pytest.raises(UserError, match=MISSING.format("experts.down_proj")):
        read_layer(without(tensors, "experts.down_proj"), family="mixtral")
    crossed = tensors | {"experts.gate_up_proj": np.zeros((E, M, 2 * H), np.float32)}
    with pytest.raises(UserError, match=r"experts.gate_up_proj \(\(3, 5, 14\)\), .*\(3, 5, 7\)"):
        read_layer(crossed, family="mixtral")


def test_a_hundred_missing_names_are_counted_not_listed():
    router = {"gate.weight": np.zeros((40, M), np.float32), "experts.0.w3.weight": np.zeros((H, M))}
    with pytest.raises(UserError, match=r"experts.5.w1.weight \(missing\) and 113 more"):
        read_layer(router, family="mixtral")  # 40 * 3 - 1 are missing, 6 of them named


def test_family_must_be_known_and_fit_the_layer():
    with pytest.raises(UserError, match=r"family must be one of .*: got 'dense'"):
        read_layer({}, family="dense")
    layer = MoE(M, H, E, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r"got \[\] too many, \['experts.wg_EMH'\] missing"):
        write_layer(layer, family="mixtral")
    biased = MoE(M, H, E, use_bias=True, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r"\['experts.bi_EH', 'experts.bo_EM'\] too many"):
        write_layer(biased, family="switch")
    # A rule with state of its own: no tensor would fill it.
    with pytest.raises(UserError, match=r"\['router.bias_E'\] too many"):
        read_layer(random(LAYOUTS["mixtral"]), family="mixtral", router=SigmoidTopK())
    with pytest.raises(UserError, match=r"fused must be False .*: got True for 'switch'"):
        write_layer(layer, family="switch", fused=True)
