"""The dense feed-forward layer that an MoE layer replaces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from moe.layers.experts import Activation
from moe.sharding import param


class FeedForward(nnx.Module):
    """y = act(x wi) wo, without biases; the same network as one expert."""

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        activation: Activation = jax.nn.relu,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        self.wi_MH = param(init(rngs.params(), (d_model, d_hidden)), "model", "hidden")
        self.wo_HM = param(init(rngs.params(), (d_hidden, d_model)), "hidden", "model")
        self.activation = activation
        self.dtype = dtype

    def __call__(self, x_BLM: jax.Array) -> jax.Array:
        """y_BLM."""
        dtype = self.dtype or self.wi_MH[...].dtype
        h_BLH = self.activation(jnp.einsum("BLM,MH->BLH", x_BLM, self.wi_MH[...].astype(dtype)))
        return jnp.einsum("BLH,HM->BLM", h_BLH, self.wo_HM[...].astype(dtype))
