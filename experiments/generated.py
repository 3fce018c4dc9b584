"""Smoke run: two invented languages, learnt in a few minutes without a download.

Command:  moe train experiments/generated.py
Hardware: any; a few minutes on 2 CPU cores.
"""

from __future__ import annotations

from moe.data import Generated, MixtureConfig, TokenizerConfig
from moe.models import TransformerConfig
from moe.training import CheckpointConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """A small model on small data."""
    return TrainConfig(
        run_dir="runs/generated",
        steps=600,
        source=Generated(),
        tokenizer=TokenizerConfig(vocab_size=640),
        mixture=MixtureConfig(batch_size=16, source_length=64, target_length=64),
        model=TransformerConfig(
            d_model=64,
            d_hidden=128,
            num_heads=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_experts=4,
            dropout=0.0,
        ),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=100, schedule="linear"),
        checkpoint=CheckpointConfig(every=200),
    )
