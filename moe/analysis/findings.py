"""Says in plain words what is wrong with the load of a run and which setting mends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from moe.analysis import balance
from moe.analysis.layers import CAPACITY_FACTORS, LayerSummary
from moe.analysis.load import StackLoad

Severity = Literal["fix", "watch", "note"]
_ORDER: tuple[Severity, ...] = ("fix", "watch", "note")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the run that a finding may advise to change; None is unknown."""

    capacity_factor: float | None = None
    balance_weight: float | None = None
    z_weight: float | None = None
    batch_priority: bool | None = None
    temperature: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """From where on a number is worth a sentence; the page prints them."""

    watch_imbalance: float = 1.5
    """Busiest expert over the mean: worth an eye."""
    fix_imbalance: float = 2.0
    """Busiest expert over the mean: to be mended. Twice the room of a balanced load is the most
    that published systems pay for."""
    dead: float = 0.1
    """An expert below this part of its fair share, 1 / E, is called dead."""
    watch_drop_rate: float = 0.05
    """Fraction of choices dropped at the end of training: worth an eye."""
    fix_drop_rate: float = 0.15
    """The same: to be mended. ST-MoE (arXiv:2202.08906) saw no loss of quality up to 10 to 15 %."""
    growth: float = 0.3
    """Rise of the imbalance between the middle and the end of training: worth an eye."""
    undecided: float = 0.98
    """Router entropy over log E above which the router hardly tells its experts apart."""
    certain: float = 0.05
    """Router entropy over log E below which the second choice of a token hardly counts."""
    specialised_bits: float = 0.1
    """Mutual information of direction and expert that is worth a note."""
    choices_per_expert: int = 100
    """Below so many measured choices for each expert the shares are mostly chance (10 %)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know: where, what, the evidence for it and what to do.

    Attributes:
      severity: "fix" costs quality or speed now, "watch" may, "note" is only worth knowing.
      stack, layer: where to look.
      title: what is the case, half a sentence.
      evidence: the numbers behind it.
      cure: what to change; names of settings stand in backticks.
    """

    severity: Severity
    stack: str
    layer: int
    title: str
    evidence: str
    cure: str

    @property
    def where(self) -> str:
        """The layer as people call it: "decoder layer 2"."""
        return f"{self.stack} layer {self.layer}"


def find_problems(
    layers: Sequence[LayerSummary],
    loads: Mapping[str, StackLoad],
    *,
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    thresholds: Thresholds = Thresholds(),  # noqa: B008  (frozen)
) -> list[Finding]:
    """Everything worth a sentence, the worst first; empty when there is nothing to say."""
    ranked: list[tuple[float, Finding]] = []
    for layer in layers:
        load = loads[layer.stack]
        found = [
            *_balance(layer, load, settings, thresholds),
            *_drops(layer, settings, thresholds),
            *_router(layer, settings, thresholds),
            *_sample(layer, thresholds),
        ]
        ranked += [(layer.max_over_mean, finding) for finding in found]
    ranked += [(0, finding) for finding in _specialisation(layers, loads, thresholds)]
    ranked.sort(key=lambda item: (_ORDER.index(item[1].severity), -item[0]))
    return [finding for _, finding in ranked]


def _balance(
    layer: LayerSummary, load: StackLoad, settings: Settings, thresholds: Thresholds
) -> Iterator[Finding]:
    dead, hot = layer.dead(thresholds.dead), layer.max_over_mean
    growth = _growth(layer)
    severity = _severity(hot, thresholds.watch_imbalance, thresholds.fix_imbalance)
    if dead:
        severity = "fix"
    if severity is None and growth < thresholds.growth:
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
        title=_balance_title(layer, dead, severity, thresholds),
        evidence=" ".join(filter(None, evidence)),
        cure=_balance_cure(layer, dead, driver, settings, thresholds),
    )


def _spread(layer: LayerSummary) -> str:
    return (
        f"Expert {layer.hottest} takes {percent(layer.share_E[layer.hottest])} of the choices "
        f"instead of {percent(1 / layer.num_experts)}; the load spreads as over "
        f"{layer.effective_experts:.1f} of {layer.num_experts} experts."
    )


