"""Checkpoints: written by Orbax in the background, never taken for good when they are not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from moe.errors import UserError

_TEXTS = "data state and validation loss"
_REMOVED = "removed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is validated and saved, and what is kept."""

    every: int = 1000
    """Steps from one validation and checkpoint to the next; the last step always has one."""
    keep_last: int = 2
    """Newest checkpoints kept, beside the one with the lowest validation loss."""

    def __post_init__(self):
        for name in ("every", "keep_last"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"checkpoint.{name} must be at least 1: got {getattr(self, name)}. Raise it."
                )


class Checkpoints:
    """The checkpoints of one run: `<directory>/<step>/`, each complete or absent.

    Orbax writes into a temporary folder and renames it when the last byte is there, and renames what is
    no longer kept before it deletes it, so a killed process leaves no half checkpoint. A checksum of every
    array, of the data state and of the validation loss is stored beside them and compared on restore, so
    damage to the files is found too: what is restored is what was saved.

    Raises:
      UserError: a validation loss, which is read when the folder is opened, is damaged.
    """

    def __init__(self, directory: Path, config: CheckpointConfig = CheckpointConfig()):
        self.directory = directory
        self._check_validation_losses()
        policies = [
            preservation_policy.LatestN(config.keep_last),
            preservation_policy.BestN(
                get_metric_fn=_validation_loss,
                reverse=True,
                n=1,
                keep_checkpoints_without_metrics=False,
            ),
        ]
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
                best_fn=_validation_loss,
                best_mode="min",
                todelete_subdir=_REMOVED,
            ),
        )

    def save(
        self, step: int, state: Any, data_state: Any, *, validation_loss: float | None
    ) -> None:
        """Starts writing; returns as soon as the arrays are copied off the device.

        Without a validation loss the checkpoint can be the newest but never the best.
        """
        metrics = None if validation_loss is None else {"validation_loss": validation_loss}
        sums = checksums(state) | {_TEXTS: _text_sum(data_state, metrics)}
        self.wait()
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=ocp.args.JsonSave(data_state),
                checksums=ocp.args.JsonSave(sums),
            ),
            metrics=metrics,
        )

    def restore(self, step: int, like: Any, *, partly: bool = False) -> tuple[Any, Any]:
        """The state and the data state of `step`, placed as `like` (arrays or their shapes) is.

        With `partly` only what `like` has is read: `{"params": ...}` leaves the optimizer on disk.

        Raises:
          UserError: the checkpoint does not fit `like`, is damaged or is not complete.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        wanted = ocp.args.StandardRestore(abstract)
        if partly:
            places = ocp.checkpoint_utils.construct_restore_args(abstract)
            wanted = ocp.args.PyTreeRestore(abstract, restore_args=places, partial_restore=True)
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=wanted,
                    data=ocp.args.JsonRestore(),
                    checksums=ocp.args.JsonRestore(),
                ),
            )
        except Exception as error:  # whatever Orbax and TensorStore raise on what they cannot read
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise self._damaged(step, reason) from error
        sums = checksums(restored.state)
        if _TEXTS in restored.checksums:  # not in those of earlier versions
            sums[_TEXTS] = _text_sum(restored.data, self._manager.metrics(step))
        wrong = [name for name, value in sums.items() if restored.checksums.get(name) != value]
        if wrong:
            raise self._damaged(step, f"{wrong[0]} is not what was saved")
        return restored.state, restored.data

    def latest(self) -> int | None:
        """The newest step that has a checkpoint."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step with the lowest validation loss."""
        return self._manager.best_step()

    def steps(self) -> list[int]:
        """All steps that have a checkpoint, in order."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Returns when what was saved is on disk, and what is no longer kept is not."""
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            shutil.rmtree(self.directory / _REMOVED, ignore_errors=True)

    def close(self) -> None:
        """Waits and lets go of the directory."""
        self._manager.close()

    def _check_validation_losses(self) -> None:
        """Orbax reads them all when it opens the folder, and does not say which one is damaged."""
        for step in self._listed():
            file = self.directory / str(step) / "metrics" / "metrics"
            try:
                with contextlib.suppress(FileNotFoundError):  # it has none, or was just removed
                    _validation_loss(json.loads(file.read_bytes()))
            except (ValueError, KeyError, TypeError) as error:
                raise self._damaged(step, "no validation loss in metrics/metrics") from error

    def _listed(self) -> list[int]:
        """The steps as the folder's names say; what is being written has another name."""
        return sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdigit())

    def _damaged(self, step: int, reason: str) -> UserError:
        others = [other for other in self._listed() if other != step]
        cure = f"use the checkpoint of step {others[-1]}" if others else "start the run anew"
        return UserError(
            f"checkpoint {self.directory / str(step)} must be complete and unchanged: {reason}. "
            f"Remove that folder and {cure}."
        )


def checksums(tree: Any) -> dict[str, int]:
    """For each array by its path the sum of its bits modulo 2**32: equal bits, equal sum.

    Computed where the arrays lie, in integers, so that it does not depend on how they are split.
    """
    leaves, _ = jax.tree.flatten_with_path(tree)
    sums = _bit_sums([leaf for _, leaf in leaves])
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: int(value) for name, value in zip(names, jax.device_get(sums), strict=True)}


@jax.jit
def _bit_sums(leaves: list[jax.Array]) -> list[jax.Array]:
    def one(x):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        width = np.dtype(x.dtype).itemsize
        bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
        return jnp.sum(bits, dtype=jnp.uint32)

    return [one(leaf) for leaf in leaves]


def _text_sum(data_state: Any, metrics: dict[str, float] | None) -> int:
    return zlib.crc32(json.dumps([data_state, metrics], sort_keys=True).encode())


def _validation_loss(metrics) -> float:
    return metrics["validation_loss"]
