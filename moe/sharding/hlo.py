"""The text of a compiled program, and what is read there: its collectives, its loops and its arrays.

The text is of XLA's optimized module, the program of one device: shapes are parts, not wholes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from moe.errors import UserError

KINDS = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
)
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%[\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)")
_COMPUTATION = re.compile(r"(ENTRY )?(%[\w.-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(\w+)=\{?(%[\w.-]+(?:, ?%[\w.-]+)*)\}?")
_IOTA = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
# Everything but data that another instruction has already made.
_NO_ARRAY_OF_ITS_OWN = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while"}
_COPIES = {"tuple", "bitcast", "copy", "copy-start", "copy-done", "optimization-barrier"}


def compile_and_print(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """Compiles, and takes the text that the compiler writes on its way.

    For libtpu 0.0.52 cannot print a finished program in which it gave a gather to the sparse cores
    ("async-update instruction should have 1 operands").
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options=dump_to(folder))
        return compiled, dumped(folder, "after_optimizations")


def dump_to(folder: str) -> dict[str, Any]:
    """The compiler's options to write its texts into a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def dumped(folder: str, stage: str) -> str:
    """What it wrote there of a stage.

    Raises:
      UserError: nothing, or several texts.
    """
    found = list(Path(folder).glob(f"*{stage}.txt"))
    if len(found) != 1:
        raise UserError(
            f"the compiler must write one {stage} of the program: got {len(found)}. "
            "Its process ended, for lack of memory perhaps; look at its messages above."
        )
    return found[0].read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `name = type opcode(operands...`, the rest as text."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def kind(self) -> str | None:
        """The kind of collective, started or whole; None for all else."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else None

    @property
    def operands(self) -> list[str]:
        """Names of what it reads."""
        return re.findall(r"%[\w.-]+", self.rest.split(")")[0])

    @property
    def grad_pass(self) -> Literal["forward", "backward"] | None:
        """The pass of `jax.grad` that it belongs to, by the name it got there."""
        name = self.attribute(r'op_name="([^"]*)"') or ""
        if "transpose(" in name:
            return "backward"
        return "forward" if "jvp(" in name else None

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        found = re.search(pattern, self.rest)
        return found and found.group(1)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of the program.

    Attributes:
      source: the line of the user's program that it comes from.
      trips: how often its body runs; None where the program does not say.
    """

    source: str
    trips: int | None


class Module:
    """A parsed module: `computations`, name to instructions, and where each computation stands."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self._frames = _Frames(text)
        current: list[Instruction] = []
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header.group(2), [])
                if header.group(1):
                    self.entry = header.group(2)
            elif instruction := _INSTRUCTION.match(line):
                current.append(Instruction(*instruction.groups()))

    def source(self, instruction: Instruction) -> str:
        """`file:line` of the user's program; empty where the compiler made it up."""
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        if frame is not None:
            return self._frames.source(int(frame))
        file = instruction.attribute(r'source_file="([^"]*)"')
        line = instruction.attribute(r"source_line=(\d+)")
        return f"{file}:{line}" if file else ""

    def collectives(self) -> Iterator[tuple[str, Instruction]]:
        """Each collective once, with the computation that it is in.

        The TPU's reduce-scatter is a fusion of that name, of an all-reduce and the part of it that a
        device keeps: it is told as what it is.
        """
        for name, instructions in self.computations.items():
            for instruction in instructions:
                if instruction.kind == "all-reduce" and name.startswith("%all-reduce-scatter"):
                    instruction = dataclasses.replace(instruction, opcode="reduce-scatter")
                if instruction.kind:
                    yield name, instruction

    def arrays(self) -> Iterator[Instruction]:
        """What the program itself stores while it runs: not what is inside of a fusion."""
        for name in self._run:
            for instruction in self.computations[name]:
                is_array = not instruction.type.startswith("(")
                if is_array and instruction.opcode not in _NO_ARRAY_OF_ITS_OWN:
                    yield instruction

    def kept_for_backward(self) -> Iterator[Instruction]:
        """The arrays that the forward pass makes and the backward pass reads: activations.

        Told apart by the names that JAX gives what `jax.grad` makes of a program. The program's own
        level is enough: what a loop keeps of each turn, it hands on as one array. Left out is what is
        in another memory than the main one, and what a loop hands on as it took it.
        """
        entry = self.computations[self.entry]
        made = {one.name: one for one in entry}
        readers = collections.defaultdict(list)
        for one in entry:
            for name in set(one.operands):
                readers[name].append(one)

        def read_backward(name: str) -> bool:
            return any(
                reader.grad_pass == "backward"
                or (reader.opcode in _COPIES and read_backward(reader.name))
                for reader in readers[name]
            )

        for one in entry:
            if one.opcode in (*_COPIES, "constant") or one.type.startswith("(") or "S(" in one.type:
                continue
            maker = one
            if one.opcode == "get-tuple-element":
                maker = made[one.operands[0]]
                if maker.opcode == "while" and self._hands_on(maker, one):
                    continue
            if maker.grad_pass == "forward" and read_backward(one.name):
                yield one

    def _hands_on(self, loop: Instruction, element: Instruction) -> bool:
        """Whether a loop leaves this element of its state as it was."""
        *body, root = self.computations[loop.attribute(r"body=(%[\w.-]+)") or ""]
        index = element.attribute(r"index=(\d+)") or ""
        if root.opcode != "tuple":
            return False
        return any(
            one.opcode == "get-tuple-element" and one.attribute(r"index=(\d+)") == index
            for one in body
            if one.name == root.operands[int(index)]
        )

    def loops(self, computation: str) -> tuple[Loop, ...]:
        """The loops that a computation is in, from the outermost."""
        caller, loop = self._callers.get(computation, (None, None))
        outer = () if caller is None else self.loops(caller)
        return outer if loop is None else (*outer, loop)

    def operand_bytes(self, computation: str, instruction: Instruction) -> int:
        """Bytes of what an instruction reads."""
        types = {other.name: other.type for other in self.computations[computation]}
        return sum(num_bytes(types.get(name, "")) for name in instruction.operands)

    @functools.cached_property
    def _callers(self) -> dict[str, tuple[str, Loop | None]]:
        callers = {}
        for name, instruction, role, callee in self._calls:
            loop = None
            if instruction.opcode == "while" and role == "body":
                loop = Loop(self.source(instruction), self._trips(instruction))
            callers[callee] = (name, loop)
        return callers

    @functools.cached_property
    def _run(self) -> set[str]:
        """Computations that run instruction by instruction: the entry and what its loops call."""
        run, new = set(), {self.entry}
        while new:
            run |= new
            new = {
                callee
                for name, instruction, _, callee in self._calls
                if name in run and instruction.opcode in ("while", "conditional", "call")
            } - run
        return run

    @functools.cached_property
    def _calls(self) -> list[tuple[str, Instruction, str, str]]:
        """Caller, the calling instruction, as what (body, condition, ...), callee."""
        return [
            (name, instruction, role, callee)
            for name, instructions in self.computations.items()
            for instruction in instructions
            for role, callees in _CALLED.findall(instruction.rest)
            for callee in re.findall(r"%[\w.-]+", callees)
            if callee in self.computations
        ]

    def _trips(self, loop: Instruction) -> int | None:
        """What the compiler wrote, else n of a condition `i < n`: JAX counts its loops from 0."""
        written = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        if written is not None:
            return int(written)
        condition = self.computations.get(loop.attribute(r"condition=(%[\w.-]+)") or "", [])
        constants = {
            other.name: int(value)
            for other in condition
            if other.opcode == "constant" and (value := other.rest.split(")")[0]).isdigit()
        }
        for other in condition:
            if other.opcode == "compare" and "direction=LT" in other.rest:
                return constants.get(other.operands[-1])
        return None


