"""Growing, pruning and merging the experts of a trained layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import (
    FeedForward,
    Hash,
    MoE,
    NoisyTopK,
    SharedExperts,
    SigmoidTopK,
    Soft,
    Top1,
    Top2,
    TopK,
    TwoLevel,
    Without,
)
from moe.models import Transformer, TransformerConfig
from moe.upcycle import grow_experts, merge_experts, prune_experts, resize_model

B, L, M, H, E = 2, 11, 5, 7, 4
# Sums of a few float32 products of size 1 in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
LOAD = (5, 40, 1, 12)


def layer_of(rule=None, **settings):
    """By einsums, which compile quickly."""
    layer = MoE(M, H, E, router=rule or Top2(), dispatch="einsum", rngs=nnx.Rngs(3), **settings)
    for name in ("bi_EH", "bo_EM"):
        if settings.get("use_bias"):
            bias = getattr(layer.experts, name)
            bias.set_value(jax.random.normal(jax.random.key(5), bias.shape))
    return layer


@pytest.fixture(scope="module")
def x_BLM():
    return jax.random.normal(jax.random.key(0), (B, L, M))


@nnx.jit
def output(layer, x_BLM):
    return layer(x_BLM)


@nnx.jit
def experts_of(layer, x_BLM):
    return layer.route(x_BLM).expert_GSK[0]


def values(layer):
    return {".".join(map(str, p)): np.asarray(v) for p, v in nnx.to_flat_state(nnx.state(layer))}


@pytest.mark.parametrize("gates", ["renormalized", "softmax_then_top_k", "softmax_over_selected"])
def test_doubling_experts_and_choices_preserves_every_output(x_BLM, gates):
    old = layer_of(TopK(num_choices=2, gates=gates), use_bias=True)
    new = grow_experts(old, 2 * E, router=TopK(num_choices=4, gates=gates))
    np.testing.assert_allclose(output(new, x_BLM)[0], output(old, x_BLM)[0], **CLOSE)


def test_one_choice_of_gate_one_is_preserved_however_many_copies_there_are(x_BLM):
    old = layer_of(TopK(num_choices=1), gated=True)
    new = grow_experts(old, E + 3, LOAD)
    np.testing.assert_allclose(output(new, x_BLM)[0], output(old, x_BLM)[0], **CLOSE)


def test_a_token_is_preserved_unless_an_expert_before_its_last_choice_was_split(x_BLM):
    old = layer_of(TopK(num_choices=2))
    new = grow_experts(old, E + 1, LOAD)  # expert 1 is split
    untouched = np.asarray(experts_of(old, x_BLM))[:, 0] != 1
    assert 0 < untouched.sum() < B * L
    ours, theirs = (np.asarray(output(layer, x_BLM)[0]).reshape(B * L, M) for layer in (new, old))
    np.testing.assert_allclose(ours[untouched], theirs[untouched], **CLOSE)
    assert not np.isclose(ours[~untouched], theirs[~untouched], **CLOSE).any()


def test_copies_go_to_the_largest_load_a_copy_and_take_everything_with_them():
    old = layer_of(SigmoidTopK(), gated=True, use_bias=True)
    old.router.bias_E.set_value(jnp.arange(E) / 8.0)
    new = grow_experts(old, E + 4, LOAD)
    # 40 | 40/2=20 | 40/3=13.3 | 12 against 40/4=10: three copies of expert 1, then one of expert 3
    source = [0, 1, 2, 3, 1, 1, 1, 3]
    for name, value in values(new).items():
        expert_dim = 1 if name == "router.kernel_ME" else 0
        np.testing.assert_array_equal(value, np.take(values(old)[name], source, expert_dim))
    assert len(values(new)) == 8


def test_the_old_layer_is_untouched_and_the_new_one_trains_alone(x_BLM):
    old = layer_of()
    before = values(old)
    for new in (grow_experts(old, 6), prune_experts(old, LOAD, 3), merge_experts(old, LOAD, 3)):
        new.router.kernel_ME.set_value(new.router.kernel_ME[...] + 1)
    for name, value in values(old).items():
        np.testing.assert_array_equal(value, before[name])


def test_noise_parts_the_copies_and_leaves_the_old_experts(x_BLM):
    old = layer_of(NoisyTopK())
    new = grow_experts(old, 2 * E, noise=0.1, rngs=nnx.Rngs(0))
    ours, theirs = values(new), values(old)
    for name in ("experts.wi_EMH", "experts.wo_EHM"):
        np.testing.assert_array_equal(ours[name][:E], theirs[name])
        size = np.sqrt(np.mean((ours[name][E:] - theirs[name]) ** 2) / np.mean(theirs[name] ** 2))
        assert 0.08 < size < 0.12  # 140 draws of 0.1: standard error 0.006
    assert (ours["router.kernel_ME"][:, E:] != theirs["router.kernel_ME"]).all()
    np.testing.assert_array_equal(ours["router.kernel_ME"][:, :E], theirs["router.kernel_ME"])


@pytest.mark.parametrize("rule", [Top2(), Top1(), TopK(num_choices=2, gates="softmax_then_top_k")])
def test_a_pruned_layer_is_the_layer_without_its_least_used_experts(x_BLM, rule):
    old = layer_of(rule)
    pruned = prune_experts(old, LOAD, 2)  # 1 and 3 stay
    without = layer_of(Without(experts=(0, 2), rule=rule))
    ours, theirs = output(pruned, x_BLM), output(without, x_BLM)
    np.testing.assert_allclose(ours[0], theirs[0], **CLOSE)
    np.testing.assert_array_equal(ours[1].assigned_E, np.asarray(theirs[1].assigned_E)[[1, 3]])


def test_a_broken_expert_does_not_reach_the_kept_ones(x_BLM):
    old = layer_of()
    old.experts.wi_EMH.set_value(old.experts.wi_EMH[...].at[2].set(jnp.nan))
    assert np.isfinite(output(prune_experts(old, LOAD, 3), x_BLM)[0]).all()


def test_merging_undoes_growing(x_BLM):
    old = layer_of(gated=True, use_bias=True)
    grown = grow_experts(old, 2 * E)
    merged = merge_experts(grown, np.ones(2 * E), E)
    for name, value in values(merged).items():
        # (a + a) / 2 in float32
        np.testing.assert_allclose(value, values(old)[name], rtol=1e-6)


def test_the_least_used_joins_the_most_alike_by_load():
    old = layer_of()
    wi, wo, kernel = (
        np.array(v[...]) for v in (old.experts.wi_EMH, old.experts.wo_EHM, old.router.kernel_ME)
    )
    wi[2], wo[2] = 1.1 * wi[0], 0.9 * wo[0]  # expert 2, with load 1, is like expert 0, with load 5
    old.experts.wi_EMH.set_value(jnp.asarray(wi))
    old.experts.wo_EHM.set_value(jnp.asarray(wo))
    new = merge_experts(old, LOAD, 3)
    np.testing.assert_allclose(new.experts.wi_EMH[0], (5 * wi[0] + 1 * wi[2]) / 6, **CLOSE)
    np.testing.assert_allclose(new.experts.wo_EHM[0], (5 * wo[0] + 1 * wo[2]) / 6, **CLOSE)
    np.testing.assert_allclose(
        new.router.kernel_ME[:, 0], (5 * kernel[:, 0] + kernel[:, 2]) / 6, **CLOSE
    )
    np.testing.assert_array_equal(new.experts.wi_EMH[1:], wi[[1, 3]])
    np.testing.assert_array_equal(new.router.kernel_ME[:, 1:], kernel[:, [1, 3]])


def test_experts_that_nothing_used_are_averaged_evenly():
    old = layer_of()
    wi = np.asarray(old.experts.wi_EMH[...])
    old.experts.wi_EMH.set_value(jnp.asarray(wi))
    old.experts.wi_EMH.set_value(jnp.asarray(wi).at[3].set(wi[0]))
    old.experts.wo_EHM.set_value(old.experts.wo_EHM[...].at[3].set(old.experts.wo_EHM[0]))
    new = merge_experts(old, (0, 2, 2, 0), 3)
    kernel = np.asarray(old.router.kernel_ME[...])
    np.testing.assert_allclose(
        new.router.kernel_ME[:, 0], (kernel[:, 0] + kernel[:, 3]) / 2, **CLOSE
    )


def test_stacked_layers_are_changed_each_by_its_own_load():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stacked(rngs):
        return MoE(M, H, E, rngs=rngs)

    def one(layer, n):
        graph, state = nnx.split(layer)
        return nnx.merge(graph, jax.tree.map(lambda x: x[n], state))

    layers = stacked(nnx.Rngs(1))
    load_YE = np.array([LOAD, LOAD[::-1], (3, 3, 7, 3)])
    changes = [
        lambda layer, load: grow_experts(layer, 7, load),
        lambda layer, load: prune_experts(layer, load, 2),
        lambda layer, load: merge_experts(layer, load, 2),
    ]
    for change in changes:
        together = change(layers, load_YE)
        for n in range(3):
            alone = values(change(one(layers, n), load_YE[n]))
            for name, value in values(one(together, n)).items():
                np.testing.assert_allclose(value, alone[name], **CLOSE)


@pytest.mark.slow
def test_a_whole_model_gets_another_number_of_experts():
    config = TransformerConfig(
        vocab_size=13,
        d_model=4,
        d_hidden=3,
        num_heads=1,
        num_encoder_layers=4,
        num_decoder_layers=2,
        num_experts=4,
        router=TopK(num_choices=1),
        dispatch="einsum",
    )
    model = Transformer(config, rngs=nnx.Rngs(0))
    loads = {"encoder": np.array([LOAD, LOAD[::-1]]), "decoder": np.array([LOAD])}
    tokens_BL = jnp.array([[3, 5, 7, 2, 11]])
    positions_BL, segments_BL = jnp.arange(5)[None], jnp.ones((1, 5), int)
    run = nnx.jit(
        lambda model: model(
            source_BL=tokens_BL,
            source_segments_BL=segments_BL,
            source_positions_BL=positions_BL,
            target_in_BL=tokens_BL,
            target_segments_BL=segments_BL,
            target_positions_BL=positions_BL,
        )
    )
    grown = resize_model(model, 7, loads)
    assert (grown.config.num_experts, model.config.num_experts) == (7, 4)
    (ours, stats), (theirs, _) = run(grown), run(model)
    assert stats["encoder"].assigned_E.shape == (2, 7)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for fewer in ("merge", "prune"):
        small = resize_model(model, 2, loads, fewer=fewer)
        assert small.encoder.pairs.sparse.ffn.experts.wi_EMH.shape == (2, 2, 4, 3)
        assert small.decoder.pairs.sparse.ffn.router.kernel_ME.shape == (1, 4, 2)
    with pytest.raises(UserError, match=r"loads must be .* got \['encoder'\], num_experts=4"):
        resize_model(model, 7, {"encoder": loads["encoder"]})


def test_what_is_beside_the_experts_stays(x_BLM):
    rngs = nnx.Rngs(0)
    old = SharedExperts(
        layer_of(TopK(num_choices=1)), FeedForward(M, H, rngs=rngs), gated=True, rngs=rngs
    )
    new = grow_experts(old, E + 2)
    np.testing.assert_allclose(output(new, x_BLM)[0], output(old, x_BLM)[0], **CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: grow_experts(m, E), "num_experts must be larger .*: got 4, it has 4"),
        (lambda m: grow_experts(m, 6, noise=0.1), "rngs must be given for noise: got None"),
        (lambda m: grow_experts(m, 6, noise=-1.0), "noise must not be negative: got -1.0"),
        (lambda m: grow_experts(m, 6, [1, 2, 3]), r"of shape \(4,\): got \(3,\)"),
        (lambda m: grow_experts(m, 6, [1, 2, 3, -4]), "least -4"),
        (lambda m: grow_experts(m, 6, [1, 2, 3, np.nan]), "load must be a number"),
        (lambda m: prune_experts(m, LOAD, E), "keep must be .* got 4, it has 4"),
        (lambda m: prune_experts(m, LOAD, 1), "keep must be at least 2 .* got 1"),
        (lambda m: prune_experts(m, np.ones((2, E)), 2), r"got \(2, 4\)"),
        (lambda m: merge_experts(m, LOAD, 5), "into must be .* got 5, it has 4"),
        (lambda m: prune_experts(m, LOAD, 2, router=TopK(num_choices=3)), "num_choices, 3: got 2"),
        (lambda m: grow_experts(m, 6, router=SigmoidTopK()), "got SigmoidTopK for one .* Top2"),
        (lambda m: grow_experts(m, 6, router=Hash()), "got Hash for one trained with Top2"),
    ],
)
def test_what_cannot_be_done_is_told(change, message):
    with pytest.raises(UserError, match=message):
        change(layer_of())


@pytest.mark.parametrize("rule", [Hash(), Soft(), Without(experts=(0,))])
def test_a_router_without_a_column_for_each_expert_is_refused(rule):
    with pytest.raises(UserError, match="router must have a column for each expert"):
        grow_experts(layer_of(rule), 6)


@pytest.mark.parametrize("rule", [TwoLevel(), TopK(num_expert_groups=2)])
def test_groups_of_experts_are_refused(rule):
    with pytest.raises(UserError, match="num_expert_groups=2, where an expert's place matters"):
        grow_experts(layer_of(rule), 6)
