"""The shape of the translation Transformer, checked where it is made."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.layers import Rule, Top2
from moe.layers.block import Beside, BlockConfig
from moe.layers.dispatch import Dispatch
from moe.layers.moe import check_causal

Remat = Literal["none", "exchange", "dots", "full"]

_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of the model; every second layer of a stack has an MoE layer for its FFN."""

    vocab_size: int = 8000
    """V, rows of the embedding; the trainer sets it to what the tokenizer has."""
    source_vocab_size: int | None = None
    """Rows of an embedding for source tokens alone, set likewise; None is one for both sides."""
    d_model: int = 256
    """M, width of a token."""
    d_hidden: int = 1024
    """H, width inside a dense FFN, and inside each expert unless d_expert says otherwise."""
    d_expert: int | None = None
    """Width inside each expert; None is d_hidden."""
    num_heads: int = 4
    """N, attention heads."""
    d_head: int | None = None
    """D, width of a head; None is d_model / num_heads."""
    num_encoder_layers: int = 4
    """Layers of the encoder; even."""
    num_decoder_layers: int = 4
    """Layers of the decoder; even."""
    num_experts: int = 8
    """E of each MoE layer; 0 is a dense model of the same FLOPs a token (FFNs of twice an expert)."""
    router: Rule = dataclasses.field(default_factory=Top2)
    """The routing rule."""
    decoder_router: Rule | None = None
    """The rule of the decoder, which must not look ahead; None is `router`."""
    dispatch: Dispatch = "auto"
    """How tokens are moved to experts; the numbers are the same."""
    exchange_chunks: int = 1
    """Parts in which the tokens of a device go to experts on others; the numbers are the same."""
    group_size: int = 1024
    """S, tokens that compete for the slots of an expert."""
    activation: Literal["relu", "gelu", "swiglu", "geglu"] = "relu"
    """Of FFNs and experts; the last two are gated and have half as many weights again."""
    output_masking: float = 0.0
    """Share of expert outputs masked in training (NLLB's EOM)."""
    beside: Beside = "none"
    """A dense FFN beside the experts: shared (DeepSeek), residual (DeepSpeed), conditional (NLLB)."""
    positions: Literal["rotary", "relative"] = "rotary"
    """How tokens know where they stand."""
    tied_embeddings: bool = True
    """One matrix for the embedding and the output."""
    dropout: float = 0.1
    """Share of activations dropped in training, after each sub-layer and the embedding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation; parameters and router are float32."""
    remat: Remat = "none"
    """What the backward pass computes again instead of keeping it: nothing, all but what crossed
    devices, all but the products with weights, or all inside each pair of layers."""
    num_microbatches: int = 1
    """Parts of the rows of a batch that go through the layers one after another, and on a mesh with
    stages through different ones at a time. Slots and noise are of each part; nothing depends on the
    number of stages."""
    pipeline_rounds: int = 1
    """How often a part goes through all stages, each time through fewer layers of each: less idle
    time, and weights that travel to their stages in each step. The numbers are the same."""

    def __post_init__(self):
        for name in (
            "vocab_size",
            "source_vocab_size",
            "d_model",
            "d_hidden",
            "d_expert",
            "num_heads",
            "group_size",
            "exchange_chunks",
            "num_microbatches",
            "pipeline_rounds",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"model.{name} must be at least 1: got {value}. Raise it.")
        for name in ("num_encoder_layers", "num_decoder_layers"):
            if getattr(self, name) < 2 or getattr(self, name) % 2:
                raise UserError(
                    f"model.{name} must be even and at least 2: got {getattr(self, name)}. "
                    "Layers come in pairs, one dense and one sparse."
                )
        if self.num_experts == 1 or self.num_experts < 0:
            raise UserError(
                f"model.num_experts must be 0 (dense) or at least 2: got {self.num_experts}. "
                "Top-2 routing needs two experts."
            )
        if self.d_head is None and self.d_model % self.num_heads:
            raise UserError(
                f"model.d_model must divide by num_heads: got d_model={self.d_model}, "
                f"num_heads={self.num_heads}. Set d_head or change one of them."
            )
        if self.head_width % 2 and self.positions == "rotary":
            raise UserError(
                f"model.d_head must be even for rotary positions: got {self.head_width}. "
                'Change it or use positions="relative".'
            )
        for name in ("dropout", "output_masking"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"model.{name} must be in [0, 1): got {getattr(self, name)}. Lower it."
                )
        if self.remat not in get_args(Remat):
            raise UserError(
                f"model.remat must be one of {get_args(Remat)}: got {self.remat!r}. Choose one of them."
            )
        check_causal(self.decoder_router or self.router)

    @property
    def head_width(self) -> int:
        """D."""
        return self.d_head or self.d_model // self.num_heads

    @property
    def expert_width(self) -> int:
        """H of an expert."""
        return self.d_expert or self.d_hidden

    def block(self, *, cross_attention: bool) -> BlockConfig:
        """The layers of the encoder, or of the decoder (with cross-attention)."""
        return BlockConfig(
            d_model=self.d_model,
            d_hidden=self.d_hidden,
            d_expert=self.expert_width,
            num_heads=self.num_heads,
            d_head=self.head_width,
            num_experts=self.num_experts,
            router=(cross_attention and self.decoder_router) or self.router,
            dispatch=self.dispatch,
            exchange_chunks=self.exchange_chunks,
            group_size=self.group_size,
            activation=_ACTIVATIONS[self.activation],
            gated=self.activation in ("swiglu", "geglu"),
            output_masking=self.output_masking,
            beside=self.beside,
            dropout=self.dropout,
            dtype=jnp.dtype(self.dtype),
            cross_attention=cross_attention,
        )