def _balance_title(
    layer: LayerSummary, dead: Sequence[int], severity: Severity | None, thresholds: Thresholds
) -> str:
    if _collapsed(layer, thresholds):
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


def _balance_cure(
    layer: LayerSummary,
    dead: Sequence[int],
    driver: tuple[str, float] | None,
    settings: Settings,
    thresholds: Thresholds,
) -> str:
    cures = [f"{_raised('balance_weight', settings.balance_weight, at_zero=0.01)} and train on."]
    if _growth(layer) <= -thresholds.growth:
        cures.insert(0, "Training on may be enough, for it is falling; if not:")
    if _collapsed(layer, thresholds):
        cures.append(
            f"{_raised('z_weight', settings.z_weight, at_zero=0.001)} too, and start from an "
            "earlier checkpoint: experts that no token chooses get no gradient."
        )
    elif driver:
        cures.append(
            f"If {driver[0]} fills most of the training mix, a higher `temperature`"
            f"{_now(settings.temperature)} lets it weigh less."
        )
    if dead and not _collapsed(layer, thresholds):
        fewer = layer.num_experts - len(dead)
        cures.append(
            f"Experts that stay dead cost memory only: `num_experts={fewer}` would do as well."
        )
    return " ".join(cures)


def _drops(layer: LayerSummary, settings: Settings, thresholds: Thresholds) -> Iterator[Finding]:
    if layer.drop_rate > 0:
        yield Finding(
            severity="fix",
            stack=layer.stack,
            layer=layer.layer,
            title=f"{percent(layer.drop_rate)} of the choices are dropped in evaluation",
            evidence="A translation then depends on the other sentences of its batch.",
            cure="Leave `router.eval_capacity_factor` at None, which is dropless.",
        )
    rate = layer.training_drop_rate
    if rate is None:
        return
    severity = _severity(rate, thresholds.watch_drop_rate, thresholds.fix_drop_rate)
    if severity is None:
        return
    yield Finding(
        severity=severity,
        stack=layer.stack,
        layer=layer.layer,
        title=f"{percent(rate)} of the choices are dropped in training",
        evidence=f"In its last fifth. {_explained(layer, settings)}",
        cure=_drop_cure(layer, settings, thresholds),
    )


def _explained(layer: LayerSummary, settings: Settings) -> str:
    """How much of the drop rate the mean load explains; the rest is due to single groups."""
    assert layer.training_share_E is not None
    need = f"nothing would be dropped from {layer.training_max_over_mean:.2f} on"
    if settings.capacity_factor is None:
        return f"With the mean load of that time and large groups {need}."
    explained = float(balance.drop_rate_at(layer.training_share_E, settings.capacity_factor))
    return (
        f"The mean load of that time explains {percent(explained)} at a capacity factor of "
        f"{settings.capacity_factor:g} ({need}); what is more comes from groups less even than it."
    )


def _drop_cure(layer: LayerSummary, settings: Settings, thresholds: Thresholds) -> str:
    assert layer.training_share_E is not None and layer.training_max_over_mean is not None
    now = settings.capacity_factor
    rates = {x: float(balance.drop_rate_at(layer.training_share_E, x)) for x in CAPACITY_FACTORS}
    enough = [x for x, rate in rates.items() if rate <= 0.01 and (now is None or x > now)]
    cures = []
    if layer.training_max_over_mean >= thresholds.watch_imbalance:
        cures.append("Balance the layer first.")
    if enough:
        cures.append(
            f"Raise `router.capacity_factor`{_now(now)} to {enough[0]:g}, where the mean load "
            f"alone would drop {percent(rates[enough[0]])}."
        )
    elif not cures:
        cures.append("Raise `group_size`: larger groups are each closer to the mean load.")
    if not settings.batch_priority:
        cures.append(
            "`router.batch_priority=True` makes sure that it hits the tokens the router is least "
            "certain of."
        )
    return " ".join(cures)


