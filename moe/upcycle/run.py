"""A trained run as the start of a run with experts, or with another number of them."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
from flax import nnx

from moe.errors import UserError
from moe.models import Transformer
from moe.training import Run, TrainConfig, open_run
from moe.training.run import begin_run, read_checkpoint
from moe.training.step import make_eval_step
from moe.upcycle.dense import upcycle_config, upcycle_model
from moe.upcycle.resize import resize_model


def upcycle_run_config(run: Run, run_dir: str, num_experts: int) -> TrainConfig:
    """The configuration of a run, with so many experts, for another folder."""
    model = run.config.model
    if model.num_experts:
        model = dataclasses.replace(model, num_experts=num_experts)
    else:
        model = upcycle_config(model, num_experts)
    return dataclasses.replace(run.config, run_dir=run_dir, model=model)


def upcycle_run(
    old_run: str | os.PathLike[str],
    config: TrainConfig,
    *,
    checkpoint: str = "best",
    noise: float = 0.0,
) -> Run:
    """Makes a run folder whose step 0 is the model of a run with experts, or with another number.

    The FFNs of a dense run are copied to the experts (`upcycle_model`). Of a run with experts the busiest
    are copied or the least used merged (`resize_model`), by their load on its validation sentences.

    `moe train` goes on from it as from any run, on any mesh: with a fresh optimizer, on the data that came
    next in the old run.

    Args:
      old_run: folder of the run.
      config: of the new run, as `upcycle_run_config` makes it, maybe with another optimizer, objective,
        mesh or number of steps; after a dense run also with another routing rule. Its seed draws
        new routers and noise.
      checkpoint: of the old run: "best" (lowest validation loss), "last", or a step.
      noise: as in `upcycle_model` and `grow_experts`.

    Returns:
      The new run. After a dense run, without noise, its validation loss at step 0 is that of the
      checkpoint.

    Raises:
      UserError: a folder that holds something already, a configuration of other data or another
        model, or no such run or checkpoint.
    """
    run = open_run(old_run)
    for name in ("source", "tokenizer", "mixture"):
        if getattr(run.config, name) != getattr(config, name):
            raise UserError(
                f"{name} must be that of the old run, whose data go on: got "
                f"{getattr(config, name)}, not {getattr(run.config, name)}. Restore it."
            )
    graph, state, data_state = read_checkpoint(run, checkpoint)
    old = nnx.merge(graph, state.params)
    change = _resized if run.config.model.num_experts else _upcycled
    params = nnx.state(change(run, old, config, noise))
    return begin_run(config, tokenizer_of=run, params=params, data_state=data_state)


def _upcycled(run: Run, old: Transformer, config: TrainConfig, noise: float) -> Transformer:
    model_config = dataclasses.replace(run, config=config).model_config
    return upcycle_model(old, model_config, noise=noise, rngs=nnx.Rngs(config.seed))


def _resized(run: Run, old: Transformer, config: TrainConfig, noise: float) -> Transformer:
    num_experts = config.model.num_experts
    if config.model != dataclasses.replace(run.config.model, num_experts=num_experts):
        raise UserError(
            f"model must be that of the old run but for num_experts: got {config.model}, not "
            f"{run.config.model}. Restore it."
        )
    loads = _loads(run, old)
    return resize_model(old, num_experts, loads, noise=noise, rngs=nnx.Rngs(config.seed))


def _loads(run: Run, model: Transformer) -> dict[str, np.ndarray]:
    """Choices of each expert, YE by stack, over the validation sentences of the run."""
    graph, params = nnx.split(model)
    eval_step = make_eval_step(graph)
    loads: dict[str, np.ndarray] = {}
    for _, batch in run.batches("validation", run.config.validation_sentences):
        for stack, stats in eval_step(params, batch)[2].items():
            loads[stack] = loads.get(stack, 0) + np.asarray(stats.assigned_E)
    return loads
