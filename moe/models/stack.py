"""A stack of layer pairs, encoder or decoder, as one scan or as a pipeline."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from moe.errors import UserError
from moe.layers import MoEStats
from moe.layers.attention import KeyValue
from moe.layers.block import BlockConfig, LayerPair, PairCache, View
from moe.layers.dispatch import EXCHANGE
from moe.models.config import Remat
from moe.routing import RoutingPlan, SoftPlan
from moe.sharding import from_microbatches, gathered, num_shards, pipeline, to_microbatches
from moe.sharding.pipeline import all_computed

Policy = Callable[..., bool]


def _products_with(num_batch_dims: int) -> Policy:
    """Keeps products of at most so many batch dimensions; those with a dense layer's weights have 0."""

    def policy(primitive, *_, **params) -> bool:
        if primitive is not jax.lax.dot_general_p:
            return False
        _, (batch_dims, _) = params["dimension_numbers"]
        return len(batch_dims) <= num_batch_dims

    return policy


_POLICIES: dict[Remat, Policy | None] = {
    "none": None,
    "exchange": jax.checkpoint_policies.save_only_these_names(EXCHANGE),
    "dots": _products_with(0),
    "full": jax.checkpoint_policies.nothing_saveable,
}
# In a pipeline every product has a dimension of stages, and a stage is what is computed again.
_STAGE_POLICIES = _POLICIES | {"none": all_computed, "dots": _products_with(1)}

_NO_PLANS = (
    "model.num_microbatches must be 1 where plans are captured or forced: got {}. Make the same model "
    "with num_microbatches=1; its parameters are the same."
)


class Stack(nnx.Module):
    """Pairs of layers with stacked parameters, run by a scan: compile time does not grow with depth."""

    def __init__(
        self,
        config: BlockConfig,
        num_layers: int,
        *,
        remat: Remat = "none",
        num_microbatches: int = 1,
        pipeline_rounds: int = 1,
        rngs: nnx.Rngs,
    ):
        self.num_pairs = num_layers // 2
        self.remat = remat
        self.num_microbatches = num_microbatches
        self.pipeline_rounds = pipeline_rounds

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

        A `plan` with leading Y replaces the routing of every pair. Micro-batches go through the
        pipeline, unless this is a step of decoding, or an evaluation whose rows they do not divide.

        Raises:
          UserError: rows that the micro-batches do not divide in training, or a plan for them.
        """
        graph, state_Y = nnx.split(self.pairs)
        keys_Y = None if key is None else jax.random.split(key, self.num_pairs)

        def one_pair(x_BLM, pair_inputs, view):
            state, pair_caches, pair_key, pair_plan = pair_inputs
            pair = nnx.merge(graph, gathered(state))
            x_BLM, stats, pair_caches = pair(x_BLM, view, pair_caches, pair_key, pair_plan)
            return x_BLM, (stats, pair_caches)

        if self._is_pipelined(len(x_BLM), view, key):
            if plan is not None:
                raise UserError(_NO_PLANS.format(self.num_microbatches))
            x_BLM, stats_Y = self._pipelined(one_pair, x_BLM, (state_Y, keys_Y), view)
        else:
            policy = _POLICIES[self.remat]
            if policy is not None:
                # Within a scan the compiler cannot merge the second computation with the first.
                one_pair = jax.checkpoint(one_pair, policy=policy, prevent_cse=False)
            x_BLM, (stats_Y, caches) = jax.lax.scan(
                lambda x_BLM, inputs: one_pair(x_BLM, inputs, view),
                x_BLM,
                (state_Y, caches, keys_Y, plan),
            )
        return self.norm(x_BLM), stats_Y, caches

    def _is_pipelined(self, num_rows: int, view: View, key: jax.Array | None) -> bool:
        if self.num_microbatches == 1 or view.step is not None:
            return False
        num_parts = self.num_microbatches * num_shards("batch")
        if num_rows % num_parts == 0:
            return True
        if key is None:
            return False
        raise UserError(
            f"the rows of a batch must divide by model.num_microbatches x devices along the batch: got "
            f"{num_rows} rows for {self.num_microbatches} x {num_shards('batch')}. Change one of them."
        )

    def _pipelined(
        self, one_pair: Callable, x_BLM: jax.Array, pairs_Y: tuple, view: View
    ) -> tuple[jax.Array, MoEStats | None]:
        """As the scan over pairs, for micro-batches; noise is drawn by pair and micro-batch."""
        num_parts = self.num_microbatches
        x, view = jax.tree.map(lambda rows: to_microbatches(rows, num_parts), (x_BLM, view))

        def layer(pair, x_BLM, beside):
            (state, key), (view, number) = pair, beside
            key = None if key is None else jax.random.fold_in(key, number)
            x_BLM, (stats, _) = one_pair(x_BLM, (state, (None, None), key, None), view)
            if stats is not None and stats.plan is not None:
                raise UserError(_NO_PLANS.format(num_parts))
            return x_BLM, stats

        x, stats = pipeline(
            layer,
            pairs_Y,
            x,
            (view, jnp.arange(num_parts)),
            num_stages=num_shards("layers"),
            num_rounds=self.pipeline_rounds,
            policy=_STAGE_POLICIES[self.remat],
        )
        return from_microbatches(x), None if stats is None else stats.over_microbatches()

    def memory_keys_values(self, memory_BTM: jax.Array) -> tuple[KeyValue, KeyValue]:
        """The cross-attention's keys and values of both layers of every pair; leaves YBTND."""
        graph, state_Y = nnx.split(self.pairs)

        def one_pair(state):
            pair = nnx.merge(graph, state)
            layers = (pair.dense, pair.sparse)
            return tuple(layer.cross.keys_values(memory_BTM) for layer in layers)

        return jax.lax.map(one_pair, state_Y)
