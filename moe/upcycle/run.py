"""A trained dense run as the start of a run with experts."""

from __future__ import annotations

import dataclasses
import os

from flax import nnx

from moe.errors import UserError
from moe.training import Run, TrainConfig, open_run
from moe.training.run import begin_run, read_checkpoint
from moe.upcycle.dense import upcycle_config, upcycle_model


def upcycle_run_config(run: Run, run_dir: str, num_experts: int) -> TrainConfig:
    """The configuration of a dense run, with experts, for another folder."""
    model = upcycle_config(run.config.model, num_experts)
    return dataclasses.replace(run.config, run_dir=run_dir, model=model)


def upcycle_run(
    dense_run: str | os.PathLike[str],
    config: TrainConfig,
    *,
    checkpoint: str = "best",
    noise: float = 0.0,
) -> Run:
    """Makes a run folder whose step 0 is a dense run's model with its FFNs copied to experts.

    `moe train` goes on from it as from any run: with a fresh optimizer, on the data that came next in
    the dense run.

    Args:
      dense_run: folder of a run with num_experts=0.
      config: of the new run, as `upcycle_run_config` makes it, maybe with another routing rule,
        optimizer, objective or number of steps. Its seed draws the new routers.
      checkpoint: of the dense run: "best" (lowest validation loss), "last", or a step.
      noise: as in `upcycle_model`.

    Returns:
      The new run. Without noise its validation loss at step 0 is that of the checkpoint.

    Raises:
      UserError: a folder that holds something already, a configuration of other data or another
        model, or no such run or checkpoint.
    """
    run = open_run(dense_run)
    for name in ("source", "tokenizer", "mixture"):
        if getattr(run.config, name) != getattr(config, name):
            raise UserError(
                f"{name} must be that of the dense run, whose data go on: got "
                f"{getattr(config, name)}, not {getattr(run.config, name)}. Restore it."
            )
    vocab_size = run.tokenizer.vocab_size
    graph, state, data_state = read_checkpoint(run, checkpoint)
    model = upcycle_model(
        nnx.merge(graph, state.params),
        dataclasses.replace(config.model, vocab_size=vocab_size),
        noise=noise,
        rngs=nnx.Rngs(config.seed),
    )
    params = nnx.state(model)
    return begin_run(config, tokenizer_of=run, params=params, data_state=data_state)
