"""Every token-choice rule under a mesh: the numbers of one device, and nothing gathered."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.layers.routers import NoisyTopK, SigmoidTopK, Top1, TopK, TwoLevel
from moe.sharding import MeshConfig, constrain, make_mesh, shardings

G, S, M, E = 16, 6, 10, 12  # groups divide over 8 devices
LIMIT = {"num_choices": 3, "num_expert_groups": 4, "num_kept_groups": 2}
RULES = {
    "top1": Top1(jitter=0.1, batch_priority=True),
    "top_k": TopK(gates="softmax_over_selected", min_capacity=1, **LIMIT),
    "noisy": NoisyTopK(min_capacity=1),
    "sigmoid": SigmoidTopK(min_capacity=1, **LIMIT),
    "two_level": TwoLevel(num_expert_groups=4, batch_priority=True),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_mesh_of_data_and_experts_changes_no_number_and_gathers_nothing(rule):
    graph, params = nnx.split(rule.router(M, E, rngs=nnx.Rngs(0)))
    x_GSM = jax.random.normal(jax.random.key(1), (G, S, M))
    mask_GS = jax.random.bernoulli(jax.random.key(2), 0.9, (G, S))
    weight_GSK = jnp.arange(1.0, 1 + getattr(rule, "num_choices", 1))

    def loss(params, x_GSM, mask_GS):
        x_GSM = constrain(x_GSM, "groups", None, None)
        router = nnx.merge(graph, params)
        plan = router(x_GSM, token_mask_GS=mask_GS, key=jax.random.key(3))
        total = jnp.sum(weight_GSK * plan.gate_GSK) + plan.aux_loss + plan.z_loss
        return total, (plan, plan.load())

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    expected = step(params, x_GSM, mask_GS)
    assert not expected[0][1][0].kept_GSK.all()
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "expert")))
        inputs = (
            jax.device_put(params, shardings(params, mesh)),
            *jax.device_put((x_GSM, mask_GS), rows),
        )
        compiled = step.lower(*inputs).compile()
        found = compiled(*inputs)
    assert not re.search(r"all-gather|all-to-all|collective-permute", compiled.as_text())
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Sums over tokens are split over devices: float32 rounding in another order.
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
