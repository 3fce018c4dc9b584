"""A dense FFN beside the routed experts: every token runs it, and the two outputs are joined.

Each layer here wraps an MoE layer and is called like one. Gates are computed in float32. Padding gets
zeros and counts nowhere, whatever it holds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe.errors import UserError
from moe.layers.feed_forward import FeedForward
from moe.layers.moe import MoE, MoEStats
from moe.layers.routers.linear import project
from moe.sharding import param


class _WithFFN(nnx.Module):
    """An MoE layer and an FFN beside it; a subclass says how their outputs are joined."""

    moe: MoE
    ffn: FeedForward

    def __call__(
        self,
        x_BLM: jax.Array,
        token_mask_BL: jax.Array | None = None,
        key: jax.Array | None = None,
        **more,
    ) -> tuple[jax.Array, MoEStats]:
        """As `MoE`, which gets `more`."""
        y_BLM, stats = self.moe(x_BLM, token_mask_BL, key, **more)
        x_BLM = _without_padding(x_BLM, token_mask_BL)
        y_BLM, losses = self._join(x_BLM, y_BLM, token_mask_BL, key)
        y_BLM = _without_padding(y_BLM.astype(x_BLM.dtype), token_mask_BL)
        return y_BLM, dataclasses.replace(stats, **losses)

    def _join(self, x_BLM, y_BLM, token_mask_BL, key) -> tuple[jax.Array, dict[str, Any]]:
        """The output of both, and losses of the joining by their names in `MoEStats`."""
        raise AssertionError("each layer of this file joins in its own way")


class SharedExperts(_WithFFN):
    """y = FFN(x) + MoE(x): what every token needs is learned once, and routed experts specialise.

    Several shared experts are one FFN with their widths added up.
    """

    def __init__(self, moe: MoE, ffn: FeedForward, *, gated: bool = False, rngs: nnx.Rngs):
        """Makes the layer.

        Args:
          moe: the routed experts.
          ffn: the shared ones; any width.
          gated: each token weighs the FFN by sigmoid(x . gate_M1), as in Qwen2-MoE.
          rngs: the stream "params" is read for the gate.

        Source: Dai et al. 2024, DeepSeekMoE (arXiv:2401.06066), section 3.2; the gate is that of
        Qwen2-MoE's published code, there in the type of the tokens.
        """
        self.moe, self.ffn = moe, ffn
        self.gate_M1 = _kernel(ffn, 1, rngs) if gated else None

    def _join(self, x_BLM, y_BLM, token_mask_BL, key) -> tuple[jax.Array, dict[str, Any]]:
        shared_BLM = self.ffn(x_BLM)
        if self.gate_M1 is not None:
            shared_BLM = jax.nn.sigmoid(project(x_BLM, self.gate_M1[...])) * shared_BLM
        return y_BLM + shared_BLM, {}


class ResidualMoE(_WithFFN):
    """y = c1 MoE(x) + c2 FFN(x), (c1, c2) = softmax(x mix_M2 + mix_bias_2): experts correct an FFN."""

    def __init__(self, moe: MoE, ffn: FeedForward, *, rngs: nnx.Rngs):
        """Makes the layer.

        Args:
          moe: the routed experts; the paper uses top-1.
          ffn: the FFN that every token runs.
          rngs: the stream "params" is read for the coefficients, 1/2 each for x = 0.

        Source: Rajbhandari et al. 2022, DeepSpeed-MoE (arXiv:2201.05596), section 4.1, which adds the
        two up; the learned coefficients are those of the published code.
        """
        self.moe, self.ffn = moe, ffn
        self.mix_M2 = _kernel(ffn, 2, rngs)
        self.mix_bias_2 = param(jnp.zeros(2), None)

    def _join(self, x_BLM, y_BLM, token_mask_BL, key) -> tuple[jax.Array, dict[str, Any]]:
        mix_BL2 = jax.nn.softmax(project(x_BLM, self.mix_M2[...]) + self.mix_bias_2[...], axis=-1)
        return mix_BL2[..., :1] * y_BLM + mix_BL2[..., 1:] * self.ffn(x_BLM), {}


class ConditionalMoE(_WithFFN):
    """y = (1 - g) FFN(x) + g MoE(x), g = sigmoid(x gate_M1 + gate_bias_1): tokens choose capacity.

    The budget loss in the statistics keeps g near the share of the experts that is wanted. Both
    branches are computed for every token: this regularises, it saves no time.
    """

    def __init__(
        self,
        moe: MoE,
        ffn: FeedForward,
        *,
        budget: float = 0.8,
        gate_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          moe: the routed experts.
          ffn: the FFN for the rest.
          budget: p, what g should be, in [0, 1].
          gate_dropout: in training (with a key) the share of tokens whose g is 0, in [0, 1); the paper
            trains with 0.2.
          rngs: the stream "params" is read for the gate.

        Raises:
          UserError: a budget or dropout out of range.

        Source: NLLB team 2022 (arXiv:2207.04672), conditional MoE routing. The budget loss is the
        paper's, the mean over real tokens of |g - p|, before any dropout: 0 when every token is at the
        budget, max(p, 1 - p) at worst. The published code takes |mean of g - p| over all layers,
        which half the tokens at 0 can satisfy, and its dropout scales the other gates up, beyond 1.
        """
        if not 0 <= budget <= 1:
            raise UserError(f"budget must be in [0, 1]: got {budget}. 0.8 is the paper's.")
        if not 0 <= gate_dropout < 1:
            raise UserError(f"gate_dropout must be in [0, 1): got {gate_dropout}. Lower it.")
        self.moe, self.ffn = moe, ffn
        self.budget, self.gate_dropout = budget, gate_dropout
        self.gate_M1 = _kernel(ffn, 1, rngs)
        self.gate_bias_1 = param(jnp.zeros(1), None)

    def _join(self, x_BLM, y_BLM, token_mask_BL, key) -> tuple[jax.Array, dict[str, Any]]:
        gate_BL1 = jax.nn.sigmoid(project(x_BLM, self.gate_M1[...]) + self.gate_bias_1[...])
        budget_loss = _mean_over_real(jnp.abs(gate_BL1 - self.budget), token_mask_BL)
        if key is not None and self.gate_dropout > 0:
            dropout_key = jax.random.fold_in(key, 2)  # the MoE layer uses the key itself
            kept_BL1 = jax.random.bernoulli(dropout_key, 1 - self.gate_dropout, gate_BL1.shape)
            gate_BL1 = jnp.where(kept_BL1, gate_BL1, 0)
        y_BLM = (1 - gate_BL1) * self.ffn(x_BLM) + gate_BL1 * y_BLM
        return y_BLM, {"budget_loss": budget_loss}


def _kernel(ffn: FeedForward, width: int, rngs: nnx.Rngs) -> nnx.Param:
    init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    return param(init(rngs.params(), (ffn.wi_MH.shape[0], width)), "model", None)


def _without_padding(x_BLM: jax.Array, token_mask_BL: jax.Array | None) -> jax.Array:
    """Zeros for padding, were it NaN."""
    return x_BLM if token_mask_BL is None else jnp.where(token_mask_BL[..., None], x_BLM, 0)


def _mean_over_real(x_BL1: jax.Array, token_mask_BL: jax.Array | None) -> jax.Array:
    if token_mask_BL is None:
        return jnp.mean(x_BL1)
    num_real = jnp.maximum(jnp.sum(token_mask_BL), 1)
    return jnp.sum(_without_padding(x_BL1, token_mask_BL)) / num_real
