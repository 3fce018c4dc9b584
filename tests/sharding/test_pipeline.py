"""The pipeline as a pure function: a plain loop's numbers, the schedule's idle share, what travels."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.sharding import (
    MeshConfig,
    explain,
    from_microbatches,
    make_mesh,
    pipeline,
    to_microbatches,
)

Y, B, D = 8, 3, 7  # layers, rows of a micro-batch, width
POLICIES = {"default": {}, "nothing": {"policy": jax.checkpoint_policies.nothing_saveable}}


def layer(weight_DD, x_BD, shift_BD):
    """With a normalisation that is infinite on a row of zeros."""
    y_BD = x_BD @ weight_DD + shift_BD
    y_BD = y_BD / jnp.linalg.norm(y_BD, axis=-1, keepdims=True)
    return y_BD, {"sum": jnp.sum(y_BD), "first": y_BD[0]}


def one_after_another(weights, x, shifts):
    """Every micro-batch through every layer, in two loops of Python."""
    xs, outs = [], []
    for x_BD, shift_BD in zip(x, shifts, strict=True):
        of_layers = []
        for weight_DD in weights:
            x_BD, out = layer(weight_DD, x_BD, shift_BD)
            of_layers.append(out)
        xs.append(x_BD)
        outs.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layers))
    return jnp.stack(xs), jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *outs)


def with_gradients(run):
    def loss(weights, x, shifts):
        y, out = run(weights, x, shifts)
        first = jnp.sum(jnp.sin(jnp.arange(out["first"].size)) * out["first"].reshape(-1))
        return jnp.sum(y**3) + first, (y, out)

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


def inputs(num_microbatches: int):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (Y, D, D), (num_microbatches, B, D), (num_microbatches, B, D)
    return tuple(jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True))


def on_mesh(run, arguments, num_stages: int) -> jax.stages.Compiled:
    """Compiled for K stages, whose weights are where they are used."""
    weights, *others = arguments
    mesh = make_mesh(MeshConfig(data=1, stage=num_stages), jax.devices()[:num_stages])
    with jax.set_mesh(mesh):
        held = jax.NamedSharding(mesh, jax.P("stage"))
        placed = jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=held)
        return run.lower(placed, *others).compile()


@pytest.fixture(scope="module")
def expected():
    return {m: jax.device_get(with_gradients(one_after_another)(*inputs(m))) for m in (3, 5)}


@pytest.mark.parametrize(
    ("stages", "rounds", "microbatches", "policy"),
    [
        (1, 1, 5, "default"),
        (2, 1, 5, "default"),
        (4, 1, 3, "nothing"),
        (2, 2, 5, "nothing"),
        (4, 2, 3, "default"),
    ],
)
def test_values_and_gradients_are_those_of_a_loop(expected, stages, rounds, microbatches, policy):
    run = with_gradients(
        lambda *arguments: pipeline(
            layer, *arguments, num_stages=stages, num_rounds=rounds, **POLICIES[policy]
        )
    )
    arguments = inputs(microbatches)
    compiled = on_mesh(jax.jit(run), arguments, stages)
    weights_where = compiled.input_shardings[0][0]
    found = compiled(jax.device_put(arguments[0], weights_where), *arguments[1:])
    for a, b in zip(*map(jax.tree.leaves, (expected[microbatches], found)), strict=True):
        # The same products in another order; values are near 1.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("stages", "rounds", "microbatches"), [(1, 1, 3), (4, 1, 4), (4, 1, 32), (4, 2, 8), (8, 1, 32)]
)
def test_the_measured_idle_share_is_the_formulas(stages, rounds, microbatches):
    """Each layer tells what it was given: x counts the layers that it has been through."""
    told = []

    def counting(number, passed, microbatch):
        jax.debug.callback(
            lambda *seen: told.append(tuple(map(int, seen))), number, microbatch, passed
        )
        return passed + 1, ()

    passed, _ = pipeline(
        counting,
        jnp.arange(Y),
        jnp.zeros(microbatches, jnp.int32),
        jnp.arange(microbatches),
        num_stages=stages,
        num_rounds=rounds,
    )
    jax.effects_barrier()
    assert passed.tolist() == [Y] * microbatches
    due = {(number, microbatch) for number, microbatch, before in told if before == number}
    assert len(due) == Y * microbatches
    idle = 1 - Fraction(len(due), len(told))
    assert idle == Fraction(stages - 1, microbatches * rounds + stages - 1)


@pytest.fixture(scope="module")
def gradients():
    """Policy, rounds -> the gradient of a pipeline of 4 stages and 11 micro-batches, compiled."""

    def compiled(policy, rounds=1, layers=Y):
        def loss(weights, x, shifts):
            y, _ = pipeline(
                layer, weights, x, shifts, num_stages=4, num_rounds=rounds, **POLICIES[policy]
            )
            return jnp.sum(y**3)

        weights, x, shifts = inputs(11)
        weights = jnp.zeros((layers, D, D))
        return on_mesh(jax.jit(jax.grad(loss, argnums=(0, 1))), (weights, x, shifts), 4)

    return compiled


def test_only_what_stages_hand_on_travels_between_them(gradients):
    exchanges = explain(gradients("nothing")).collectives
    assert {one.axes for one in exchanges} == {("stage",)}
    at_each_tick = [one for one in exchanges if one.loops]
    assert {one.kind for one in at_each_tick} == {"collective-permute"}
    assert {one.times for one in at_each_tick} == {11 + 4 - 1}
    # Forward x and its shift; backward x, in two parts: to the stage before, and around.
    assert {one.bytes_per_device for one in at_each_tick} == {4 * B * D}
    assert len(at_each_tick) == 4
    # Once: results leave the last stage and gradients arrive there; no weight does.
    once = [one for one in exchanges if not one.loops]
    assert {one.kind for one in once} <= {"collective-permute", "all-reduce"}
    assert max(one.bytes_per_device for one in once) <= 4 * B * D * (11 + 4 - 1)


def test_rounds_bring_weights_to_their_stages_once(gradients):
    exchanges = explain(gradients("nothing", rounds=2)).collectives
    assert {one.kind for one in exchanges if one.loops} == {"collective-permute"}
    assert {one.times for one in exchanges if one.loops} == {11 * 2 + 4 - 1}
    assert any(one.kind == "all-to-all" for one in exchanges if not one.loops)


@pytest.mark.parametrize(("policy", "rounds"), [("default", 1), ("default", 2), ("nothing", 2)])
def test_no_copy_of_weights_is_kept_for_each_tick(gradients, policy, rounds):
    tensors = explain(gradients(policy, rounds=rounds), top=1000).tensors
    per_tick = [one for one in tensors if one.role == "temporary" and one.shape[:1] == (26,)]
    assert all(one.shape[-2:] != (D, D) for one in per_tick)


def test_recomputed_stages_keep_their_inputs_alone(gradients):
    """GPipe: O(N + L / K * N / M), where all that is computed would be O(N * L / K)."""

    def temporaries(policy, layers):
        return gradients(policy, layers=layers).memory_analysis().temp_size_in_bytes

    growth = {p: temporaries(p, 32) - temporaries(p, 8) for p in POLICIES}
    # Six layers more a stage: their gradients' accumulators 6 D D, and the activations of one tick
    # or of all 14.
    of_tick = 4 * 6 * B * D
    accumulators = 4 * 6 * D * D
    assert growth["default"] > 14 * of_tick
    assert growth["nothing"] < 4 * accumulators + 6 * of_tick


def test_micro_batches_take_turns_in_the_rows():
    x = jnp.arange(12).reshape(6, 2)
    parts = to_microbatches(x, 3)
    assert parts[1].tolist() == [[2, 3], [8, 9]]  # rows 1 and 4
    assert from_microbatches(parts).tolist() == x.tolist()


def test_layers_must_divide_by_stages_and_rounds():
    with pytest.raises(UserError, match=r"number of layers .* got 8 for 4 x 3"):
        pipeline(layer, *inputs(3), num_stages=4, num_rounds=3)
