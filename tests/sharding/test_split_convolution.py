"""Convolutions of which an image dimension is split: the compiler exchanges halos with neighbours."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe.errors import UserError
from moe.sharding import ANY, MeshConfig, explain, make_mesh, split, split_convolution

CHANNELS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    height: int
    window: int = 3
    stride: int = 1
    dilation: int = 1
    padding: str = "SAME"
    gathers: int = 0


EVEN = [
    Case(16),
    Case(16, window=4),
    Case(16, stride=2),
    Case(64, window=7, stride=4),
    Case(16, dilation=4),  # a halo of four rows, where a device has two
]
ANY_SIZE = [
    Case(16, stride=2),
    Case(16, dilation=4),
    # A size that does not divide is whole outside of the program, and so is its gradient.
    Case(19, gathers=1),
    Case(19, stride=2, gathers=1),
    Case(18, padding="VALID", gathers=1),
    Case(13, window=5, stride=3, dilation=2, gathers=1),
    Case(7, window=5, stride=4, gathers=2),  # two rows over eight devices are not worth splitting
]


def convolution(x_NHWC, kernel, case):
    """The compiler's: annotated, it exchanges halos by itself."""
    y_NHWC = jax.lax.conv_general_dilated(
        split(x_NHWC, 1, "data"),
        kernel,
        (case.stride, 1),
        case.padding,
        rhs_dilation=(case.dilation, 1),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return split(y_NHWC, 1, "data")


def by_hand(x_NHWC, kernel, case):
    strides, dilation = (case.stride, 1), (case.dilation, 1)
    return split_convolution(
        x_NHWC, kernel, "H", "data", strides=strides, padding=case.padding, dilation=dilation
    )


def once(x_NHWC, kernels, case):
    return jnp.mean(jnp.sin(convolution(x_NHWC, kernels[0], case)) ** 2)


def twice(x_NHWC, kernels, case):
    """The second must see no more of the first than its real rows."""
    h_NHWC = jnp.tanh(by_hand(x_NHWC, kernels[0], case))
    return jnp.mean(jnp.sin(by_hand(h_NHWC, kernels[1], case)) ** 2)


@pytest.mark.parametrize(
    ("model", "case"),
    [(once, case) for case in EVEN] + [(twice, case) for case in ANY_SIZE],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_halos_are_exchanged_and_nothing_is_gathered(model, case):
    key_x, *keys = jax.random.split(jax.random.key(0), 3)
    x_NHWC = jax.random.normal(key_x, (2, case.height, 5, CHANNELS))
    kernels = [jax.random.normal(key, (case.window, 3, CHANNELS, CHANNELS)) for key in keys]
    both = jax.value_and_grad(lambda x, kernels: model(x, kernels, case), argnums=(0, 1))
    expected = jax.jit(both)(x_NHWC, kernels)
    with jax.set_mesh(make_mesh(MeshConfig())):
        compiled = jax.jit(both).lower(x_NHWC, kernels).compile()
        explanation = explain(compiled)
        found = compiled(x_NHWC, kernels)
    counts = explanation.counts()
    assert counts["collective-permute"] >= 2
    assert counts["all-gather"] <= case.gathers and not counts["all-to-all"], str(explanation)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        # Sums over rows in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("convolve", [convolution, by_hand])
def test_a_halo_is_as_large_as_the_window_reaches(convolve):
    """3 rows of window need one row of each neighbour: 5 columns of 3 floats for each of 2 images."""
    mesh = make_mesh(MeshConfig())
    x_NHWC = jax.ShapeDtypeStruct(
        (2, 16, 5, CHANNELS), jnp.float32, sharding=jax.NamedSharding(mesh, P(None, "data"))
    )
    kernel = jax.ShapeDtypeStruct((3, 3, CHANNELS, CHANNELS), jnp.float32)
    with jax.set_mesh(mesh):
        explanation = explain(lambda x, kernel: convolve(x, kernel, Case(16)), x_NHWC, kernel)
    above, below = explanation.collectives
    assert above.kind == below.kind == "collective-permute"
    assert above.bytes_per_device == below.bytes_per_device == 2 * 5 * 3 * 4


def test_both_dimensions_of_an_image_may_be_split():
    """Rows by hand, columns by the compiler."""
    x_NHWC = jax.random.normal(jax.random.key(0), (2, 13, 10, CHANNELS))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, CHANNELS, CHANNELS))

    def run(x_NHWC, kernel):
        x_NHWC = split(x_NHWC, 2, "model", others=ANY)
        y_NHWC = by_hand(x_NHWC, kernel, Case(13))
        return jnp.sum(split(y_NHWC, 2, "model", others=ANY) ** 2)

    both = jax.value_and_grad(run, argnums=(0, 1))
    expected = jax.jit(both)(x_NHWC, kernel)
    with jax.set_mesh(make_mesh(MeshConfig(data=4, model=2))):
        compiled = jax.jit(both).lower(x_NHWC, kernel).compile()
        found = compiled(x_NHWC, kernel)
    axes = {one.axes for one in explain(compiled).collectives if one.kind == "collective-permute"}
    assert axes >= {("data",), ("model",)}
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)  # sums over rows in another order


def test_a_sequence_is_split_as_an_image_is():
    x_NLC = jax.random.normal(jax.random.key(0), (2, 21, CHANNELS))
    kernel = jax.random.normal(jax.random.key(1), (4, CHANNELS, 5))

    def causal(x_NLC):
        return split_convolution(
            x_NLC,
            kernel,
            "L",
            "data",
            strides=(1,),
            padding=[(3, 0)],
            dilation=(1,),
            dimension_numbers=("NLC", "LIO", "NLC"),
        )

    expected = causal(x_NLC)
    with jax.set_mesh(make_mesh(MeshConfig())):
        np.testing.assert_allclose(jax.jit(causal)(x_NLC), expected, rtol=1e-5, atol=1e-5)
    x_NLC = x_NLC.at[:, 10].set(9.0)
    assert np.array_equal(causal(x_NLC)[:, :10], expected[:, :10])


@pytest.mark.parametrize(
    ("dim", "axis", "padding", "message"),
    [
        ("C", "data", "SAME", r"got 'C', .* has \['H', 'W'\]"),
        ("H", "rows", "SAME", r"got 'rows', the mesh has \('data'"),
        ("H", "data", [(-1, 0), (0, 0)], r"got \(-1, 0\) for 'H'"),
    ],
)
def test_what_cannot_be_split_is_refused(dim, axis, padding, message):
    x_NHWC, kernel = jnp.zeros((2, 8, 5, 3)), jnp.zeros((3, 3, 3, 3))
    with jax.set_mesh(make_mesh(MeshConfig())), pytest.raises(UserError, match=message):
        split_convolution(x_NHWC, kernel, dim, axis, padding=padding)
