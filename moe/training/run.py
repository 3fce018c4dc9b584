"""The run folder: what it holds, how it is made, and how a trained model is read from it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.sharding import Mesh

from moe.data import Batch, Direction, Pairs, Tokenizer, eval_batches, train_tokenizer
from moe.data.pairs import Split
from moe.errors import UserError
from moe.models import Transformer, TransformerConfig
from moe.sharding import shardings
from moe.training.checkpoint import Checkpoints
from moe.training.config import TrainConfig
from moe.training.optimizer import make_optimizer
from moe.training.state import TrainState, init_state

# What may change when a run goes on: how long, where and how it is computed, what is recorded, and what
# `moe analyze` advises to change in a run under way. The rest defines what is learnt from which batches.
MAY_CHANGE = (
    "run_dir",
    "steps",
    "log_every",
    "mesh",
    "checkpoint",
    "validation_sentences",
    "max_skipped_in_a_row",
    "objective",
    "model.router",
    "model.dispatch",
    "model.exchange_chunks",
    "model.remat",
    "model.pipeline_rounds",
)
# What a run folder holds; anything else in it is the user's, and the folder is left alone.
FILES = {
    "config.json",
    "tokenizer.model",
    "source_tokenizer.model",
    "checkpoints",
    "metrics.jsonl",
    "load.jsonl",
    "tensorboard",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """An existing run folder: its path, configuration and tokenizer."""

    path: Path
    config: TrainConfig
    tokenizer: Tokenizer

    @property
    def model_config(self) -> TransformerConfig:
        """The model's shape with the tokenizer's vocabulary."""
        source = self.tokenizer.source
        return dataclasses.replace(
            self.config.model,
            vocab_size=self.tokenizer.vocab_size,
            source_vocab_size=None if source is self.tokenizer else source.vocab_size,
        )

    def batches(self, split: Split, limit: int) -> Iterator[tuple[Direction, Batch]]:
        """The first `limit` sentences of each direction of a split, one direction a batch.

        Raises:
          UserError: the split holds no sentence.
        """
        pairs = {
            direction: of_direction[:limit]
            for direction, of_direction in self.config.source.pairs(split).items()
            if len(of_direction)
        }
        if not pairs:
            raise UserError(
                f"the {split} split must hold at least one sentence: got none from "
                f"{self.config.source.kind}. Raise source.{split}_fraction or give more sentences."
            )
        mixture = self.config.mixture
        return eval_batches(
            pairs,
            self.tokenizer,
            batch_size=mixture.batch_size,
            source_length=mixture.source_length,
            target_length=mixture.target_length,
            pack=True,
        )

    def checkpoints(self) -> Checkpoints:
        """Its checkpoints, opened."""
        return Checkpoints(self.path / "checkpoints", self.config.checkpoint)


def start_run(config: TrainConfig, pairs: Pairs) -> Run:
    """Opens the run folder of `config`, or makes it: trains the tokenizer, then writes the config.

    A run begins with its first checkpoint; before that the folder is made anew, so that a mistake in
    a first configuration can be mended.

    Raises:
      UserError: the folder holds a run of another configuration, or something else than a run.
    """
    path = Path(config.run_dir)
    if _has_begun(path):
        run = open_run(path)
        config = _with_shards(config, run.config.mixture.shards)
        _check_same(run.config, config)
        run = dataclasses.replace(run, config=config)
    else:
        config = _with_shards(config, jax.process_count() if jax.process_count() > 1 else None)
        run = Run(path, config, _new_tokenizer(path, config, pairs))
    _write_config(run)
    return run


def _with_shards(config: TrainConfig, shards: int | None) -> TrainConfig:
    """The configuration with so many shards, unless it says how many."""
    if config.mixture.shards is not None:
        return config
    return dataclasses.replace(config, mixture=dataclasses.replace(config.mixture, shards=shards))


def begin_run(config: TrainConfig, *, tokenizer_of: Run, params: nnx.State, data_state: Any) -> Run:
    """Makes the run folder of `config` with a checkpoint at step 0 of parameters made elsewhere.

    Args:
      config: the new run, with the tokenizer and the data of `tokenizer_of`.
      tokenizer_of: the run whose tokenizer the parameters were trained with.
      params: the model's state.
      data_state: where the batches go on, as in a checkpoint.

    Raises:
      UserError: the folder holds a run, or something else.
    """
    path = Path(config.run_dir)
    if (path / "config.json").exists() or _has_begun(path):
        raise UserError(
            f"run_dir must be new or empty: got {path}, which holds a run. Choose another folder."
        )
    _make_folder(path)
    run = Run(path, config, tokenizer_of.tokenizer)
    run.tokenizer.save(path / "tokenizer.model")
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = TrainState(
        step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params)
    )
    checkpoints = run.checkpoints()
    checkpoints.save(0, state, data_state, validation_loss=None)
    checkpoints.close()
    _write_config(run)  # last, so that a killed process leaves nothing that looks like a run
    return run


def _write_config(run: Run) -> None:
    document = {"tokenizer_sha256": run.tokenizer.fingerprint, "config": _as_json(run.config)}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_atomically(run.path / "config.json", text)


def _has_begun(path: Path) -> bool:
    return any(entry.name.isdigit() for entry in path.glob("checkpoints/*"))


def _make_folder(path: Path) -> None:
    """Makes the folder of a run; one that holds anything else than a run is refused."""
    others = {entry.name for entry in path.glob("*")} - FILES
    if others:
        raise UserError(
            f"run_dir must be a run, empty or new: got {path}, which holds "
            f"{', '.join(sorted(others)[:3])}. Choose another --run-dir."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run_dir must be a folder that can be made: got {path} ({error.strerror}). "
            "Choose another --run-dir."
        ) from error


def _new_tokenizer(path: Path, config: TrainConfig, pairs: Pairs) -> Tokenizer:
    _make_folder(path)
    return train_tokenizer(
        pairs,
        config.tokenizer,
        path=path / "tokenizer.model",
        temperature=config.mixture.temperature,
        seed=config.seed,
    )


def open_run(path: str | os.PathLike[str]) -> Run:
    """Reads an existing run folder.

    Raises:
      UserError: no such run, a configuration that cannot be read, or the tokenizer of another run.
    """
    path = Path(path)
    file = path / "config.json"
    if not file.is_file():
        raise UserError(
            f"run must be a folder made by `moe train`: got {path}, which has no config.json. "
            "Check the path."
        )
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
        config = _adapter().validate_python(text["config"])
        expected = text["tokenizer_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"config must be what `moe train` wrote: got {file} with {reason}. Restore the file."
        ) from error
    tokenizer = Tokenizer.load(path / "tokenizer.model")
    if tokenizer.fingerprint != expected:
        raise UserError(
            f"tokenizer must be the one the run was trained with: got {path / 'tokenizer.model'} with "
            f"SHA-256 {tokenizer.fingerprint[:12]}, not {expected[:12]}. Restore the file, and "
            "source_tokenizer.model if the run has one."
        )
    return Run(path, config, tokenizer)


def load_model(
    run: Run, checkpoint: str = "best", *, mesh: Mesh | None = None
) -> tuple[Transformer, int]:
    """The trained model of a run, and the step it was saved at.

    Args:
      checkpoint: "best" (lowest validation loss), "last", or a step.
      mesh: where the parameters go, each part straight to the devices that hold it; any mesh, whatever
        the run was trained on. None is this process's default device.

    Raises:
      UserError: no such checkpoint, one that is damaged, or a mesh that the parameters do not divide by.
    """
    graph, params = jax.eval_shape(
        lambda: nnx.split(Transformer(run.model_config, rngs=nnx.Rngs(0)))
    )
    place = jnp.zeros(()).sharding  # of the default device
    places = jax.tree.map(lambda _: place, params) if mesh is None else shardings(params, mesh)
    like = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places
    )
    checkpoints = run.checkpoints()
    step = _chosen_step(checkpoints, checkpoint, run)
    restored, _ = checkpoints.restore(step, {"params": like}, partly=True)
    checkpoints.close()
    return nnx.merge(graph, restored["params"]), step


def read_checkpoint(run: Run, checkpoint: str) -> tuple[nnx.GraphDef, TrainState, Any]:
    """The model's structure, all of its state and where its data go on, on the default device."""
    checkpoints = run.checkpoints()
    step = _chosen_step(checkpoints, checkpoint, run)
    optimizer = make_optimizer(run.config.optimizer, run.config.steps)
    graph, state = init_state(run.model_config, optimizer, seed=run.config.seed)
    state, data_state = checkpoints.restore(step, state)
    checkpoints.close()
    return graph, state, data_state


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file in one move, so that a killed process leaves the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _chosen_step(checkpoints: Checkpoints, checkpoint: str, run: Run) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise UserError(
            f"run must have a checkpoint: got {run.path}, which has none yet. Train it first."
        )
    if checkpoint == "best":
        best = checkpoints.best()
        return steps[-1] if best is None else best
    if checkpoint == "last":
        return steps[-1]
    if not checkpoint.isdigit() or int(checkpoint) not in steps:
        raise UserError(
            f"checkpoint must be best, last or one of {steps}: got {checkpoint!r}. Choose one of them."
        )
    return int(checkpoint)


@functools.cache
def _adapter() -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(TrainConfig)


def _as_json(config: TrainConfig) -> dict[str, Any]:
    return _adapter().dump_python(config, mode="json")


def _check_same(old: TrainConfig, new: TrainConfig) -> None:
    before, now = (_flat(_as_json(config)) for config in (old, new))
    for name in sorted(before.keys() | now.keys()):
        may_change = any(name == free or name.startswith(f"{free}.") for free in MAY_CHANGE)
        if not may_change and before.get(name) != now.get(name):
            cure = "Restore it or choose another --run-dir"
            if name == "model.num_experts":
                cure = f"`moe upcycle {new.run_dir} NEW_RUN --num-experts {now[name]}` makes a run with it"
            raise UserError(
                f"{name} must stay what the run in {old.run_dir} was started with: got "
                f"{now.get(name)!r}, not {before.get(name)!r}. {cure}."
            )


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Leaves by dotted name."""
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is None)
    return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}
