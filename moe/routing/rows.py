"""Rows of tokens moved to places and back, by gathers in both directions.

The index back-ends differ only in what a place is: a slot of an expert, or a position in the order
sorted by expert. A row r = s * K + k is token s once more for its choice k. `place_GSK` says where each
row goes (Q, one past the end, for nowhere), `row_of_place_GQ` is the inverse (S * K for an empty place).

JAX would differentiate a gather into a scatter-add, which is several times slower on CPU; since both
directions are known, the gradient here is a gather too. Only where a token has far more choices than
there are places (expert choice, K = E) are sums over choices scatter-adds from the places.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def spread(x_GSM: jax.Array, place_GSK: jax.Array, row_of_place_GQ: jax.Array) -> jax.Array:
    """Copies tokens to their places: x_GQM, zero where a place is empty. Reverse mode only."""
    num_choices = place_GSK.shape[-1]
    return _take(x_GSM, row_of_place_GQ // num_choices)


def _spread_forward(x_GSM, place_GSK, row_of_place_GQ):
    return spread(x_GSM, place_GSK, row_of_place_GQ), (place_GSK, row_of_place_GQ)


def _spread_backward(residuals, dx_GQM):
    place_GSK, row_of_place_GQ = residuals
    ones_GQ = jnp.ones(row_of_place_GQ.shape, jnp.float32)
    dx_GSM = _sum_over_choices(dx_GQM, ones_GQ, place_GSK, row_of_place_GQ)
    return dx_GSM.astype(dx_GQM.dtype), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(
    y_GQM: jax.Array, gate_GSK: jax.Array, place_GSK: jax.Array, row_of_place_GQ: jax.Array
) -> jax.Array:
    """Adds up what a token's places hold, by its gates: y_GSM in y's type. Reverse mode only.

    Sums in float32. A token without a place gets zeros.
    """
    gate_GQ = _gate_of_place(gate_GSK, row_of_place_GQ)
    return _sum_over_choices(y_GQM, gate_GQ, place_GSK, row_of_place_GQ).astype(y_GQM.dtype)


def _collect_forward(y_GQM, gate_GSK, place_GSK, row_of_place_GQ):
    residuals = (y_GQM, gate_GSK, place_GSK, row_of_place_GQ)
    return collect(*residuals), residuals


def _collect_backward(residuals, dy_GSM):
    y_GQM, gate_GSK, place_GSK, row_of_place_GQ = residuals
    dy_GQM = _take(dy_GSM, row_of_place_GQ // place_GSK.shape[-1]).astype(jnp.float32)
    gate_GQ = _gate_of_place(gate_GSK, row_of_place_GQ)
    # A product, not the sum of one: XLA on CPU takes 3 ms for 8192 rows of 512, for the sum 60.
    dgate_GQ = jnp.vecdot(dy_GQM, y_GQM.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    dgate_GR = _take(dgate_GQ, place_GSK.reshape(len(place_GSK), -1))
    dgate_GSK = dgate_GR.reshape(gate_GSK.shape)
    return (dy_GQM * gate_GQ[..., None]).astype(y_GQM.dtype), dgate_GSK, None, None


collect.defvjp(_collect_forward, _collect_backward)


def invert(place_GSK: jax.Array, num_places: int) -> jax.Array:
    """row_of_place_GQ for given places: the row at each place, S * K where none is."""
    place_GR = place_GSK.reshape(len(place_GSK), -1)
    num_rows = place_GR.shape[1]

    def of_group(place_R):
        empty_Q = jnp.full((num_places,), num_rows, jnp.int32)
        return empty_Q.at[place_R].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")

    return jax.vmap(of_group)(place_GR)


def _sum_over_choices(y_GQM, weight_GQ, place_GSK, row_of_place_GQ) -> jax.Array:
    """sum_k weight * y at the K places of each token: y_GSM, float32."""
    _, group_size, num_choices = place_GSK.shape
    y_GQM = y_GQM.astype(jnp.float32)
    if group_size * num_choices <= 2 * row_of_place_GQ.shape[1]:
        weight_GSK = _take(weight_GQ, place_GSK.reshape(len(place_GSK), -1))
        weight_GSK = weight_GSK.reshape(place_GSK.shape)
        y_GSM = jnp.zeros((), jnp.float32)
        for k in range(num_choices):  # K gathers that fuse into one sum; no tensor of S * K * M
            y_GSM += weight_GSK[..., k, None] * _take(y_GQM, place_GSK[..., k])
        return y_GSM

    def of_group(y_QM, token_Q):
        empty_SM = jnp.zeros((group_size, y_QM.shape[-1]), jnp.float32)
        return empty_SM.at[token_Q].add(y_QM, mode="drop")

    return jax.vmap(of_group)(weight_GQ[..., None] * y_GQM, row_of_place_GQ // num_choices)


def _gate_of_place(gate_GSK, row_of_place_GQ) -> jax.Array:
    return _take(gate_GSK.reshape(len(gate_GSK), -1), row_of_place_GQ)


def _take(x_GR, index_GQ) -> jax.Array:
    """x[g, index[g, q]] along the second dimension; zero where the index is past the end."""
    # One gather a group, not one over all: the partitioner then sees that groups never mix.
    return jax.vmap(lambda x_R, index_Q: x_R.at[index_Q].get(mode="fill", fill_value=0))(
        x_GR, index_GQ
    )
