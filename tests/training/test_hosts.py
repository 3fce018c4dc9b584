"""Several processes on loopback train as one does, end together, and leave what any number goes on from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.sharding import MeshConfig, make_mesh
from moe.training import HostsConfig, load_model, open_run
from moe.training import train as run_training
from moe.training.hosts import rows_here
from tests.training.small import small_config

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
from tests.training.small import small_config
from moe.sharding import MeshConfig

def config():
    return small_config("unset", mesh=MeshConfig(expert=8))
"""
# The programs are the same; only the order in which gloo adds up the processes' gradients differs.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


class Hosts:
    """Processes of one `moe train`, 8 devices in all; each can be asked for its end."""

    def __init__(self, folder: Path, count: int, *arguments: str, own: dict[int, list[str]] = {}):  # noqa: B006
        experiment = folder / "experiment.py"
        experiment.write_text(EXPERIMENT)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = f"--xla_force_host_platform_device_count={8 // count}"
        environment = os.environ | {"XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0"}
        self.processes = []
        for process in range(count):
            command = [sys.executable, "-m", "moe.cli", "train", str(experiment), *arguments]
            command += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count)]
            command += ["--process-id", str(process), *own.get(process, [])]
            with (folder / f"log{process}").open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stderr=log, stdout=log, text=True
                    )
                )
        self.folder = folder

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def codes(self, timeout: float = 600) -> list[int]:
        end = time.monotonic() + timeout
        return [p.wait(max(end - time.monotonic(), 0.1)) for p in self.processes]

    def log(self, process: int) -> str:
        return (self.folder / f"log{process}").read_text()

    def wait_for_step(self, run_dir: Path, step: int, timeout: float = 600) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end and not (run_dir / "checkpoints" / str(step)).exists():
            assert all(p.poll() is None for p in self.processes), self.log(0) + self.log(1)
            time.sleep(0.2)


def run_together(folder: Path, count: int, *arguments: str) -> None:
    with Hosts(folder, count, *arguments) as hosts:
        codes = hosts.codes()
        assert codes == [0] * count, "\n".join(hosts.log(p) for p in range(count))


def alone(run_dir: Path, **changes):
    """The same run in this process, on its 8 devices."""
    changes = {"mesh": MeshConfig(expert=8)} | changes
    return run_training(small_config(run_dir, **changes))


def with_shards(shards: int):
    return dataclasses.replace(small_config("unset").mixture, shards=shards)


