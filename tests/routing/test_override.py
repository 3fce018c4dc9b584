from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import MoE
from moe.layers.routers.override import Balanced, Without
from moe.layers.routers.token_choice import Top2
from moe.layers.routers.top_k import Top1, TopK
from moe.routing import SoftPlan
from moe.routing.override import balanced, drop_experts, mask_expert_outputs, without_experts
from moe.sharding import MeshConfig, make_mesh
from tests import oracle
from tests.routing.compiled import top2

G, S, E, K, M = 3, 7, 5, 2, 11
MASK_GS = np.array([[1, 1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 0, 0], [0] * 7], bool)
LOGITS_GSE = np.random.default_rng(0).normal(size=(G, S, E)).astype(np.float32)
deal = jax.jit(balanced, static_argnames=("num_choices", "capacity"))


@pytest.fixture(scope="module")
def plan():
    return top2(LOGITS_GSE, capacity=3, second_policy="all", token_mask_GS=MASK_GS)


def test_evaluation_scales_every_gate_and_training_masks_that_share_of_them(plan):
    np.testing.assert_array_equal(
        mask_expert_outputs(plan, 0.25).gate_GSK, np.float32(0.75) * plan.gate_GSK
    )
    masks = jax.jit(jax.vmap(lambda key: mask_expert_outputs(plan, 0.25, key=key).gate_GSK))(
        jax.random.split(jax.random.key(0), 400)
    )
    kept = np.asarray(plan.kept_GSK)
    # Each gate is either whole or gone.
    whole = masks == plan.gate_GSK
    assert np.all(whole | (masks == 0))
    # 400 draws of each of some 15 choices: the standard deviation of a mean over all is 0.0056.
    assert abs(whole[:, kept].mean() - 0.75) < 0.02
    # The choices of a token are masked independently.
    both = kept.all(axis=-1)
    assert abs(whole[:, both].all(axis=-1).mean() - 0.75**2) < 0.03
    assert np.all(masks[:, ~kept] == 0)


def test_masking_leaves_experts_slots_and_load(plan):
    masked = mask_expert_outputs(plan, 0.5, key=jax.random.key(1))
    for name in ("expert_GSK", "slot_GSK", "assigned_GSK", "kept_GSK", "probs_GSE", "aux_loss"):
        np.testing.assert_array_equal(getattr(masked, name), getattr(plan, name))


def test_a_masked_choice_has_no_gradient_and_the_others_keep_theirs(plan):
    def gates(logits_GSE, rate):
        plan = top2(logits_GSE, capacity=S, second_policy="all", token_mask_GS=MASK_GS)
        if rate:
            plan = mask_expert_outputs(plan, rate, key=jax.random.key(1))
        return plan.gate_GSK

    unmasked, vjp = jax.vjp(partial(gates, rate=0), LOGITS_GSE)
    masked, vjp_masked = jax.vjp(partial(gates, rate=0.5), LOGITS_GSE)
    kept_GSK = (masked == unmasked) & (unmasked > 0)
    np.testing.assert_allclose(vjp_masked(jnp.ones_like(masked))[0], vjp(kept_GSK * 1.0)[0])


def test_tokens_are_dealt_out_in_turn(plan):
    dealt = deal(LOGITS_GSE, num_choices=K, capacity=3, token_mask_GS=MASK_GS)
    # Group g starts at expert g; padding takes no turn.
    expected = {(0, 0): [0, 1], (0, 2): [4, 0], (0, 4): [1, 2], (1, 0): [1, 2], (1, 2): [3, 4]}
    for (g, s), experts in expected.items():
        np.testing.assert_array_equal(dealt.expert_GSK[g, s], experts)
    probs_GSE = oracle.softmax(LOGITS_GSE.astype(np.float64))
    for g, s in np.argwhere(MASK_GS):
        pair_K = probs_GSE[g, s, dealt.expert_GSK[g, s]]
        np.testing.assert_allclose(dealt.gate_GSK[g, s], pair_K / pair_K.sum(), rtol=1e-5)


