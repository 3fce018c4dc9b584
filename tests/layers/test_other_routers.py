"""Hash, task, expert-choice, soft and Sinkhorn routing as rules of an `MoE` layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import ExpertChoice, Hash, MoE, Sinkhorn, Soft, TaskRouting

B, L, M, H, E = 2, 7, 6, 10, 5
RULES = [
    Hash(num_choices=2),
    TaskRouting(num_tasks=3),
    Sinkhorn(),
    Sinkhorn(num_choices=2, gating="softmax"),
    ExpertChoice(),
    Soft(slots_per_expert=2),
]
CAUSAL = [rule for rule in RULES if rule.causal_safe]
LOOKING_AHEAD = [rule for rule in RULES if not rule.causal_safe]
X = np.random.default_rng(0).normal(size=(B, L, M)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 3, (B, L)).astype(np.int32)
KEY = jax.random.key(7)


def layer(rule, **options) -> MoE:
    """All tokens are one group. By einsums, which compile quickly."""
    options = {"group_size": B * L, "dispatch": "einsum"} | options
    return MoE(M, H, E, router=rule, rngs=nnx.Rngs(0), **options)


@nnx.jit
def run(moe: MoE, x_BLM=X, token_mask_BL=None, key=None, *, ids_BL=IDS):
    return moe(x_BLM, token_mask_BL, key, ids_BL=ids_BL)


def names(rule) -> str:
    return type(rule).__name__


def test_causal_safe_are_those_in_which_tokens_choose():
    assert {names(rule) for rule in CAUSAL} == {"Hash", "TaskRouting", "Sinkhorn"}
    assert {names(rule) for rule in LOOKING_AHEAD} == {"ExpertChoice", "Soft"}


@pytest.mark.parametrize("rule", LOOKING_AHEAD, ids=names)
def test_a_causal_layer_refuses_a_rule_that_looks_ahead(rule):
    with pytest.raises(UserError, match=rf"causal.*{names(rule)}"):
        layer(rule, causal=True)


@pytest.mark.parametrize("rule", CAUSAL, ids=names)
def test_in_evaluation_no_output_depends_on_a_later_token(rule):
    moe = layer(rule, causal=True)
    y_BLM = run(moe)[0]
    for last in (1, 3, 6):
        x_BLM, ids_BL = X.copy(), IDS.copy()
        x_BLM[1, last:] *= -9
        ids_BL[1, last:] = (ids_BL[1, last:] + 1) % 3
        changed = run(moe, x_BLM, ids_BL=ids_BL)[0]
        # The einsums add up the same numbers, and zeros between them, in another order.
        np.testing.assert_allclose(changed[0], y_BLM[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(changed[1, :last], y_BLM[1, :last], rtol=1e-5, atol=1e-6)
        assert np.abs(changed[1, last:] - y_BLM[1, last:]).max() > 1e-2

    def early(x_BLM):
        return jnp.sum(moe(x_BLM, ids_BL=IDS)[0][1, :3] ** 2)

    grad_BLM = np.asarray(jax.jit(jax.grad(early))(X))
    assert not grad_BLM[1, 3:].any() and np.abs(grad_BLM[1, :3]).max() > 1e-3


@pytest.mark.parametrize("rule", LOOKING_AHEAD, ids=names)
def test_where_rules_look_ahead_a_later_token_changes_an_earlier_output(rule):
    moe = layer(rule)
    x_BLM = X.copy()
    x_BLM[1, -1] *= -50
    y_BLM, changed = run(moe)[0], run(moe, x_BLM)[0]
    assert np.abs(changed[0] - y_BLM[0]).max() > 1e-3


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_every_parameter_learns(rule):
    moe = layer(rule)
    graph, params = nnx.split(moe)

    def loss(params):
        y_BLM, stats = nnx.merge(graph, params)(X, key=KEY, ids_BL=IDS)
        return jnp.sum(y_BLM**2) + stats.aux_loss + stats.z_loss

    grads = jax.jit(jax.grad(loss))(params)
    for path, grad in nnx.to_flat_state(grads):
        assert np.isfinite(grad[...]).all(), path
        assert np.abs(grad[...]).max() > 1e-6, path
    assert bool(jax.tree.leaves(nnx.state(moe.router))) == (not isinstance(rule, Hash))


@pytest.mark.parametrize("rule", RULES, ids=names)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_fewer_tokens_than_experts_as_in_decoding(rule, num_tokens):
    y_BLM, stats = run(layer(rule), X[:1, :num_tokens], ids_BL=IDS[:1, :num_tokens])
    assert np.isfinite(y_BLM).all() and np.abs(y_BLM).max() > 1e-4
    assert int(stats.num_tokens) == num_tokens


@pytest.mark.parametrize("rule", RULES, ids=names)
def test_padding_gets_nothing_and_changes_nothing(rule):
    moe = layer(dataclasses.replace(rule, capacity_factor=None) if rule in CAUSAL else rule)
    mask_BL = np.ones((B, L), bool)
    mask_BL[1, 3:] = False
    wild_BLM = np.where(mask_BL[..., None], X, 1e9).astype(np.float32)
    y_BLM, stats = run(moe, np.where(mask_BL[..., None], X, 0), mask_BL)
    wild, wild_stats = run(moe, wild_BLM, mask_BL, ids_BL=np.where(mask_BL, IDS, 1))
    np.testing.assert_allclose(wild, y_BLM, rtol=1e-6)
    assert not np.asarray(y_BLM)[~mask_BL].any() and np.asarray(y_BLM)[mask_BL].any()
    np.testing.assert_array_equal(wild_stats.assigned_E, stats.assigned_E)


@pytest.mark.parametrize("rule", [Hash(), TaskRouting(num_tasks=3)], ids=names)
def test_without_ids_the_error_says_which_argument_is_missing(rule):
    with pytest.raises(UserError, match="ids_BL"):
        layer(rule)(X)


def test_sinkhorn_balances_in_training_and_is_greedy_in_evaluation():
    moe = layer(Sinkhorn(capacity_factor=None))
    x_BLM = np.asarray(X + 3 * moe.router.kernel_ME[...][:, 2])  # all lean towards expert 2
    training, evaluation = run(moe, x_BLM, key=KEY)[1], run(moe, x_BLM)[1]
    logits_BLE = x_BLM @ moe.router.kernel_ME[...]
    greedy_E = np.bincount(np.ravel(logits_BLE.argmax(-1)), minlength=E)
    np.testing.assert_array_equal(evaluation.assigned_E, greedy_E)
    assert np.std(training.assigned_E) < 0.5 * np.std(greedy_E)


def test_training_limits_capacity_and_evaluation_drops_nothing():
    for rule in (Hash(min_capacity=1), TaskRouting(num_tasks=3, capacity_factor=0.5)):
        moe = layer(rule)
        ids_BL = np.zeros((B, L), np.int32)
        assert run(moe, key=KEY, ids_BL=ids_BL)[1].dropped_E.any()
        assert not run(moe, ids_BL=ids_BL)[1].dropped_E.any()


def test_expert_choice_gives_a_token_as_many_experts_on_average_as_it_says():
    stats = run(layer(ExpertChoice(capacity_factor=2.5)))[1]
    assert stats.kept_E.tolist() == [7] * E  # 2.5 * 14 tokens / 5 experts


def test_a_slot_of_soft_routing_is_learned_and_does_not_depend_on_the_group():
    moe = layer(Soft(slots_per_expert=2))
    assert moe.router.phi_MEC.shape == (M, E, 2)
    assert moe.router.scale[...] == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Hash(num_choices=0), ["num_choices", "0"]),
        (lambda: Hash(hashing="md5"), ["hashing", "md5", "modulo"]),
        (lambda: Hash(balance="all"), ["balance", "Hash", "'all'"]),
        (lambda: Hash(jitter=0.1), ["jitter", "Hash", "0.1"]),
        (lambda: Hash(capacity_factor=-1), ["capacity_factor", "-1"]),
        (lambda: TaskRouting(num_tasks=0), ["num_tasks", "0"]),
        (lambda: TaskRouting(num_tasks=3, num_choices=0), ["num_choices", "0"]),
        (lambda: TaskRouting(num_tasks=3, jitter=0.1), ["jitter", "TaskRouting"]),
        (lambda: Sinkhorn(num_iterations=0), ["num_iterations", "0"]),
        (lambda: Sinkhorn(num_choices=0), ["num_choices", "0"]),
        (lambda: Sinkhorn(gating="tanh"), ["gating", "tanh", "softmax"]),
        (lambda: Sinkhorn(balance_over="global"), ["balance_over", "Sinkhorn", "'global'"]),
        (lambda: ExpertChoice(capacity_factor=0), ["capacity_factor", "0"]),
        (lambda: Soft(slots_per_expert=0), ["slots_per_expert", "0"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(make, words):
    with pytest.raises(UserError) as error:
        make()
    for word in words:
        assert word in str(error.value)
