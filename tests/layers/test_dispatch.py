"""Which back-end a layer takes and why, and that the choice changes no number."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe import routing
from moe.errors import UserError
from moe.layers import MoE, Top2
from moe.layers.dispatch import Dispatch, choose_dispatch
from moe.sharding import MeshConfig, make_mesh, shardings

B, L, M, H, E = 8, 6, 11, 13, 5


def plan_of(capacity: int) -> routing.RoutingPlan:
    logits_GSE = jax.random.normal(jax.random.key(0), (2, 6, E))
    return routing.top2(logits_GSE, capacity=capacity, second_policy="all")


def soft_plan() -> routing.SoftPlan:
    weight_GSEC, zero = jnp.ones((1, 6, E, 1)) / 6, jnp.zeros(())
    return routing.SoftPlan(
        dispatch_weight_GSEC=weight_GSEC,
        combine_weight_GSEC=weight_GSEC,
        token_mask_GS=jnp.ones((1, 6), bool),
        aux_loss=zero,
        z_loss=zero,
    )


def test_auto_takes_sorted_rows_where_every_device_holds_every_expert():
    choice = choose_dispatch("auto", plan_of(capacity=6))
    assert choice.name == "sorted"
    assert "no padding" in choice.reason


def test_auto_takes_equal_slots_of_limited_capacity_where_experts_are_split_over_devices():
    with jax.set_mesh(make_mesh(MeshConfig(data=2, expert=4))):
        limited, dropless = (choose_dispatch("auto", plan_of(capacity)) for capacity in (2, 6))
    assert limited.name == "gather"
    assert "4 devices" in limited.reason
    assert dropless.name == "sorted"
    assert "not a slot for each token and expert" in dropless.reason


@pytest.mark.parametrize(("capacity", "name"), [(6, "sorted"), (2, "gather")])
def test_auto_on_an_accelerator_sorts_only_what_is_dropless(monkeypatch, capacity, name):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choose_dispatch("auto", plan_of(capacity)).name == name


def test_what_is_asked_for_is_taken():
    assert choose_dispatch("einsum", plan_of(capacity=6)) == ("einsum", "asked for")


def test_soft_routing_has_one_back_end_and_says_so():
    assert choose_dispatch("auto", soft_plan()).name == "einsum"
    with pytest.raises(UserError, match=r'dispatch must be "einsum" or "auto".*got .sorted'):
        choose_dispatch("sorted", soft_plan())


def test_the_statistics_say_which_back_end_ran_and_why():
    layer = MoE(M, H, E, rngs=nnx.Rngs(0))
    _, stats = jax.jit(lambda x_BLM: layer(x_BLM))(jnp.ones((B, L, M)))
    assert stats.dispatch.name == "sorted"
    assert stats.dispatch.reason


def value_and_gradients(dispatch: Dispatch, key, *, num_experts=E, mesh=None, **options):
    """Output, statistics and gradients of a layer in training (key) or evaluation (None)."""
    layer = MoE(M, H, num_experts, dispatch=dispatch, group_size=L, **options, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x_BLM = jax.random.normal(jax.random.key(1), (B, L, M))
    mask_BL = jnp.arange(L) < jnp.array([6, 5, 6, 2, 6, 6, 0, 6])[:, None]

    def loss(params, x_BLM):
        y_BLM, stats = nnx.merge(graph, params)(x_BLM, mask_BL, key)
        return jnp.sum(y_BLM**2) + stats.aux_loss + stats.z_loss, (y_BLM, stats.kept_E)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    if mesh is None:
        return jax.tree.leaves(step(params, x_BLM))
    with jax.set_mesh(mesh):
        return jax.tree.leaves(step(jax.device_put(params, shardings(params, mesh)), x_BLM))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gated", [False, True])
def test_every_pair_of_back_ends_agrees_in_values_and_gradients(training, gated):
    options = {"router": Top2(capacity_factor=0.7, min_capacity=1), "gated": gated}
    options |= {"use_bias": gated, "activation": jax.nn.silu if gated else jax.nn.relu}
    key = jax.random.key(2) if training else None
    results = [value_and_gradients(name, key, **options) for name in ("einsum", "gather", "sorted")]
    for ours, theirs in itertools.combinations(results, 2):
        for a, b in zip(ours, theirs, strict=True):
            # The same products of 11 and 13 terms, summed in another order.
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=3e-5)


def test_sorted_rows_of_eight_devices_that_hold_all_experts_are_those_of_one():
    alone = value_and_gradients("sorted", None)
    together = value_and_gradients("sorted", None, mesh=make_mesh(MeshConfig(data=8)))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=3e-5)
