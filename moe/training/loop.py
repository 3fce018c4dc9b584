"""The training loop: resumes where the run folder stands, and leaves it resumable at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe.data import Batch, Pairs, train_batches
from moe.errors import UserError
from moe.models import Stats
from moe.sharding import make_mesh, weight_update
from moe.training.checkpoint import Checkpoints
from moe.training.config import TrainConfig
from moe.training.hosts import LostProcessError, agree, compiled_by_all, rows_here, share
from moe.training.logs import RunLogs
from moe.training.optimizer import learning_rate, make_optimizer
from moe.training.run import Run, open_run, start_run
from moe.training.state import TrainState, fitted, init_state, logical_shapes
from moe.training.step import Metrics, batch_sharding, make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How training ended.

    Attributes:
      run: the run folder, ready to be read.
      step: steps taken in all.
      validation_loss: nats a target token at the last validation; NaN if none was made.
      signal: number of the signal that ended the training before the last step, if one did.
    """

    run: Run
    step: int
    validation_loss: float
    signal: int | None


def train(
    config: TrainConfig,
    *,
    devices: Sequence[jax.Device] | None = None,
    console: Console | None = None,
) -> Outcome:
    """Trains the run of `config` to its last step, from its newest checkpoint if it has one.

    SIGTERM and SIGINT save a checkpoint after the step under way and end the training; of several
    processes (`jax.distributed`) one that gets the signal is enough. On one device a resumed run
    computes the very bits that an uninterrupted one would have.

    Args:
      config: the run.
      devices: those of the mesh; None is all that are attached.
      console: where progress is shown; None shows that of process 0 on standard error.

    Raises:
      UserError: bad data, a run folder of another configuration, a mesh that does not fit the
        devices or the batch, a damaged checkpoint, or too many steps in a row without a finite gradient.
      LostProcessError: another process ended before its time.
    """
    console = console or Console(stderr=True, quiet=jax.process_index() > 0)
    mesh = make_mesh(config.mesh, devices)
    if config.mixture.batch_size % mesh.size:
        raise UserError(
            f"mixture.batch_size must be a multiple of the devices: got {config.mixture.batch_size} "
            f"rows for {mesh.size} devices. Use other devices, or in a new run --mixture.batch-size."
        )
    with contextlib.ExitStack() as stack:
        try:
            run, pairs = _start(config)
            if mesh.size > 1:
                stack.enter_context(jax.set_mesh(mesh))
            stack.enter_context(weight_update(config.mesh.weight_update))
            checkpoints = run.checkpoints()
            stack.callback(checkpoints.close)
            trainer = _Trainer(run, pairs, checkpoints, mesh, console)
            stack.callback(trainer.close)
            stop = stack.enter_context(_stop_signal())
            return trainer.train(stop)
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            stack.pop_all()  # closing would wait for the process that is no more
            raise LostProcessError(str(error)) from error


def _start(config: TrainConfig) -> tuple[Run, Pairs]:
    """Process 0 opens or makes the run folder; then the others read it and follow what it says."""

    def first() -> tuple[Run, Pairs] | None:
        if jax.process_index() > 0:
            return None
        pairs = config.source.pairs("train")
        return start_run(config, pairs), pairs

    def read() -> tuple[Run, Pairs]:
        run = open_run(config.run_dir)
        return run, run.config.source.pairs("train")

    started = agree(first)
    return agree(lambda: started or read())


