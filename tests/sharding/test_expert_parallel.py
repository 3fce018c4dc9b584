"""Experts over devices: each way to split them gives the outputs, statistics and gradients of one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.data import Batch
from moe.errors import UserError
from moe.layers import MoE, Top2
from moe.layers.dispatch import Dispatch
from moe.models import Transformer, TransformerConfig
from moe.sharding import (
    MeshConfig,
    count_collectives,
    layout,
    make_mesh,
    partition_spec,
    shardings,
)
from moe.training.objective import ObjectiveConfig, cross_entropy, router_losses, total_loss

# 16 rows of 6 tokens are a group each, two for each of 8 devices; hidden divides over 2.
B, L, M, H = 16, 6, 11, 14
DROPLESS, LIMITED = 8.0, 0.7  # capacity factors: C = 6 slots hold any group, C = 2 do not
ONE_AXIS = {"experts": ("expert", "model"), "hidden": None}


@functools.cache
def layer(num_experts: int, dispatch: Dispatch, factor: float, chunks: int, bias: bool):
    """Graph and parameters of a layer with biases that are not zero, or none."""
    layer = MoE(
        M,
        H,
        num_experts,
        router=Top2(capacity_factor=factor, min_capacity=1),
        dispatch=dispatch,
        exchange_chunks=chunks,
        group_size=L,
        use_bias=bias,
        rngs=nnx.Rngs(0),
    )
    if layer.experts.bo_EM is not None:
        layer.experts.bo_EM[...] = jax.random.normal(jax.random.key(4), (num_experts, M))
    return nnx.split(layer)


def step(graph):
    """Objective, outputs and statistics; gradients of parameters and input."""

    def objective(params, x_BLM):
        mask_BL = jnp.arange(L) < jnp.arange(B)[:, None] % 9  # up to a row without a token
        y_BLM, stats = nnx.merge(graph, params)(x_BLM, mask_BL, jax.random.key(3))
        loss = jnp.sum(y_BLM**2) + stats.aux_loss + stats.z_loss
        numbers = (stats.aux_loss, stats.z_loss, stats.kept_E, stats.dropped_E, stats.mean_prob_E)
        return loss, (y_BLM, *numbers, stats.entropy, stats.num_tokens)

    return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)


def inputs(params):
    return params, jax.random.normal(jax.random.key(1), (B, L, M))


@functools.cache
def alone(num_experts: int, factor: float, bias: bool):
    """What one device computes with the paper's einsums."""
    graph, params = layer(num_experts, "einsum", factor, 1, bias)
    program = jax.jit(step(graph))
    return program, jax.device_get(program(*inputs(params)))


def compiled(graph, params, config: MeshConfig, rules=None):
    """The program on a mesh, and a function that places its inputs."""
    mesh = make_mesh(config)

    def place(params, x_BLM):
        rows = jax.NamedSharding(mesh, partition_spec(("batch", None, None), mesh))
        return jax.device_put(params, shardings(params, mesh)), jax.device_put(x_BLM, rows)

    with jax.set_mesh(mesh), layout(rules or {}):
        placed = place(*inputs(params))
        return jax.jit(step(graph)).lower(*placed).compile(), place, placed


def assert_equal(expected, found, *, rtol=2e-4, atol=3e-5):
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    for a, b in pairs:
        # The same products of 11 and 14 terms, summed in another order.
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def check(num_experts, dispatch, factor, config, *, chunks=1, bias=False, rules=None):
    """Compares with one device and returns the collectives."""
    graph, params = layer(num_experts, dispatch, factor, chunks, bias)
    program, _, placed = compiled(graph, params, config, rules)
    assert_equal(alone(num_experts, factor, bias)[1], jax.device_get(program(*placed)))
    return count_collectives(program)


@pytest.fixture(scope="module")
def sorted_on_eight():
    """Sorted rows, 8 experts over 4 devices, and the devices over 2: program and parameters."""
    graph, params = layer(8, "sorted", DROPLESS, 1, False)
    return *compiled(graph, params, MeshConfig(data=2, expert=4)), params


def test_dropless_rows_go_to_their_experts_and_back(sorted_on_eight):
    program, _, placed, _ = sorted_on_eight
    assert_equal(alone(8, DROPLESS, False)[1], jax.device_get(program(*placed)))
    counts = count_collectives(program)
    # Counts, rows there, rows back; backward rows back and there. No weight or token is gathered.
    assert counts["all-to-all"] == 5
    assert set(counts) <= {"all-to-all", "all-reduce"}


def test_all_tokens_on_one_device_lose_nothing(sorted_on_eight):
    program, place, _, params = sorted_on_eight
    params = jax.tree.map(jnp.copy, params)
    params["router"]["kernel_ME"][...] *= 0  # a tie, so that all go to the first two experts
    expected = alone(8, DROPLESS, False)[0](*inputs(params))
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    with jax.set_mesh(mesh):
        found = jax.device_get(program(*place(*inputs(params))))
    (_, (_, _, _, kept_E, *_)), _ = found
    num_tokens = sum(min(L, row % 9) for row in range(B))
    assert kept_E[0] == num_tokens and not np.any(kept_E[2:])
    assert_equal(jax.device_get(expected), found)


def test_chunks_of_slots_and_a_split_inside_each_expert_change_no_number():
    config = MeshConfig(data=2, expert=2, model=2)
    counts = check(8, "gather", DROPLESS, config, chunks=2)
    assert counts["all-to-all"] == 8  # two chunks, there and back, forward and backward
    assert not counts["all-gather"]


