"""The expert FFNs of one layer, stacked."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from moe.routing import ExpertWeights, grouped_ffn
from moe.sharding import param

Activation = Callable[[jax.Array], jax.Array]


class Experts(nnx.Module):
    """E feed-forward networks: y = act(x wi) wo; gated, y = (act(x wg) * (x wi)) wo (SwiGLU, GEGLU).

    Source of the gated form: Shazeer 2020 (arXiv:2002.05202), equation 6, without biases by default.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        *,
        activation: Activation = jax.nn.relu,
        gated: bool = False,
        use_bias: bool = False,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        # Each expert is initialised as a network of its own: E is not part of the fan-in.
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))

        def hidden_kernel():
            kernel_EMH = init(rngs.params(), (num_experts, d_model, d_hidden))
            return param(kernel_EMH, "experts", "model", "hidden")

        self.wi_EMH = hidden_kernel()
        self.wg_EMH = hidden_kernel() if gated else None
        wo_EHM = init(rngs.params(), (num_experts, d_hidden, d_model))
        self.wo_EHM = param(wo_EHM, "experts", "hidden", "model")
        bias_EH, bias_EM = (jnp.zeros((num_experts, width)) for width in (d_hidden, d_model))
        self.bi_EH = param(bias_EH, "experts", "hidden") if use_bias else None
        self.bg_EH = param(bias_EH, "experts", "hidden") if use_bias and gated else None
        self.bo_EM = param(bias_EM, "experts", "model") if use_bias else None
        self.activation = activation
        self.dtype = dtype

    def __call__(self, x_EGCM: jax.Array) -> jax.Array:
        """y_EGCM: every expert on its slots. Without biases an empty slot stays zero."""
        h_EGCH = self._linear(x_EGCM, self.wi_EMH, self.bi_EH)
        if self.wg_EMH is None:
            h_EGCH = self.activation(h_EGCH)
        else:
            h_EGCH = self.activation(self._linear(x_EGCM, self.wg_EMH, self.bg_EH)) * h_EGCH
        return self._linear(h_EGCH, self.wo_EHM, self.bo_EM)

    def ragged(self, x_RM: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
        """y_RM: expert e on the group_sizes_E[e] rows after those of the experts before it.

        Rows past the last group are zero.
        """
        names = ("wi_EMH", "wo_EHM", "wg_EMH", "bi_EH", "bg_EH", "bo_EM")
        variables = {name: getattr(self, name) for name in names}
        weights = ExpertWeights(**{n: self._cast(v) for n, v in variables.items() if v is not None})
        return grouped_ffn(x_RM, weights, group_sizes_E, activation=self.activation)

    def _linear(self, x, kernel: nnx.Param, bias: nnx.Param | None) -> jax.Array:
        """Every expert's kernel on its slots: EGC? with the kernel's last dimension."""
        y = jnp.einsum("EGCM,EMH->EGCH", x, self._cast(kernel))
        return y if bias is None else y + self._cast(bias)[:, None, None]

    def _cast(self, variable: nnx.Param) -> jax.Array:
        return variable[...] if self.dtype is None else variable[...].astype(self.dtype)
