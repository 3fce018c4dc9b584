"""A Transformer layer, and the pair (dense FFN, MoE FFN) that a stack repeats."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from moe.layers.attention import Attention, KeyValue
from moe.layers.dispatch import Dispatch
from moe.layers.experts import Activation
from moe.layers.feed_forward import FeedForward
from moe.layers.moe import MoE, MoEStats
from moe.layers.routers import Rule
from moe.layers.shared import ConditionalMoE, ResidualMoE, SharedExperts
from moe.routing import RoutingPlan, SoftPlan
from moe.sharding import constrain

Beside = Literal["none", "shared", "residual", "conditional"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What one pair of layers is made of; `TransformerConfig` explains the fields."""

    d_model: int
    d_hidden: int
    d_expert: int
    num_heads: int
    d_head: int
    num_experts: int
    router: Rule
    dispatch: Dispatch
    exchange_chunks: int
    group_size: int
    activation: Activation
    gated: bool
    output_masking: float
    beside: Beside
    dropout: float
    dtype: jnp.dtype
    cross_attention: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """What the tokens of a stack may see, the same for all its layers.

    Attributes:
      mask_BLT: True where a token sees a token of its own sequence.
      token_mask_BL: real tokens.
      token_BL: token ids, which hash routing looks at.
      task_BL: id of the language tag of each token's sentence, which task routing looks at.
      rotary_BL: positions, for rotary attention.
      bias_BNLT: relative position bias, for relative attention.
      memory_BTM: encoder output; not needed where its keys and values are cached.
      memory_mask_BLT: True where a token sees a token of the memory.
      step: scalar, the position that the one token of x is written to in the cache.
    """

    mask_BLT: jax.Array
    token_mask_BL: jax.Array | None = None
    token_BL: jax.Array | None = None
    task_BL: jax.Array | None = None
    rotary_BL: jax.Array | None = None
    bias_BNLT: jax.Array | None = None
    memory_BTM: jax.Array | None = None
    memory_mask_BLT: jax.Array | None = None
    step: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Keys and values of one decoder layer: of the tokens so far, and of the memory."""

    own: KeyValue
    memory: KeyValue


PairCache = tuple[LayerCache | None, ...]


class Layer(nnx.Module):
    """Pre-norm residual layer: self-attention, cross-attention in a decoder, feed-forward."""

    def __init__(self, config: BlockConfig, *, sparse: bool, rngs: nnx.Rngs):
        c = config

        def norm():
            return nnx.RMSNorm(c.d_model, dtype=c.dtype, rngs=rngs)

        def attention():
            return Attention(c.d_model, c.num_heads, c.d_head, dtype=c.dtype, rngs=rngs)

        self.attention_norm, self.attention = norm(), attention()
        if c.cross_attention:
            self.cross_norm, self.cross = norm(), attention()
        self.has_cross = c.cross_attention
        self.ffn_norm = norm()
        # Where a dense model stands in for a sparse one, twice the width: the FLOPs of two experts.
        width = 2 * c.d_expert if sparse else c.d_hidden
        has_experts = sparse and c.num_experts > 0
        self.ffn = _experts(c, rngs=rngs) if has_experts else _feed_forward(c, width, rngs=rngs)
        self.ids = c.router.ids
        self.dropout = c.dropout

    def __call__(
        self,
        x_BLM: jax.Array,
        view: View,
        cache: LayerCache | None,
        key: jax.Array | None,
        plan: RoutingPlan | SoftPlan | None = None,
    ) -> tuple[jax.Array, MoEStats | None, LayerCache | None]:
        """The layer's output, the load of its experts if it has any, and the cache with x added.

        A `plan` replaces the routing of the experts.
        """
        keys = (None,) * 4 if key is None else tuple(jax.random.split(key, 4))

        h_BLM = self.attention_norm(x_BLM)
        own = self.attention.keys_values(h_BLM, view.rotary_BL)
        if cache is not None and view.step is not None:
            own = cache.own.write(own, view.step)
            cache = dataclasses.replace(cache, own=own)
        y_BLM = self.attention(
            h_BLM, own, view.mask_BLT, bias_BNLT=view.bias_BNLT, rotary_BL=view.rotary_BL
        )
        x_BLM = x_BLM + dropout(y_BLM, self.dropout, keys[0])

        if self.has_cross:
            memory = cache.memory if cache is not None else self.cross.keys_values(view.memory_BTM)
            y_BLM = self.cross(self.cross_norm(x_BLM), memory, view.memory_mask_BLT)
            x_BLM = x_BLM + dropout(y_BLM, self.dropout, keys[1])

        y_BLM, stats = self._feed_forward(self.ffn_norm(x_BLM), view, keys[2], plan)
        x_BLM = x_BLM + dropout(y_BLM, self.dropout, keys[3])
        return constrain(x_BLM, "batch", None, None), stats, cache

    def _feed_forward(self, x_BLM, view: View, key, plan) -> tuple[jax.Array, MoEStats | None]:
        if isinstance(self.ffn, FeedForward):
            return self.ffn(x_BLM), None
        ids_BL = {"token": view.token_BL, "task": view.task_BL, None: None}[self.ids]
        return self.ffn(x_BLM, view.token_mask_BL, key, ids_BL=ids_BL, plan=plan)


def _feed_forward(c: BlockConfig, width: int, *, rngs: nnx.Rngs) -> FeedForward:
    return FeedForward(
        c.d_model, width, activation=c.activation, gated=c.gated, dtype=c.dtype, rngs=rngs
    )


def _experts(
    c: BlockConfig, *, rngs: nnx.Rngs
) -> MoE | SharedExperts | ResidualMoE | ConditionalMoE:
    """The MoE layer, with a dense FFN of an expert's width beside it where the config says so."""
    layer = MoE(
        c.d_model,
        c.d_expert,
        c.num_experts,
        router=c.router,
        dispatch=c.dispatch,
        exchange_chunks=c.exchange_chunks,
        group_size=c.group_size,
        activation=c.activation,
        gated=c.gated,
        output_masking=c.output_masking,
        causal=c.cross_attention,
        dtype=c.dtype,
        rngs=rngs,
    )
    if c.beside == "none":
        return layer
    wrap = {"shared": SharedExperts, "residual": ResidualMoE, "conditional": ConditionalMoE}[
        c.beside
    ]
    return wrap(layer, _feed_forward(c, c.d_expert, rngs=rngs), rngs=rngs)


class LayerPair(nnx.Module):
    """Two layers, the second with an MoE layer for its FFN: every other FFN is sparse (GShard)."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.dense = Layer(config, sparse=False, rngs=rngs)
        self.sparse = Layer(config, sparse=True, rngs=rngs)

    def __call__(
        self,
        x_BLM: jax.Array,
        view: View,
        caches: PairCache,
        key: jax.Array | None,
        plan: RoutingPlan | SoftPlan | None = None,
    ) -> tuple[jax.Array, MoEStats | None, PairCache]:
        """As `Layer`, for both."""
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        first, second = caches
        x_BLM, _, first = self.dense(x_BLM, view, first, keys[0])
        x_BLM, stats, second = self.sparse(x_BLM, view, second, keys[1], plan)
        return x_BLM, stats, (first, second)


def dropout(x_BLM: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes a share `rate` of x and scales up the rest; the identity without a key."""
    if key is None or rate == 0:
        return x_BLM
    keep_BLM = jax.random.bernoulli(key, 1 - rate, x_BLM.shape)
    return jnp.where(keep_BLM, x_BLM / (1 - rate), 0)
