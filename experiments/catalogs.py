"""All 46 languages of the default data to English and back.

Command:  moe train experiments/catalogs.py
Hardware: written for one accelerator or more (`--mesh.expert 8` splits the experts over 8 devices).
Result:   not trained to the end yet; the demo is the part of it that two CPU cores can learn.
"""

from __future__ import annotations

from moe.data import MixtureConfig, TfdsSource, TokenizerConfig
from moe.layers import Top2
from moe.models import TransformerConfig
from moe.training import CheckpointConfig, OptimizerConfig, TrainConfig


def config() -> TrainConfig:
    """A base-size Transformer with 32 experts in every other layer."""
    return TrainConfig(
        run_dir="runs/catalogs",
        steps=50_000,
        source=TfdsSource(),
        tokenizer=TokenizerConfig(vocab_size=32_000),
        mixture=MixtureConfig(
            batch_size=128, source_length=128, target_length=128, temperature=5.0
        ),
        model=TransformerConfig(
            d_model=512,
            d_hidden=2048,
            num_heads=8,
            num_encoder_layers=6,
            num_decoder_layers=6,
            num_experts=32,
            router=Top2(capacity_factor=1.25),
            dropout=0.1,
            dtype="bfloat16",
        ),
        optimizer=OptimizerConfig(learning_rate=7e-4, warmup_steps=4000, schedule="rsqrt"),
        checkpoint=CheckpointConfig(every=2000),
    )
