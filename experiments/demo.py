"""The demo: six languages to English and back, trained in minutes on two CPU cores.

Command:  make demo
Hardware: two CPU cores.
Time:     9 minutes of training.
Result:   chrF++ 38.9 on unseen sentences; nearest training sentence 28.5, copied source 26.9.
"""

from __future__ import annotations

from moe.data import MixtureConfig, TfdsSource, TokenizerConfig
from moe.layers import Top2
from moe.models import TransformerConfig
from moe.training import CheckpointConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """Sizes and schedule for ten minutes on two cores."""
    return TrainConfig(
        run_dir="runs/demo",
        steps=1500,
        source=TfdsSource(languages=("ca", "es", "fr", "gl", "it", "pt")),
        tokenizer=TokenizerConfig(vocab_size=3000),
        mixture=MixtureConfig(batch_size=32, source_length=64, target_length=64, temperature=2.0),
        model=TransformerConfig(
            d_model=128,
            d_hidden=512,
            num_heads=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_experts=8,
            router=Top2(capacity_factor=1.25),
            dropout=0.0,  # three epochs on a small model: it has not yet learnt enough to forget
        ),
        optimizer=OptimizerConfig(
            name="muon", learning_rate=4e-3, warmup_steps=50, schedule="linear"
        ),
        checkpoint=CheckpointConfig(every=500),
        validation_sentences=32,
    )
