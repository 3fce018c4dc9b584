"""Shazeer's noise, and the losses that its smooth load makes possible."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.routing.noisy_top_k import choice_probability, noisy_top_k

route = jax.jit(noisy_top_k, static_argnames=("num_choices", "capacity"))
T, E = 4000, 5


def test_the_smooth_load_is_how_often_an_expert_is_chosen_when_its_noise_is_drawn_again():
    logits_E = np.array([1.0, 0.6, 0.2, -0.3, -1])
    rng = np.random.default_rng(0)
    std_E, noise_TE = np.array([0.5, 1, 0.7, 0.6, 1.2]), rng.normal(size=(T, E))
    noisy_E = logits_E + std_E * noise_TE[0]
    load_GSE = choice_probability(
        *(jnp.float32(values[None, None]) for values in (logits_E, noisy_E, std_E)), 2
    )
    for e in range(E):
        redrawn_TE = np.tile(noisy_E, (T, 1))
        redrawn_TE[:, e] = logits_E[e] + std_E[e] * noise_TE[:, e]
        share = (np.argsort(-redrawn_TE, axis=1)[:, :2] == e).any(1).mean()
        # A share of 4000 draws has a deviation of at most 0.008; four of them.
        assert abs(float(load_GSE[0, 0, e]) - share) < 0.032


def test_noise_has_the_deviation_that_the_noise_logits_say():
    noise_logits_GSE = jnp.broadcast_to(jnp.array([-2.0, -1, 0, 1, 2]), (1, T, E))
    plan = route(
        jnp.zeros((1, T, E)), noise_logits_GSE, num_choices=1, capacity=T, key=jax.random.key(0)
    )
    log_probs_SE = np.log(plan.probs_GSE[0])
    # log p = H - logsumexp(H): the second term cancels in a difference of two experts.
    expected_E = np.log1p(np.exp(np.array([-2.0, -1, 0, 1, 2])))
    for e in range(1, E):
        std = (log_probs_SE[:, e] - log_probs_SE[:, 0]).std()
        np.testing.assert_allclose(std, np.hypot(expected_E[e], expected_E[0]), rtol=0.05)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_the_loss_is_0_when_balanced_and_grows_to_its_stated_value_at_collapse(num_choices):
    turns_SE = 20 * np.stack([np.roll(np.eye(E)[0], s) for s in range(E)])
    if num_choices == 2:
        turns_SE = turns_SE + np.roll(turns_SE, 1, axis=1)
    one_SE = np.tile(turns_SE[:1], (E, 1))
    balanced, collapsed = (
        route(jnp.float32(x_SE[None]), None, num_choices=num_choices, capacity=E).aux_loss
        for x_SE in (turns_SE, one_SE)
    )
    np.testing.assert_allclose(balanced, 0, atol=1e-6)
    # CV^2 of E experts of which K share everything is E / K - 1; importance and load alike.
    np.testing.assert_allclose(collapsed, 2 * (E / num_choices - 1), rtol=1e-5)


def test_the_load_teaches_the_router_and_the_size_of_the_noise():
    logits_GSE = jnp.float32(np.random.default_rng(0).normal([1, 0, 0, 0, -1], size=(1, 7, E)))

    def loss(logits_GSE, noise_GSE):
        key = jax.random.key(1)
        return route(logits_GSE, noise_GSE, num_choices=2, capacity=7, key=key).aux_loss

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(logits_GSE, jnp.zeros((1, 7, E)))
    assert all((np.abs(gradient_GSE) > 1e-4).any() for gradient_GSE in gradients)
    assert gradients[0][..., 0].sum() > 0 > gradients[0][..., 4].sum()  # down with the favourite


def test_evaluation_has_no_noise():
    logits_GSE = jnp.float32(np.random.default_rng(0).normal(size=(2, 7, E)))
    plans = [
        route(logits_GSE, None, num_choices=2, capacity=7, key=key)
        for key in (None, jax.random.key(0))
    ]
    jax.tree.map(np.testing.assert_array_equal, *plans)
    np.testing.assert_allclose(plans[0].probs_GSE, jax.nn.softmax(logits_GSE), rtol=1e-6)
