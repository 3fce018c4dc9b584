"""Losses over tokens that are split over devices are those of one device."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from moe.layers import Top2
from moe.routing.losses import (
    balance_loss,
    cv_squared_loss,
    mean_entropy_loss,
    router_entropy_loss,
)
from moe.sharding import MeshConfig, constrain, count_collectives, make_mesh

G, S, E = 16, 7, 5
MASK_GS = np.random.default_rng(0).random((G, S)) > 0.2
SEQUENCE_GS = np.arange(G * S).reshape(G, S) // 11  # rows span groups and devices


def losses(logits_GSE, token_mask_GS, sequence_GS):
    """Every loss of every scope, and their sum for the gradient."""
    logits_GSE = constrain(logits_GSE, "groups", None, None)
    plan = Top2(second_policy="all")(logits_GSE, token_mask_GS=token_mask_GS)
    plan = dataclasses.replace(plan, probs_GSE=jax.nn.softmax(logits_GSE, axis=-1))
    found = [router_entropy_loss(plan.probs_GSE, token_mask_GS), plan.aux_loss, plan.z_loss]
    for over in ("group", "sequence", "global"):
        scope = {"over": over, "sequence_GS": sequence_GS}
        found += [balance_loss(plan, choices=choices, **scope) for choices in ("first", "all")]
        found += [
            loss(plan.probs_GSE, token_mask_GS, **scope)
            for loss in (cv_squared_loss, mean_entropy_loss)
        ]
    return sum(found), found


@pytest.mark.parametrize(
    "config", [MeshConfig(data=1, expert=8), MeshConfig(data=4, expert=2)], ids=str
)
def test_no_loss_or_gradient_depends_on_the_mesh(config):
    logits_GSE = np.random.default_rng(1).normal(size=(G, S, E)).astype(np.float32)
    inputs = logits_GSE, MASK_GS, SEQUENCE_GS
    gradient = jax.value_and_grad(losses, has_aux=True)
    expected = jax.jit(gradient)(*inputs)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "expert")))
        compiled = jax.jit(gradient).lower(*jax.device_put(inputs, rows)).compile()
        found = compiled(*jax.device_put(inputs, rows))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Sums over tokens are split over devices: float32 rounding in another order.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert set(count_collectives(compiled)) <= {"all-reduce"}  # no token travels for a loss
