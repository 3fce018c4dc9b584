"""What `explain` says of programs whose communication is known beforehand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe.errors import UserError
from moe.sharding import MeshConfig, count_collectives, explain, hlo, make_mesh, replicate, split
from moe.sharding.explain import read_collectives

ROWS, WIDTH, STEPS = 16, 24, 5


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, expert=4))


def abstract(mesh, spec, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))


def in_a_loop(x, w):
    def body(x, _):
        x = split(x, 0, "expert")
        x = split(x.T, 0, "expert").T  # rows for columns: the all-to-all
        return jnp.tanh(split(x, 0, "expert") @ w), None

    x, _ = jax.lax.scan(body, x, length=STEPS)
    return jnp.sum(x)


def arguments(mesh):
    return abstract(mesh, P("expert"), ROWS, WIDTH), abstract(mesh, P(), WIDTH, WIDTH)


def check(explanation):
    counts = explanation.counts()
    assert counts["all-to-all"] == 2 and counts["all-reduce"] == 1
    for one in explanation.collectives:
        assert one.axes == ("expert",) and one.num_devices == 4
        if one.kind == "all-to-all":
            # A device holds 16 / 4 rows of 24 floats, or 16 rows of 24 / 4.
            assert one.bytes_per_device == 4 * 24 * 4
            assert [loop.trips for loop in one.loops] == [STEPS] and one.times == STEPS
            assert "test_explain.py:" in one.source and "test_explain.py:" in one.loops[0].source
        if one.kind == "all-reduce":
            assert (one.bytes_per_device, one.loops, one.times) == (4, (), 1)
    assert explanation.bytes_per_device("all-to-all") == 2 * STEPS * 384


@pytest.fixture(scope="module")
def explained(mesh):
    with jax.set_mesh(mesh):
        return explain(in_a_loop, *arguments(mesh))


def test_a_collective_has_its_bytes_axis_line_and_loop(explained):
    check(explained)


def test_arguments_and_outputs_say_how_they_are_split(explained):
    found = {(tensor.role, tensor.name): tensor for tensor in explained.tensors}
    x, w = found["argument", "0"], found["argument", "1"]
    assert (x.shape, x.spec, x.bytes_per_device) == ((16, 24), P("expert"), 4 * 24 * 4)
    assert (w.shape, w.bytes_per_device) == ((24, 24), 24 * 24 * 4)
    assert found["output", ""].bytes_per_device == 4
    assert any(tensor.role == "temporary" for tensor in explained.tensors)
    sizes = [tensor.bytes_per_device for tensor in explained.tensors]
    assert sizes == sorted(sizes, reverse=True)


def test_it_reads_well(explained):
    text = str(explained)
    assert "all-to-all" in text and "5 times" in text and "sharding/test_explain.py:" in text
    assert "float32[16, 24]" in text and "[expert, -]" in text and "384 B" in text


def test_programs_in_every_state_of_compilation_are_read_alike(mesh, explained):
    with jax.set_mesh(mesh):
        lowered = jax.jit(in_a_loop).lower(*arguments(mesh))
        compiled = lowered.compile()
    for program in (lowered, compiled):
        check(explain(program))
    assert count_collectives(compiled) == explained.counts()


def test_a_program_that_its_compiler_cannot_print_is_told_as_it_was_compiled(
    mesh, explained, monkeypatch
):
    def cannot(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: operands")

    with jax.set_mesh(mesh):
        lowered = jax.jit(in_a_loop).lower(*arguments(mesh))
        compiled = lowered.compile()
        monkeypatch.setattr(jax.stages.Compiled, "as_text", cannot)
        check(explain(lowered))
        with pytest.raises(UserError, match="got 'INTERNAL: operands' from its compiler"):
            explain(compiled)


def test_on_one_device_nothing_is_said():
    explanation = explain(jnp.sin, jnp.ones(3))
    assert explanation.collectives == ()
    assert "collective" in str(explanation)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['data'=2,'expert'=4] {'data'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", tuple(range(8))),
        # The first half of an axis of 8 read as 2 x 4, and the second.
        ("replica_groups=mesh['a'=8] {'a':(1)2}", (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", (0, 1)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", (0, 2)),
        ("source_target_pairs={{0,1},{1,0}}", (0, 1)),
        ("channel_id=1", ()),
    ],
)
def test_every_way_to_write_a_group_of_devices_is_read(text, devices):
    instruction = hlo.Instruction("%x", "f32[2]", "all-reduce", f"%y), channel_id=1, {text}, z=1")
    assert hlo.devices_of(instruction) == devices


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[2,3]{1,0:T(8,128)}", 24),
        ("(bf16[4]{0}, /*index=1*/pred[5], s4[3])", 8 + 5 + 2),
        ("f8e4m3fn[7]", 7),
        ("c64[]", 8),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_type(text, size):
    assert hlo.num_bytes(text) == size


def test_a_permutation_and_a_gather_are_told_with_what_they_carry(mesh):
    with jax.set_mesh(mesh):
        explanation = explain(
            lambda x: split(jnp.roll(x, 1, axis=0), 0, "data"), abstract(mesh, P("data"), 8, 3)
        )
        gather = explain(replicate, abstract(mesh, P(("data", "expert")), 8, 6))
    (shift,) = [one for one in explanation.collectives if one.kind == "collective-permute"]
    assert (shift.axes, shift.bytes_per_device) == (("data",), 1 * 3 * 4)
    (one,) = gather.collectives
    # Of 8 rows of 6 floats every device ends up with all.
    assert (one.kind, one.axes, one.bytes_per_device) == ("all-gather", ("data", "expert"), 192)


SCATTER = """\
%all-reduce-scatter (input: f32[8,6]) -> f32[2,6] {
  %input = f32[8,6]{1,0} parameter(0)
  %all-reduce.1 = f32[8,6]{1,0} all-reduce(%input), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %dynamic-slice.3 = f32[2,6]{1,0} dynamic-slice(%all-reduce.1, %start, %zero)
}

