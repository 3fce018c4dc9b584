"""A stack of layer pairs, encoder or decoder, as one scan."""

from __future__ import annotations

import jax
from flax import nnx

from moe.layers import MoEStats
from moe.layers.attention import KeyValue
from moe.layers.block import BlockConfig, LayerPair, PairCache, View
from moe.routing import RoutingPlan, SoftPlan


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
