"""Gated experts as transformers 5 holds them in memory: two arrays for all, not three for each."""

from __future__ import annotations

import numpy as np

from moe.convert.checks import refuse_misshaped, refuse_missing
from moe.convert.families import Convention
from moe.convert.files import Tensors

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def unfuse(tensors: Tensors, convention: Convention) -> Tensors:
    """The same tensors with three arrays for each expert, if they come with two for all.

    Raises:
      UserError: one of the two is missing, or their shapes are not (E, 2H, M) and (E, M, H).
    """
    if not convention.gated or not {GATE_UP, DOWN} & tensors.keys():
        return tensors
    refuse_missing(tensors, (GATE_UP, DOWN))
    gate_up, down = tensors[GATE_UP], tensors[DOWN]
    halves = (len(down), 2 * down.shape[-1], down.shape[1]) if down.ndim == 3 else None
    if gate_up.shape != halves:
        refuse_misshaped({GATE_UP: str(gate_up.shape), DOWN: str(down.shape)})
    rest = {name: value for name, value in tensors.items() if name not in (GATE_UP, DOWN)}
    gate_name, up_name, down_name = _names(convention)
    for e, (both, out) in enumerate(zip(gate_up, down, strict=True)):
        rest[gate_name.format(e=e)], rest[up_name.format(e=e)] = np.split(both, 2)
        rest[down_name.format(e=e)] = out
    return rest


def fuse(tensors: Tensors, convention: Convention, num_experts: int) -> Tensors:
    """The inverse of `unfuse`."""
    rest = dict(tensors)
    gate, up, down = (
        np.stack([rest.pop(name.format(e=e)) for e in range(num_experts)])
        for name in _names(convention)
    )
    return rest | {GATE_UP: np.concatenate([gate, up], axis=1), DOWN: down}


def _names(convention: Convention) -> list[str]:
    return [convention.names[f"experts.{ours}"] for ours in ("wg_EMH", "wi_EMH", "wo_EHM")]