class _Frames:
    """The tables of source lines at the head of a module, if it has them."""

    def __init__(self, text: str):
        head = text.split("\n%", 1)[0]

        def table(title: str, pattern: str) -> dict[int, tuple[str, ...]]:
            _, found, rows = head.partition(f"\n{title}\n")
            rows = rows.split("\n\n", 1)[0] if found else ""
            return {int(row[0]): row[1:] for row in re.findall(rf"(?m)^(\d+) {pattern}", rows)}

        self._files = table("FileNames", r'"(.*)"')
        self._lines = table("FileLocations", r"\{file_name_id=(\d+) .*?line=(\d+)")
        self._frames = table("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")

    def source(self, frame: int) -> str:
        """The innermost line outside of this package, whose annotations are nobody's arithmetic."""
        room = __file__.rpartition("/")[0] + "/"
        seen = set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, parent = self._frames[frame]
            file, line = self._lines.get(int(location), ("0", "0"))
            path = self._files.get(int(file), ("",))[0]
            if not path.startswith(room):
                return f"{path}:{line}" if path else ""
            frame = int(parent or 0)
        return ""


def shape_of(type_text: str) -> tuple[str, tuple[int, ...]]:
    """Type and shape of an array: "f32[2,3]{1,0}" is ("f32", (2, 3))."""
    dtype, sizes = _ARRAY.findall(type_text)[0]
    return dtype, _numbers(sizes)


