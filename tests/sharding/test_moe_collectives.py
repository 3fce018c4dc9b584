"""The contract of the MoE layer: two all-to-alls forward, four with backward, nothing gathered."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import MoE, Top2
from moe.sharding import MeshConfig, count_collectives, make_mesh, shardings

MESHES = [MeshConfig(data=1, expert=8), MeshConfig(data=2, expert=4)]
# Rows divide over 8 devices; 8 experts; no two sizes alike but the 16 rows and 8 experts.
B, L, M, H, E = 16, 12, 24, 40, 8


@pytest.fixture(scope="module", params=["gather", "einsum"])
def layer_and_inputs(request):
    layer = MoE(M, H, E, router=Top2(), group_size=L, dispatch=request.param, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x_BLM = jax.random.normal(jax.random.key(1), (B, L, M))
    return graph, params, x_BLM


def forward(graph):
    def run(params, x_BLM):
        y_BLM, stats = nnx.merge(graph, params)(x_BLM, key=jax.random.key(3))
        return jnp.mean(y_BLM**2) + 0.01 * stats.aux_loss + 0.001 * stats.z_loss, (y_BLM, stats)

    return run


def placed(params, x_BLM, mesh):
    rows = jax.NamedSharding(mesh, jax.P(("data", "expert")))
    return jax.device_put(params, shardings(params, mesh)), jax.device_put(x_BLM, rows)


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_two_all_to_alls_forward_four_with_backward_and_no_all_gather(layer_and_inputs, config):
    graph, params, x_BLM = layer_and_inputs
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        inputs = placed(params, x_BLM, mesh)
        only_forward = jax.jit(forward(graph)).lower(*inputs).compile()
        gradient = jax.value_and_grad(forward(graph), argnums=(0, 1), has_aux=True)
        both = jax.jit(gradient).lower(*inputs).compile()
    for compiled, all_to_alls in ((only_forward, 2), (both, 4)):
        counts = count_collectives(compiled)
        assert counts["all-to-all"] == all_to_alls
        assert set(counts) <= {"all-to-all", "all-reduce"}
        assert not re.search(r"all-gather|collective-permute", compiled.as_text())


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_a_mesh_changes_no_number(layer_and_inputs, config):
    graph, params, x_BLM = layer_and_inputs
    step = jax.jit(jax.value_and_grad(forward(graph), argnums=(0, 1), has_aux=True))
    expected = step(params, x_BLM)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        found = step(*placed(params, x_BLM, mesh))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Sums over tokens are split over devices: float32 rounding in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (B, "of 192 tokens on 8 devices. Take 24"),
        (3, "of 36 tokens on 8 devices. Change the batch"),
    ],
)
def test_groups_that_the_devices_cannot_share_are_refused_with_a_size_that_works(rows, told):
    layer = MoE(M, H, E, rngs=nnx.Rngs(0))  # groups of 1024
    told = f"group_size must .* got 1024, and so 1 groups {told}"
    with jax.set_mesh(make_mesh(MeshConfig(expert=8))), pytest.raises(UserError, match=told):
        layer(jnp.zeros((rows, L, M)))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "sorted"])
def test_the_layer_runs_on_a_mesh_outside_of_a_program_too(dispatch):
    layer = MoE(M, H, E, group_size=L, dispatch=dispatch, rngs=nnx.Rngs(0))
    x_BLM = jax.random.normal(jax.random.key(1), (B, L, M))
    alone_BLM, _ = layer(x_BLM)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, expert=2, model=2))):
        y_BLM, _ = layer(x_BLM)
    assert y_BLM.sharding.spec[0] == ("data", "expert")
    np.testing.assert_allclose(y_BLM, alone_BLM, rtol=1e-4, atol=1e-6)  # as above


@pytest.mark.slow  # needs the extra [tpu]; `pip install '.[tpu]'`
def test_the_tpu_compiler_keeps_the_contract(layer_and_inputs, tpu_slice):
    graph, params, x_BLM = layer_and_inputs
    _, chips = tpu_slice("v5p:2x2x2")
    mesh = make_mesh(MeshConfig(data=2, expert=4), chips)

    def abstract(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "expert")))
        inputs = jax.tree.map(abstract, params, shardings(params, mesh)), abstract(x_BLM, rows)
        gradient = jax.value_and_grad(forward(graph), argnums=(0, 1), has_aux=True)
        for function, all_to_alls in ((forward(graph), 2), (gradient, 4)):
            counts = count_collectives(jax.jit(function).lower(*inputs))
            assert counts["all-to-all"] == all_to_alls
            assert set(counts) <= {"all-to-all", "all-reduce"}
