"""What a compiler made of a step: its text and the bytes it needs.

For TPU chips a plan stops where the program is optimised and each of its buffers has its place: all that
it reads is known then, and the machine code, most of the work, is not made. JAX cannot stop a compiler,
so it runs in a process of its own, and writes its text and buffers (`xla_dump_to`) on its way.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from moe.errors import UserError
from moe.sharding.hlo import compile_and_print, dump_to, dumped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A program for one device.

    Attributes:
      text: its HLO, optimised.
      arguments: bytes of its arguments, as stored.
      results: bytes of outputs that take no argument's place.
      temporaries: bytes of everything else while it runs.
      code: bytes of the machine code; None where none was made.
    """

    text: str
    arguments: int
    results: int
    temporaries: int
    code: int | None


def compiled_program(lowered: jax.stages.Lowered, *, on_tpu: bool = False) -> Program:
    """The whole compilation, machine code included.

    Raises:
      UserError: the program does not compile.
    """
    try:
        if on_tpu:
            compiled, text = compile_and_print(lowered)
        else:
            compiled = lowered.compile()
            text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        raise _refused(str(error)) from error
    stats = compiled.memory_analysis()
    assert stats is not None, "XLA reports the memory of every backend that we compile for"
    return Program(
        text=text,
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def optimised_program(compile_it: Callable[..., None], *arguments: Any) -> Program:
    """The program without its machine code.

    Args:
      compile_it: a function of a module, run in a new process with `arguments` and then the compiler's
        options, which it is to compile a single program with.
      *arguments: what can be sent to a process.

    Raises:
      UserError: the program does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(
            target=_compile_in, args=(folder, compile_it, *arguments), daemon=True
        )
        process.start()
        # The last text that the compiler writes before it makes machine code.
        while process.is_alive() and not list(Path(folder).glob("*_after_buffer_assignment.txt")):
            time.sleep(0.1)
        process.kill()
        process.join()
        failed = Path(folder, "error")
        if failed.exists():
            raise _refused(failed.read_text(encoding="utf-8"))
        buffers = dumped(folder, "after_optimizations-buffer-assignment")
        return Program(text=dumped(folder, "after_optimizations"), code=None, **_sizes(buffers))


def _compile_in(folder: str, compile_it: Callable[..., None], *arguments: Any) -> None:
    jax.config.update("jax_platforms", "cpu")  # as its parent: what it compiles for is not here
    jax.config.update("jax_enable_compilation_cache", False)  # what is found there is not written
    try:
        compile_it(*arguments, dump_to(folder))
    except Exception as error:  # to be raised in the parent, whatever it is
        Path(folder, "error").write_text(str(error), encoding="utf-8")


_BUFFER = re.compile(r"^allocation \d+: size (\d+), page 0, ?(.*):$", re.MULTILINE)
"""A buffer in the chip's main memory; those of other memories have a colour before the page."""


def _sizes(buffers: str) -> dict[str, int]:
    """Bytes of the buffers by what they hold, from the compiler's list of them."""
    sizes = {"arguments": 0, "results": 0, "temporaries": 0}
    for size, what in _BUFFER.findall(buffers):
        if "parameter" in what:
            sizes["arguments"] += int(size)
        elif "maybe-live-out" in what:
            sizes["results"] += int(size)
        elif (
            "preallocated-temp" in what
        ):  # constants are the program's, thread-local buffers no bytes
            sizes["temporaries"] += int(size)
    return sizes


def _refused(message: str) -> UserError:
    first = message.partition("\n")[0]
    return UserError(
        f"the step must compile and fit into the memory of a chip: got {first} Use more devices, "
        "split more (--mesh) or compute more again (--model.remat)."
    )
