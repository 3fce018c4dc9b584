"""Eight simulated devices, compiled programs kept between runs, and the TPU's compiler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Most of the suite's time is compilation, so the compiler may be lazy; the cores have a worker each.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1",
)
CACHE = Path(__file__).parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


@pytest.fixture(scope="session")
def tpu_slice():
    """A slice and its chips, which are not here, by the topology's name."""
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [tpu]")
    from moe.planning import planned_devices  # not before the environment is set

    return lambda topology: planned_devices(topology, None)
