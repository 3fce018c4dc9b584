"""A checkpoint is complete and unchanged, or it is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.training import CheckpointConfig, Checkpoints

# What TensorStore and Orbax say of coroutines that a refused restore leaves behind.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
DATA = {"0": {"next_index": 5}, "balance_weight": 0.01}


def state_of(step):
    """Some arrays of other sizes and types; one is stored by itself, beside the small ones."""
    return {
        "step": jnp.int32(step),
        "params": {"w": jax.random.normal(jax.random.key(step), (23, 17)), "b": jnp.arange(7.0)},
        "optimizer": (jnp.full(3, step, jnp.bfloat16), jnp.array([True, False])),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run's folder of checkpoints, with one of step 2."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, state_of(2), DATA, validation_loss=2.5)
    checkpoints.close()
    return folder


def outcome(folder) -> str:
    """What becomes of the checkpoint of step 2: refused, absent, or what was saved."""
    try:
        checkpoints = Checkpoints(folder)
    except UserError:
        return "refused"
    try:
        if checkpoints.latest() != 2:
            return "absent"
        assert checkpoints.best() in (2, None)
        state, data = checkpoints.restore(2, state_of(0))
    except UserError as error:
        assert f"{folder / '2'} must be complete and unchanged" in str(error)
        return "refused"
    finally:
        checkpoints.close()
    for array, other in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(2)), strict=True):
        np.testing.assert_array_equal(array, other)
    assert data == DATA
    return "restored"


def outcomes(saved, folder, damages_of) -> dict[str, set[str]]:
    """By the file, what becomes of the checkpoint when it is changed in each way."""
    found = {}
    for file in sorted(path for path in saved.rglob("*") if path.is_file()):
        name = file.relative_to(saved)
        for damaged in damages_of(file.read_bytes()):
            shutil.copytree(saved, folder)
            if damaged is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(damaged)
            kind = "/".join(name.parts[1:-1]) if len(name.name) == 32 else "/".join(name.parts[1:])
            found.setdefault(kind, set()).add(outcome(folder))
            shutil.rmtree(folder)
    return found


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def some(data: bytes):
    """Removed, cut at the beginning, in the middle and before the last byte, one bit flipped."""
    yield None
    for length in sorted({0, len(data) // 2, len(data) - 1}):
        yield data[:length]
    yield flipped(data, len(data) // 2)


def many(data: bytes):
    """Cut and changed at every 13th byte, which is every field of every file of so small a state."""
    for place in range(0, len(data), 13):
        yield data[:place]
        yield flipped(data, place)


def test_what_is_restored_is_what_was_saved_whichever_file_is_cut_or_changed(saved, tmp_path):
    """`outcome` asserts it; here also that what a restore reads is refused when it is damaged."""
    assert outcome(saved) == "restored"
    found = outcomes(saved, tmp_path / "copy", some)
    for file in (
        "checksums/metadata",
        "data/metadata",
        "metrics/metrics",
        "state/_METADATA",
        "state/manifest.ocdbt",
        "state/d",
    ):
        assert found[file] == {"refused"}, file
    assert found["_CHECKPOINT_METADATA"] == {"restored"}  # which nothing reads


@pytest.mark.slow
def test_a_cut_or_a_changed_bit_anywhere_is_never_taken_for_good(saved, tmp_path):
    outcomes(saved, tmp_path / "copy", many)


def test_a_checkpoint_that_was_being_written_is_absent(saved, tmp_path):
    """What a kill leaves: Orbax writes under a temporary name and renames when all is written."""
    files = sorted(path for path in (saved / "2").rglob("*") if path.is_file())
    for file in files:
        copy = tmp_path / "2.orbax-checkpoint-tmp" / file.relative_to(saved / "2")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.latest() is None
        checkpoints.close()
        shutil.copyfile(file, copy)


def test_a_damaged_validation_loss_names_its_checkpoint_and_the_one_before(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    checkpoints = Checkpoints(folder)
    checkpoints.save(4, state_of(4), DATA, validation_loss=2.25)
    checkpoints.close()
    (folder / "4" / "metrics" / "metrics").write_text('{"validation_l')
    with pytest.raises(UserError, match=r"copy/4 must be complete.*use the checkpoint of step 2"):
        Checkpoints(folder)
    shutil.rmtree(folder / "4")
    assert outcome(folder) == "restored"


def test_another_validation_loss_than_was_saved_is_told(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / "2" / "metrics" / "metrics").write_text(json.dumps({"validation_loss": 0.5}))
    checkpoints = Checkpoints(folder)
    with pytest.raises(UserError, match="data state and validation loss is not what was saved"):
        checkpoints.restore(2, state_of(0))
    checkpoints.close()


def test_a_checkpoint_of_another_shape_is_refused(saved):
    checkpoints = Checkpoints(saved)
    like = state_of(0)
    like["params"]["w"] = jnp.zeros((23, 18))
    with pytest.raises(UserError, match="2 must be complete and unchanged"):
        checkpoints.restore(2, like)
    checkpoints.close()


SAVING = """
import sys
from pathlib import Path
from moe.training import CheckpointConfig, Checkpoints
from tests.training.test_checkpoint import DATA, large_state

checkpoints = Checkpoints(Path(sys.argv[1]), CheckpointConfig(keep_last=2))
step = checkpoints.latest() or 0
if step:
    checkpoints.restore(step, large_state(0))
while True:
    step += 1
    checkpoints.save(step, large_state(step), DATA, validation_loss=1 / step)
    print(step, flush=True)
"""


def large_state(step):
    return {"w": np.full((1000, 1000), step, np.float32), "step": np.full((), step, np.int32)}


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_only_whole_checkpoints(tmp_path):
    """SIGKILL at five moments of a loop that does nothing but save 4 MB; each goes on from the last."""
    before = 0
    for delay in (0.0, 0.013, 0.029, 0.047, 0.071):
        with subprocess.Popen(
            [sys.executable, "-c", SAVING, str(tmp_path)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for _ in range(3):
                assert process.stdout.readline()
            time.sleep(delay)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
        latest = checkpoints.latest()
        assert latest is not None
        assert latest > before
        for step in checkpoints.steps():
            state, data = checkpoints.restore(step, large_state(0))
            np.testing.assert_array_equal(state["w"], step)
            assert data == DATA
        checkpoints.close()
        before = latest
