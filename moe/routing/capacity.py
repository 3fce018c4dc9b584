"""How many slots an expert keeps for each group."""

from __future__ import annotations

import math

from moe.errors import UserError


def expert_capacity(
    num_tokens: int,
    num_experts: int,
    capacity_factor: float,
    *,
    num_choices: int = 2,
    min_capacity: int = 4,
) -> int:
    """Slots per group and expert: room for a balanced load, times `capacity_factor`.

    C = ceil(capacity_factor * S * K / E), at least `min_capacity`, never more than S.

    Args:
      num_tokens: S, tokens in a group, padding included; at least 1.
      num_experts: E, at least 1.
      capacity_factor: 1 holds a perfectly balanced load whatever K is; above 0.
      num_choices: K, experts a token is sent to.
      min_capacity: lower bound, so that tiny groups do not lose tokens to rounding.

    Returns:
      C as a Python integer: `expert_capacity(1024, 512, 1.0)` is 4.

    Raises:
      UserError: a size below 1 or a capacity factor that is not positive.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), section 2.2, whose C = 2S/E is
    `capacity_factor=1, num_choices=2`. V-MoE and MaxText count the same way; Lingvo, Mesh-TensorFlow
    and T5X leave K out, so that their 2.0 is our 1.0.
    """
    sizes = {
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "num_choices": num_choices,
        "min_capacity": min_capacity,
    }
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} must be at least 1: got {size}. Raise it.")
    if not 0 < capacity_factor < math.inf:
        raise UserError(
            f"capacity_factor must be positive and finite: got {capacity_factor}. "
            "1.0 is room for a balanced load."
        )
    # 1.1 * 100 * 2 / 10 is 22.000000000000004 in binary: rounding noise must not buy a slot.
    wanted = math.ceil(capacity_factor * num_tokens * num_choices / num_experts - 1e-9)
    return min(max(wanted, min_capacity), num_tokens)
