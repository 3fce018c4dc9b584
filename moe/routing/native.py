"""The grouped product as a C++ kernel for CPUs, compiled once on the machine that runs it.

XLA on CPU has no product of ragged groups. `native.cc` is one: it computes the rows that there are, at
the speed of a dense product. It is compiled with the system's C++ compiler (`CXX`, or `c++`, with
`CXXFLAGS`) for the processor at hand, which takes some seconds, and kept in the user's cache folder.
Without a compiler, or with MOE_NATIVE=0, the product runs in blocks: for `jax.export`, say, whose files
may not hold it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib

SOURCE = Path(__file__).with_suffix(".cc")
TARGETS = ("moe_grouped_rows", "moe_grouped_matrices")
_TOLD_APART = ("model name", "flags", "Features")  # lines of /proc/cpuinfo


@functools.cache
def missing() -> str | None:
    """Why the kernel cannot be used on this machine; None where it can. The first call compiles it.

    Warns where there is no compiler, or it fails: experts are slower then.
    """
    if os.environ.get("MOE_NATIVE") == "0":
        return "MOE_NATIVE is 0"
    try:
        library = ctypes.CDLL(str(_library()))
    except subprocess.CalledProcessError as error:
        reason = f"{error.cmd[0]} failed: {error.stderr.strip()[-500:]}"
    except OSError as error:  # no such compiler, or a folder that cannot be written
        reason = str(error)
    else:
        for target in TARGETS:
            function = jax.ffi.pycapsule(getattr(library, target))
            jax.ffi.register_ffi_target(target, function, platform="cpu")
        return None
    warnings.warn(
        f"products of experts run in blocks, slower than in the kernel of moe.routing.native: {reason}. "
        "Install a C++17 compiler or name it in CXX; MOE_NATIVE=0 is silent.",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason


def _library() -> Path:
    """The compiled kernel; its name tells source, compiler, headers and processor."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-fPIC", "-shared"]
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    command = [*compiler, *flags, "-isystem", jax.ffi.include_dir(), str(SOURCE)]
    known = [SOURCE.read_text(), shlex.join(command), jaxlib.__version__, _processor()]
    name = hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe"
    library = folder / f"grouped-{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            subprocess.run([*command, "-o", str(built)], check=True, capture_output=True, text=True)
            built.replace(library)  # at once: other processes may look for it
    return library


def _processor() -> str:
    """What tells processors apart for which different code is made."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(_TOLD_APART)}))


@jax.custom_vjp
def product(x_RM: jax.Array, w_EMH: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """y_RH: the rows of each group times its own matrix, zero past the last group. float32 only."""
    return _rows(x_RM, w_EMH, group_sizes_E, transposed=False)


def _product_forward(x_RM, w_EMH, group_sizes_E):
    return product(x_RM, w_EMH, group_sizes_E), (x_RM, w_EMH, group_sizes_E)


def _product_backward(residuals, dy_RH):
    x_RM, w_EMH, group_sizes_E = residuals
    dx_RM = _rows(dy_RH, w_EMH, group_sizes_E, transposed=True)
    dw_EMH = _call("moe_grouped_matrices", w_EMH.shape)(x_RM, dy_RH, group_sizes_E)
    return dx_RM, dw_EMH, None


product.defvjp(_product_forward, _product_backward)


def _rows(x_RM, w_EMH, group_sizes_E, *, transposed: bool) -> jax.Array:
    shape = (len(x_RM), w_EMH.shape[1 if transposed else 2])
    return _call("moe_grouped_rows", shape)(x_RM, w_EMH, group_sizes_E, transposed=transposed)


def _call(target: str, shape: tuple[int, ...]):
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ffi.ffi_call(target, result, vmap_method="sequential")
