"""Everything that defines a training run, in one value."""

from __future__ import annotations

import dataclasses

from moe.data import DataSource, MixtureConfig, TfdsSource, TokenizerConfig
from moe.errors import UserError
from moe.models import TransformerConfig
from moe.sharding import MeshConfig
from moe.training.checkpoint import CheckpointConfig
from moe.training.objective import ObjectiveConfig
from moe.training.optimizer import OptimizerConfig


def _default(cls):
    return dataclasses.field(default_factory=cls)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run: an experiment file's `config()` returns one, the command line overrides fields."""

    run_dir: str
    """Folder of the run: its configuration, tokenizer, checkpoints and logs."""
    steps: int
    """Training steps in all, those before a resume included."""
    source: DataSource = _default(TfdsSource)
    """Where sentence pairs come from."""
    tokenizer: TokenizerConfig = _default(TokenizerConfig)
    """The SentencePiece model trained on them."""
    mixture: MixtureConfig = _default(MixtureConfig)
    """How they become batches."""
    model: TransformerConfig = _default(TransformerConfig)
    """The shape of the model; vocab_size is taken from the tokenizer."""
    objective: ObjectiveConfig = _default(ObjectiveConfig)
    """What is minimised."""
    optimizer: OptimizerConfig = _default(OptimizerConfig)
    """How."""
    mesh: MeshConfig = _default(MeshConfig)
    """The devices."""
    checkpoint: CheckpointConfig = _default(CheckpointConfig)
    """When to validate and save."""
    validation_sentences: int = 64
    """Sentences of each direction that the validation loss is taken over."""
    log_every: int = 20
    """Steps from one line of metrics.jsonl to the next."""
    max_skipped_in_a_row: int = 10
    """Steps in a row with a NaN or infinite gradient, skipped each, after which the run ends."""
    seed: int = 0
    """Of parameters, dropout, routing and the order of the data."""

    def __post_init__(self):
        for name in ("steps", "validation_sentences", "log_every", "max_skipped_in_a_row"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1: got {getattr(self, name)}. Raise it.")
        if self.seed < 0:
            raise UserError(f"seed must not be negative: got {self.seed}. Use 0 or more.")
