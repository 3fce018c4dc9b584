"""The translation Transformer: encoder and decoder, every other FFN an MoE layer."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from moe.errors import UserError
from moe.layers import MoEStats, Rule, Top2
from moe.layers.attention import KeyValue
from moe.layers.block import Beside, BlockConfig, LayerCache, LayerPair, PairCache, View, dropout
from moe.layers.dispatch import Dispatch
from moe.layers.moe import check_causal
from moe.layers.positions import RelativeBias
from moe.routing import RoutingPlan, SoftPlan
from moe.sharding import constrain, param

Stats = dict[str, MoEStats]
"""Expert load by stack ("encoder", "decoder"), each field led by the dimension Y of MoE layers."""

Plans = dict[str, RoutingPlan | SoftPlan]
"""Routing by stack, each leaf led by the dimension Y; what `MoEStats.plan` holds."""

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

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "d_hidden", "num_heads", "group_size"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"model.{name} must be at least 1: got {getattr(self, name)}. Raise it."
                )
        if self.d_expert is not None and self.d_expert < 1:
            raise UserError(f"model.d_expert must be at least 1: got {self.d_expert}. Raise it.")
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
            group_size=self.group_size,
            activation=_ACTIVATIONS[self.activation],
            gated=self.activation in ("swiglu", "geglu"),
            output_masking=self.output_masking,
            beside=self.beside,
            dropout=self.dropout,
            dtype=jnp.dtype(self.dtype),
            cross_attention=cross_attention,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCache:
    """What decoding remembers, for each pair of layers stacked along Y.

    Attributes:
      own: keys and values of the tokens so far; leaves YBTND with T = max_length. Reorder these by
        parent when beams change places.
      memory: keys and values of the source; leaves YBTND with T = source length.
      source_mask_BT: real source tokens.
      task_B: the language tag of each row; None where it was not given.
    """

    own: tuple[KeyValue, ...]
    memory: tuple[KeyValue, ...]
    source_mask_BT: jax.Array
    task_B: jax.Array | None = None


class Stack(nnx.Module):
    """Pairs of layers with stacked parameters, run by a scan: compile time does not grow with depth."""

    def __init__(self, config: BlockConfig, num_layers: int, *, rngs: nnx.Rngs):
        self.num_pairs = num_layers // 2

        @nnx.split_rngs(splits=self.num_pairs)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def make_pairs(rngs):
            return LayerPair(config, rngs=rngs)

        self.pairs = make_pairs(rngs)
        self.norm = nnx.RMSNorm(config.d_model, dtype=config.dtype, rngs=rngs)

    def __call__(
        self,
        x_BLM: jax.Array,
        view: View,
        caches: PairCache = (None, None),
        key: jax.Array | None = None,
        plan: RoutingPlan | SoftPlan | None = None,
    ) -> tuple[jax.Array, MoEStats | None, PairCache]:
        """The normalised output, MoEStats with leading Y (None if dense), and the caches.

        A `plan` with leading Y replaces the routing of every pair.
        """
        graph, state_Y = nnx.split(self.pairs)
        keys_Y = None if key is None else jax.random.split(key, self.num_pairs)

        def one_pair(x_BLM, pair_inputs):
            state, pair_caches, pair_key, pair_plan = pair_inputs
            pair = nnx.merge(graph, state)
            x_BLM, stats, pair_caches = pair(x_BLM, view, pair_caches, pair_key, pair_plan)
            return x_BLM, (stats, pair_caches)

        x_BLM, (stats_Y, caches) = jax.lax.scan(one_pair, x_BLM, (state_Y, caches, keys_Y, plan))
        return self.norm(x_BLM), stats_Y, caches

    def memory_keys_values(self, memory_BTM: jax.Array) -> tuple[KeyValue, KeyValue]:
        """The cross-attention's keys and values of both layers of every pair; leaves YBTND."""
        graph, state_Y = nnx.split(self.pairs)

        def one_pair(state):
            pair = nnx.merge(graph, state)
            layers = (pair.dense, pair.sparse)
            return tuple(layer.cross.keys_values(memory_BTM) for layer in layers)

        return jax.lax.map(one_pair, state_Y)