def test_a_balanced_capacity_drops_nothing_and_fills_every_slot():
    mask_GS = np.ones((4, 15), bool)
    # 15 tokens with 2 choices for 5 experts: 6 slots each.
    dealt = deal(np.zeros((4, 15, E)), num_choices=K, capacity=6, token_mask_GS=mask_GS)
    assert bool(dealt.kept_GSK.all())
    slots = np.sort(np.asarray(dealt.flat_slot_GSK()).reshape(4, -1), axis=1)
    np.testing.assert_array_equal(slots, np.broadcast_to(np.arange(30), (4, 30)))
    np.testing.assert_array_equal(dealt.gate_GSK, 0.5)
    np.testing.assert_allclose(dealt.aux_loss, 1, rtol=1e-6)


def test_tokens_without_an_expert_go_to_the_next_best(plan):
    rerouted = top2(
        without_experts(LOGITS_GSE, (1, 3)), capacity=S, second_policy="all", token_mask_GS=MASK_GS
    )
    for g, s in np.argwhere(MASK_GS):
        ranking = [e for e in oracle.best_first(LOGITS_GSE[g, s]) if e not in (1, 3)]
        np.testing.assert_array_equal(rerouted.expert_GSK[g, s], ranking[:2])
    # As if the experts did not exist.
    others = top2(
        np.delete(LOGITS_GSE, (1, 3), axis=-1),
        capacity=S,
        second_policy="all",
        token_mask_GS=MASK_GS,
    )
    np.testing.assert_allclose(rerouted.gate_GSK, others.gate_GSK, rtol=1e-6)
    np.testing.assert_allclose(rerouted.z_loss, others.z_loss, rtol=1e-6)
    np.testing.assert_allclose(rerouted.aux_loss, others.aux_loss * E / 3, rtol=1e-6)


def test_an_impossible_expert_has_no_gradient():
    def loss(logits_GSE):
        plan = top2(without_experts(logits_GSE, (1, 3)), capacity=S, second_policy="all")
        return jnp.sum(plan.gate_GSK[..., 0]) + plan.aux_loss + plan.z_loss

    gradient_GSE = jax.jit(jax.grad(loss))(LOGITS_GSE)
    np.testing.assert_array_equal(gradient_GSE[..., [1, 3]], 0)
    assert np.all(np.isfinite(gradient_GSE)) and np.any(gradient_GSE[..., [0, 2, 4]] != 0)


def test_dropped_experts_do_nothing_and_their_choices_are_counted_as_dropped(plan):
    dropped, kept_sum = drop_experts(plan, (0,)), drop_experts(plan, (0,), renormalize=True)
    load, before = dropped.load(), plan.load()
    np.testing.assert_array_equal(load.assigned_E, before.assigned_E)
    np.testing.assert_array_equal(load.kept_E, np.where(np.arange(E) == 0, 0, before.kept_E))
    gate_GSK = np.asarray(plan.gate_GSK)
    for g, s in np.ndindex(G, S):
        left = gate_GSK[g, s] * (np.asarray(plan.expert_GSK[g, s]) != 0)
        np.testing.assert_array_equal(dropped.gate_GSK[g, s], left)
        total = gate_GSK[g, s].sum() if left.any() else 0
        np.testing.assert_allclose(kept_sum.gate_GSK[g, s].sum(), total, rtol=1e-6)


@pytest.mark.parametrize("rule", [Top1(), Top2(), TopK(num_choices=3)], ids=lambda rule: rule.kind)
def test_a_model_without_experts_has_the_parameters_of_the_model_with_them(rule):
    x_BLM = jax.random.normal(jax.random.key(1), (3, 7, M))
    layer = MoE(M, 13, E, router=rule, rngs=nnx.Rngs(0))
    ablated = MoE(M, 13, E, router=Without(experts=(2, 4), rule=rule), rngs=nnx.Rngs(0))
    params = nnx.state(layer, nnx.Param)
    assert jax.tree.structure(params) == jax.tree.structure(nnx.state(ablated, nnx.Param))
    plan, whole = jax.jit(ablated.route)(x_BLM), jax.jit(layer.route)(x_BLM)
    assert not np.isin(plan.expert_GSK, (2, 4)).any()
    assert np.isin(whole.expert_GSK, (2, 4)).any()
    unhurt = ~np.isin(whole.expert_GSK, (2, 4)).any(axis=-1)
    np.testing.assert_array_equal(plan.expert_GSK[unhurt], whole.expert_GSK[unhurt])
    nothing_out = Without(experts=(), rule=rule).router(M, E, rngs=nnx.Rngs(0))
    kernel_ME = np.asarray(layer.router.kernel_ME[...])
    np.testing.assert_array_equal(nothing_out.kernel_ME[...], kernel_ME)


