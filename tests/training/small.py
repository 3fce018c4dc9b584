"""A run that trains in seconds."""

from __future__ import annotations

import dataclasses

from moe.data import Generated, MixtureConfig, TokenizerConfig
from moe.layers import Top2
from moe.models import TransformerConfig
from moe.training import CheckpointConfig, OptimizerConfig, TrainConfig


def small_config(run_dir, **changes) -> TrainConfig:
    config = TrainConfig(
        run_dir=str(run_dir),
        steps=6,
        source=Generated(languages=("qaa", "qab"), sentences=300),
        tokenizer=TokenizerConfig(vocab_size=400),
        mixture=MixtureConfig(batch_size=8, source_length=48, target_length=48),
        model=TransformerConfig(
            d_model=16,
            d_hidden=32,
            num_heads=2,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_experts=8,
            router=Top2(capacity_factor=1.0),
            group_size=48,
            dispatch="gather",  # what "auto" takes on a mesh; compiles faster than "sorted"
            dropout=0.1,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
        checkpoint=CheckpointConfig(every=2),
        validation_sentences=4,
        log_every=1,
    )
    return dataclasses.replace(config, **changes)
