"""What every router refuses, in the sentences that say how to mend it."""

from __future__ import annotations

from typing import get_args

import jax

from moe.errors import UserError


def check_router_inputs(
    logits_GSE: jax.Array,
    *,
    capacity: int,
    num_choices: int,
    **per_token: jax.Array | None,
) -> None:
    """Raises a UserError for what no token-choice router can use; `per_token` are (G, S) arrays."""
    if logits_GSE.ndim != 3 or logits_GSE.shape[-1] < 2:
        raise UserError(
            f"logits_GSE must be (groups, tokens, experts) with at least 2 experts: "
            f"got shape {logits_GSE.shape}. Reshape it or add experts."
        )
    num_experts = logits_GSE.shape[-1]
    if not 1 <= num_choices <= num_experts:
        raise UserError(
            f"num_choices must be in [1, num_experts]: got num_choices={num_choices}, "
            f"num_experts={num_experts}. Lower num_choices or add experts."
        )
    if capacity < 1:
        raise UserError(f"capacity must be at least 1: got {capacity}. Use expert_capacity().")
    for name, array in per_token.items():
        if array is not None and array.shape != logits_GSE.shape[:2]:
            raise UserError(
                f"{name} must have the shape (G, S) of the logits: got {array.shape}, "
                f"logits_GSE has {logits_GSE.shape}. Group it as the tokens are grouped."
            )


def check_choice(name: str, value: str, literal) -> None:
    """Raises a UserError unless `value` is one of a Literal's strings."""
    if value not in get_args(literal):
        raise UserError(
            f"{name} must be one of {get_args(literal)}: got {value!r}. Choose one of them."
        )
