from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe.errors import UserError
from moe.sharding import (
    MeshConfig,
    constrain,
    explain,
    gathered,
    layout,
    make_mesh,
    param,
    spread,
    weight_update,
)
from moe.sharding.weight_update import spread_spec, unpadded
from moe.training.optimizer import OptimizerConfig, make_optimizer
from moe.training.state import (
    TrainState,
    fitted,
    logical_shapes,
    placed,
    state_shardings,
    stored,
    updated,
)

# 14, 22 and 131 divide over none of these meshes but [8]'s 128; on three devices not even that.
MESHES = {
    "data=4 x expert=2": (MeshConfig(data=4, expert=2), 8),
    "data=8": (MeshConfig(data=8), 8),
    "data=3": (MeshConfig(data=3), 3),
}


def first_params() -> nnx.State:
    """Experts, stacked layers with a nameless norm, and a matrix that Adafactor factors."""
    draw = np.random.default_rng(1).standard_normal
    wi_EMH, wo_YHM, wide_MH = (
        jnp.asarray(draw(shape, np.float32)) for shape in ((2, 14, 22), (3, 22, 14), (131, 128))
    )
    return nnx.State(
        {
            "wi_EMH": param(wi_EMH, "experts", "model", "hidden"),
            "wo_YHM": param(wo_YHM, "layers", "hidden", "model"),
            "scale": nnx.Param(jnp.ones((3, 14))),
            "wide_MH": param(wide_MH, "model", "hidden"),
        }
    )


def loss_of(params, x_BM):
    params = gathered(params)
    wi_EMH = params["wi_EMH"][...]
    x_BM = constrain(x_BM, "batch", None)

    def layer(x_BM, layer_params):
        layer_params = gathered(layer_params)
        h_BH = jax.nn.relu(jnp.einsum("BM,EMH->BH", x_BM, wi_EMH))
        return h_BH @ layer_params["wo"][...] * layer_params["scale"][...], None

    layers = nnx.State({"wo": params["wo_YHM"], "scale": params["scale"]})
    y_BM, _ = jax.lax.scan(jax.checkpoint(layer), x_BM, layers)
    wide_BH = jnp.tile(x_BM, (1, 10))[:, :131] @ params["wide_MH"][...]
    return jnp.mean(y_BM**2) + jnp.mean(wide_BH**2)


def make_step(name, mesh):
    config = OptimizerConfig(
        name=name, warmup_steps=1, schedule="constant", learning_rate=0.1, weight_decay=0.1
    )
    optimizer = make_optimizer(config, 10)

    def create() -> TrainState:
        params = first_params()
        state = TrainState(
            step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params)
        )
        return state if mesh is None else stored(state, mesh)

    def step(state: TrainState, x_BM):
        state = unpadded(state)
        grads = spread(jax.grad(loss_of)(state.params, x_BM))
        return placed(updated(state, grads, optimizer))

    return create, jax.jit(step)


X_BM = np.random.default_rng(0).standard_normal((24, 14), np.float32)


@functools.cache
def alone(name) -> TrainState:
    """The state after two steps on one device; in the first the learning rate is still 0."""
    create, step = make_step(name, None)
    return step(step(jax.jit(create)(), X_BM), X_BM)


@functools.cache
def together(name, mesh_name, mode):
    """The state after two steps, as stored and as a checkpoint has it."""
    config, num_devices = MESHES[mesh_name]
    mesh = make_mesh(config, jax.devices()[:num_devices])
    with jax.set_mesh(mesh), weight_update(mode):
        create, step = make_step(name, mesh)
        places = state_shardings(jax.eval_shape(create), mesh)
        state = jax.jit(create, out_shardings=places)()
        state = step(step(state, X_BM), X_BM)
        saved = fitted(state, logical_shapes(state, mesh))
        again = fitted(saved, state)
    jax.tree.map(np.testing.assert_array_equal, state, again)
    return state, saved


CASES = [
    ("sgd", "data=3", "sharded"),
    ("adamw", "data=4 x expert=2", "sharded"),
    ("adamw", "data=3", "fully_sharded"),
    ("adafactor", "data=4 x expert=2", "sharded"),
    ("lamb", "data=8", "fully_sharded"),
]
# Muon's state also holds three constants, which no device can share.
MUON = ("muon", "data=4 x expert=2", "fully_sharded")


@pytest.mark.parametrize(("name", "mesh_name", "mode"), [*CASES, MUON])
def test_a_shared_update_gives_the_state_of_one_device(name, mesh_name, mode):
    expected, (_, found) = alone(name), together(name, mesh_name, mode)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Gradients and norms are summed in another order: float32 rounding.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), first_params(), found.params)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(("name", "mesh_name", "mode"), CASES)
