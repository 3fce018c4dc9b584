"""The other routers on eight simulated devices: the same numbers, and no token gathered anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.layers import ExpertChoice, Hash, MoE, Sinkhorn, Soft, TaskRouting
from moe.sharding import MeshConfig, count_collectives, make_mesh, shardings

# Rows divide over 8 devices; 8 experts; no two sizes alike but the 16 rows and 8 experts.
B, L, M, H, E, TASKS = 16, 12, 24, 40, 8, 3
RULES = [
    Hash(num_choices=2),
    TaskRouting(num_tasks=TASKS),
    ExpertChoice(),
    Soft(slots_per_expert=2),
    Sinkhorn(),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_two_all_to_alls_no_all_gather_and_a_mesh_changes_no_number(rule):
    # What "auto" takes on this mesh, so that the layer without a mesh compiles to the same.
    dispatch = "einsum" if isinstance(rule, Soft) else "gather"
    layer = MoE(M, H, E, router=rule, group_size=L, dispatch=dispatch, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x_BLM = jax.random.normal(jax.random.key(1), (B, L, M))
    ids_BL = jax.random.randint(jax.random.key(2), (B, L), 0, TASKS)

    def objective(params, x_BLM, ids_BL):
        y_BLM, stats = nnx.merge(graph, params)(x_BLM, key=jax.random.key(3), ids_BL=ids_BL)
        loss = jnp.mean(y_BLM**2) + 0.01 * stats.aux_loss + 0.001 * stats.z_loss
        return loss, (y_BLM, stats.kept_E, stats.assigned_E, stats.mean_prob_E)

    step = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    expected = step(params, x_BLM, ids_BL)
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "expert")))
        inputs = (
            jax.device_put(params, shardings(params, mesh)),
            *jax.device_put((x_BLM, ids_BL), rows),
        )
        compiled = step.lower(*inputs).compile()
        found = compiled(*inputs)
    counts = count_collectives(compiled)
    # Two forward, two backward; a router that reads no token still sends tokens.
    assert counts["all-to-all"] == 4
    assert set(counts) <= {"all-to-all", "all-reduce"}
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Sums over tokens are split over devices: float32 rounding in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
