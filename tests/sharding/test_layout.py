"""Layout rules: what they split, that jit follows them, and what they may not say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pydantic
import pytest
from jax.sharding import PartitionSpec as P

from moe.errors import UserError
from moe.sharding import (
    LAYOUT,
    MeshConfig,
    constrain,
    current_layout,
    layout,
    make_mesh,
    num_shards,
    param,
    partition_spec,
    shardings,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, expert=2, model=2))


def test_the_default_splits_tokens_experts_and_the_inside_of_layers(mesh):
    assert current_layout()["groups"] == LAYOUT["groups"]
    assert partition_spec(("batch", "model", "heads"), mesh) == P(("data", "expert"), None, "model")
    assert partition_spec(("experts", "exchanged_groups"), mesh) == P("expert", "data")
    wi_EMH = {"wi_EMH": param(jnp.zeros((4, 6, 8)), "experts", "model", "hidden")}
    assert shardings(wi_EMH, mesh)["wi_EMH"].get_value().spec == P("expert", None, "model")


def test_a_layout_goes_over_the_one_before_or_replaces_it(mesh):
    with layout({"hidden": "data", "batch": None}):
        assert partition_spec(("batch", "hidden", "heads"), mesh) == P(None, "data", "model")
        with layout({"hidden": None}):
            assert partition_spec(("heads", "hidden"), mesh) == P("model", None)
        with layout({"batch": "model"}, replace=True), jax.set_mesh(mesh):
            assert partition_spec(("batch", "hidden", "heads"), mesh) == P("model", None, None)
            assert (num_shards("batch"), num_shards("experts")) == (2, 1)
    assert current_layout().keys() == LAYOUT.keys()
    assert current_layout()["hidden"] == ("model",)


def test_groups_keep_after_the_exchange_what_experts_leave():
    with layout({"groups": ("rows", "cols"), "experts": "cols"}):
        assert current_layout()["exchanged_groups"] == ("rows",)
    with layout({"groups": ("rows", "cols"), "exchanged_groups": None}):
        assert current_layout()["exchanged_groups"] == ()
        with layout({"hidden": None}):
            assert current_layout()["exchanged_groups"] == ()


def test_a_dimension_of_the_users_own_is_named_by_a_layout(mesh):
    with layout({"height": "data"}):
        assert partition_spec(("height",), mesh) == P("data")
    with pytest.raises(UserError, match="got 'height'"):
        partition_spec(("height",), mesh)


def test_another_layout_traces_again_and_the_same_one_does_not(mesh):
    traced = []

    @jax.jit
    def f(x):
        traced.append(current_layout()["hidden"])
        return constrain(x, "batch", "hidden")

    def spec(*rules):
        with layout(*rules):
            return f(jnp.zeros((8, 8))).sharding.spec

    with jax.set_mesh(mesh):
        first, second = {"hidden": None, "batch": "model"}, {"batch": "data", "hidden": "expert"}
        assert spec(first) == P("model")
        assert spec(second) == P("data", "expert")
        assert spec({"batch": ["model"], "hidden": ()}) == P("model")
        assert f(jnp.zeros((8, 8))).sharding.spec == P(("data", "expert"), "model")
    assert traced == [(), ("expert",), ("model",)]


def test_a_run_saved_before_the_model_axis_has_a_mesh():
    saved = {"data": 2, "expert": 4}
    assert pydantic.TypeAdapter(MeshConfig).validate_python(saved) == MeshConfig(data=2, expert=4)


@pytest.mark.parametrize(
    ("rules", "dims", "message"),
    [
        ({"hidden": 3}, (), "got 3 for 'hidden'"),
        ({"batch": ("data", "data")}, (), r"got \('data', 'data'\) for 'batch'"),
        (
            {"hidden": "modle"},
            ("hidden",),
            r"got 'modle' for dimension 'hidden', the mesh has \('d",
        ),
        (
            {"hidden": "expert"},
            ("experts", "hidden"),
            "got 'expert' for dimensions 'experts' and 'h",
        ),
        ({}, ("hiden",), r"got 'hiden', near are hidden\. "),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(rules, dims, message, mesh):
    with pytest.raises(UserError, match=message), layout(rules):
        partition_spec(dims, mesh)