def test_a_device_holds_its_part_of_the_slots_alone(name, mesh_name, mode):
    num_devices = MESHES[mesh_name][1]
    state, saved = together(name, mesh_name, mode)
    shared = [(state.optimizer, saved.optimizer)]
    if mode == "fully_sharded":
        shared.append((state.params, saved.params))
    for pairs in shared:
        for stored_x, true_x in zip(*map(jax.tree.leaves, pairs), strict=True):
            if true_x.ndim == 0:
                continue
            part = stored_x.sharding.shard_shape(stored_x.shape)
            assert math.prod(part) * num_devices == stored_x.size
            # What was added is less than one index of one dimension on each device.
            assert stored_x.size - true_x.size < num_devices * true_x.size / min(true_x.shape)
            assert sum(a != b for a, b in zip(stored_x.shape, true_x.shape, strict=True)) <= 1
    if mode == "sharded" and "expert" not in mesh_name:
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))


def lowered(name, mesh_name, mode):
    """The program of a step, from shapes alone."""
    mesh = make_mesh(MESHES[mesh_name][0])
    with jax.set_mesh(mesh), weight_update(mode):
        create, step = make_step(name, mesh)
        abstract = jax.eval_shape(create)
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            abstract,
            state_shardings(abstract, mesh),
        )
        return step.lower(state, jax.ShapeDtypeStruct(X_BM.shape, X_BM.dtype))


def test_a_device_computes_the_update_of_its_part_alone():
    def num_roots(mode):  # Adam takes one for each number that a device updates
        return lowered("adamw", "data=8", mode).compile().cost_analysis()["transcendentals"]

    # 2 * 14 * 22 + 3 * 22 * 14 + 3 * 14 + 131 * 128, and some for the norm and the bias corrections.
    assert 18350 <= num_roots("replicated") < 18350 + 16
    # An eighth each of 2 * 14 * 24, 3 * 24 * 14, 3 * 16 and 131 * 128.
    assert 2312 <= num_roots("sharded") < 2312 + 16


def test_fully_sharded_layers_are_gathered_in_the_loop_one_at_a_time():
    found = explain(lowered("sgd", "data=8", "fully_sharded")).collectives
    gathers = [one for one in found if one.kind == "all-gather" and one.loops]
    assert all(one.times == 3 for one in gathers)
    # wo: its 22 rows are 24 with padding; scale: 14 are 16. Four bytes each.
    sizes = [one.bytes_per_device for one in gathers]
    assert set(sizes) <= {4 * 24 * 14, 4 * 16}
    # Once in the forward and once in the backward pass, which does not keep what was gathered.
    assert sizes.count(4 * 24 * 14) == 2


def test_replicated_updates_add_nothing_to_the_program():
    def num_constraints(mode):
        _, step = make_step("lamb", mesh)
        with weight_update(mode):
            return str(jax.make_jaxpr(step)(state, X_BM)).count("sharding_constraint[")

    mesh = make_mesh(MESHES["data=8"][0])
    create, _ = make_step("lamb", None)
    state = jax.eval_shape(create)
    assert num_constraints("fully_sharded") == num_constraints("replicated") == 0  # without a mesh
    with jax.set_mesh(mesh):
        kept = 1 + len(jax.tree.leaves(state))  # those of the batch and of what the step returns
        assert num_constraints("replicated") == kept
        assert num_constraints("sharded") > kept


@pytest.mark.parametrize(
    ("shape", "dims", "spec"),
    [
        ((16, 8), ("model", "hidden"), P("data")),  # the outermost that divides by 4
        ((6, 8), ("model", "hidden"), P(None, "data")),
        ((8, 8), ("layers", "model"), P(None, "data")),  # layers are left to the scan
        ((8, 8, 6), ("experts", "model", "hidden"), P("expert", "data")),  # a whole one first
        ((16, 3, 3), ("experts", "model", "hidden"), P(("expert", "data"))),
        # [23, 9] becomes [24, 9] by 9 numbers, or [23, 12] by 69.
        ((23, 9), ("model", "head"), P("data")),
        ((5,), (None,), P("data")),
        ((), (), P()),
    ],
)
def test_the_dimension_to_split_further_is_the_outermost_that_divides(shape, dims, spec):
    mesh = make_mesh(MeshConfig(data=4, expert=2))
    with layout({"batch": "data"}):
        found = spread_spec(shape, dims, mesh)
    assert tuple(found) == (*spec, *(None,) * (len(shape) - len(spec)))


def test_an_unknown_mode_is_refused():
    with pytest.raises(UserError, match=r"mesh.weight_update must be one of .* got 'zero'"):
        MeshConfig(weight_update="zero")
