"""The devices that a plan is made for: chips that are not here, simulated ones, or the attached."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from moe.errors import UserError
from moe.planning.chips import Slice, read_slice


def planned_devices(
    topology: str | None, count: int | None
) -> tuple[Slice | None, Sequence[jax.Device]]:
    """The slice of a topology's name and its chips, or `count` simulated devices, or the attached.

    Raises:
      UserError: both are given, or as `read_slice`, `slice_devices` and `simulated_devices`.
    """
    if topology is not None and count is not None:
        raise UserError(
            f"devices must be left out with a topology: got devices={count}, topology={topology}. "
            "Give one of them."
        )
    if topology is None and count is None:
        return None, jax.devices()
    where = None if topology is None else read_slice(topology)
    # What is compiled for devices elsewhere must not take hold of those that are here.
    jax.config.update("jax_platforms", "cpu")
    if where is None:
        return None, simulated_devices(count or 0)
    return where, slice_devices(where)


def slice_devices(where: Slice) -> Sequence[jax.Device]:
    """Descriptions of the chips of a TPU slice: the true compiler compiles for them, nothing can run.

    Raises:
      UserError: the TPU compiler is not installed, or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"topology must have its compiler installed: got {where.name} without libtpu. "
            "Run pip install 'moe-jax[tpu]', or plan for --devices N."
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no cloud which machine this is
    # Descriptions take hold of no chip, so that processes need not take turns.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # It would say that there is no TPU.
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{where.chip.name}-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=where.name).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"topology must be one that the TPU compiler knows: got {where.name}. "
            f"It says: {str(error).splitlines()[0]}"
        ) from error


def simulated_devices(count: int) -> Sequence[jax.Device]:
    """The first `count` CPU devices; as many are made if JAX has not started yet.

    Raises:
      UserError: a count below 1, or JAX runs with fewer.
    """
    if count < 1:
        raise UserError(f"devices must be at least 1: got {count}. Raise it.")
    with contextlib.suppress(RuntimeError):  # JAX has started and keeps what it has
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"devices must be simulated before JAX starts: got {count} wanted, {len(devices)} there. "
            "Start a new process, or set XLA_FLAGS=--xla_force_host_platform_device_count."
        )
    return devices[:count]
