"""Where a token stands: rotary angles, or a learned bias by relative distance."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from moe.sharding import param


def rotate(x_BLND: jax.Array, positions_BL: jax.Array) -> jax.Array:
    """Rotary positions: turns each pair of head dimensions by an angle proportional to the position.

    The product of a rotated query and key then depends on their distance only. D must be even;
    angles are computed in float32.

    Source: Su et al. 2021 (arXiv:2104.09864), equation 34; the pairs are (d, d + D/2).
    """
    half = x_BLND.shape[-1] // 2
    frequency_D = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BL1D = positions_BL[..., None, None].astype(jnp.float32) * frequency_D
    sin, cos = jnp.sin(angle_BL1D), jnp.cos(angle_BL1D)
    first, second = jnp.split(x_BLND.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLND.dtype)


class RelativeBias(nnx.Module):
    """A learned attention bias for each head and bucket of relative distance, shared by a stack.

    Half of the buckets hold exact distances, the rest grow logarithmically up to `max_distance`.

    Source: Raffel et al. 2020, T5 (arXiv:1910.10683), section 2.1.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        bidirectional: bool,
        num_buckets: int = 32,
        max_distance: int = 128,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(0.02)
        self.table_bucket_N = param(init(rngs.params(), (num_buckets, num_heads)), None, "heads")
        self.bidirectional = bidirectional
        self.num_buckets = num_buckets
        self.max_distance = max_distance

    def __call__(self, query_positions_BL: jax.Array, key_positions_BT: jax.Array) -> jax.Array:
        """bias_BNLT, to be added to the attention logits."""
        distance_BLT = key_positions_BT[:, None, :] - query_positions_BL[:, :, None]
        bias_BLTN = self.table_bucket_N[...][self._bucket(distance_BLT)]
        return jnp.transpose(bias_BLTN, (0, 3, 1, 2))

    def _bucket(self, distance_BLT: jax.Array) -> jax.Array:
        num_buckets = self.num_buckets
        offset_BLT = jnp.zeros_like(distance_BLT)
        if self.bidirectional:
            num_buckets //= 2
            offset_BLT = jnp.where(distance_BLT > 0, num_buckets, 0)
            distance_BLT = jnp.abs(distance_BLT)
        else:
            distance_BLT = jnp.maximum(-distance_BLT, 0)
        exact = num_buckets // 2
        ratio = jnp.log(jnp.maximum(distance_BLT, 1) / exact) / math.log(self.max_distance / exact)
        far = exact + (ratio * (num_buckets - exact)).astype(jnp.int32)
        near = distance_BLT < exact
        return offset_BLT + jnp.where(near, distance_BLT, jnp.minimum(far, num_buckets - 1))
