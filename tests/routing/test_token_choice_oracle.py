"""Top-1, top-k, noisy and sigmoid routing beside the oracle: decisions, numbers and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.routing.noisy_top_k import noisy_top_k
from moe.routing.sigmoid_top_k import sigmoid_top_k
from moe.routing.top1 import top1
from moe.routing.top_k import top_k
from tests import oracle
from tests import oracle_token_choice as loops

G, S, E, C = 3, 7, 6, 2  # 14 or 21 choices for 12 slots in each group
KEY = jax.random.key(3)
BIAS_E = np.array([0.3, -0.2, 0, 0.1, 0, -0.6], np.float32)


def random_case(seed: int):
    """Logits that overfill expert 0, noise logits, and a mask; one group may be all padding."""
    rng = np.random.default_rng(seed)
    logits_GSE = rng.normal([2, 0, 1, 0, -1, 0], 2, size=(G, S, E)).astype(np.float32)
    noise_GSE = rng.normal(size=(G, S, E)).astype(np.float32)
    mask_GS = rng.random((G, S)) < 0.9
    mask_GS[1] &= seed % 2 == 0
    return logits_GSE, noise_GSE, mask_GS


def choose(score_GSE, probs_GSE, mask_GS, *, batch_priority=False, **options):
    options.pop("renormalize_after_drop", None)
    priority = {"priority_GSE": probs_GSE} if batch_priority else {}
    return loops.choose(score_GSE, capacity=C, token_mask_GS=mask_GS, **priority, **options)


def expected_top_k(logits_GSE, noise_GSE, mask_GS, *, gates, num_choices, decided=None, **options):
    probs_GSE = oracle.softmax(logits_GSE)
    choices = decided or choose(logits_GSE, probs_GSE, mask_GS, num_choices=num_choices, **options)
    return loops.Plan(
        choices=choices,
        probs_GSE=probs_GSE,
        gate_GSK=loops.gates(
            probs_GSE,
            choices,
            normalize=gates != "softmax_then_top_k",
            renormalize_after_drop=options.get("renormalize_after_drop", False),
        ),
        aux_loss=loops.load_balance(probs_GSE, choices),
        z_loss=oracle.z_loss(logits_GSE, mask_GS),
    )


def expected_noisy(
    logits_GSE, noise_GSE, mask_GS, *, num_choices, noise=True, decided=None, **options
):
    std_GSE = loops.softplus(noise_GSE)
    noisy_GSE = logits_GSE
    if noise:
        noisy_GSE = logits_GSE + np.asarray(jax.random.normal(KEY, (G, S, E))) * std_GSE
    probs_GSE = oracle.softmax(noisy_GSE)
    choices = decided or choose(noisy_GSE, probs_GSE, mask_GS, num_choices=num_choices, **options)
    load_GSE = loops.chosen(choices, E)
    if noise:
        load_GSE = loops.smooth_load(logits_GSE, noisy_GSE, std_GSE, num_choices)
    importance_GSE = loops.importance(noisy_GSE, choices)
    return loops.Plan(
        choices=choices,
        probs_GSE=probs_GSE,
        gate_GSK=loops.gates(probs_GSE, choices),
        aux_loss=loops.cv_squared(importance_GSE, mask_GS) + loops.cv_squared(load_GSE, mask_GS),
        z_loss=oracle.z_loss(logits_GSE, mask_GS),
    )


def expected_sigmoid(
    logits_GSE, noise_GSE, mask_GS, *, num_choices, scale=1.0, decided=None, **options
):
    scores_GSE = loops.sigmoid(logits_GSE)
    probs_GSE = scores_GSE / scores_GSE.sum(-1, keepdims=True)
    choices = decided or choose(
        scores_GSE + BIAS_E, probs_GSE, mask_GS, num_choices=num_choices, **options
    )
    renormalize = options.get("renormalize_after_drop", False)
    return loops.Plan(
        choices=choices,
        probs_GSE=probs_GSE,
        gate_GSK=loops.gates(scores_GSE, choices, scale=scale, renormalize_after_drop=renormalize),
        aux_loss=loops.load_balance(probs_GSE, choices),
        z_loss=oracle.z_loss(logits_GSE, mask_GS),
    )


def found_top_k(logits_GSE, noise_GSE, mask_GS, **options):
    return top_k(logits_GSE, capacity=C, token_mask_GS=mask_GS, **options)


def found_noisy(logits_GSE, noise_GSE, mask_GS, *, noise=True, **options):
    noise_GSE = noise_GSE if noise else None
    return noisy_top_k(logits_GSE, noise_GSE, capacity=C, key=KEY, token_mask_GS=mask_GS, **options)


def found_sigmoid(logits_GSE, noise_GSE, mask_GS, **options):
    return sigmoid_top_k(logits_GSE, BIAS_E, capacity=C, token_mask_GS=mask_GS, **options)


METHODS = {
    "top_k": (found_top_k, expected_top_k),
    "noisy": (found_noisy, expected_noisy),
    "sigmoid": (found_sigmoid, expected_sigmoid),
}
LIMIT = {"num_expert_groups": 3, "num_kept_groups": 2}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("top_k", {"gates": "softmax_then_top_k", "num_choices": 1, "batch_priority": True}),
        ("top_k", {"gates": "softmax_then_top_k", "num_choices": 3, "slot_rule": "paper"}),
        ("top_k", {"gates": "renormalized", "num_choices": 3, "renormalize_after_drop": True}),
        ("top_k", {"gates": "renormalized", "num_choices": 2, **LIMIT}),
        ("top_k", {"gates": "softmax_over_selected", "num_choices": 3, "batch_priority": True}),
        ("noisy", {"num_choices": 2}),
        ("noisy", {"num_choices": 1, "batch_priority": True}),
        ("noisy", {"num_choices": E}),
        ("noisy", {"num_choices": 3, "noise": False}),
        ("sigmoid", {"num_choices": 3, "scale": 2.5, "renormalize_after_drop": True}),
        ("sigmoid", {"num_choices": 2, "group_score": "top2_sum", "batch_priority": True, **LIMIT}),
    ],
    ids=str,
)
def test_plan_and_its_gradient_are_the_oracles(method, options):
    found, expected_of = METHODS[method]
    num_choices = options["num_choices"]
    weight_GSK = np.random.default_rng(0).normal(size=(G, S, num_choices))

    def objective(logits_GSE, noise_GSE, mask_GS):
        plan = found(logits_GSE, noise_GSE, mask_GS, **options)
        return jnp.sum(weight_GSK * plan.gate_GSK) + plan.aux_loss + 0.1 * plan.z_loss, plan

    objective = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    for seed in range(2):
        case = random_case(seed)
        (_, plan), gradients = objective(*case)
        logits_GSE, noise_GSE, mask_GS = case[0].astype(float), case[1].astype(float), case[2]
        expected = expected_of(logits_GSE, noise_GSE, mask_GS, **options)
        assert_same_plan(plan, expected)

        def frozen(logits_GSE, noise_GSE, mask_GS=mask_GS, decided=expected.choices):
            plan = expected_of(logits_GSE, noise_GSE, mask_GS, decided=decided, **options)
            return np.sum(weight_GSK * plan.gate_GSK) + plan.aux_loss + 0.1 * plan.z_loss

        steps = [
            oracle.gradient(lambda x, f=frozen, n=noise_GSE: f(x, n), logits_GSE),
            oracle.gradient(lambda n, f=frozen, x=logits_GSE: f(x, n), noise_GSE),
        ]
        for ours_GSE, theirs_GSE in zip(gradients, steps, strict=True):
            # Sums of terms of size 1 that partly cancel: absolute float32 rounding.
            np.testing.assert_allclose(ours_GSE, theirs_GSE, rtol=2e-5, atol=2e-6)


def assert_same_plan(plan, expected):
    choices, real_GS = expected.choices, np.asarray(plan.token_mask_GS)
    assert not choices.kept_GSK.all()
    for name in ("assigned_GSK", "kept_GSK"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(choices, name), err_msg=name)
    for name in ("expert_GSK", "slot_GSK"):
        ours = np.asarray(getattr(plan, name))
        assert ours.dtype == np.int32
        np.testing.assert_array_equal(ours[real_GS], getattr(choices, name)[real_GS], err_msg=name)
    np.testing.assert_array_equal(np.asarray(plan.gate_GSK)[~choices.kept_GSK], 0)
    for name in ("probs_GSE", "gate_GSK", "aux_loss", "z_loss"):
        ours, theirs = np.asarray(getattr(plan, name)), np.asarray(getattr(expected, name))
        assert ours.dtype == np.float32
        if ours.ndim:
            ours, theirs = ours[real_GS], theirs[real_GS]
        # A few exponentials, sums and quotients: the last digits of float32.
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-7, err_msg=name)


def test_top1_is_the_first_choice_of_top_k_weighted_by_its_probability():
    logits_GSE, _, mask_GS = random_case(0)
    plan = top1(logits_GSE, capacity=C, token_mask_GS=mask_GS, slot_rule="paper")
    expected = expected_top_k(
        logits_GSE.astype(float), None, mask_GS, gates="softmax_then_top_k", num_choices=1
    )
    assert_same_plan(plan, expected)


def test_a_selection_bias_moves_choices_but_receives_no_gradient():
    logits_GSE, _, mask_GS = random_case(0)

    def total(bias_E):
        plan = sigmoid_top_k(logits_GSE, bias_E, num_choices=2, capacity=S, token_mask_GS=mask_GS)
        return jnp.sum(plan.gate_GSK[..., 0]) + plan.aux_loss, plan.expert_GSK

    gradient_E, expert_GSK = jax.grad(total, has_aux=True)(jnp.asarray(BIAS_E))
    np.testing.assert_array_equal(gradient_E, np.zeros(E))
    assert (expert_GSK != total(jnp.zeros(E))[1]).any()
