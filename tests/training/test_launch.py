"""The launch templates start `moe train` with options that it has, and act on how it ends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
import yaml

from moe.training import HostsConfig, TrainConfig

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "experiments" / "launch"
# In place of the launchers: each starts one `moe`, as the real one starts many.
STUBS = {
    "moe": 'printf "%s\\n" "$@" > "$CALLS/moe"; exit "${MOE_CODE:-0}"',
    "srun": 'while [ "${1:0:2}" = -- ]; do shift; done; "$@"',
    "scontrol": 'echo "$@" > "$CALLS/scontrol"',
    "mpirun": """while [ "$1" != bash ]; do echo "$1" >> "$CALLS/mpirun"; shift; done
        export OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3; "$@" """,
    "gcloud": """for last; do :; done; cd "$CALLS/.." && bash -c "$last" """,
}
EXPERIMENT = "experiments/catalogs.py"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The folder into which stubs of the launchers, the only programs there are, write their arguments."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "calls").mkdir()
    (tmp_path / "moe").mkdir()  # the checkout on a TPU worker
    for name, script in STUBS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def run_script(name: str, *arguments: str, **environment: str) -> int:
    command = ["bash", str(LAUNCH / name), *arguments]
    return subprocess.run(command, env=os.environ | environment, check=False).returncode


def parsed(calls: Path) -> tuple[HostsConfig, list[str]]:
    """What `moe train` makes of the arguments it got, and those left for the experiment."""
    command, experiment, *arguments = (calls / "moe").read_text().splitlines()
    assert (command, experiment) == ("train", EXPERIMENT)
    assert (ROOT / experiment).is_file()
    return tyro.cli(HostsConfig, args=arguments, return_unknown_args=True, add_help=False)


def jobset() -> dict:
    return yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_a_script_is_one_that_bash_can_read(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)


@pytest.mark.parametrize(
    ("code", "requeued"), [(0, False), (2, False), (1, False), (75, True), (134, True), (143, True)]
)
def test_slurm_requeues_a_job_that_lost_a_process_or_was_stopped(code, requeued, calls):
    environment = {"MOE_CODE": str(code), "SLURM_JOB_ID": "7"}
    assert run_script("slurm.sh", EXPERIMENT, "--run-dir", "runs/x", **environment) == code
    assert parsed(calls)[1] == ["--run-dir", "runs/x"]
    assert (calls / "scontrol").exists() is requeued
    if requeued:
        assert (calls / "scontrol").read_text().split() == ["requeue", "7"]


def test_open_mpi_numbers_the_processes(calls):
    launcher = ["-np", "4", "--host", "a:2,b:2"]
    code = run_script("openmpi.sh", "a:12345", *launcher, "--", EXPERIMENT, "--run-dir", "a b")
    assert code == 0
    assert (calls / "mpirun").read_text().split() == launcher
    hosts, others = parsed(calls)
    assert others == ["--run-dir", "a b"]
    assert (hosts.coordinator, hosts.num_processes, hosts.process_id) == ("a:12345", 4, 3)


def test_a_tpu_worker_asks_the_launcher_and_keeps_what_is_quoted(calls):
    assert run_script("tpu_slice.sh", "slice", "zone", EXPERIMENT, "--run-dir", "a b") == 0
    hosts, others = parsed(calls)
    assert hosts.distributed
    assert others == ["--run-dir", "a b"]


def test_a_pod_of_the_jobset_is_a_process(calls):
    spec = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    command = [*container["command"], *container["args"]]
    environment = os.environ | {"JOB_COMPLETION_INDEX": "3"}
    subprocess.run(command, env=environment, check=True)
    hosts, others = parsed(calls)
    assert hosts.num_processes == spec["parallelism"] == spec["completions"] == 4
    assert hosts.process_id == 3
    name, job = jobset()["metadata"]["name"], jobset()["spec"]["replicatedJobs"][0]["name"]
    assert hosts.coordinator == f"{name}-{job}-0-0.{name}:12345"
    assert others == ["--run-dir", "/shared/runs/catalogs"]
    assert others[1].startswith(container["volumeMounts"][0]["mountPath"])
    assert "run_dir" in TrainConfig.__dataclass_fields__


MEET = """
import jax
from moe.training import HostsConfig, join_hosts
from moe.training.hosts import share
join_hosts(HostsConfig())
print(jax.process_index(), share({"text": "x" * 5000 * jax.process_index()})[1]["text"].count("x"))
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def slurm(process: int, job: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
        "SLURM_STEP_NUM_NODES": "1",
    }


def open_mpi(process: int, job: int) -> dict[str, str]:
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job * 4096}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [slurm, open_mpi])
def test_two_tasks_of_a_launcher_find_one_another_by_their_environment(launcher):
    job = free_port()  # JAX makes a port of the job's number
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEET],
            cwd=ROOT,
            env=os.environ | launcher(process, job),
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    said = [process.communicate(timeout=600)[0].splitlines() for process in processes]
    assert [lines[-1] for lines in said] == ["0 5000", "1 5000"]  # below what gloo prints


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
@pytest.mark.parametrize("by_script", [True, False])
def test_open_mpi_starts_a_run_of_two_processes(by_script, tmp_path):
    """By the template, and `mpirun moe train` as it is, which up to version 4 is noticed."""
    experiment = tmp_path / "experiment.py"
    experiment.write_text(
        "from tests.training.small import small_config\ndef config():\n    return small_config('')\n"
    )
    moe = tmp_path / "moe"
    moe.write_text(f'#!/bin/bash\nexec {sys.executable} -m moe.cli "$@"\n')
    moe.chmod(0o755)
    options = ["--allow-run-as-root", "--oversubscribe", "-np", "2"]
    training = [str(experiment), "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    command = ["mpirun", *options, "moe", "train", *training]
    if by_script:
        address = f"127.0.0.1:{free_port()}"
        command = ["bash", str(LAUNCH / "openmpi.sh"), address, *options, "--", *training]
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
    }
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stderr.count("Trained") == 1  # process 0 alone prints
    assert '"shards": 2' in (tmp_path / "run" / "config.json").read_text()