class _Trainer:
    """What lives as long as the training: state, data, compiled steps, logs."""

    def __init__(
        self, run: Run, pairs: Pairs, checkpoints: Checkpoints, mesh: Mesh, console: Console
    ):
        config = run.config
        self.run, self.config, self.checkpoints, self.console = run, config, checkpoints, console
        self.mesh = mesh if mesh.size > 1 else None
        self.key = jax.random.key(config.seed)
        num_rows = config.mixture.batch_size
        rows = list(range(num_rows)) if self.mesh is None else rows_here(self.mesh, num_rows)
        self.batches = train_batches(
            pairs, run.tokenizer, config.mixture, seed=config.seed, rows=rows
        )
        self.validation = [
            Batch(*(array[rows] for array in batch))
            for _, batch in run.batches("validation", config.validation_sentences)
        ]

        optimizer = make_optimizer(config.optimizer, config.steps)
        self.learning_rate = learning_rate(config.optimizer, config.steps)
        graph, self.state = init_state(
            run.model_config, optimizer, seed=config.seed, mesh=self.mesh
        )
        self.train_step = compiled_by_all(make_train_step(graph, optimizer, config.objective))
        self.eval_step = compiled_by_all(make_eval_step(graph))
        self.everywhere: Callable[[Stats], Stats] = lambda stats: stats
        whole = NamedSharding(mesh, PartitionSpec())
        if jax.process_count() > 1:  # each holds a part
            self.everywhere = compiled_by_all(jax.jit(self.everywhere, out_shardings=whole))
        self.step = 0
        # Beside the state and not in it, so that a drop band can be set or taken away in a running run.
        balance_weight = config.objective.balance_weight
        if (step := checkpoints.latest()) is not None:
            restored, data_state = checkpoints.restore(step, self._saved_shapes())
            self.state = fitted(restored, self.state)
            balance_weight = data_state.pop("balance_weight", balance_weight)
            self.batches.set_state(data_state)
            self.step = step
        self.balance_weight: jax.Array | None = None
        if config.objective.drop_band is not None:
            self.balance_weight = jnp.float32(balance_weight)
            if self.mesh:  # placed as a step returns it, so that the second is not compiled anew
                self.balance_weight = jax.make_array_from_process_local_data(
                    whole, np.float32(balance_weight), ()
                )
        self.logs = RunLogs(run.path, step=self.step) if jax.process_index() == 0 else None
        self.validation_loss = float("nan")

    def train(self, stop: list[int]) -> Outcome:
        """Steps to the end or to a signal, with a progress bar."""
        config = self.config
        if self.step:
            verb = "Resuming" if self.step < config.steps else "Nothing to do for"
            self.console.print(f"{verb} {self.run.path} at step {self.step}.")
        with _progress(self.console) as bar:
            task = bar.add_task("training", total=config.steps, completed=self.step, status="")
            window = _Window()
            while self.step < config.steps and not self._is_stopped(stop):
                self.state, metrics, stats = self.train_step(
                    self.state, self._on_devices(next(self.batches)), self.key, self.balance_weight
                )
                self.balance_weight = metrics.get("balance_weight", self.balance_weight)
                self.step += 1
                window.add(metrics)
                if self.step % config.log_every == 0 or self.step == config.steps:
                    values = self._log(window)
                    self._record_load(stats)
                    bar.update(task, completed=self.step, status=_status(values))
                    if not self.console.is_terminal:  # a bar shows nothing in a file
                        self.console.print(f"step {self.step}: {_status(values)}")
                    window = _Window()
                if self.step % config.checkpoint.every == 0 or self.step == config.steps:
                    self._validate_and_save()
                    window.restart_clock()
        cut_short = stop[0] if self.step < config.steps else None
        if cut_short:
            self._save_interrupted(cut_short)
        self.checkpoints.wait()
        return Outcome(self.run, self.step, self.validation_loss, cut_short)

    def close(self) -> None:
        """Lets go of data workers and files."""
        if self.logs:
            self.logs.close()
        self.batches.close()

    def _is_stopped(self, stop: list[int]) -> bool:
        """Whether a signal came; several processes agree on the step before which they stop."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self.step):
            stop.append(signal.SIGTERM)
        return bool(stop)

    def _log(self, window: _Window) -> dict[str, float]:
        values = window.values()
        values["learning_rate"] = float(self.learning_rate(self.step - 1))
        self._record(values)
        in_a_row = int(values["skipped_in_a_row"])
        if in_a_row >= self.config.max_skipped_in_a_row:
            raise UserError(
                f"gradients must be finite: got NaN or infinity in {in_a_row} steps in a row up to "
                f"step {self.step}; the newest checkpoint is of step {self.checkpoints.latest()}. "
                "Lower optimizer.learning_rate or raise optimizer.warmup_steps."
            )
        return values

    def _record(self, values: dict[str, float]) -> None:
        if self.logs:
            self.logs.scalars(self.step, values)

    def _record_load(self, stats: Stats) -> None:
        stats = self.everywhere(stats)  # which all processes must call
        if self.logs:
            self.logs.load(self.step, stats)

    def _validate_and_save(self) -> None:
        total, num_tokens = 0.0, 0
        for batch in self.validation:
            loss, count, _ = self.eval_step(self.state.params, self._on_devices(batch))
            total, num_tokens = total + float(loss), num_tokens + int(count)
        self.validation_loss = total / max(num_tokens, 1)
        self._record({"validation_loss": self.validation_loss})
        self.console.print(f"step {self.step}: validation loss {self.validation_loss:.4f}")
        if not np.isfinite(self.validation_loss):
            raise UserError(
                f"validation loss must be finite: got {self.validation_loss} at step {self.step}. "
                "Lower optimizer.learning_rate; the run folder keeps its last good checkpoint."
            )
        self._save(self.validation_loss)

    def _save_interrupted(self, number: int) -> None:
        self.console.print(f"{signal.Signals(number).name}: saving step {self.step}.")
        if self.checkpoints.latest() != self.step:
            self._save(None)

    def _save(self, validation_loss: float | None) -> None:
        data_state: dict[str, Any] = {}
        for state in share(self.batches.get_state()):
            data_state |= state
        if self.balance_weight is not None:
            data_state |= {"balance_weight": float(np.asarray(self.balance_weight))}
        state = fitted(self.state, self._saved_shapes())
        self.checkpoints.save(self.step, state, data_state, validation_loss=validation_loss)

    def _saved_shapes(self) -> TrainState:
        """Shapes of the state in a checkpoint, and places on this mesh."""
        return self.state if self.mesh is None else logical_shapes(self.state, self.mesh)

    def _on_devices(self, batch: Batch) -> Batch:
        """The batch's rows on the devices that hold them; each process gives its own rows."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        where, num_rows = batch_sharding(self.mesh), self.config.mixture.batch_size
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(where, x, (num_rows, *x.shape[1:])),
            batch,
        )


