"""The processes and devices that one command runs on, beside those of `moe train`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import tyro

from moe.errors import UserError

if TYPE_CHECKING:
    from jax.sharding import Mesh

T = TypeVar("T")
LOST_PROCESS = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed
HOSTS_USAGE = (
    "--coordinator HOST:PORT --num-processes N --process-id I, or --distributed to ask the launcher "
    "(by itself under srun and mpirun); --heartbeat-timeout SECONDS"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshArguments:
    """The devices that hold a model to read from; those of all processes."""

    data: int | None = None
    """Devices along which sentences alone are split; None is all that the others leave."""
    expert: int = 1
    """Devices along which experts are split, for a model that is too large for one; sentences too."""
    model: int = 1
    """Devices along which the inside of FFNs, experts and attention is split."""


def read_options(options_type: type[T], arguments: Sequence[str], *, prog: str) -> T:
    """The options of a command, after this process has met the others that it may be one of."""
    import jax

    from moe.training import HostsConfig, join_hosts

    hosts, others = tyro.cli(HostsConfig, args=arguments, return_unknown_args=True, add_help=False)
    description = f"{options_type.__doc__} Several processes: {HOSTS_USAGE}."
    options = tyro.cli(options_type, prog=prog, description=description, args=others)
    several = hosts.distributed or hosts.coordinator is not None
    if several:
        _keep_stdout_clean()
    join_hosts(hosts)
    if several:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX keeps it, for a training to save by
    if jax.process_index() > 0:
        logging.getLogger("moe").setLevel(logging.ERROR)  # process 0 warns for all
    return options


def _keep_stdout_clean() -> None:
    """What gloo, which connects processes on CPU, writes to standard output goes to standard error."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)
    sys.stdout = ours


@contextlib.contextmanager
def on_mesh(arguments: MeshArguments) -> Iterator[Mesh | None]:
    """Within it the mesh of all devices is in force; None and no mesh where there is but one.

    The loss of another process ends this one.

    Raises:
      UserError: the mesh does not fit the devices.
    """
    import jax

    from moe.sharding import MeshConfig, make_mesh
    from moe.training import LostProcessError

    mesh = make_mesh(MeshConfig(**dataclasses.asdict(arguments)))
    try:
        with jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext():
            yield mesh if mesh.size > 1 else None
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        end_without(LostProcessError(str(error)))


def end_without(error: Exception) -> None:
    """Ends this process at once: an orderly end would wait for the lost one."""
    print(f"moe: {error}", file=sys.stderr, flush=True)
    os._exit(LOST_PROCESS)


def from_first(work: Callable[[], T]) -> T:
    """What `work`, which makes what `json.dumps` takes, makes in process 0, in every process."""
    import jax

    from moe.training.hosts import agree, share

    if jax.process_count() == 1:
        return work()
    return share(agree(lambda: work() if jax.process_index() == 0 else None))[0]


def waiting() -> Callable[[], None] | None:
    """What several processes call to wait for one another; None where there is but one."""
    import jax

    from moe.training.hosts import wait_for_all

    return wait_for_all if jax.process_count() > 1 else None


def check_same(name: str, value: str) -> None:
    """Raises a UserError in all processes where one has another value than process 0."""
    from moe.training.hosts import agree

    first = from_first(lambda: value)

    def check() -> None:
        if value != first:
            raise UserError(
                f"{name} must be the same in all processes: got {value}, process 0 has {first}. "
                "Give all of them the same files."
            )

    agree(check)
