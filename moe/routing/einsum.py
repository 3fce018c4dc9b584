"""Dispatch by one-hot einsums: the paper's form and the readable reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe.routing.plan import RoutingPlan, SoftPlan


def einsum_dispatch(plan: RoutingPlan | SoftPlan, x_GSM: jax.Array) -> jax.Array:
    """Copies each kept token into its slots; an empty slot is zero. Returns x_GECM.

    Work and memory are O(G * S * E * C) beside the tokens: use it to read and to compare.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), Algorithm 2.
    """
    # What padding holds must not matter, and 0 * NaN would.
    x_GSM = jnp.where(plan.token_mask_GS[..., None], x_GSM, 0)
    mask_GSEC = plan.dispatch_GSEC().astype(x_GSM.dtype)
    # A copy must stay exact: accelerators multiply float32 in fewer bits unless told otherwise.
    return jnp.einsum("GSEC,GSM->GECM", mask_GSEC, x_GSM, precision=jax.lax.Precision.HIGHEST)


def einsum_combine(plan: RoutingPlan | SoftPlan, y_GECM: jax.Array) -> jax.Array:
    """Adds up each token's expert outputs, weighted by its gates. Returns y_GSM in y's type.

    A token none of whose choices was kept gets zeros. Sums in float32.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), Algorithm 2.
    """
    y_GSM = jnp.einsum(
        "GSEC,GECM->GSM",
        plan.combine_GSEC(),
        y_GECM.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return y_GSM.astype(y_GECM.dtype)