def test_a_group_of_experts_with_none_left_drops_its_choices():
    # Experts 0 and 1 are a group; with one of them out the group has one expert for two choices.
    rule = TopK(num_choices=2, num_expert_groups=2, num_kept_groups=1)
    router = Without(experts=(0,), rule=rule).router(M, 4, rngs=nnx.Rngs(0))
    plan = jax.jit(router)(jax.random.normal(jax.random.key(1), (2, 9, M)))
    out = np.asarray(plan.expert_GSK) == 0
    assert out.any()
    np.testing.assert_array_equal(plan.kept_GSK, ~out)
    assert int(plan.load().dropped_E[0]) == out.sum()


def test_a_whole_layer_can_be_balanced():
    x_BLM = jax.random.normal(jax.random.key(1), (3, 10, M))
    layer = MoE(M, 13, E, router=Balanced(num_choices=2), group_size=10, rngs=nnx.Rngs(0))
    _, stats = jax.jit(layer)(x_BLM, key=jax.random.key(0))
    np.testing.assert_array_equal(stats.kept_E, 3 * 10 * 2 / E)
    assert int(stats.dropped_E.sum()) == 0


def test_overrides_on_eight_devices_are_those_of_one():
    logits_GSE = np.random.default_rng(2).normal(size=(16, S, E)).astype(np.float32)

    def plans(logits_GSE):
        return (
            balanced(logits_GSE, num_choices=K, capacity=3),
            drop_experts(Top2(second_policy="all")(without_experts(logits_GSE, (1,))), (2,)),
        )

    expected = jax.jit(plans)(logits_GSE)
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "expert")))
        found = jax.jit(plans)(jax.device_put(logits_GSE, rows))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # the losses are summed in another order


def soft_plan() -> SoftPlan:
    zero = jnp.zeros(())
    weight_GSEC = jnp.zeros((1, 2, 2, 1))
    return SoftPlan(
        dispatch_weight_GSEC=weight_GSEC,
        combine_weight_GSEC=weight_GSEC,
        token_mask_GS=jnp.ones((1, 2), bool),
        aux_loss=zero,
        z_loss=zero,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda plan: mask_expert_outputs(plan, 1.0), r"rate must be in \[0, 1\): got 1.0"),
        (lambda plan: mask_expert_outputs(plan, -0.1), r"rate must be in \[0, 1\): got -0.1"),
        (
            lambda plan: mask_expert_outputs(soft_plan(), 0.1),
            "plan must choose experts: got SoftPlan",
        ),
        (lambda plan: drop_experts(plan, (5,)), r"experts must be .* \[0, 5\).* got \(5,\)"),
        (lambda plan: without_experts(LOGITS_GSE, (-1,)), r"experts must be .* got \(-1,\)"),
        (
            lambda plan: without_experts(LOGITS_GSE, range(5)),
            r"experts must be .* got \(0, 1, 2, 3, 4\)",
        ),
        (
            lambda plan: balanced(LOGITS_GSE, num_choices=6, capacity=2),
            "num_choices must be in .* got num_choices=6, num_experts=5",
        ),
        (lambda plan: balanced(LOGITS_GSE, num_choices=2, capacity=0), "capacity must .* got 0"),
        (lambda plan: Balanced(num_choices=0), "num_choices must be at least 1: got 0"),
        (
            lambda plan: jax.eval_shape(
                Without(experts=(0, 1, 2, 3)).router(M, E, rngs=nnx.Rngs(0)), jnp.ones((1, 2, M))
            ),
            r"experts must leave one .* got \(0, 1, 2, 3\) of 5 for 2 choices",
        ),
    ],
)
def test_malformed_overrides_are_refused(plan, call, message):
    with pytest.raises(UserError, match=message):
        call(plan)
