"""Switch routing: one expert a token, and noise on what the router sees."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.routing.plan import RoutingPlan
from moe.routing.token_choice import Queueing
from moe.routing.top_k import top_k


def top1(
    logits_GSE: jax.Array,
    *,
    capacity: int,
    token_mask_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Sends each token to its most probable expert, weighted by that probability.

    The gate is not normalised: it would always be 1, and the router would learn from the losses
    alone. (`renormalize_after_drop` makes it so.) Arguments and errors are those of `top_k`.

    Returns:
      The plan, K = 1.

    Source: Fedus et al. 2021, Switch Transformers (arXiv:2101.03961), section 2.1.
    """
    return top_k(
        logits_GSE,
        num_choices=1,
        gates="softmax_then_top_k",
        capacity=capacity,
        token_mask_GS=token_mask_GS,
        **queueing,
    )


def jittered(x_GSM: jax.Array, jitter: float, *, key: jax.Array | None = None) -> jax.Array:
    """Tokens times noise, for the router alone: the experts get `x_GSM`.

    Args:
      x_GSM: tokens of any float type.
      jitter: each number is multiplied by its own draw from [1 - jitter, 1 + jitter); in [0, 1).
      key: of the draws; not read where `jitter` is 0.

    Returns:
      x_GSM in float32, so that bfloat16 does not round the noise away; as it was where `jitter` is 0.

    Raises:
      UserError: `jitter` outside [0, 1), or positive without a key.

    Source: Fedus et al. 2021 (arXiv:2101.03961), section 2.4: "input jitter", 1e-2 there.
    """
    check_jitter(jitter)
    if jitter == 0:
        return x_GSM
    if key is None:
        raise UserError(
            f"key must be given for jitter: got jitter={jitter}, key=None. "
            "Pass a key in training, or jitter=0 in evaluation."
        )
    noise_GSM = jax.random.uniform(key, x_GSM.shape, minval=1 - jitter, maxval=1 + jitter)
    return x_GSM.astype(jnp.float32) * noise_GSM


def check_jitter(jitter: float) -> None:
    """Raises a UserError unless `jitter` is in [0, 1)."""
    if not 0 <= jitter < 1:
        raise UserError(
            f"jitter must be in [0, 1): got {jitter}. 0 is none; Switch Transformers use 0.01."
        )
