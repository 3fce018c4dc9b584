"""Training: configuration, objective, optimizer, step, loop, checkpoints and the run folder."""

from __future__ import annotations

from moe.training.checkpoint import CheckpointConfig, Checkpoints
from moe.training.config import TrainConfig
from moe.training.hosts import HostsConfig, LostProcessError, join_hosts
from moe.training.loop import Outcome, train
from moe.training.objective import ObjectiveConfig
from moe.training.optimizer import OptimizerConfig
from moe.training.run import Run, load_model, open_run

__all__ = [
    "CheckpointConfig",
    "Checkpoints",
    "HostsConfig",
    "LostProcessError",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Outcome",
    "Run",
    "TrainConfig",
    "join_hosts",
    "load_model",
    "open_run",
    "train",
]
