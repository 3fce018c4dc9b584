"""GSPMD's dense family, 64 billion to 1.1 trillion parameters: what tensor parallelism is for.

Command:  moe plan experiments/gspmd.py --model 128b --topology v5p:8x8x8
Hardware: any number of devices that 16 divides. Planned only; none was trained.

As published (arXiv:2105.04663, dense Transformers with wide layers, and Lingvo's configurations of
them): widths, heads, layers in all, GELU-gated FFNs in every layer, one vocabulary of 32,000 for input
and output, relative positions, no dropout, Adafactor without momentum, bfloat16 computation.
Ours instead: theirs are decoders alone, ours is an encoder and a decoder of half the layers each. So L/2
layers have a cross-attention more, one stack's norm more, and a stack's layers share one table of
positions. With these taken off the counts are Lingvo's to the digit (tests/planning/test_models.py):
137,702,416,384 (128b) and 1,100,041,175,040 (1t). The other three have the layers of these two, as many as
their names say in units of 2**30 parameters: 32 layers of 2**31 are 64b.
Every layer sees 1024 tokens of a row, as theirs. Their weights are split in two dimensions; ours over
`model`, and over `data` as fully sharded. A batch has 512 rows, as their 128b on 2,048 devices.
"""

from __future__ import annotations

from typing import NamedTuple

from moe.data import MixtureConfig, TfdsSource, TokenizerConfig
from moe.errors import UserError
from moe.models import TransformerConfig
from moe.sharding import MeshConfig
from moe.training import CheckpointConfig, ObjectiveConfig, OptimizerConfig, TrainConfig

ROW = 1024


class Published(NamedTuple):
    """Layers in all, M, H and N; D is 128."""

    num_layers: int
    d_model: int
    d_hidden: int
    num_heads: int


MODELS = {
    "64b": Published(32, 8192, 65_536, 128),
    "128b": Published(64, 8192, 65_536, 128),
    "256b": Published(128, 8192, 65_536, 128),
    "512b": Published(64, 16_384, 131_072, 256),
    "1t": Published(128, 16_384, 131_072, 256),
}


def config(model: str = "64b") -> TrainConfig:
    """The run of a published model: 16 devices split each layer, the others the batch."""
    if model not in MODELS:
        raise UserError(f"model must be one of {', '.join(MODELS)}: got {model!r}. Choose one.")
    published = MODELS[model]
    return TrainConfig(
        run_dir=f"runs/gspmd/{model}",
        steps=100_000,
        source=TfdsSource(),
        tokenizer=TokenizerConfig(vocab_size=32_000),
        mixture=MixtureConfig(batch_size=512, source_length=ROW, target_length=ROW),
        model=TransformerConfig(
            vocab_size=32_000,
            d_model=published.d_model,
            d_hidden=published.d_hidden,
            d_expert=published.d_hidden // 2,  # the second FFN of a pair has twice this width
            num_heads=published.num_heads,
            d_head=128,
            num_encoder_layers=published.num_layers // 2,
            num_decoder_layers=published.num_layers // 2,
            num_experts=0,
            activation="geglu",
            positions="relative",
            dropout=0.0,
            dtype="bfloat16",
            remat="full",
        ),
        objective=ObjectiveConfig(label_smoothing=0.0),
        optimizer=OptimizerConfig(
            name="adafactor", learning_rate=0.01, schedule="rsqrt", warmup_steps=10_000
        ),
        mesh=MeshConfig(model=16, weight_update="fully_sharded"),
        checkpoint=CheckpointConfig(every=5000),
    )