ENTRY %main (x: f32[8,6]) -> f32[2,6] {
  %x = f32[8,6]{1,0} parameter(0)
  ROOT %fusion = f32[2,6]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_a_reduce_scatter_is_told_as_one_where_the_compiler_writes_it_as_a_fusion():
    (one,) = read_collectives(SCATTER, {"data": 4, "model": 2})
    assert (one.kind, one.axes, one.bytes_per_device) == ("reduce-scatter", ("data",), 8 * 6 * 4)


@pytest.mark.parametrize("wrap", [lambda layer: layer, jax.checkpoint], ids=["kept", "again"])
def test_what_the_backward_pass_reads_of_the_forward_pass_is_told(wrap):
    def loss(w, x):
        def layer(x, _):
            return jnp.sin(x @ w), None

        return jnp.sum(jax.lax.scan(wrap(layer), x, length=5)[0])

    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones((7, 7)), jnp.ones((3, 7))).compile()
    kept = [hlo.shape_of(one.type) for one in hlo.Module(compiled.as_text()).kept_for_backward()]
    # The input of each layer, for the gradient of w; without a checkpoint also cos(x @ w). Not w.
    assert set(kept) == {("f32", (5, 3, 7))}
    assert len(kept) == 1 if wrap is jax.checkpoint else len(kept) >= 2


@pytest.mark.slow  # needs the extra [tpu]; `pip install '.[tpu]'`
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MeshConfig(data=4, model=16), "reduce-scatter"),  # data is a side of the torus
        (MeshConfig(data=64), "all-reduce"),  # over all links of the slice
    ],
)
def test_the_tpu_scatters_a_sum_along_a_side_of_its_torus(tpu_slice, config, kind):
    _, chips = tpu_slice("v5p:4x4x4")
    mesh = make_mesh(config, chips)
    scatter = jax.shard_map(
        lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
        mesh=mesh,
        in_specs=P(),
        out_specs=P("data"),
        check_vma=False,
    )
    counts = explain(scatter, abstract(mesh, P(), 8192, 1024)).counts()
    assert {name: counts[name] for name in ("reduce-scatter", "all-reduce")} == {
        "reduce-scatter": 0,
        "all-reduce": 0,
        kind: 1,
    }


@pytest.mark.slow  # needs the extra [tpu]; `pip install '.[tpu]'`
def test_the_program_of_another_compiler_is_read_alike(tpu_slice):
    _, chips = tpu_slice("v5p:2x2x2")
    mesh = make_mesh(MeshConfig(data=2, expert=4), chips)
    with jax.set_mesh(mesh):
        explanation = explain(in_a_loop, *arguments(mesh))
    assert np.all([one.axes == ("expert",) for one in explanation.collectives])
    all_to_alls = [one for one in explanation.collectives if one.kind == "all-to-all"]
    assert [one.times for one in all_to_alls] == [STEPS, STEPS]
    assert all("test_explain.py:" in one.source for one in all_to_alls)
    assert explanation.bytes_per_device("all-reduce") >= 4
