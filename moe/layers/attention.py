"""Multi-head attention over keys and values that may come from elsewhere: memory or a cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from moe.layers.positions import rotate
from moe.sharding import param


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValue:
    """What attention reads: key_BTND and value_BTND."""

    key_BTND: jax.Array
    value_BTND: jax.Array

    def write(self, new: KeyValue, position: jax.Array) -> KeyValue:
        """A cache with `new` (one or more tokens) put at `position` along T, the same in all rows."""

        def put(cache_BTND, new_BTND):
            return jax.lax.dynamic_update_slice_in_dim(cache_BTND, new_BTND, position, axis=1)

        return jax.tree.map(put, self, new)


class Attention(nnx.Module):
    """Scaled dot-product attention with N heads of width D; no biases."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_head: int,
        *,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

        def inward():
            kernel = init(rngs.params(), (d_model, num_heads * d_head))
            return param(kernel.reshape(d_model, num_heads, d_head), "model", "heads", None)

        self.wq_MND, self.wk_MND, self.wv_MND = inward(), inward(), inward()
        wo = init(rngs.params(), (num_heads * d_head, d_model))
        self.wo_NDM = param(wo.reshape(num_heads, d_head, d_model), "heads", None, "model")
        self.dtype = dtype

    def keys_values(self, x_BTM: jax.Array, rotary_BT: jax.Array | None = None) -> KeyValue:
        """Projects the tokens that will be attended to; `rotary_BT` are their positions, if used."""
        key_BTND = jnp.einsum("BTM,MND->BTND", x_BTM, self._weight(self.wk_MND))
        value_BTND = jnp.einsum("BTM,MND->BTND", x_BTM, self._weight(self.wv_MND))
        return KeyValue(key_BTND if rotary_BT is None else rotate(key_BTND, rotary_BT), value_BTND)

    def __call__(
        self,
        x_BLM: jax.Array,
        memory: KeyValue,
        mask_BLT: jax.Array,
        *,
        bias_BNLT: jax.Array | None = None,
        rotary_BL: jax.Array | None = None,
    ) -> jax.Array:
        """y_BLM: for each token of x the mean of the values it may see, weighted by softmax."""
        query_BLND = jnp.einsum("BLM,MND->BLND", x_BLM, self._weight(self.wq_MND))
        if rotary_BL is not None:
            query_BLND = rotate(query_BLND, rotary_BL)
        if bias_BNLT is not None:
            bias_BNLT = bias_BNLT.astype(query_BLND.dtype)
        mean_BLND = jax.nn.dot_product_attention(
            query_BLND, memory.key_BTND, memory.value_BTND, bias=bias_BNLT, mask=mask_BLT[:, None]
        )
        return jnp.einsum("BLND,NDM->BLM", mean_BLND, self._weight(self.wo_NDM))

    def _weight(self, kernel: nnx.Param) -> jax.Array:
        return kernel[...] if self.dtype is None else kernel[...].astype(self.dtype)
