"""replicate, split and mesh_split: values stay, places are as said, and what is illegal is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe.errors import UserError
from moe.sharding import (
    ANY,
    MeshConfig,
    constrain,
    explain,
    make_mesh,
    mesh_split,
    pad_to_split,
    replicate,
    split,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, expert=2, model=2))


@pytest.fixture
def x_34():
    return jnp.arange(96.0).reshape(8, 12)


ANNOTATIONS = {
    "split": (lambda x: split(x, 0, "expert"), P("expert")),
    "split of the last": (lambda x: split(x, -1, "model"), P(None, "model")),
    "split over two axes": (lambda x: split(x, 0, ("model", "data")), P(("model", "data"))),
    "mesh_split by name": (lambda x: mesh_split(x, ("data", "model")), P("data", "model")),
    "mesh_split by index": (lambda x: mesh_split(x, (3, 0)), P("model", "data")),
    "mesh_split of some": (lambda x: mesh_split(x, (-1, "data")), P(None, "data")),
    "mesh_split over two": (lambda x: mesh_split(x, ((0, "model"), -1)), P(("data", "model"))),
    "by dimension": (lambda x: constrain(x, "batch", "hidden"), P(("data", "expert"), "model")),
    "replicate": (replicate, P()),
}


@pytest.mark.parametrize("annotate, spec", ANNOTATIONS.values(), ids=ANNOTATIONS)
def test_an_annotation_places_and_changes_no_value(annotate, spec, mesh, x_34):
    assert annotate(x_34) is x_34  # without a mesh
    with jax.set_mesh(mesh):
        y = jax.jit(annotate)(x_34)
    assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), x_34.ndim)
    np.testing.assert_array_equal(y, x_34)


def test_what_is_left_to_the_compiler_stays_as_it_was(mesh, x_34):
    """Rows come split over `data`: ANY keeps that, None moves them."""
    with jax.set_mesh(mesh):
        rows = jax.device_put(x_34, jax.NamedSharding(mesh, P("data")))
        kept = [
            explain(annotate, rows)
            for annotate in (
                lambda x: mesh_split(x, (ANY, "model")),
                lambda x: split(x, 1, "model", others=ANY),
                lambda x: constrain(x, ANY, "hidden"),
            )
        ]
        gathered = explain(lambda x: mesh_split(x, (-1, "model")), rows)
    for explanation in kept:
        assert not explanation.collectives
        (output,) = [tensor for tensor in explanation.tensors if tensor.role == "output"]
        assert output.spec == P("data", "model")
    assert gathered.collectives


def uneven(x_34):
    """Products, sums, a maximum and a softmax over a dimension of 11 split in 4: padding would show."""
    x = split(x_34[:, :11] + 1, 1, ("data", "model"), pad=True)
    h = split(x.T @ x, 0, ("data", "model"), pad=True)
    p = jax.nn.softmax(split(-h / 1000, 1, ("data", "model"), pad=True), axis=1)
    return jnp.sum(p**2) + jnp.min(x) + jnp.mean(h, axis=0).std() + jnp.prod(x[0] / 7)


def test_an_uneven_dimension_is_padded_and_masked_by_the_compiler(mesh, x_34):
    expected = jax.jit(jax.value_and_grad(uneven))(x_34)
    with jax.set_mesh(mesh):
        explanation = explain(jax.value_and_grad(uneven), x_34)
        found = jax.jit(jax.value_and_grad(uneven))(x_34)
    assert explanation.collectives, "the work is shared out"
    for a, b in zip(expected, found, strict=True):
        # Sums in another order.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_an_array_at_the_border_is_filled_up_and_masked(mesh):
    x_53 = jnp.arange(15.0).reshape(5, 3) + 1
    whole, everything = pad_to_split(x_53, 0, "data")
    np.testing.assert_array_equal(whole, x_53)
    assert everything.all() and len(everything) == 5
    with jax.set_mesh(mesh):
        x_83, mask_8 = pad_to_split(x_53, 0, ("data", "expert"), value=jnp.nan)
        x_83 = jax.device_put(x_83, jax.NamedSharding(mesh, P(("data", "expert"))))
        mean = jax.jit(lambda x, mask: jnp.mean(x, axis=0, where=mask[:, None]))(x_83, mask_8)
    assert x_83.shape == (8, 3)
    assert x_83.addressable_shards[0].data.shape == (2, 3)
    np.testing.assert_array_equal(mask_8, [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_allclose(mean, [7, 8, 9], rtol=1e-6)


def in_region(annotate, axes, mesh, x):
    """`annotate` where `axes` are held by hand and split dimension 0."""
    region = jax.shard_map(annotate, in_specs=P(axes), out_specs=P(axes), axis_names=set(axes))
    with jax.set_mesh(mesh):
        return jax.jit(region)(x)


def test_in_a_manual_region_automatic_axes_may_be_annotated(mesh, x_34):
    seen = []

    def local(x):
        seen.append(x.shape)
        return mesh_split(constrain(x, None, "hidden") * 2, ("data", ANY))

    y = in_region(local, ("expert",), mesh, x_34)
    assert seen[0] == (4, 12)  # 8 rows over 2 devices by hand; the columns are whole to look at
    np.testing.assert_array_equal(y, x_34 * 2)
    assert y.sharding.shard_shape(y.shape) == (2, 6)


def test_where_every_axis_is_manual_there_is_nothing_to_say(mesh, x_34):
    np.testing.assert_array_equal(
        in_region(replicate, ("data", "expert", "model"), mesh, x_34), x_34
    )


@pytest.mark.parametrize(
    ("annotate", "message"),
    [
        (lambda x: split(x, 1, "expert"), r"got \['expert'\] for dimension 1, .* by hand"),
        (lambda x: constrain(x, "batch", None), r"got \['expert'\] for dimension 'batch'"),
    ],
)
def test_in_a_manual_region_its_axes_are_refused(annotate, message, mesh, x_34):
    with pytest.raises(UserError, match=message):
        in_region(annotate, ("expert",), mesh, x_34)


@pytest.mark.parametrize(
    ("annotate", "message"),
    [
        (
            lambda x: split(x, 0, "modle"),
            r"got 'modle', the mesh has \('data', 'stage', 'expert', 'model'\)",
        ),
        (
            lambda x: mesh_split(x, (4, -1)),
            r"got 4, the mesh has \('data', 'stage', 'expert', 'model'\)",
        ),
        (lambda x: mesh_split(x, ("data",)), r"got \('data',\) for shape \(8, 12\)"),
        (lambda x: mesh_split(x, ("data", "data")), "got 'data' for dimensions 0 and 1"),
        (lambda x: mesh_split(x, (("data", 0), -1)), "got 'data' for dimensions 0 and 0"),
        (lambda x: split(x, 2, "data"), r"got 2 for shape \(8, 12\)"),
        (
            lambda x: split(x[:, :11], 1, "model"),
            r"dimension 1 must divide .*'model'.* got size 11 over 2 devices.*pad it",
        ),
        (
            lambda x: constrain(x, "groups", "experts"),
            "got 'expert' for dimensions 'groups' and 'e",
        ),
        (lambda x: constrain(x, "expert", None), "got 'expert', near are .*experts"),
    ],
)
def test_what_is_illegal_is_refused_with_both_sides(annotate, message, mesh, x_34):
    with jax.set_mesh(mesh), pytest.raises(UserError, match=message):
        annotate(x_34)


def test_a_mesh_of_explicit_axes_is_refused(x_34):
    with (
        jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))),
        pytest.raises(UserError, match=r"must be of type Auto: got .*Explicit"),
    ):
        split(x_34, 0, "data")
