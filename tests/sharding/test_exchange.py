"""Ragged rows between devices, against loops in numpy; the ragged form by what JAX documents of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.sharding import count_collectives
from moe.sharding.exchange import (
    exchange,
    padded_exchange,
    plan_route,
    ragged_arguments,
)

P, E, M, R, MOST = (
    4,
    3,
    5,
    23,
    13,
)  # peers, experts of each, width, rows of a device, most for a peer
AXES = ("data", "expert")


def slices_of(rng, skewed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Starts and sizes of every device's slices, [device, P, E]; between slices lie rows of nobody."""
    start, size = np.zeros((2, P, P, E), np.int32)
    for device in range(P):
        if skewed:  # all for the second expert of the third device, and a whole block full
            size[device, 2, 1] = MOST
        else:
            size[device] = rng.multinomial(R - 4, np.ones(P * E) / (P * E)).reshape(P, E)
        gaps = np.arange(P * E).reshape(P, E) // 4
        start[device] = np.cumsum(size[device]).reshape(P, E) - size[device] + gaps
    return start, size


def expected_rows(x, start, size):
    """Each device's rows by expert, then by the device that they come from."""
    y = np.zeros((P, P * MOST, M), np.float32)
    for here in range(P):
        rows = [
            x[there, start[there, here, e] + i]
            for e in range(E)
            for there in range(P)
            for i in range(size[there, here, e])
        ]
        y[here, : len(rows)] = np.reshape(rows, (-1, M))
    return y


def emulated(x, num_rows: int, arguments):
    """What the documentation of `jax.lax.ragged_all_to_all` says, for all devices: [device, rows, M]."""
    input_offsets, send_sizes, output_offsets, receive_sizes = arguments
    y = np.zeros((P, num_rows, M), np.float32)
    for here in range(P):
        for i in range(P * E):
            to, size = i // E, send_sizes[here, i]
            first, place = input_offsets[here, i], output_offsets[here, i]
            assert size == receive_sizes[to, here * E + i % E]
            y[to, place : place + size] = x[here, first : first + size]
    return y


@pytest.fixture(scope="module")
def mesh():
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), AXES, axis_types=auto, devices=jax.devices()[:P])


@pytest.fixture(scope="module")
def program(mesh):
    """x, starts, sizes, dy -> the exchange, its arguments there and back, and its gradient."""

    def on_one_device(*arrays):
        x_RM, start_PE, size_PE, dy_QM = (array[0] for array in arrays)
        route = plan_route(start_PE, size_PE, AXES, num_rows=R, most=MOST)
        y_QM, back = jax.vjp(lambda x_RM: exchange(x_RM, route), x_RM)
        there, again = ragged_arguments(route), ragged_arguments(route.back())
        return jax.tree.map(lambda out: out[None], (y_QM, back(dy_QM)[0], there, again))

    spec = jax.P(AXES)
    return jax.jit(
        jax.shard_map(
            on_one_device, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False
        )
    )


@pytest.mark.parametrize("skewed", [False, True])
def test_rows_arrive_by_expert_and_go_back_where_they_came_from(program, skewed):
    rng = np.random.default_rng(0)
    start, size = slices_of(rng, skewed)
    x = rng.normal(size=(P, R, M)).astype(np.float32)
    dy = rng.normal(size=(P, P * MOST, M)).astype(np.float32)
    y, dx, there, again = jax.device_get(program(x, start, size, dy))
    np.testing.assert_array_equal(y, expected_rows(x, start, size))
    np.testing.assert_array_equal(y, emulated(x, P * MOST, there))
    np.testing.assert_array_equal(dx, emulated(dy, R, again))
    # The gradient of a linear map: <y, dy> = <x, dx>. Float32 sums of some 400 products.
    np.testing.assert_allclose(np.sum(y * dy), np.sum(x * dx), rtol=1e-4)
    assert np.any(dx) and not np.any(dx[:, -1])  # the last row is in no slice


def test_a_device_alone_puts_its_rows_together_by_expert():
    @jax.jit
    def there_and_back(x_RM):
        start_PE, size_PE = jnp.array([[1, 5, 2]]), jnp.array([[1, 2, 3]])
        route = plan_route(start_PE, size_PE, (), num_rows=7, most=6)
        y_RM = exchange(x_RM, route)
        return y_RM, exchange(y_RM, route.back())

    y_RM, x_RM = there_and_back(jnp.arange(7.0)[:, None])
    assert y_RM[:, 0].tolist() == [1, 5, 6, 2, 3, 4]
    assert x_RM[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]  # row 0 is of nobody, and 0 in any case


@pytest.mark.slow  # needs the extra [tpu]; `pip install '.[tpu]'`
def test_the_tpu_compiler_takes_the_ragged_form_with_several_slices_for_a_peer(tpu_slice):
    _, chips = tpu_slice("v5e:2x2")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), AXES, axis_types=auto, devices=chips)

    def run(form):
        def on_one_device(x_1RM, start_1PE, size_1PE):
            route = plan_route(start_1PE[0], size_1PE[0], AXES, num_rows=R, most=MOST)
            y_QM, back = jax.vjp(lambda x_RM: form(x_RM, route), x_1RM[0])
            return back(y_QM)[0][None]

        spec = jax.P(AXES)
        mapped = jax.shard_map(on_one_device, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
        shapes = [((P, R, M), jnp.float32), ((P, P, E), jnp.int32), ((P, P, E), jnp.int32)]
        with jax.set_mesh(mesh):
            where = jax.NamedSharding(mesh, spec)
            inputs = [jax.ShapeDtypeStruct(*shape, sharding=where) for shape in shapes]
            return count_collectives(jax.jit(mapped).lower(*inputs).compile())

    # There and back; what is before them tells sizes, and the places that rows are given.
    assert run(exchange) == {"ragged-all-to-all": 2, "all-to-all": 2}
    assert run(padded_exchange) == {"all-to-all": 3}