def metrics(run_dir: Path, name: str = "loss") -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def assert_same_training(run_dir: Path, reference: Path) -> None:
    for name in ("num_tokens", "loss", "validation_loss", "drop_rate"):
        ours, theirs = metrics(run_dir, name), metrics(reference, name)
        assert theirs.keys() <= ours.keys()  # a run in parts is validated at the end of each
        for step, value in theirs.items():
            np.testing.assert_allclose(ours[step], value, **CLOSE)
    ours, theirs = (
        jax.tree.leaves(nnx.state(load_model(open_run(path), "last")[0]))
        for path in (run_dir, reference)
    )
    for array, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(array, other, **CLOSE)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Four steps of two shards, in one process."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    alone(run_dir, steps=4, mixture=with_shards(2))
    return run_dir


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two steps in two processes of four devices."""
    folder = tmp_path_factory.mktemp("two")
    run_together(folder, 2, "--run-dir", str(folder / "run"), "--steps", "2")
    return folder


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on_from_them(two, reference):
    run_dir = two / "run"
    assert open_run(run_dir).config.mixture.shards == 2  # one for each process that began
    assert "Trained" in (two / "log0").read_text()
    assert "step" not in (two / "log1").read_text()  # process 0 alone prints
    assert len(metrics(run_dir)) == 2
    alone(run_dir, steps=4)
    assert_same_training(run_dir, reference)


@pytest.mark.slow
def test_one_then_two_then_four_then_one_process_train_as_one(tmp_path):
    """A run that one process began has one shard, of which several read the same and keep other rows."""
    run_dir = tmp_path / "run"
    alone(run_dir, steps=1)
    assert open_run(run_dir).config.mixture.shards is None
    for count, steps in ((2, 2), (4, 3)):
        run_together(tmp_path, count, "--run-dir", str(run_dir), "--steps", str(steps))
    alone(run_dir, steps=4)
    alone(tmp_path / "alone", steps=4)
    assert_same_training(run_dir, tmp_path / "alone")


@pytest.mark.slow
def test_four_processes_train_as_one(tmp_path):
    mesh = ["--mesh.data", "2", "--mesh.expert", "2", "--mesh.model", "2"]
    run_together(tmp_path, 4, "--run-dir", str(tmp_path / "run"), "--steps", "4", *mesh)
    alone(tmp_path / "alone", steps=4, mixture=with_shards(4), mesh=MeshConfig(expert=2, model=2))
    assert_same_training(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_a_process_ends_the_others_and_the_run_goes_on(killed, tmp_path):
    run_dir = tmp_path / "run"
    endless = ["--run-dir", str(run_dir), "--steps", "100000", "--heartbeat-timeout", "10"]
    with Hosts(tmp_path, 2, *endless) as hosts:
        hosts.wait_for_step(run_dir, 4)
        hosts.processes[killed].kill()
        start = time.monotonic()
        codes = hosts.codes(timeout=60)
        print(f"ended {time.monotonic() - start:.1f} s after the kill with {codes}")
        message = hosts.log(1 - killed)
    assert codes[killed] == -signal.SIGKILL
    # Whichever notices first: our own message, or that of JAX, whose heartbeats end the process.
    assert codes[1 - killed] in (75, -signal.SIGABRT)
    assert "has most likely lost another one" in message or "another task died" in message, message
    latest = open_run(run_dir).checkpoints().latest()
    assert latest is not None
    assert latest >= 4
    assert alone(run_dir, steps=latest + 2).step == latest + 2


@pytest.mark.slow
def test_a_signal_to_one_process_saves_and_ends_all(tmp_path):
    run_dir = tmp_path / "run"
    with Hosts(tmp_path, 2, "--run-dir", str(run_dir), "--steps", "100000") as hosts:
        hosts.wait_for_step(run_dir, 2)
        hosts.processes[1].send_signal(signal.SIGTERM)
        assert hosts.codes(timeout=60) == [128 + signal.SIGTERM] * 2, hosts.log(0) + hosts.log(1)
        assert "SIGTERM: saving step" in hosts.log(0)
    latest = open_run(run_dir).checkpoints().latest()
    assert latest == len(metrics(run_dir))  # no step is lost


@pytest.mark.slow
def test_a_mistake_of_one_process_is_told_by_all(tmp_path):
    """Here the folder is not shared: process 1 looks elsewhere."""
    own = {i: ["--run-dir", str(tmp_path / name)] for i, name in enumerate(["run", "elsewhere"])}
    with Hosts(tmp_path, 2, own=own) as hosts:
        assert hosts.codes() == [2, 2], hosts.log(0) + hosts.log(1)
        for process in range(2):
            assert "moe: process 1 of 2: run must be a folder" in hosts.log(process)


def test_the_processes_rows_are_those_of_its_devices():
    mesh = make_mesh(MeshConfig(expert=4))
    assert rows_here(mesh, 16) == list(range(16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_id": 1}, r"given together: got coordinator=None.*process_id=1"),
        ({"coordinator": "node1", "num_processes": 2, "process_id": 0}, "HOST:PORT: got 'node1'"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, r"process_id=2, num_pro.*=2"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout must be at least 1: got 0"),
    ],
)
def test_processes_that_cannot_meet_are_told_so(arguments, message):
    with pytest.raises(UserError, match=message):
        HostsConfig(**arguments)


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "4"}, False),  # the batch script itself, outside srun
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
    ],
)
def test_several_tasks_of_a_launcher_are_noticed(environment, several, monkeypatch):
    for name in ("SLURM_NTASKS", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert HostsConfig().distributed is several
