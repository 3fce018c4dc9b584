"""The finding that matters most: a layer whose load is uneven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moe.analysis.advice import (
    Finding,
    Settings,
    Severity,
    Thresholds,
    graded,
    now,
    percent,
    raised,
)
from moe.analysis.layers import LayerSummary
from moe.analysis.load import StackLoad


def find_imbalance(
    layer: LayerSummary, load: StackLoad, settings: Settings, thresholds: Thresholds
) -> Iterator[Finding]:
    """At most one finding: a busy expert, dead experts, a collapse, or a load that gets worse."""
    dead, hot = layer.dead(thresholds.dead), layer.max_over_mean
    growth = _growth(layer)
    severity = graded(hot, thresholds.watch_imbalance, thresholds.fix_imbalance)
    if dead:
        severity = "fix"
    if severity is None and not growth >= thresholds.growth:  # nan: unknown
        return
    driver = _driver(layer, load) if hot >= thresholds.watch_imbalance else None
    evidence = [
        _spread(layer) if severity else "",
        f"{driver[1]:.0%} of that expert's excess comes from {driver[0]}." if driver else "",
        _trend(layer, growth, thresholds),
    ]
    yield Finding(
        severity=severity or "watch",
        stack=layer.stack,
        layer=layer.layer,
        title=_title(layer, dead, severity, thresholds),
        evidence=" ".join(filter(None, evidence)),
        cure=_cure(layer, dead, driver, settings, thresholds),
    )


def _spread(layer: LayerSummary) -> str:
    return (
        f"Expert {layer.hottest} takes {percent(layer.share_E[layer.hottest])} of the choices "
        f"instead of {percent(1 / layer.num_experts)}; the load spreads as over "
        f"{layer.effective_experts:.1f} of {layer.num_experts} experts."
    )


def _title(
    layer: LayerSummary, dead: Sequence[int], severity: Severity | None, thresholds: Thresholds
) -> str:
    if layer.collapsed:
        few = max(round(layer.choices_per_token), 1)
        busiest = np.argsort(-layer.share_E)[:few]
        taken = layer.share_E[busiest].sum()
        verb = "receives" if few == 1 else "receive"
        return f"collapsed: {_experts(sorted(busiest))} {verb} {percent(taken)} of all choices"
    if severity is None:
        return "the load grows more uneven"
    hot = f"expert {layer.hottest} receives {layer.max_over_mean:.1f} times its share"
    if not dead:
        return hot
    lost = f"{_experts(dead)} {'is' if len(dead) == 1 else 'are'} dead"
    return f"{hot}; {lost}" if layer.max_over_mean >= thresholds.watch_imbalance else lost


def _cure(
    layer: LayerSummary,
    dead: Sequence[int],
    driver: tuple[str, float] | None,
    settings: Settings,
    thresholds: Thresholds,
) -> str:
    cures = [
        f"{raised('objective.balance_weight', settings.balance_weight, at_zero=0.01)} and train on."
    ]
    if _growth(layer) <= 1 / thresholds.growth:
        cures.insert(0, "Training on may be enough, for it is falling; if not:")
    if layer.collapsed:
        cures.append(
            f"{raised('objective.z_weight', settings.z_weight, at_zero=0.001)} too, and start from an "
            "earlier checkpoint: experts that no token chooses get no gradient."
        )
        return " ".join(cures)
    if driver:
        cures.append(
            f"If {driver[0]} fills most of the training mix, a higher `mixture.temperature`"
            f"{now(settings.temperature)} lets it weigh less."
        )
    if len(dead) * 4 >= layer.num_experts:
        cures.append("If they stay dead, fewer experts (`model.num_experts`) do as well.")
    return " ".join(cures)


def _driver(layer: LayerSummary, load: StackLoad) -> tuple[str, float] | None:
    """The direction that alone causes most of the busiest expert's excess, and its part of it."""
    assigned_RE = load.assigned_RYE[:, layer.layer]
    fair_R = assigned_RE.sum(-1) / layer.num_experts
    excess_R = assigned_RE[:, layer.hottest] - fair_R
    row = int(np.argmax(excess_R))
    part = excess_R[row] / np.maximum(excess_R, 0).sum()
    return (str(load.rows[row]), float(part)) if part > 0.5 and len(load.rows) > 1 else None


def _growth(layer: LayerSummary) -> float:
    if layer.middle_max_over_mean is None or layer.training_max_over_mean is None:
        return 1.0
    return layer.training_max_over_mean / layer.middle_max_over_mean


def _trend(layer: LayerSummary, growth: float, thresholds: Thresholds) -> str:
    if not (growth >= thresholds.growth or growth <= 1 / thresholds.growth):
        return ""
    word = "grew" if growth > 1 else "fell"
    return (
        f"In training the busiest expert {word} from {layer.middle_max_over_mean:.1f} (middle) to "
        f"{layer.training_max_over_mean:.1f} times its share (end)."
    )


def _experts(indices: Sequence[int]) -> str:
    names = [str(index) for index in indices]
    if len(names) > 6:
        return f"{len(names)} experts"
    if len(names) == 1:
        return f"expert {names[0]}"
    return f"experts {', '.join(names[:-1])} and {names[-1]}"