class _Window:
    """The steps since the last log line: the newest metrics and the speed."""

    def __init__(self):
        self.metrics: list[Metrics] = []
        self.start = time.perf_counter()

    def add(self, metrics: Metrics) -> None:
        self.metrics.append(metrics)

    def restart_clock(self) -> None:
        """Validation is not training time."""
        self.start = time.perf_counter()

    def values(self) -> dict[str, float]:
        """Waits for the steps; the last step's metrics, and target tokens a second over all."""
        all_metrics = jax.device_get(self.metrics)
        seconds = time.perf_counter() - self.start
        values = {name: float(value) for name, value in all_metrics[-1].items()}
        num_tokens = sum(int(metrics["num_tokens"]) for metrics in all_metrics)
        return values | {"tokens_per_second": num_tokens / seconds}


@contextlib.contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT put their number into, in place of what they did before.

    Of several processes JAX takes SIGTERM and tells the others, so SIGINT becomes one.
    """
    received: list[int] = []
    before = {}
    if jax.process_count() == 1:
        handlers = {n: lambda n, _: received.append(n) for n in (signal.SIGTERM, signal.SIGINT)}
    else:
        handlers = {signal.SIGINT: lambda *_: os.kill(os.getpid(), signal.SIGTERM)}
    for number, handler in handlers.items():
        with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
            before[number] = signal.signal(number, handler)
    try:
        yield received
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    )


def _status(values: dict[str, float]) -> str:
    parts = [f"loss {values['loss']:.3f}", f"{values['tokens_per_second']:,.0f} tokens/s"]
    if "drop_rate" in values:
        parts[1:1] = [f"balance {values['aux_loss']:.2f}", f"dropped {values['drop_rate']:.1%}"]
    if values["skipped"]:
        parts.append(f"skipped {values['skipped']:.0f}")
    return ", ".join(parts)
