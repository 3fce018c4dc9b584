"""One layer in numbers: what the table, the findings, the page and load.json all say of it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from moe.analysis import balance
from moe.analysis.load import StackLoad
from moe.errors import UserError

CAPACITY_FACTORS = (1.0, 1.25, 1.5, 2.0)
RECENT = 0.2
"""The part of the logged steps, the last fifth, that counts as the end of training."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerSummary:
    """The load of one MoE layer over all directions; `training` numbers are its last fifth.

    Attributes:
      stack: "encoder" or "decoder".
      layer: index among the MoE layers of the stack, from 0.
      share_E: fraction of all choices; 1 / E balanced.
      mean_prob_E: mean router probability.
      max_over_mean: 1 balanced, E / K collapsed; also the capacity factor of zero drop.
      effective_experts: E balanced, K collapsed.
      load_entropy: entropy of the load over log E: 1 balanced.
      variation: coefficient of variation: 0 balanced.
      router_entropy: mean entropy of the router over log E: 0 certain, 1 undecided.
      choices_per_token: K.
      choices: how many choices were measured.
      drop_rate: measured in evaluation: 0 when dropless.
      drop_rate_at: predicted by `balance.drop_rate_at` for each of CAPACITY_FACTORS.
      specialisation_bits: mutual information of direction and expert, every direction weighing the
        same; 0 when all directions use the experts alike, at most `max_specialisation_bits`.
      training_drop_rate: in training, with its capacity; None without a history.
      training_share_E: shares in training; None without a history.
      middle_max_over_mean, training_max_over_mean: at two fifths to three fifths of training and in
        its last fifth; None without enough history.
    """

    stack: str
    layer: int
    share_E: np.ndarray
    mean_prob_E: np.ndarray
    max_over_mean: float
    effective_experts: float
    load_entropy: float
    variation: float
    router_entropy: float
    choices_per_token: float
    choices: int
    drop_rate: float
    drop_rate_at: dict[float, float]
    specialisation_bits: float
    max_specialisation_bits: float
    training_drop_rate: float | None = None
    training_share_E: np.ndarray | None = None
    training_max_over_mean: float | None = None
    middle_max_over_mean: float | None = None

    @property
    def name(self) -> str:
        """How people call it: "decoder layer 2"."""
        return f"{self.stack} layer {self.layer}"

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.share_E)

    @property
    def hottest(self) -> int:
        """The busiest expert."""
        return int(np.argmax(self.share_E))

    @property
    def collapsed(self) -> bool:
        """Only about as many experts are in use as one token chooses, out of clearly more."""
        chosen = self.choices_per_token
        return self.num_experts > 2 * chosen and self.effective_experts < 1.5 * chosen

    def dead(self, threshold: float) -> tuple[int, ...]:
        """Experts that receive less than `threshold` times their fair share, 1 / E."""
        return tuple(np.flatnonzero(self.share_E * self.num_experts < threshold).tolist())


def summarise(stack: str, load: StackLoad, history: StackLoad | None) -> list[LayerSummary]:
    """The summary of every layer of a stack.

    Args:
      stack: its name.
      load: evaluation, rows = directions.
      history: training, rows = steps; None when the run has none.

    Raises:
      UserError: the history is of a model of another shape.
    """
    shapes_YE = [x.assigned_RYE.shape[1:] for x in (load, history) if x is not None]
    if shapes_YE[0] != shapes_YE[-1]:
        raise UserError(
            f"load.jsonl must be of the model that is analysed: got {shapes_YE[-1]} layers and "
            f"experts in the {stack}, not {shapes_YE[0]}. Remove the load.jsonl of the other run."
        )
    return [_layer(stack, load, history, layer) for layer in range(load.num_layers)]


def recent(history: StackLoad) -> StackLoad:
    """The last fifth of the logged steps, at least one."""
    return history.select(slice(-math.ceil(len(history.rows) * RECENT), None))


def _layer(stack: str, load: StackLoad, history: StackLoad | None, layer: int) -> LayerSummary:
    total = load.total
    share_E = total.share_RYE[0, layer]
    choices = int(total.assigned_RYE[0, layer].sum())
    load_entropy = float(balance.entropy(share_E))
    directions = int((load.num_tokens_RY[:, layer] > 0).sum())
    return LayerSummary(
        stack=stack,
        layer=layer,
        share_E=share_E,
        mean_prob_E=total.mean_prob_RYE[0, layer],
        max_over_mean=float(balance.max_over_mean(share_E)),
        effective_experts=math.exp(load_entropy),
        load_entropy=load_entropy / math.log(load.num_experts),
        variation=float(balance.variation(share_E)),
        router_entropy=float(total.mean_entropy_RY[0, layer]),
        choices_per_token=choices / max(int(total.num_tokens_RY[0, layer]), 1),
        choices=choices,
        drop_rate=float(total.drop_rate_RY[0, layer]),
        drop_rate_at={
            factor: float(balance.drop_rate_at(share_E, factor)) for factor in CAPACITY_FACTORS
        },
        specialisation_bits=float(np.nan_to_num(np.nanmean(load.divergence_RY[:, layer]))),
        max_specialisation_bits=math.log2(max(min(directions, load.num_experts), 1)),
        **(_training(history, layer) if history is not None else {}),
    )


def _training(history: StackLoad, layer: int) -> dict:
    end = recent(history).total
    share_E = end.share_RYE[0, layer]
    steps = len(history.rows)
    middle = history.select(slice(steps * 2 // 5, max(steps * 3 // 5, 1))).total
    enough = steps >= 10
    return {
        "training_drop_rate": float(end.drop_rate_RY[0, layer]),
        "training_share_E": share_E,
        "training_max_over_mean": float(balance.max_over_mean(share_E)),
        "middle_max_over_mean": (
            float(balance.max_over_mean(middle.share_RYE[0, layer])) if enough else None
        ),
    }