def test_experts_without_an_axis_of_tokens_and_a_split_inside_add_up_their_parts():
    """Eight experts over the axes `expert` and `model`: copies of tokens along the second."""
    counts = check(
        8, "sorted", LIMITED, MeshConfig(data=2, expert=2, model=2), bias=True, rules=ONE_AXIS
    )
    assert counts["all-to-all"] == 5 and not counts["all-gather"]


def test_chunks_are_a_divisor_of_the_groups():
    graph, params = layer(8, "gather", LIMITED, 3, False)  # two groups on each device
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    with jax.set_mesh(mesh):
        text = jax.jit(step(graph)).lower(*inputs(params)).as_text()
    of_two = layer(8, "gather", LIMITED, 2, False)[0]
    with jax.set_mesh(mesh):
        assert text == jax.jit(step(of_two)).lower(*inputs(params)).as_text()


def test_no_chunk_is_refused():
    with pytest.raises(UserError, match="exchange_chunks must be at least 1: got 0"):
        MoE(M, H, 8, exchange_chunks=0, rngs=nnx.Rngs(0))


def test_experts_that_do_not_divide_are_refused():
    graph, params = layer(6, "sorted", DROPLESS, 1, False)
    with (
        jax.set_mesh(make_mesh(MeshConfig(data=2, expert=4))),
        pytest.raises(UserError, match=r"'experts' must divide .* got size 6 over 4 devices"),
    ):
        jax.jit(step(graph)).lower(*inputs(params))


MESHES = [
    (MeshConfig(data=1, expert=8), None),
    (MeshConfig(data=2, expert=4), None),
    (MeshConfig(data=4, expert=2), None),
    (MeshConfig(data=8, expert=1), None),
    (MeshConfig(data=2, expert=2, model=2), None),
    (MeshConfig(data=1, expert=4, model=2), None),
    (MeshConfig(data=4, expert=1, model=2), None),
    (MeshConfig(data=1, expert=4, model=2), ONE_AXIS),
    (MeshConfig(data=2, expert=4), {"experts": ("data", "expert")}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "rules"), MESHES, ids=str)
@pytest.mark.parametrize("dispatch", ["sorted", "gather", "einsum"])
@pytest.mark.parametrize(("num_experts", "factor", "chunks"), [(8, DROPLESS, 2), (16, LIMITED, 1)])
def test_every_back_end_on_every_mesh_is_one_device(
    num_experts, factor, chunks, dispatch, config, rules
):
    counts = check(num_experts, dispatch, factor, config, chunks=chunks, bias=True, rules=rules)
    if rules is ONE_AXIS and dispatch != "sorted":
        return  # the compiler gathers slots along the axis where tokens are copies, each way
    assert not counts["all-gather"]
    splits = config.expert > 1 or rules is not None
    rows = 5 if dispatch == "sorted" else 4
    assert counts["all-to-all"] == (rows * chunks if splits else 0)


@functools.cache
def after_one_step(config: MeshConfig | None, factor: float, dispatch: Dispatch, chunks: int):
    """Losses, statistics and parameters of a small Transformer after a step of SGD on a random batch."""
    model = TransformerConfig(
        vocab_size=38,
        d_model=16,
        d_hidden=22,
        num_heads=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        router=Top2(capacity_factor=factor),
        dispatch=dispatch,
        exchange_chunks=chunks,
        group_size=L,
    )
    graph, params = nnx.split(Transformer(model, rngs=nnx.Rngs(0)))
    ids_BL = jax.random.randint(jax.random.key(5), (B, L), 1, 38)
    real_BL = (jnp.arange(L) < 1 + jnp.arange(B)[:, None] % 6).astype(jnp.int32)
    position_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    arrays = (ids_BL, real_BL, position_BL, ids_BL, ids_BL, real_BL, position_BL)
    batch = Batch(*map(np.asarray, arrays))

    @jax.jit
    def step(params, batch):
        def objective(params):
            inputs = batch._asdict()
            target_BL = inputs.pop("target_out_BL")
            logits_BLV, stats = nnx.merge(graph, params)(**inputs, key=jax.random.key(7))
            routers = router_losses(stats)
            loss = cross_entropy(logits_BLV, target_BL, batch.target_segments_BL > 0)
            return total_loss(loss, routers, ObjectiveConfig()), (loss, routers, stats)

        grads, losses = jax.grad(objective, has_aux=True)(params)
        return jax.tree.map(lambda x, gradient: x - 0.5 * gradient, params, grads), losses

    if config is None:
        return jax.device_get(step(params, batch))
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, partition_spec(("batch", None), mesh))
        params = jax.device_put(params, shardings(params, mesh))
        return jax.device_get(step(params, jax.device_put(batch, rows)))


STEPS = [
    (MeshConfig(data=1, expert=8), DROPLESS, "auto", 2),
    (MeshConfig(data=2, expert=4), 1.0, "auto", 2),
    (MeshConfig(data=4, expert=2), 1.0, "auto", 1),
    (MeshConfig(data=8, expert=1), 1.0, "gather", 1),
    (MeshConfig(data=2, expert=2, model=2), DROPLESS, "auto", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "factor", "dispatch", "chunks"), STEPS, ids=str)
def test_parameters_after_one_step_are_those_of_one_device(config, factor, dispatch, chunks):
    expected = after_one_step(None, factor, "gather", 1)
    # Four layers in float32, gradients summed over devices in another order.
    assert_equal(expected, after_one_step(config, factor, dispatch, chunks), rtol=1e-3, atol=1e-5)
