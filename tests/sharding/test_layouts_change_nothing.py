"""A layout never changes a result: over random legal layouts of a small model on random meshes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moe.layers import MoE, Top2
from moe.layers.feed_forward import FeedForward
from moe.sharding import MeshConfig, constrain, layout, make_mesh, shardings

# What is split divides by 8; 16 rows of 3 tokens make 8 groups of 6.
B, L, M, H, E, S = 16, 3, 16, 24, 8, 6
AXES = ("data", "expert", "model")
MESHES = [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4), (1, 1, 8)]


class Model(nnx.Module):
    def __init__(self, dispatch, rngs):
        self.dense = FeedForward(M, H, use_bias=True, rngs=rngs)
        self.moe = MoE(
            M, H, E, router=Top2(), group_size=S, dispatch=dispatch, use_bias=True, rngs=rngs
        )

    def __call__(self, x_BLM, key):
        x_BLM = constrain(x_BLM + self.dense(x_BLM), "batch", None, "model")
        y_BLM, stats = self.moe(x_BLM, key=key)
        return x_BLM + y_BLM, stats


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


@functools.cache
def setting(dispatch):
    """The program of one optimizer step, its inputs, and what one device makes of them."""
    graph, params = nnx.split(Model(dispatch, nnx.Rngs(0)))
    x_BLM = jax.random.normal(jax.random.key(1), (B, L, M))

    def loss_of(params, x_BLM):
        y_BLM, stats = nnx.merge(graph, params)(x_BLM, key=jax.random.key(3))
        loss = jnp.mean(y_BLM**2) + 0.1 * stats.aux_loss + 0.01 * stats.z_loss
        return loss, (y_BLM, stats)

    @jax.jit
    def step(params, slots, x_BLM):
        gradient = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        result, (grads, grad_x_BLM) = gradient(params, x_BLM)
        updates, slots = OPTIMIZER.update(grads, slots, params)
        return result, grads, grad_x_BLM, optax.apply_updates(params, updates), slots

    inputs = (params, OPTIMIZER.init(params), x_BLM)
    return step, inputs, jax.device_get(step(*inputs))


@st.composite
def layouts(draw):
    """A back-end, a mesh and a legal layout.

    Each axis splits at most one dimension of the weights, and tokens where no array has it twice.
    """
    sizes = dict(zip(AXES, draw(st.sampled_from(MESHES)), strict=True))
    of_weights = {
        axis: draw(st.sampled_from(["experts", "hidden", "model", None])) for axis in AXES
    }
    of_tokens = {axis: draw(st.booleans()) for axis in AXES}

    def chosen(role):
        return tuple(axis for axis in AXES if of_weights[axis] == role)

    tokens = tuple(axis for axis in AXES if of_tokens[axis])
    rules = {dim: chosen(dim) for dim in ("experts", "hidden", "model")}
    rules |= {
        "groups": tokens,
        "batch": tuple(axis for axis in tokens if axis not in rules["model"]),
    }
    sharded = [axis for axis in (*tokens, *sum(rules.values(), ())) if sizes[axis] > 1]
    assume(sharded)
    return draw(st.sampled_from(["auto", "einsum"])), MeshConfig(**sizes), rules


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=layouts())
def test_values_gradients_and_one_optimizer_step_are_those_of_one_device(case):
    dispatch, config, rules = case
    step, inputs, expected = setting(dispatch)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh), layout(rules):
        found = step(*jax.device_put(inputs, shardings(inputs, mesh)))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Sums over devices round otherwise; Adam's first update of 1e-2 is g / |g|, so where a
        # gradient is next to nothing, rounding shows.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)
