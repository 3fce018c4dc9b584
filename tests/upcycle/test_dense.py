"""A trained dense FFN, model or run as the start of one with experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import FeedForward, NoisyTopK, SigmoidTopK, TaskRouting, Top1, Top2, TopK
from moe.models import Transformer, TransformerConfig
from moe.training import open_run
from moe.training.optimizer import make_optimizer
from moe.training.run import read_checkpoint, start_run
from moe.training.state import init_state
from moe.training.step import make_eval_step
from moe.upcycle import upcycle, upcycle_config, upcycle_model
from moe.upcycle.run import upcycle_run, upcycle_run_config
from tests.training.small import small_config

B, L, M, H, E = 2, 7, 5, 11, 3
# Gates that sum to 1 within a few units in the last place, times sums of 11 numbers of size 10.
CLOSE = {"rtol": 2e-5, "atol": 5e-5}
SETTINGS = {"dispatch": "einsum"}  # which compiles quickly


def trained(*, gated, use_bias):
    """An FFN none of whose arrays is zero."""
    ffn = FeedForward(
        M, H, activation=jax.nn.gelu, gated=gated, use_bias=use_bias, rngs=nnx.Rngs(0)
    )
    for seed, variable in enumerate(jax.tree.leaves(nnx.state(ffn), is_leaf=_is_variable)):
        variable.set_value(jax.random.normal(jax.random.key(seed), variable.shape))
    return ffn


@nnx.jit
def output(layer, x_BLM, key=None, ids_BL=None):
    return layer(x_BLM, key=key, ids_BL=ids_BL)


def _is_variable(x):
    return isinstance(x, nnx.Variable)


@pytest.fixture(scope="module")
def x_BLM():
    return jax.random.normal(jax.random.key(9), (B, L, M))


@pytest.mark.parametrize(
    ("gated", "use_bias", "rule"),
    [
        (False, False, Top2()),
        (True, True, TopK(num_choices=3)),
        (False, True, SigmoidTopK(num_choices=2)),
        (True, False, NoisyTopK()),
        (False, False, TaskRouting(num_tasks=2)),
    ],
)
def test_the_first_forward_pass_is_the_dense_ffn(x_BLM, gated, use_bias, rule):
    ffn = trained(gated=gated, use_bias=use_bias)
    layer = upcycle(ffn, E, router=rule, rngs=nnx.Rngs(1), group_size=5, **SETTINGS)
    ids_BL = jnp.arange(B * L).reshape(B, L) % 2
    np.testing.assert_allclose(output(layer, x_BLM, None, ids_BL)[0], ffn(x_BLM), **CLOSE)


def test_so_is_a_training_pass_in_which_no_token_loses_all_its_experts(x_BLM):
    ffn = trained(gated=False, use_bias=False)
    rule = Top2(capacity_factor=1.5, min_capacity=1, renormalize_after_drop=True)
    layer = upcycle(ffn, E, router=rule, rngs=nnx.Rngs(1), **SETTINGS)
    layer.capture_plan = True
    y_BLM, stats = output(layer, x_BLM, jax.random.key(3))
    kept_BL = np.asarray(stats.plan.kept_GSK.any(-1)).reshape(B, L)
    assert kept_BL.sum() > B * L / 2
    assert not stats.plan.kept_GSK.all()
    np.testing.assert_allclose(y_BLM[kept_BL], ffn(x_BLM)[kept_BL], **CLOSE)


def test_arrays_of_any_model_are_enough(x_BLM):
    inward, outward = nnx.Linear(M, H, rngs=nnx.Rngs(4)), nnx.Linear(H, M, rngs=nnx.Rngs(5))
    arrays = {
        "wi_MH": inward.kernel[...],
        "wo_HM": outward.kernel[...],
        "bi_H": np.arange(H) / H,
        "bo_M": np.arange(M) / M,
    }
    inward.bias.set_value(jnp.asarray(arrays["bi_H"]))
    outward.bias.set_value(jnp.asarray(arrays["bo_M"]))
    layer = upcycle(arrays, E, activation=jax.nn.tanh, rngs=nnx.Rngs(1), **SETTINGS)
    np.testing.assert_allclose(
        output(layer, x_BLM)[0], outward(jax.nn.tanh(inward(x_BLM))), **CLOSE
    )


def test_a_gate_that_is_a_probability_scales_the_dense_output(x_BLM):
    ffn = trained(gated=False, use_bias=True)
    layer = upcycle(ffn, E, router=Top1(), rngs=nnx.Rngs(1), **SETTINGS)
    layer.capture_plan = True
    y_BLM, stats = output(layer, x_BLM)
    gate_BL1 = stats.plan.gate_GSK.reshape(B, L, 1)
    assert (gate_BL1 < 1).all()
    np.testing.assert_allclose(y_BLM, gate_BL1 * ffn(x_BLM), **CLOSE)


def test_noise_is_relative_and_every_expert_has_its_own():
    ffn = trained(gated=False, use_bias=True)
    layer = upcycle(ffn, E, noise=0.2, rngs=nnx.Rngs(1))
    dense_MH = np.asarray(ffn.wi_MH[...])
    noise_EMH = np.asarray(layer.experts.wi_EMH[...]) - dense_MH
    size = np.sqrt(np.mean(noise_EMH**2) / np.mean(dense_MH**2))
    assert 0.17 < size < 0.23  # 165 draws of 0.2: standard error 0.011
    assert not np.allclose(noise_EMH[0], noise_EMH[1], atol=0.05)
    np.testing.assert_array_equal(layer.experts.bi_EH[...], np.tile(ffn.bi_H[...], (E, 1)))


def test_a_step_of_training_makes_the_experts_differ(x_BLM):
    layer = upcycle(trained(gated=False, use_bias=False), E, rngs=nnx.Rngs(1), **SETTINGS)

    def loss(layer):
        return jnp.mean((layer(x_BLM)[0] - 1) ** 2)

    grads = nnx.jit(nnx.grad(loss))(layer)
    wi_EMH = np.asarray(grads["experts"]["wi_EMH"][...])
    assert not np.allclose(wi_EMH[0], wi_EMH[1], rtol=0.1)
    # All experts say the same, so that to shift weight between them changes nothing.
    np.testing.assert_allclose(grads["router"]["kernel_ME"][...], 0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wo_HM": None}, r"wo_HM.*got \['wi_MH'\], not \['wi_MH', 'wo_HM'\]"),
        ({"bi_H": np.zeros(H)}, r"not \['bi_H', 'bo_M', 'wi_MH', 'wo_HM'\]"),
        ({"kernel": np.zeros(3)}, r"got \['kernel', 'wi_MH', 'wo_HM'\]"),
        ({"wo_HM": np.zeros((M, H))}, r"wo_HM must have .*: got \(5, 11\) with wi_MH of \(5, 11\)"),
        ({"wi_MH": np.zeros((2, M, H))}, r"wi_MH must have .*: got \(2, 5, 11\)"),
    ],
)
def test_arrays_that_are_no_ffn_are_told(change, message):
    arrays = {"wi_MH": np.zeros((M, H)), "wo_HM": np.zeros((H, M))} | change
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(UserError, match=message):
        upcycle(arrays, E, rngs=nnx.Rngs(0))


def test_one_expert_and_negative_noise_are_refused():
    ffn = trained(gated=False, use_bias=False)
    with pytest.raises(UserError, match="num_experts must be at least 2: got 1"):
        upcycle(ffn, 1, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r"noise must not be negative: got -0.1"):
        upcycle(ffn, E, noise=-0.1, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    """A dense run with one checkpoint, whose batches have come as far as 7."""
    config = small_config(tmp_path_factory.mktemp("runs") / "dense")
    model = dataclasses.replace(config.model, num_experts=0, activation="swiglu", **SETTINGS)
    config = dataclasses.replace(config, model=model)
    run = start_run(config, config.source.pairs("train"))
    optimizer = make_optimizer(config.optimizer, config.steps)
    _, state = init_state(run.model_config, optimizer, seed=3)
    checkpoints = run.checkpoints()
    checkpoints.save(4, state, {"next": 7}, validation_loss=1.0)
    checkpoints.close()
    return run


def validation_loss(run):
    graph, state, _ = read_checkpoint(run, "best")
    step = make_eval_step(graph)
    results = [step(state.params, batch)[:2] for _, batch in run.batches("validation", 4)]
    return sum(float(loss) for loss, _ in results) / sum(int(count) for _, count in results)


def test_a_run_with_experts_starts_where_the_dense_run_was(dense_run, tmp_path):
    config = upcycle_run_config(dense_run, str(tmp_path / "sparse"), 4)
    assert (config.model.num_experts, config.model.d_expert) == (4, 64)
    run = upcycle_run(dense_run.path, config)
    assert open_run(run.path).config == config
    # Float32 sums in another order, over a few hundred tokens of some 6 nats each.
    assert validation_loss(run) == pytest.approx(validation_loss(dense_run), rel=1e-5)

    _, state, data_state = read_checkpoint(run, "last")
    assert int(state.step) == 0
    assert data_state == {"next": 7}
    wi_YEMH = state.params["encoder"]["pairs"]["sparse"]["ffn"]["experts"]["wi_EMH"]
    assert wi_YEMH.shape == (1, 4, 16, 64)
    moments = jax.tree.leaves(state.optimizer)
    assert sum(int(jnp.count_nonzero(moment)) for moment in moments if moment.ndim) == 0


def test_a_folder_that_holds_a_run_is_refused(dense_run):
    config = upcycle_run_config(dense_run, str(dense_run.path), 4)
    with pytest.raises(UserError, match=r"run_dir must be new or empty: got .*dense"):
        upcycle_run(dense_run.path, config)


def test_other_data_are_refused(dense_run, tmp_path):
    config = upcycle_run_config(dense_run, str(tmp_path / "new"), 4)
    mixture = dataclasses.replace(config.mixture, batch_size=4)
    with pytest.raises(UserError, match="mixture must be that of the old run"):
        upcycle_run(dense_run.path, dataclasses.replace(config, mixture=mixture))
    assert not (tmp_path / "new").exists()


SMALL = TransformerConfig(
    vocab_size=19,
    d_model=8,
    d_hidden=6,
    num_heads=2,
    num_encoder_layers=4,
    num_decoder_layers=2,
    num_experts=0,
    **SETTINGS,
)


def inputs(key):
    tokens_BL = jax.random.randint(key, (2, 5), 1, 19)
    segments_BL = jnp.array([[1, 1, 1, 1, 0], [1, 1, 2, 2, 2]])
    positions_BL = jnp.array([[0, 1, 2, 3, 0], [0, 1, 0, 1, 2]])
    names = ("source", "target")
    given = {f"{name}_segments_BL": segments_BL for name in names}
    given |= {f"{name}_positions_BL": positions_BL for name in names}
    return given | {"source_BL": tokens_BL, "target_in_BL": tokens_BL[:, ::-1]}


@pytest.mark.slow
def test_the_logits_of_a_whole_model_are_the_dense_ones():
    dense = Transformer(SMALL, rngs=nnx.Rngs(0))
    config = upcycle_config(SMALL, 3)
    assert (config.num_experts, config.d_expert) == (3, 12)
    sparse = upcycle_model(dense, config, rngs=nnx.Rngs(1))
    batch = inputs(jax.random.key(2))
    run = nnx.jit(lambda model: model(**batch))
    (logits_BLV, stats), (dense_BLV, _) = run(sparse), run(dense)
    real_BL = np.asarray(batch["target_segments_BL"]) > 0  # experts leave padding alone
    np.testing.assert_allclose(logits_BLV[real_BL], dense_BLV[real_BL], rtol=1e-4, atol=1e-5)
    assert stats["encoder"].assigned_E.shape == (2, 3)
    kernel_YME = np.asarray(sparse.encoder.pairs.sparse.ffn.router.kernel_ME[...])
    assert not np.allclose(kernel_YME[0], kernel_YME[1])  # every layer has a router of its own


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"num_experts": 4}, {"num_experts": 4}, "model must be dense: got num_experts=4"),
        ({}, {"num_experts": 0}, "model.num_experts must be at least 2: got 0"),
        ({}, {"num_experts": 4}, "model.d_expert must be .* 12: got 6"),
        ({}, {"num_experts": 4, "d_expert": 12, "d_hidden": 7}, "model.d_hidden must be .* got 7"),
        ({}, {"num_experts": 4, "d_expert": 12, "beside": "shared"}, "got 'shared'"),
    ],
)
def test_a_configuration_that_does_not_fit_is_told(old, new, message):
    class Stub:
        config = dataclasses.replace(SMALL, **old)

    with pytest.raises(UserError, match=message):
        upcycle_model(Stub(), dataclasses.replace(SMALL, **new), rngs=nnx.Rngs(0))
