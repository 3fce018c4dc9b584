"""The load of a stack of MoE layers, split by direction or by step of training.

Letters beside the project's key: R row, that is a direction ("en-de") or a training step; Y MoE
layer of the stack, counted from 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from moe.analysis import balance
from moe.errors import UserError

if TYPE_CHECKING:
    from moe.layers import MoEStats


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StackLoad:
    """What the experts of one stack received. Only sums are stored, so rows can be merged exactly.

    Attributes:
      rows: what each row is: a direction or a step.
      assigned_RYE: int64, token choices that asked for an expert.
      kept_RYE: int64, those that found a slot.
      prob_RYE: float64, router probability summed over real tokens.
      entropy_RY: float64, entropy of the router's distribution summed over real tokens, nats.
      num_tokens_RY: int64, real tokens.
    """

    rows: tuple[Any, ...]
    assigned_RYE: np.ndarray
    kept_RYE: np.ndarray
    prob_RYE: np.ndarray
    entropy_RY: np.ndarray
    num_tokens_RY: np.ndarray

    @property
    def num_layers(self) -> int:
        """MoE layers of the stack."""
        return self.assigned_RYE.shape[1]

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return self.assigned_RYE.shape[2]

    @cached_property
    def share_RYE(self) -> np.ndarray:
        """The fraction of a row's choices that each expert received; 1 / E balanced."""
        return balance.shares(self.assigned_RYE)

    @cached_property
    def mean_prob_RYE(self) -> np.ndarray:
        """Router probability averaged over real tokens; sums to 1 over the experts."""
        return self.prob_RYE / self._tokens_or_nan_RY[..., None]

    @cached_property
    def mean_entropy_RY(self) -> np.ndarray:
        """Router entropy over its largest value, log E: 0 certain of one expert, 1 undecided."""
        return self.entropy_RY / self._tokens_or_nan_RY / np.log(self.num_experts)

    @cached_property
    def drop_rate_RY(self) -> np.ndarray:
        """The fraction of choices that found no slot: 0 when dropless."""
        assigned_RY = self.assigned_RYE.sum(-1)
        wanted_RY = np.where(assigned_RY > 0, assigned_RY, np.nan)
        return 1 - self.kept_RYE.sum(-1) / wanted_RY

    @cached_property
    def divergence_RY(self) -> np.ndarray:
        """How unlike the mean of all rows a row's load is, in bits; see `balance.divergence_bits`."""
        return balance.divergence_bits(self.share_RYE.swapaxes(0, 1)).swapaxes(0, 1)

    def merged(self, starts: Sequence[int]) -> StackLoad:
        """Sums neighbouring rows: one new row from each start up to the next, named by its first."""
        sums = {
            field.name: np.add.reduceat(getattr(self, field.name), starts, axis=0)
            for field in dataclasses.fields(self)
            if field.name != "rows"
        }
        return StackLoad(rows=tuple(self.rows[start] for start in starts), **sums)

    def select(self, keep: slice) -> StackLoad:
        """Some neighbouring rows."""
        arrays = {field.name: getattr(self, field.name)[keep] for field in dataclasses.fields(self)}
        return StackLoad(**arrays)

    @cached_property
    def total(self) -> StackLoad:
        """All rows as one."""
        return self.merged([0])

    @property
    def _tokens_or_nan_RY(self) -> np.ndarray:
        return np.where(self.num_tokens_RY > 0, self.num_tokens_RY, np.nan)


def collect_load(batches: Iterable[tuple[object, Mapping[str, MoEStats]]]) -> dict[str, StackLoad]:
    """Adds up the statistics that a model returned, for each stack and direction.

    Args:
      batches: (direction, stats) of each batch; a batch holds one direction, a direction may have
        many batches. `stats` maps a stack ("encoder", "decoder") to statistics whose every field
        has a leading axis of layers, as the models return them.

    Returns:
      Stack name to load, rows in order of first appearance, named by `str(direction)`. Stacks
      without MoE layers are left out.

    Raises:
      UserError: no token at all, or no MoE layer in any of them.
    """
    sums: dict[str, dict[str, list[np.ndarray]]] = {}
    for direction, stats in batches:
        for stack, layer_stats in stats.items():
            rows = sums.setdefault(stack, {})
            batch = _sums(layer_stats)
            known = rows.get(str(direction))
            rows[str(direction)] = (
                [old + new for old, new in zip(known, batch, strict=True)] if known else batch
            )
    loads = {stack: _stacked(rows) for stack, rows in sums.items()}
    if not any(load.num_tokens_RY.sum() or not load.num_layers for load in loads.values()):
        raise UserError(
            "The sentences to analyse must hold at least one token: got none. "
            "Use a split and languages that hold sentences."
        )
    in_order = sorted(loads, key=lambda stack: stack != "encoder")  # a token meets it first
    loads = {stack: loads[stack] for stack in in_order if loads[stack].num_layers}
    if not loads:
        raise UserError(
            f"The model must have MoE layers: got none in {', '.join(sums)}. "
            "Analyse a run that was trained with experts."
        )
    return loads


def _sums(stats: MoEStats) -> list[np.ndarray]:
    """The five sums of one batch, in the order of the fields of StackLoad."""
    tokens_Y = np.asarray(stats.num_tokens, np.int64)
    prob_YE, entropy_Y = summed_over_tokens(stats.mean_prob_E, stats.entropy, tokens_Y)
    assigned_YE, kept_YE = (np.asarray(x, np.int64) for x in (stats.assigned_E, stats.kept_E))
    return [assigned_YE, kept_YE, prob_YE, entropy_Y, tokens_Y]


def summed_over_tokens(
    mean_prob_E: Any, mean_entropy: Any, num_tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Means over real tokens as sums; 0, not nan, where there is no token."""
    weights = num_tokens[..., None]
    prob_E = np.where(weights > 0, np.asarray(mean_prob_E, np.float64) * weights, 0)
    entropy = np.where(num_tokens > 0, np.asarray(mean_entropy, np.float64) * num_tokens, 0)
    return prob_E, entropy


def _stacked(rows: Mapping[str, list[np.ndarray]]) -> StackLoad:
    assigned, kept, prob, entropy, tokens = (np.stack(x) for x in zip(*rows.values(), strict=True))
    return StackLoad(
        rows=tuple(rows),
        assigned_RYE=assigned,
        kept_RYE=kept,
        prob_RYE=prob,
        entropy_RY=entropy,
        num_tokens_RY=tokens,
    )
