"""What a partitioned program does: its communication, and where its largest arrays live.

    with jax.set_mesh(mesh):
        print(explain(step, state, batch))

Nothing runs: the program is compiled and its text is read, so shapes are enough for arguments and the
devices may be elsewhere (`jax.experimental.topologies`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moe.errors import UserError
from moe.sharding import hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One communication of the program.

    Attributes:
      kind: as XLA calls it: all-to-all, all-gather, all-reduce, reduce-scatter, collective-permute.
      axes: the mesh axes it goes along; empty without a mesh.
      num_devices: devices that exchange with one another; 2 for a permutation.
      bytes_per_device: of what a device puts in, or gets where that is more (all-gather), once.
      source: `file:line` of the user's program; empty where the compiler made it up.
      loops: the loops it is in, from the outermost.
    """

    kind: str
    axes: tuple[str, ...]
    num_devices: int
    bytes_per_device: int
    source: str
    loops: tuple[hlo.Loop, ...]

    @property
    def times(self) -> int | None:
        """How often one run of the program comes here; None in a loop of unknown length."""
        trips = [loop.trips for loop in self.loops]
        return None if None in trips else math.prod(trip for trip in trips if trip is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One array of the program.

    Attributes:
      name: of an argument or output its path; of a temporary the compiler's name.
      role: "argument", "output" or "temporary".
      dtype: type of an element.
      shape: of the whole array; of a temporary, of the part that a device has.
      spec: the mesh axes that split each dimension; None for a temporary, where only the part is
        known, and for what the compiler placed in a way that has no spec.
      bytes_per_device: of the part that a device has.
      source: as in `Collective`; of temporaries.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    spec: PartitionSpec | None
    bytes_per_device: int
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The collectives of a program, and the largest arrays of each role, the largest first."""

    collectives: tuple[Collective, ...]
    tensors: tuple[Tensor, ...]

    def counts(self) -> collections.Counter[str]:
        """How many collectives of each kind the program has; one in a loop counts once."""
        return collections.Counter(collective.kind for collective in self.collectives)

    def bytes_per_device(self, kind: str) -> int:
        """Bytes of all collectives of a kind in one run; loops of unknown length count once."""
        return sum(
            one.bytes_per_device * (1 if one.times is None else one.times)
            for one in self.collectives
            if one.kind == kind
        )

    def __str__(self) -> str:
        """Two tables."""
        alike = collections.Counter(self.collectives)
        exchanges = [
            (
                str(count),
                one.kind,
                " ".join(one.axes) or f"{one.num_devices} devices",
                _readable(one.bytes_per_device),
                " in ".join(f"{loop.trips or '?'} times" for loop in one.loops) or "once",
                _short(one.source),
            )
            for one, count in alike.items()
        ]
        arrays = [
            (
                one.role,
                one.name,
                f"{one.dtype}{list(one.shape)}",
                _split(one),
                _readable(one.bytes_per_device),
                _short(one.source),
            )
            for one in self.tensors
        ]
        return "\n\n".join(
            (
                _table(
                    ("count", "collective", "along", "bytes a device", "runs", "line"), exchanges
                ),
                _table(("tensor", "name", "shape", "split", "bytes a device", "line"), arrays),
            )
        )


def explain(program: Any, /, *args, top: int = 5, **kwargs) -> Explanation:
    """Compiles a program for the mesh in force, and says what it communicates and stores.

    Args:
      program: a function, also one under `jax.jit`; or what `jax.jit(f).lower(...)` or its
        `.compile()` returned, for any backend, without further arguments.
      args: arrays, or `jax.ShapeDtypeStruct` with their shardings.
      top: how many of the largest arguments, outputs and temporaries each are listed.
      kwargs: named arguments of the function.

    Returns:
      The MoE layer with its experts over a mesh axis, forward: `counts()["all-to-all"]` is 2.

    Raises:
      UserError: the program is compiled already, and its compiler cannot print it.
    """
    compiled, module = _compiled(program, args, kwargs)
    mesh_shape = _mesh_shape(compiled)
    exchanges = _collectives(module, mesh_shape)
    (args_info, kwargs_info), (args_placed, kwargs_placed) = (
        compiled.args_info,
        compiled.input_shardings,
    )
    roles = (
        _wholes("argument", (*args_info, kwargs_info), (*args_placed, kwargs_placed)),
        _wholes("output", compiled.out_info, compiled.output_shardings),
        _temporaries(module),
    )
    tensors = [tensor for role in roles for tensor in sorted(role, key=_bytes, reverse=True)[:top]]
    return Explanation(
        collectives=exchanges, tensors=tuple(sorted(tensors, key=_bytes, reverse=True))
    )


def count_collectives(
    program: jax.stages.Compiled | jax.stages.Lowered,
) -> collections.Counter[str]:
    """How many collectives of each kind a compiled program contains.

    Args:
      program: `jax.jit(f).lower(*args).compile()`, or what it is compiled from.

    Returns:
      Counter by HLO name, such as {"all-to-all": 2}. One inside a loop counts once.
    """
    _, module = _compiled(program, (), {})
    return collections.Counter(str(instruction.kind) for _, instruction in module.collectives())


def _compiled(program, args, kwargs) -> tuple[jax.stages.Compiled, hlo.Module]:
    """The program compiled, and its text read."""
    lowered, compiled = None, program
    with _true_source_lines():
        if not isinstance(program, jax.stages.Compiled):
            lowered = program
            if not isinstance(program, jax.stages.Lowered):
                jitted = program if hasattr(program, "lower") else jax.jit(program)
                lowered = jitted.lower(*args, **kwargs)
            compiled = lowered.compile()
        try:
            return compiled, hlo.Module(compiled.as_text() or "")
        except jax.errors.JaxRuntimeError as error:
            if lowered is None:
                raise UserError(
                    f"a compiled program must be printable: got {str(error).splitlines()[0]!r} from "
                    "its compiler. Give what `lower` returned instead, before `compile`."
                ) from error
            compiled, text = hlo.compile_and_print(lowered)
            return compiled, hlo.Module(text)


@contextlib.contextmanager
def _true_source_lines() -> Iterator[None]:
    """A program kept in the compilation cache has the lines of the day when it was first compiled."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def read_collectives(text: str, mesh_shape: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives of a compiled program given as text, in its order; as `explain` finds them."""
    return _collectives(hlo.Module(text), mesh_shape)


def _collectives(module: hlo.Module, mesh_shape: Mapping[str, int]) -> tuple[Collective, ...]:
    return tuple(_collective(module, *found, mesh_shape) for found in module.collectives())


def _collective(
    module: hlo.Module, computation: str, instruction: hlo.Instruction, mesh: Mapping[str, int]
) -> Collective:
    assert instruction.kind is not None
    devices = hlo.devices_of(instruction) or tuple(range(math.prod(mesh.values())))
    size = module.operand_bytes(computation, instruction)
    if instruction.kind == "all-gather":
        size *= len(devices)
    return Collective(
        kind=instruction.kind,
        axes=_axes_between(devices, mesh),
        num_devices=len(devices),
        bytes_per_device=size,
        source=module.source(instruction),
        loops=module.loops(computation),
    )


def _axes_between(devices: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes in which positions of the mesh differ."""
    if not mesh:
        return ()
    places = np.unravel_index(np.array(devices), tuple(mesh.values()))
    return tuple(axis for axis, place in zip(mesh, places, strict=True) if len(set(place)) > 1)


def _mesh_shape(compiled: jax.stages.Compiled) -> dict[str, int]:
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        if isinstance(sharding, NamedSharding):
            return dict(sharding.mesh.shape)
    return dict(jax.sharding.get_abstract_mesh().shape)


def _wholes(role: str, infos, shardings) -> list[Tensor]:
    """Arguments or outputs; those that the program does not use have no sharding."""

    def one(path, info, sharding) -> Tensor | None:
        if sharding is None:
            return None
        whole = sharding.is_fully_replicated
        return Tensor(
            name=jax.tree_util.keystr(path, simple=True, separator="."),
            role=role,
            dtype=str(info.dtype),
            shape=tuple(info.shape),
            spec=PartitionSpec() if whole else getattr(sharding, "spec", None),
            bytes_per_device=math.prod(sharding.shard_shape(info.shape)) * info.dtype.itemsize,
        )

    return jax.tree.leaves(jax.tree_util.tree_map_with_path(one, infos, shardings))


def _temporaries(module: hlo.Module) -> Iterator[Tensor]:
    for instruction in module.arrays():
        dtype, shape = hlo.shape_of(instruction.type)
        yield Tensor(
            name=instruction.name.removeprefix("%"),
            role="temporary",
            dtype=dtype,
            shape=shape,
            spec=None,
            bytes_per_device=hlo.num_bytes(instruction.type),
            source=module.source(instruction),
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.bytes_per_device


def _split(tensor: Tensor) -> str:
    if tensor.spec is None:
        return "a part" if tensor.role == "temporary" else "by the compiler"
    entries = [*tensor.spec, *(None,) * (len(tensor.shape) - len(tensor.spec))]
    if not any(entries):
        return "whole"
    names = ["-" if entry is None else "+".join(np.atleast_1d(entry)) for entry in entries]
    return f"[{', '.join(names)}]"


def _short(source: str) -> str:
    return "/".join(source.split("/")[-2:])


def _readable(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    justify: Callable[[str, int], str] = str.ljust
    lines = ["  ".join(map(justify, row, widths)).rstrip() for row in (head, *rows)]
    return "\n".join(lines)
