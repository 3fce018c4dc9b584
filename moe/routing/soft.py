"""Soft MoE: every slot is a weighted mean of all tokens, every token one of all slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.plan import SoftPlan


def soft_moe(logits_GSEC: jax.Array, token_mask_GS: jax.Array | None = None) -> SoftPlan:
    """Turns the affinity of each token and slot into weights of dispatch and combine.

    dispatch = softmax over the real tokens of a group, for each slot; combine = softmax over all
    slots, for each token. Everything is differentiable. Every token sees every other of its group,
    later ones too: not for causal decoders.

    Args:
      logits_GSEC: affinities of any float type; see `soft_logits`.
      token_mask_GS: False for padding, which has no weight in any slot and gets zeros.

    Returns:
      The plan. With equal logits each slot is the mean of the group's tokens.

    Raises:
      UserError: logits that are not (G, S, E, C), fewer than 2 experts, or a mask that is not (G, S).

    Source: Puigcerver et al. 2024 (arXiv:2308.00951), section 2.1. There a group is one image; here
    it is a group of S tokens, whatever sequences they come from.
    """
    _check(logits_GSEC, token_mask_GS)
    if token_mask_GS is None:
        token_mask_GS = jnp.ones(logits_GSEC.shape[:2], bool)
    mask_GS = token_mask_GS.astype(bool)
    mask_GS11 = mask_GS[..., None, None]
    logits_GSEC = jnp.where(mask_GS11, logits_GSEC.astype(jnp.float32), 0)
    # Finite, so that a group of nothing but padding has zeros and not NaN.
    lowest = jnp.finfo(jnp.float32).min
    dispatch_GSEC = jax.nn.softmax(jnp.where(mask_GS11, logits_GSEC, lowest), axis=1)
    combine_GSEC = jax.nn.softmax(logits_GSEC, axis=(2, 3))
    nothing = jnp.zeros((), jnp.float32)
    return SoftPlan(
        dispatch_weight_GSEC=dispatch_GSEC * mask_GS11,
        combine_weight_GSEC=combine_GSEC * mask_GS11,
        token_mask_GS=mask_GS,
        aux_loss=nothing,
        z_loss=nothing,
    )


def soft_logits(
    x_GSM: jax.Array, phi_MEC: jax.Array, scale: jax.Array, token_mask_GS: jax.Array | None = None
) -> jax.Array:
    """logits_GSEC in float32: `scale` times the cosine between a token and a slot's vector.

    The norms keep logits from growing with M, where softmax would become one-hot. A zero vector has
    cosine 0. Padding may hold anything.

    Source: Puigcerver et al. 2024 (arXiv:2308.00951), section 2.3.
    """
    if token_mask_GS is not None:
        x_GSM = jnp.where(token_mask_GS[..., None], x_GSM, 0)
    x_GSM = _unit(x_GSM.astype(jnp.float32), axis=-1)
    phi_MEC = scale * _unit(phi_MEC.astype(jnp.float32), axis=0)
    return jnp.einsum("GSM,MEC->GSEC", x_GSM, phi_MEC, precision=jax.lax.Precision.HIGHEST)


def _unit(x: jax.Array, axis: int) -> jax.Array:
    # Beside an ordinary norm 1e-12 rounds away; it is there for zero, where a root has no gradient.
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=axis, keepdims=True) + 1e-12)


def _check(logits_GSEC, token_mask_GS):
    if logits_GSEC.ndim != 4 or logits_GSEC.shape[2] < 2:
        raise UserError(
            f"logits_GSEC must be (groups, tokens, experts, slots) with at least 2 experts: got shape "
            f"{logits_GSEC.shape}. Reshape it or add experts."
        )
    if token_mask_GS is not None and token_mask_GS.shape != logits_GSEC.shape[:2]:
        raise UserError(
            f"token_mask_GS must have the shape (G, S) of the logits: got {token_mask_GS.shape}, "
            f"logits_GSEC has {logits_GSEC.shape}. Group it as the tokens are grouped."
        )
