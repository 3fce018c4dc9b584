from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe.errors import UserError
from moe.sharding import MeshConfig, constrain, make_mesh, param, partition_spec, shardings


def test_without_a_mesh_an_annotation_is_the_identity():
    x = jnp.arange(6.0).reshape(2, 3)
    assert constrain(x, "batch", None) is x


def test_a_named_dimension_is_split_over_its_mesh_axes():
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    with jax.set_mesh(mesh):
        x = jax.jit(lambda x: constrain(x, "groups", None))(jnp.zeros((16, 3)))
    assert x.sharding.spec[0] == ("data", "expert")
    assert x.addressable_shards[0].data.shape == (2, 3)


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_outside_of_a_program_an_array_is_put_where_its_annotation_says(zeros):
    with jax.set_mesh(make_mesh(MeshConfig(data=2, expert=4))):
        x = constrain(zeros((16, 3)), "groups", None)
        uneven = constrain(zeros((7, 3)), "groups", None, pad=True)  # is not stored unevenly
    assert x.sharding.spec[0] == ("data", "expert")
    assert x.addressable_shards[0].data.shape == (2, 3)
    assert uneven.shape == uneven.addressable_shards[0].data.shape == (7, 3)


def test_the_layout_uses_only_axes_that_the_mesh_has():
    mesh = jax.make_mesh((8,), ("expert",))
    assert partition_spec(("groups", "exchanged_groups", None), mesh) == P(("expert",), None, None)


def test_parameters_keep_their_dimensions():
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    state = nnx.State({"wi": param(jnp.zeros((4, 5, 6)), "experts", "model", "hidden")})
    assert shardings(state, mesh)["wi"].get_value().spec == P(("expert",), None, None)


def test_the_mesh_fills_the_devices_that_experts_leave():
    ones = dict.fromkeys(("data", "stage", "expert", "model"), 1)
    assert dict(make_mesh(MeshConfig(expert=4)).shape) == ones | {"data": 2, "expert": 4}
    assert dict(make_mesh(MeshConfig(), jax.devices()[:3]).shape) == ones | {"data": 3}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_mesh(MeshConfig(data=3)), "got data=3 x stage=1 x expert=1 x model=1 for 8"),
        (
            lambda: make_mesh(MeshConfig(expert=5)),
            "got data=any x stage=1 x expert=5 x model=1 for 8",
        ),
        (lambda: MeshConfig(expert=0), "mesh.expert must be at least 1: got 0"),
        (
            lambda: param(jnp.zeros((2, 3)), "model"),
            r"dims must name every dimension: got \('model',\)",
        ),
        (lambda: constrain(jnp.zeros((2, 3)), "batch"), r"got \('batch',\) for shape \(2, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_sides(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_size_that_does_not_divide_is_refused():
    with (
        jax.set_mesh(make_mesh(MeshConfig(expert=8))),
        pytest.raises(UserError, match=r"'groups' must divide .* got size 6 over 8 devices"),
    ):
        constrain(np.zeros((6, 2)), "groups", None)
