"""Everything that is known of a run's load, in one value, and its machine-readable form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from moe.analysis.advice import Finding, Settings, Thresholds
from moe.analysis.findings import find_problems
from moe.analysis.layers import RECENT, LayerSummary, recent, summarise
from moe.analysis.load import StackLoad


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadReport:
    """What `moe analyze` found out; `report_html`, `load_table` and `as_json` show it.

    Attributes:
      run: name of the run.
      loads: evaluation, from `collect_load`.
      history: training, from `read_history`; stacks that it lacks have no training numbers.
      step: of the checkpoint that was measured.
      split: which sentences were measured.
      settings: of the run, for the advice.
      thresholds: what counts as a finding.
    """

    run: str
    loads: Mapping[str, StackLoad]
    history: Mapping[str, StackLoad] = dataclasses.field(default_factory=dict)
    step: int | None = None
    split: str = "validation"
    settings: Settings = Settings()
    thresholds: Thresholds = Thresholds()

    @cached_property
    def layers(self) -> list[LayerSummary]:
        """One summary a layer, stack by stack."""
        return [
            layer
            for stack, load in self.loads.items()
            for layer in summarise(stack, load, self.history.get(stack))
        ]

    @cached_property
    def findings(self) -> list[Finding]:
        """What to know, the worst first; empty when there is nothing to say."""
        return find_problems(
            self.layers, self.loads, settings=self.settings, thresholds=self.thresholds
        )

    def verdict(self, layer: LayerSummary) -> str:
        """The worst that was found of a layer: "fix", "watch" or "fine"."""
        found = {finding.severity for finding in self.findings if finding.where == layer.name}
        return next((severity for severity in ("fix", "watch") if severity in found), "fine")

    @property
    def num_tokens(self) -> int:
        """Real tokens measured, of the stack that saw most."""
        return max(int(load.num_tokens_RY[:, 0].sum()) for load in self.loads.values())

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions measured."""
        return next(iter(self.loads.values())).rows

    def as_json(self) -> dict[str, Any]:
        """The contents of load.json: plain lists and numbers, null where there is no number.

        Units as in LayerSummary; entropies of routers are over log E, rates and shares fractions.
        """
        stacks = {
            stack: {
                "num_experts": load.num_experts,
                "layers": [self._layer_json(x) for x in self.layers if x.stack == stack],
            }
            for stack, load in self.loads.items()
        }
        document = {
            "run": self.run,
            "step": self.step,
            "split": self.split,
            "num_tokens": self.num_tokens,
            "directions": self.directions,
            "settings": dataclasses.asdict(self.settings),
            "thresholds": dataclasses.asdict(self.thresholds),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "stacks": stacks,
        }
        return plain(document)

    def _layer_json(self, layer: LayerSummary) -> dict[str, Any]:
        load, index = self.loads[layer.stack], layer.layer
        total = load.total
        numbers = dataclasses.asdict(layer)
        del numbers["stack"]
        return numbers | {
            "verdict": self.verdict(layer),
            "dead_experts": layer.dead(self.thresholds.dead),
            "assigned_E": total.assigned_RYE[0, index],
            "kept_E": total.kept_RYE[0, index],
            "dropped_E": total.assigned_RYE[0, index] - total.kept_RYE[0, index],
            "by_direction": {
                str(direction): {
                    "num_tokens": load.num_tokens_RY[row, index],
                    "assigned_E": load.assigned_RYE[row, index],
                    "mean_prob_E": load.mean_prob_RYE[row, index],
                    "router_entropy": load.mean_entropy_RY[row, index],
                    "divergence_bits": load.divergence_RY[row, index],
                }
                for row, direction in enumerate(load.rows)
            },
            "training": self._training_json(layer),
        }

    def _training_json(self, layer: LayerSummary) -> dict[str, Any] | None:
        history = self.history.get(layer.stack)
        if history is None:
            return None
        end = recent(history)
        return {
            "part_of_steps": RECENT,
            "first_step": end.rows[0],
            "last_step": end.rows[-1],
            "assigned_E": end.total.assigned_RYE[0, layer.layer],
            "kept_E": end.total.kept_RYE[0, layer.layer],
        }


def plain(value: Any) -> Any:
    """Arrays, tuples and numpy numbers as lists and numbers for json; nan becomes None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
