"""GShard's seven published models: 12.9 billion to 1.03 trillion expert weights. And GSPMD's, by name.

Command:  moe plan experiments/gshard.py --model 2048e_36l --topology v5p:8x16x16
          moe train experiments/gshard.py    (128e_12l, on 128 devices)
Hardware: as many devices as experts. Planned only, see docs/scaling.md; none was trained.

As published (arXiv:2006.16668, section 4): widths, heads, ReLU, dropout, vocabularies of 64,000 source
and 32,000 target pieces, top-2 in every other layer, groups of 1024 tokens with 2 * 1024 / E slots an
expert, tokens a batch, float32, Adafactor without momentum.
Ours instead: one matrix for the target's embedding and the output, of which the paper says nothing;
rotary positions; data that also go out of English, so that targets are in all languages; a linear
warm-up to the learning rate 0.01, which 1.0 / sqrt(step) has at step 10,000, then the same 1 / sqrt
decay. Rows are 128 tokens long on each side, and the batch counts the tokens of one side. The largest
model's batch, which the paper does not give, is taken as 4 M too. Every chip holds whole weights and
updates its part of them (arXiv:2004.13336), of which the paper says nothing; `--mesh.weight-update` has
the other ways.
GSPMD's dense models (`--model 64b` to `1t`) are those of gspmd.py.
"""

from __future__ import annotations

from typing import NamedTuple

import gspmd

from moe.data import MixtureConfig, TfdsSource, TokenizerConfig
from moe.errors import UserError
from moe.layers import Top2
from moe.models import TransformerConfig
from moe.sharding import MeshConfig
from moe.training import CheckpointConfig, ObjectiveConfig, OptimizerConfig, TrainConfig

SOURCE_PIECES, TARGET_PIECES = 64_000, 32_000
ROW = 128
MILLION = 2**20


class Published(NamedTuple):
    """One line of the paper's table: E, layers of encoder and decoder together, tokens of a batch."""

    num_experts: int
    num_layers: int
    num_tokens: int


MODELS = {
    "128e_12l": Published(128, 12, MILLION),
    "128e_36l": Published(128, 36, MILLION),
    "512e_12l": Published(512, 12, MILLION),
    "512e_36l": Published(512, 36, MILLION),
    "2048e_12l": Published(2048, 12, 4 * MILLION),
    "2048e_36l": Published(2048, 36, 4 * MILLION),
    "2048e_60l": Published(2048, 60, 4 * MILLION),
}


def config(model: str = "128e_12l") -> TrainConfig:
    """The run of a published model, an expert of each layer on every device."""
    if model in gspmd.MODELS:
        return gspmd.config(model)
    if model not in MODELS:
        known = ", ".join([*MODELS, *gspmd.MODELS])
        raise UserError(f"model must be one of {known}: got {model!r}. Choose one.")
    published = MODELS[model]
    return TrainConfig(
        run_dir=f"runs/gshard/{model}",
        steps=100_000,
        source=TfdsSource(),
        tokenizer=TokenizerConfig(vocab_size=TARGET_PIECES, source_vocab_size=SOURCE_PIECES),
        mixture=MixtureConfig(
            batch_size=published.num_tokens // ROW, source_length=ROW, target_length=ROW
        ),
        model=TransformerConfig(
            vocab_size=TARGET_PIECES,
            source_vocab_size=SOURCE_PIECES,
            d_model=1024,
            d_hidden=8192,
            num_heads=16,
            d_head=128,
            num_encoder_layers=published.num_layers // 2,
            num_decoder_layers=published.num_layers // 2,
            num_experts=published.num_experts,
            router=Top2(capacity_factor=1.0, min_capacity=1),
            group_size=1024,
            activation="relu",
            dropout=0.1,
            remat="full",
        ),
        objective=ObjectiveConfig(label_smoothing=0.1),
        optimizer=OptimizerConfig(
            name="adafactor",
            learning_rate=0.01,
            schedule="rsqrt",
            warmup_steps=10_000,
            beta2=0.99,
        ),
        mesh=MeshConfig(expert=published.num_experts, weight_update="sharded"),
        checkpoint=CheckpointConfig(every=5000),
    )
