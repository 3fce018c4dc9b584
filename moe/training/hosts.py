"""Several processes that train one run: how they meet, agree, share the rows, and end together."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from moe.errors import UserError
from moe.training.step import batch_sharding

T = TypeVar("T")
_rounds = itertools.count()
_TEXT_STEP = 4096  # bytes; what is shared is filled up to a multiple, for few compiled programs
_LONGEST_WAIT_MS = 6 * 3600 * 1000  # data are prepared meanwhile; a dead process ends it sooner


def launched_by_many() -> bool:
    """Whether this is one of several tasks of `srun` or Open MPI, by their environment."""
    slurm = os.environ.get("SLURM_NTASKS", "1") if "SLURM_STEP_NODELIST" in os.environ else "1"
    return max(int(slurm), int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))) > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """The processes that train together; where they are given, or asked of the launcher."""

    distributed: bool = dataclasses.field(default_factory=launched_by_many)
    """Ask the launcher for what the next three do not say: SLURM, Open MPI, Kubernetes, a TPU
    slice. On by itself under srun and mpirun with several tasks."""
    coordinator: str | None = None
    """HOST:PORT of process 0, a free port there that the others can reach."""
    num_processes: int | None = None
    """Processes in all."""
    process_id: int | None = None
    """Which of them this is, from 0; process 0 writes the run folder's texts and prints."""
    heartbeat_timeout: int = 30
    """Seconds of silence after which a process is taken for dead, and all others end."""

    def __post_init__(self):
        given = [self.coordinator, self.num_processes, self.process_id]
        if None in given and given != [None] * 3 and not self.distributed:
            raise UserError(
                "--coordinator, --num-processes and --process-id must be given together: got "
                f"coordinator={self.coordinator}, num_processes={self.num_processes}, "
                f"process_id={self.process_id}. Give all three, or --distributed to ask the launcher."
            )
        if self.coordinator is not None and not self.coordinator.rpartition(":")[2].isdigit():
            raise UserError(
                f"coordinator must be HOST:PORT: got {self.coordinator!r}. Add a free port of process 0."
            )
        if None not in given and not 0 <= self.process_id < self.num_processes:  # type: ignore[operator]
            raise UserError(
                f"process_id must be in [0, num_processes): got process_id={self.process_id}, "
                f"num_processes={self.num_processes}. Number the processes from 0."
            )
        if self.heartbeat_timeout < 1:
            raise UserError(
                f"heartbeat_timeout must be at least 1: got {self.heartbeat_timeout}. Raise it."
            )


def join_hosts(config: HostsConfig) -> None:
    """Meets the other processes, if there are any; before anything else is asked of JAX.

    Raises:
      UserError: the launcher does not say who they are, or they cannot be reached.
    """
    if config.coordinator is None and not config.distributed:
        return
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.num_processes,
            config.process_id,
            heartbeat_timeout_seconds=config.heartbeat_timeout,
            shutdown_timeout_seconds=config.heartbeat_timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the processes must find one another: got {str(error).splitlines()[0]!r}. Give "
            "--coordinator HOST:PORT, --num-processes and --process-id; see docs/multihost.md."
        ) from error


def wait_for_all() -> None:
    """Returns when all processes have called it, however late the last one is."""
    wait = ocp.multihost.get_barrier_sync_fn()  # JAX's own barriers are collectives of the devices
    wait(key=f"moe/{next(_rounds)}", timeout_ms=_LONGEST_WAIT_MS)


def share(value: Any) -> list[Any]:
    """What each process gives, which `json.dumps` must take, in their order; all must call it."""
    wait_for_all()
    text = json.dumps(value).encode()
    longest = int(multihost_utils.process_allgather(np.int32(len(text))).max())
    size = -(-longest // _TEXT_STEP) * _TEXT_STEP
    rows = multihost_utils.process_allgather(np.frombuffer(text.ljust(size), np.uint8))
    return [json.loads(row.tobytes()) for row in rows]


def compiled_by_all(function: Callable[..., T]) -> Callable[..., T]:
    """The jitted `function`, whose first call runs only when all processes have compiled it.

    For one may take minutes longer than another, and on CPU a collective fails whose last process comes
    30 seconds after the first.
    """
    if jax.process_count() == 1:
        return function
    is_first = True

    def run(*arguments: Any) -> T:
        nonlocal is_first
        if is_first:
            function.lower(*arguments).compile()  # type: ignore[attr-defined]
            wait_for_all()
            is_first = False
        return function(*arguments)

    return run


def agree(work: Callable[[], T]) -> T:
    """Does `work` in every process; what one of them raises as UserError, all of them raise."""
    result, error = None, None
    try:
        result = work()
    except UserError as own_error:
        if jax.process_count() == 1:
            raise
        error = str(own_error)
    for process, message in enumerate(share(error)):
        if message is not None:
            raise UserError(f"process {process} of {jax.process_count()}: {message}")
    return result  # type: ignore[return-value]


class LostProcessError(RuntimeError):
    """What the processes do together has failed: most likely one of them is no more."""

    def __init__(self, reason: str):
        super().__init__(
            f"process {jax.process_index()} of {jax.process_count()} has most likely lost another one: "
            f"{reason.splitlines()[0][:300]}. Look at the others' logs. A training run goes on from its "
            "newest checkpoint with the same command, on any number of processes."
        )


def rows_here(mesh: Mesh, num_rows: int) -> list[int]:
    """Rows of a batch that the devices of this process hold, in increasing order."""
    held = batch_sharding(mesh).addressable_devices_indices_map((num_rows, 1)).values()
    assert all(index is not None for index in held)
    return sorted({r for rows, _ in held for r in range(*rows.indices(num_rows))})  # type: ignore[misc]
