"""The translation Transformer: encoder and decoder, every other FFN an MoE layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from moe.layers import MoEStats
from moe.layers.attention import KeyValue
from moe.layers.block import LayerCache, PairCache, View, dropout
from moe.layers.positions import RelativeBias
from moe.models.config import TransformerConfig
from moe.models.stack import Stack
from moe.routing import RoutingPlan, SoftPlan
from moe.sharding import constrain, param

Stats = dict[str, MoEStats]
"""Expert load by stack ("encoder", "decoder"), each field led by the dimension Y of MoE layers."""

Plans = dict[str, RoutingPlan | SoftPlan]
"""Routing by stack, each leaf led by the dimension Y; what `MoEStats.plan` holds."""


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


class Transformer(nnx.Module):
    """Maps source tokens and the target so far to logits of the next target token.

    Pre-norm (RMS), no biases. Rows may be packed: tokens see only tokens of their own segment.

    Source: Vaswani et al. 2017 (arXiv:1706.03762) as modified by Lepikhin et al. 2020
    (arXiv:2006.16668), section 3; ours normalises before each sub-layer and has no absolute positions.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.d_model**-0.5)

        def table_VM(num_rows: int) -> nnx.Param:
            return param(init(rngs.params(), (num_rows, config.d_model)), "vocabulary", "model")

        self.embedding_VM = table_VM(config.vocab_size)
        if config.source_vocab_size is not None:
            self.source_embedding_VM = table_VM(config.source_vocab_size)
        if not config.tied_embeddings:
            self.output_VM = table_VM(config.vocab_size)
        encoder, decoder = (config.block(cross_attention=cross) for cross in (False, True))
        names = ("remat", "num_microbatches", "pipeline_rounds")
        running = {name: getattr(config, name) for name in names}
        self.encoder = Stack(encoder, config.num_encoder_layers, **running, rngs=rngs)
        self.decoder = Stack(decoder, config.num_decoder_layers, **running, rngs=rngs)
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
        x_BLM, keys = self._embed(target_in_BL, self.embedding_VM, decoder_key)
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
        shared = self.config.source_vocab_size is None
        table_VM = self.embedding_VM if shared else self.source_embedding_VM
        x_BLM, key = self._embed(source_BL, table_VM, key)
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
        x_BLM, _ = self._embed(token_B[:, None], self.embedding_VM, None)
        x_BLM, _, caches = self.decoder(x_BLM, view, caches)
        own = tuple(layer.own for layer in caches if layer is not None)
        return self._logits(x_BLM)[:, 0], dataclasses.replace(cache, own=own)

    def _embed(self, tokens_BL, table_VM, key) -> tuple[jax.Array, jax.Array | None]:
        """Embedded tokens of unit variance, and the key that is left."""
        key, dropout_key = (None, None) if key is None else jax.random.split(key)
        x_BLM = table_VM[...][tokens_BL] * self.config.d_model**0.5
        x_BLM = constrain(x_BLM.astype(self.config.dtype), "batch", None, None)
        return dropout(x_BLM, self.config.dropout, dropout_key), key

    def _logits(self, x_BLM) -> jax.Array:
        kernel = self.embedding_VM if self.config.tied_embeddings else self.output_VM
        x_BLM, kernel_VM = _gradients_together(x_BLM, kernel[...])
        logits_BLV = jnp.einsum(
            "BLM,VM->BLV",
            x_BLM,
            kernel_VM.astype(x_BLM.dtype),
            preferred_element_type=jnp.float32,
        )
        return constrain(logits_BLV, "batch", None, "vocabulary")

    def _positions(self, stack: str, query_positions_BL, key_positions_BT) -> dict[str, jax.Array]:
        """The positional fields of a `View`."""
        if self.config.positions == "rotary":
            return {"rotary_BL": query_positions_BL}
        bias = self.encoder_bias if stack == "encoder" else self.decoder_bias
        return {"bias_BNLT": bias(query_positions_BL, key_positions_BT)}


@jax.custom_vjp
def _gradients_together(x_BLM: jax.Array, kernel_VM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are; backward, neither gradient is used before both are there.

    Else the TPU compiler leaves the kernel's for later, and keeps the logits through the decoder.
    """
    return x_BLM, kernel_VM


_gradients_together.defvjp(
    lambda x_BLM, kernel_VM: ((x_BLM, kernel_VM), None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)


def _same_segment(query_BL: jax.Array, key_BT: jax.Array) -> jax.Array:
    """mask_BLT: True where both are real tokens of one segment."""
    return (query_BL[:, :, None] == key_BT[:, None, :]) & (key_BT > 0)[:, None, :]


def _tags(source_BT, source_segments_BT, segments_BL) -> jax.Array:
    """task_BL: the first source token of each token's segment, which is its language tag."""
    first_BL = jnp.argmax(segments_BL[:, :, None] == source_segments_BT[:, None, :], axis=-1)
    return jnp.take_along_axis(source_BT, first_BL, axis=1)


def _stats(stack: str, stats: MoEStats | None) -> Stats:
    return {} if stats is None else {stack: stats}
