"""Text in, batches out: sources, tokenizer, mixture, packing."""

from __future__ import annotations

from moe.data.mixture import MixtureConfig, train_batches
from moe.data.packing import Batch, eval_batches
from moe.data.pairs import Direction, Pairs, SentencePair
from moe.data.sources import (
    DataSource,
    Generated,
    Gettext,
    JsonLines,
    ParallelText,
    TabSeparated,
    TfdsSource,
)
from moe.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

__all__ = [
    "Batch",
    "DataSource",
    "Direction",
    "Generated",
    "Gettext",
    "JsonLines",
    "MixtureConfig",
    "Pairs",
    "ParallelText",
    "SentencePair",
    "TabSeparated",
    "TfdsSource",
    "Tokenizer",
    "TokenizerConfig",
    "eval_batches",
    "train_batches",
    "train_tokenizer",
]
