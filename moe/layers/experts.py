"""The expert FFNs of one layer, stacked."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from moe.sharding import param

Activation = Callable[[jax.Array], jax.Array]


class Experts(nnx.Module):
    """E feed-forward networks, each on its own slots: y = act(x wi) wo, without biases."""

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        *,
        activation: Activation = jax.nn.relu,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        # Each expert is initialised as a network of its own: E is not part of the fan-in.
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
        wi_EMH = init(rngs.params(), (num_experts, d_model, d_hidden))
        wo_EHM = init(rngs.params(), (num_experts, d_hidden, d_model))
        self.wi_EMH = param(wi_EMH, "experts", "model", "hidden")
        self.wo_EHM = param(wo_EHM, "experts", "hidden", "model")
        self.activation = activation
        self.dtype = dtype

    def __call__(self, x_EGCM: jax.Array) -> jax.Array:
        """y_EGCM; an empty (zero) slot stays zero for activations that keep zero."""
        wi_EMH, wo_EHM = self.wi_EMH[...], self.wo_EHM[...]
        if self.dtype is not None:
            wi_EMH, wo_EHM = wi_EMH.astype(self.dtype), wo_EHM.astype(self.dtype)
        h_EGCH = self.activation(jnp.einsum("EGCM,EMH->EGCH", x_EGCM, wi_EMH))
        return jnp.einsum("EGCH,EHM->EGCM", h_EGCH, wo_EHM)
