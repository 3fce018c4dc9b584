"""Says in plain words what is wrong with the load of a run and which setting mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moe.analysis import balance
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
from moe.analysis.imbalance import find_imbalance
from moe.analysis.layers import CAPACITY_FACTORS, LayerSummary
from moe.analysis.load import StackLoad

_ORDER: tuple[Severity, ...] = ("fix", "watch", "note")


def find_problems(
    layers: Sequence[LayerSummary],
    loads: Mapping[str, StackLoad],
    *,
    settings: Settings,
    thresholds: Thresholds,
) -> list[Finding]:
    """Everything worth a sentence, the worst first; empty when there is nothing to say."""
    ranked: list[tuple[float, Finding]] = []
    for layer in layers:
        load = loads[layer.stack]
        found = [
            *find_imbalance(layer, load, settings, thresholds),
            *_drops(layer, settings, thresholds),
            *_router(layer, settings, thresholds),
            *_sample(layer, thresholds),
        ]
        ranked += [(layer.max_over_mean, finding) for finding in found]
    ranked += [(0, finding) for finding in _specialisation(layers, loads, thresholds)]
    ranked.sort(key=lambda item: (_ORDER.index(item[1].severity), -item[0]))
    return [finding for _, finding in ranked]


def _drops(layer: LayerSummary, settings: Settings, thresholds: Thresholds) -> Iterator[Finding]:
    if layer.drop_rate > 0:
        yield Finding(
            severity="fix",
            stack=layer.stack,
            layer=layer.layer,
            title=f"{percent(layer.drop_rate)} of the choices are dropped in evaluation",
            evidence="A translation then depends on the other sentences of its batch.",
            cure="Leave `model.router.eval_capacity_factor` at None, which is dropless.",
        )
    rate = layer.training_drop_rate
    if rate is None:
        return
    severity = graded(rate, thresholds.watch_drop_rate, thresholds.fix_drop_rate)
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
    factor = settings.capacity_factor
    rates = {x: float(balance.drop_rate_at(layer.training_share_E, x)) for x in CAPACITY_FACTORS}
    enough = [x for x, rate in rates.items() if rate <= 0.01 and (factor is None or x > factor)]
    cures = []
    if layer.training_max_over_mean >= thresholds.watch_imbalance:
        cures.append("Balance the layer first.")
    if enough:
        cures.append(
            f"Raise `model.router.capacity_factor`{now(factor)} to {enough[0]:g}, where the mean load "
            f"alone would drop {percent(rates[enough[0]])}."
        )
    elif not cures:
        cures.append("Raise `model.group_size`: larger groups are each closer to the mean load.")
    if not settings.batch_priority:
        cures.append(
            "With `model.router.batch_priority=True` the drops hit the tokens that the router is least "
            "certain of, not the last of each group."
        )
    return " ".join(cures)


def _router(layer: LayerSummary, settings: Settings, thresholds: Thresholds) -> Iterator[Finding]:
    entropy = layer.router_entropy
    if entropy > thresholds.undecided:
        title = "the router hardly tells its experts apart"
        cure = (
            f"Train longer; if it stays, lower `balance_weight`{now(settings.balance_weight)} "
            f"or `objective.z_weight`{now(settings.z_weight)}, which both pull towards this."
        )
    elif entropy < thresholds.certain:
        title = "the router is certain of one expert for nearly every token"
        cure = (
            f"{raised('objective.z_weight', settings.z_weight, at_zero=0.001)}: it keeps the logits small, "
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
        mine = [x for x in layers if x.stack == stack and not x.collapsed]
        layer = max(mine, key=lambda x: x.specialisation_bits, default=None)
        if layer is None or layer.specialisation_bits < thresholds.specialised_bits:
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