def num_bytes(type_text: str) -> int:
    """Bytes of an array or of a tuple of arrays: "f32[2,3]{1,0}" has 24."""
    total = 0
    for dtype, sizes in _ARRAY.findall(type_text):
        bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or [0])[0])
        total += math.ceil(math.prod(_numbers(sizes)) * bits / 8)
    return total


def devices_of(instruction: Instruction) -> tuple[int, ...]:
    """Positions in the mesh of one group of devices that exchange; empty where it is not said.

    All forms of XLA: groups written out, `[4,2]<=[2,4]T(1,0)`, `mesh['x'=2,'y'=4] {'y'}`, and the
    pairs of a permutation, of which the first stands for all.
    """
    if listed := instruction.attribute(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}"):
        return _numbers(listed)
    if groups := instruction.attribute(r"replica_groups=(\[[^ ]*)"):
        return tuple(int(number) for number in _iota(groups)[0])
    if mesh := instruction.attribute(r"replica_groups=(mesh\[[^\]]*\].*?\{[^}]*\})"):
        return _of_mesh(mesh)
    return ()


def _iota(text: str) -> np.ndarray:
    """Reads "[4,2]<=[2,4]T(1,0)": 0..7 as 2 x 4, transposed, taken as 4 x 2."""
    found = re.match(_IOTA, text)
    assert found, f"unknown form of replica groups: {text}"
    shape, order, turn = (_numbers(part) for part in found.groups())
    numbers = np.arange(math.prod(shape)).reshape(order)
    return (numbers.transpose(turn) if turn else numbers).reshape(shape)


def _of_mesh(text: str) -> tuple[int, ...]:
    """Reads "mesh['x'=2,'y'=4] {'y'}": those that differ in y alone; 'y':(before)size is a part of y."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", text)}
    names = list(sizes)
    shape = tuple(sizes.values())
    ids: np.ndarray = np.arange(math.prod(shape))
    if ordered := re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", text):
        order, turn = (_numbers(part) for part in ordered.groups())
        ids = ids.reshape(order).transpose(turn or None)
    elif listed := re.search(r"device_ids=\(([\d,]+)\)", text):
        ids = np.array(_numbers(listed.group(1)))
    ids = ids.reshape(shape)
    chosen = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", text[text.rindex("{") :])
    picks: list[list[int]] = [[0] for _ in names]
    for name, before, size in chosen:
        step = sizes[name] // (int(before) * int(size)) if size else 1
        picks[names.index(name)] = [step * n for n in range(int(size) if size else sizes[name])]
    return tuple(int(number) for number in ids[np.ix_(*picks)].reshape(-1))


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))
