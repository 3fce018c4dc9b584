from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.layers import MoEStats
from moe.training.objective import ObjectiveConfig, cross_entropy, router_losses, total_loss


def test_cross_entropy_is_the_mean_over_real_tokens():
    logits_BLV = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]]))
    target_BL = jnp.array([[0, 1, 2]])
    mask_BL = jnp.array([[True, True, False]])
    # -(log 0.5 + log 0.8) / 2
    np.testing.assert_allclose(cross_entropy(logits_BLV, target_BL, mask_BL), 0.458145, rtol=1e-5)


def test_label_smoothing_mixes_in_the_mean_over_the_vocabulary():
    logits_BLV = jnp.log(jnp.array([[[0.5, 0.25, 0.25]]]))
    loss = cross_entropy(logits_BLV, jnp.array([[0]]), jnp.array([[True]]), label_smoothing=0.3)
    # -0.7 log 0.5 - 0.3 / 3 * (log 0.5 + 2 log 0.25) = 0.485203 + 0.346574
    np.testing.assert_allclose(loss, 0.831777, rtol=1e-5)


def test_a_batch_of_padding_costs_nothing():
    assert (
        float(cross_entropy(jnp.zeros((1, 2, 3)), jnp.zeros((1, 2), int), jnp.zeros((1, 2), bool)))
        == 0
    )


def stats(aux_Y, dropped_YE) -> MoEStats:
    dropped_YE = jnp.asarray(dropped_YE)
    zeros_Y = jnp.zeros(len(aux_Y))
    return MoEStats(
        aux_loss=jnp.asarray(aux_Y),
        z_loss=2 * jnp.asarray(aux_Y),
        budget_loss=3 * jnp.asarray(aux_Y),
        assigned_E=dropped_YE + 8,
        kept_E=jnp.full_like(dropped_YE, 8),
        dropped_E=dropped_YE,
        mean_prob_E=jnp.zeros(dropped_YE.shape),
        entropy=zeros_Y,
        num_tokens=zeros_Y,
    )


def test_router_losses_are_averaged_over_all_layers_of_both_stacks():
    losses = router_losses(
        {"encoder": stats([1.0], [[0, 4]]), "decoder": stats([2.0, 3.0], [[0, 0], [2, 2]])}
    )
    # (1 + 2 + 3) / 3, and 8 dropped of 6 * 8 kept + 8.
    np.testing.assert_allclose([losses["aux_loss"], losses["z_loss"]], [2.0, 4.0])
    np.testing.assert_allclose(losses["drop_rate"], 8 / 56)
    config = ObjectiveConfig(balance_weight=0.1, z_weight=0.01, budget_weight=0.001)
    np.testing.assert_allclose(
        total_loss(jnp.asarray(5.0), losses, config), 5.0 + 0.2 + 0.04 + 0.006, rtol=1e-6
    )


def test_a_dense_model_has_no_router_losses():
    assert router_losses({}) == {}
    assert float(total_loss(jnp.asarray(5.0), {}, ObjectiveConfig())) == 5.0


@pytest.mark.parametrize(
    ("field", "value"), [("label_smoothing", 1.0), ("balance_weight", -0.1), ("z_weight", -1.0)]
)
def test_malformed_weights_are_refused(field, value):
    with pytest.raises(UserError, match=f"objective.{field} must .* got {value}"):
        ObjectiveConfig(**{field: value})