def _router(layer: LayerSummary, settings: Settings, thresholds: Thresholds) -> Iterator[Finding]:
    entropy = layer.router_entropy
    if entropy > thresholds.undecided:
        title = "the router hardly tells its experts apart"
        cure = (
            f"Train longer; if it stays, lower `balance_weight`{_now(settings.balance_weight)} "
            f"or `z_weight`{_now(settings.z_weight)}, which both pull towards this."
        )
    elif entropy < thresholds.certain:
        title = "the router is certain of one expert for nearly every token"
        cure = (
            f"{_raised('z_weight', settings.z_weight, at_zero=0.001)}: it keeps the logits small, "
            "so that second experts count and learn."
        )
    else:
        return
    yield Finding(
        severity="watch",
        stack=layer.stack,
        layer=layer.layer,
        title=title,
        evidence=f"Its entropy is {entropy:.2f} of log E (0 certain, 1 undecided).",
        cure=cure,
    )


def _sample(layer: LayerSummary, thresholds: Thresholds) -> Iterator[Finding]:
    per_expert = layer.choices / layer.num_experts
    if per_expert < thresholds.choices_per_expert:
        yield Finding(
            severity="note",
            stack=layer.stack,
            layer=layer.layer,
            title="measured on few tokens",
            evidence=f"{layer.choices} choices are {per_expert:.0f} for each expert: shares are "
            f"uncertain by about {1 / max(per_expert, 1) ** 0.5:.0%} of their value.",
            cure="Analyse more sentences.",
        )


def _specialisation(
    layers: Sequence[LayerSummary], loads: Mapping[str, StackLoad], thresholds: Thresholds
) -> Iterator[Finding]:
    for stack, load in loads.items():
        layer = max((x for x in layers if x.stack == stack), key=lambda x: x.specialisation_bits)
        if layer.specialisation_bits < thresholds.specialised_bits:
            continue
        bits_R = np.nan_to_num(load.divergence_RY[:, layer.layer])
        ratio_RE = load.share_RYE[:, layer.layer] * load.num_experts
        examples = []
        for row in np.argsort(-bits_R)[:3]:
            share_E = load.share_RYE[row, layer.layer]
            expert = int(np.argmax(share_E))
            examples.append(f"{load.rows[row]} puts {share_E[expert]:.0%} on expert {expert}")
        yield Finding(
            severity="note",
            stack=stack,
            layer=layer.layer,
            title="experts specialise by direction",
            evidence=f"The expert tells {layer.specialisation_bits:.2f} of at most "
            f"{layer.max_specialisation_bits:.2f} bits about the direction, more than in any "
            f"other layer of the {stack}: {'; '.join(examples)}.",
            cure="Nothing to fix while batches mix the directions. Batches of one direction "
            f"would need a capacity factor of up to {np.nanmax(ratio_RE):.1f}.",
        )


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
        return 0.0
    return layer.training_max_over_mean - layer.middle_max_over_mean


def _trend(layer: LayerSummary, growth: float, thresholds: Thresholds) -> str:
    if abs(growth) < thresholds.growth:
        return ""
    word = "grew" if growth > 0 else "fell"
    return (
        f"In training the busiest expert {word} from {layer.middle_max_over_mean:.1f} (middle) to "
        f"{layer.training_max_over_mean:.1f} times its share (end)."
    )


def _collapsed(layer: LayerSummary, thresholds: Thresholds) -> bool:
    """Only about as many experts are in use as one token chooses, out of clearly more."""
    chosen = layer.choices_per_token
    return layer.num_experts > 2 * chosen and layer.effective_experts < 1.5 * chosen


def _severity(value: float, watch: float, fix: float) -> Severity | None:
    if value >= fix:
        return "fix"
    return "watch" if value >= watch else None


def _experts(indices: Sequence[int]) -> str:
    names = [str(index) for index in indices]
    if len(names) > 6:
        return f"{len(names)} experts"
    if len(names) == 1:
        return f"expert {names[0]}"
    return f"experts {', '.join(names[:-1])} and {names[-1]}"


def _raised(name: str, value: float | None, *, at_zero: float) -> str:
    if value is None:
        return f"Raise `{name}`"
    return f"Raise `{name}` from {value:g} to {value * 2 or at_zero:g}"


def _now(value: object) -> str:
    return "" if value is None else f" (now {value})"


def percent(fraction: float) -> str:
    """A fraction as people read it: "12.5 %", "0.3 %"."""
    return f"{100 * fraction:.1f} %"
