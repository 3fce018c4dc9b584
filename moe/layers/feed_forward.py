"""The dense feed-forward layer that an MoE layer replaces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from moe.layers.experts import Activation
from moe.sharding import param


class FeedForward(nnx.Module):
    """y = act(x wi) wo, or gated (act(x wg) * (x wi)) wo; the same network as one expert."""

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        activation: Activation = jax.nn.relu,
        gated: bool = False,
        use_bias: bool = False,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

        def hidden_kernel():
            return param(init(rngs.params(), (d_model, d_hidden)), "model", "hidden")

        self.wi_MH = hidden_kernel()
        self.wg_MH = hidden_kernel() if gated else None
        self.wo_HM = param(init(rngs.params(), (d_hidden, d_model)), "hidden", "model")
        self.bi_H = param(jnp.zeros(d_hidden), "hidden") if use_bias else None
        self.bg_H = param(jnp.zeros(d_hidden), "hidden") if use_bias and gated else None
        self.bo_M = param(jnp.zeros(d_model), "model") if use_bias else None
        self.activation = activation
        self.dtype = dtype

    def __call__(self, x_BLM: jax.Array) -> jax.Array:
        """y_BLM."""
        h_BLH = self._linear(x_BLM, self.wi_MH, self.bi_H)
        if self.wg_MH is None:
            h_BLH = self.activation(h_BLH)
        else:
            h_BLH = self.activation(self._linear(x_BLM, self.wg_MH, self.bg_H)) * h_BLH
        return self._linear(h_BLH, self.wo_HM, self.bo_M)

    def _linear(self, x, kernel: nnx.Param, bias: nnx.Param | None) -> jax.Array:
        dtype = self.dtype or kernel[...].dtype
        y = x.astype(dtype) @ kernel[...].astype(dtype)
        return y if bias is None else y + bias[...].astype(dtype)