class Transformer(nnx.Module):
    """Maps source tokens and the target so far to logits of the next target token.

    Pre-norm (RMS), no biases. Rows may be packed: tokens see only tokens of their own segment.

    Source: Vaswani et al. 2017 (arXiv:1706.03762) as modified by Lepikhin et al. 2020
    (arXiv:2006.16668), section 3; ours normalises before each sub-layer and has no absolute positions.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.d_model**-0.5)
        shape = (config.vocab_size, config.d_model)
        self.embedding_VM = param(init(rngs.params(), shape), "vocabulary", "model")
        if not config.tied_embeddings:
            self.output_VM = param(init(rngs.params(), shape), "vocabulary", "model")
        encoder, decoder = (config.block(cross_attention=cross) for cross in (False, True))
        self.encoder = Stack(encoder, config.num_encoder_layers, rngs=rngs)
        self.decoder = Stack(decoder, config.num_decoder_layers, rngs=rngs)
        if config.positions == "relative":
            self.encoder_bias = RelativeBias(config.num_heads, bidirectional=True, rngs=rngs)
            self.decoder_bias = RelativeBias(config.num_heads, bidirectional=False, rngs=rngs)

    def __call__(
        self,
        *,
        source_BL: jax.Array,
        source_segments_BL: jax.Array,
        source_positions_BL: jax.Array,
        target_in_BL: jax.Array,
        target_segments_BL: jax.Array,
        target_positions_BL: jax.Array,
        key: jax.Array | None = None,
        plans: Plans | None = None,
    ) -> tuple[jax.Array, Stats]:
        """Teacher-forced logits.

        Args:
          source_BL: source token ids; its L may differ from the target's.
          source_segments_BL: which sentence of the row a token belongs to, from 1; 0 is padding.
          source_positions_BL: position in the sentence, from 0.
          target_in_BL: target ids shifted right: the decoder's input.
          target_segments_BL: as for the source; a target sees the source of its own segment.
          target_positions_BL: as for the source.
          key: randomness of training; None is deterministic, dropless evaluation.
          plans: routing to follow in place of the routers', for the stacks that it names. After
            `set_attributes(capture_plan=True)` a call's statistics hold its own.

        Returns:
          logits_BLV in float32, and the expert load of both stacks (empty for a dense model).
        """
        encoder_key, decoder_key = (None, None) if key is None else jax.random.split(key)
        plans = plans or {}
        memory_BTM, encoder_stats = self.encode(
            source_BL,
            source_segments_BL,
            source_positions_BL,
            key=encoder_key,
            plan=plans.get("encoder"),
        )
        length = target_in_BL.shape[1]
        causal_LT = jnp.tril(jnp.ones((length, length), bool))
        view = View(
            mask_BLT=_same_segment(target_segments_BL, target_segments_BL) & causal_LT,
            token_mask_BL=target_segments_BL > 0,
            token_BL=target_in_BL,
            task_BL=_tags(source_BL, source_segments_BL, target_segments_BL),
            memory_BTM=memory_BTM,
            memory_mask_BLT=_same_segment(target_segments_BL, source_segments_BL),
            **self._positions("decoder", target_positions_BL, target_positions_BL),
        )
        x_BLM, keys = self._embed(target_in_BL, decoder_key)
        x_BLM, decoder_stats, _ = self.decoder(x_BLM, view, key=keys, plan=plans.get("decoder"))
        return self._logits(x_BLM), encoder_stats | _stats("decoder", decoder_stats)

    def encode(
        self,
        source_BL: jax.Array,
        source_segments_BL: jax.Array,
        source_positions_BL: jax.Array,
        *,
        key: jax.Array | None = None,
        plan: RoutingPlan | SoftPlan | None = None,
    ) -> tuple[jax.Array, Stats]:
        """The encoder's output, memory_BTM, and its expert load; arguments as in `__call__`."""
        view = View(
            mask_BLT=_same_segment(source_segments_BL, source_segments_BL),
            token_mask_BL=source_segments_BL > 0,
            token_BL=source_BL,
            task_BL=_tags(source_BL, source_segments_BL, source_segments_BL),
            **self._positions("encoder", source_positions_BL, source_positions_BL),
        )
        x_BLM, key = self._embed(source_BL, key)
        memory_BTM, stats, _ = self.encoder(x_BLM, view, key=key, plan=plan)
        return memory_BTM, _stats("encoder", stats)

    def start_decoding(
        self,
        memory_BTM: jax.Array,
        source_segments_BT: jax.Array,
        *,
        max_length: int,
        source_BT: jax.Array | None = None,
    ) -> DecodeCache:
        """An empty cache for `max_length` target tokens, with the memory's keys and values in it.

        Task routing in the decoder needs the source tokens, one sentence a row, for their tags.
        """
        memory = self.decoder.memory_keys_values(memory_BTM)
        c = self.config
        shape = (self.decoder.num_pairs, len(memory_BTM), max_length, c.num_heads, c.head_width)
        empty = jnp.zeros(shape, memory_BTM.dtype)
        own = (KeyValue(empty, empty), KeyValue(empty, empty))
        return DecodeCache(
            own=own,
            memory=memory,
            source_mask_BT=source_segments_BT > 0,
            task_B=None if source_BT is None else source_BT[:, 0],
        )

    def decode_step(
        self, token_B: jax.Array, step: jax.Array, cache: DecodeCache
    ) -> tuple[jax.Array, DecodeCache]:
        """Logits of the token after `token_B`, which stands at position `step` of every row.

        Args:
          token_B: the newest token ids; the beginning-of-sentence id at step 0.
          step: int32 scalar below the cache's max_length.
          cache: as `start_decoding` or the last step left it.

        Returns:
          logits_BV in float32 and the cache with this token in it.
        """
        batch, max_length = len(token_B), cache.own[0].key_BTND.shape[2]
        positions_BT = jnp.broadcast_to(jnp.arange(max_length), (batch, max_length))
        view = View(
            mask_BLT=(positions_BT <= step)[:, None],
            token_BL=token_B[:, None],
            task_BL=None if cache.task_B is None else cache.task_B[:, None],
            memory_mask_BLT=cache.source_mask_BT[:, None],
            step=step,
            **self._positions("decoder", jnp.full((batch, 1), step), positions_BT),
        )
        caches: PairCache = tuple(
            LayerCache(own=own, memory=memory)
            for own, memory in zip(cache.own, cache.memory, strict=True)
        )
        x_BLM, _ = self._embed(token_B[:, None], None)
        x_BLM, _, caches = self.decoder(x_BLM, view, caches)
        own = tuple(layer.own for layer in caches if layer is not None)
        return self._logits(x_BLM)[:, 0], dataclasses.replace(cache, own=own)

    def _embed(self, tokens_BL, key) -> tuple[jax.Array, jax.Array | None]:
        """Embedded tokens of unit variance, and the key that is left."""
        key, dropout_key = (None, None) if key is None else jax.random.split(key)
        x_BLM = self.embedding_VM[...][tokens_BL] * self.config.d_model**0.5
        x_BLM = constrain(x_BLM.astype(self.config.dtype), "batch", None, None)
        return dropout(x_BLM, self.config.dropout, dropout_key), key

    def _logits(self, x_BLM) -> jax.Array:
        kernel_VM = self.embedding_VM if self.config.tied_embeddings else self.output_VM
        logits_BLV = jnp.einsum(
            "BLM,VM->BLV",
            x_BLM,
            kernel_VM[...].astype(x_BLM.dtype),
            preferred_element_type=jnp.float32,
        )
        return constrain(logits_BLV, "batch", None, "vocabulary")

    def _positions(self, stack: str, query_positions_BL, key_positions_BT) -> dict[str, jax.Array]:
        """The positional fields of a `View`."""
        if self.config.positions == "rotary":
            return {"rotary_BL": query_positions_BL}
        bias = self.encoder_bias if stack == "encoder" else self.decoder_bias
        return {"bias_BNLT": bias(query_positions_BL, key_positions_BT)}


def _same_segment(query_BL: jax.Array, key_BT: jax.Array) -> jax.Array:
    """mask_BLT: True where both are real tokens of one segment."""
    return (query_BL[:, :, None] == key_BT[:, None, :]) & (key_BT > 0)[:, None, :]


def _tags(source_BT, source_segments_BT, segments_BL) -> jax.Array:
    """task_BL: the first source token of each token's segment, which is its language tag."""
    first_BL = jnp.argmax(segments_BL[:, :, None] == source_segments_BT[:, None, :], axis=-1)
    return jnp.take_along_axis(source_BT, first_BL, axis=1)


def _stats(stack: str, stats: MoEStats | None) -> Stats:
    return {} if stats is None else {stack: stats}
