"""The sections of the page, from top to bottom, as HTML; every text from outside is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from moe.analysis.advice import Finding, percent
from moe.analysis.layers import CAPACITY_FACTORS, LayerSummary
from moe.analysis.summary import LoadReport

_BADGE = {"fix": "▲ fix", "watch": "● watch", "note": "i note", "fine": "✓ fine"}
_FINDINGS_SHOWN = 6


def subtitle(report: LoadReport) -> str:
    """What was measured."""
    step = "" if report.step is None else f" of the checkpoint at step {report.step:,}"
    return (
        f"Measured on {report.num_tokens:,} tokens of the {html.escape(report.split)} split in "
        f"{len(report.directions)} directions, in evaluation mode{step}. Layers are the MoE layers of "
        "a stack; layers and experts are counted from 0."
    )


def tiles(report: LoadReport) -> str:
    """The worst numbers of the run; nothing is averaged over layers, which hides a collapsed one."""
    worst = max(report.layers, key=lambda layer: layer.max_over_mean)
    spread = min(report.layers, key=lambda layer: layer.effective_experts / layer.num_experts)
    dead = sum(len(layer.dead(report.thresholds.dead)) for layer in report.layers)
    experts = sum(layer.num_experts for layer in report.layers)
    entropies = [layer.router_entropy for layer in report.layers]
    special = max(report.layers, key=lambda layer: layer.specialisation_bits)
    tiles = [
        _verdict_tile(report),
        _tile(
            f"{worst.max_over_mean:.1f}×",
            f"busiest expert over the mean: {worst.name}, expert {worst.hottest}",
        ),
        _tile(
            f"{spread.effective_experts:.1f} of {spread.num_experts}",
            f"experts effectively used in {spread.name}, the least spread",
        ),
        _tile(f"{dead} of {experts}", "experts are dead"),
        _drop_tile(report),
        _tile(
            f"{min(entropies):.2f}–{max(entropies):.2f}",
            "router entropy, lowest and highest layer (0 certain, 1 undecided)",
        ),
        _tile(
            f"{special.specialisation_bits:.2f} bits",
            f"that an expert tells about the direction, most in {special.name}",
        ),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _verdict_tile(report: LoadReport) -> str:
    verdicts = [report.verdict(layer) for layer in report.layers]
    for verdict, words in (("fix", "to fix"), ("watch", "to watch")):
        if count := verdicts.count(verdict):
            number = f"{count} of {len(verdicts)}"
            return _tile(number, f"layers {words}", badge=verdict)
    return _tile("Balanced", f"{len(verdicts)} MoE layers, nothing to fix", badge="fine")


def _drop_tile(report: LoadReport) -> str:
    rates = [(x.training_drop_rate, x) for x in report.layers if x.training_drop_rate is not None]
    if not rates:
        return _tile("–", "dropped in training: the run has no load.jsonl")
    rate, layer = max(rates, key=lambda item: item[0])
    return _tile(percent(rate), f"dropped at the end of training in {layer.name}, the most")


def _tile(number: str, label: str, badge: str = "") -> str:
    mark = _badge(badge) if badge else ""
    return f'<div class="tile">{mark}<b>{number}</b><span class="label">{html.escape(label)}</span></div>'


def _badge(kind: str) -> str:
    return f'<span class="badge {kind}">{_BADGE[kind]}</span>'


def findings(report: LoadReport) -> str:
    """What is wrong and what to do, the worst first."""
    found = report.findings
    if not any(finding.severity != "note" for finding in found):
        intro = "<p><b>Nothing to fix.</b> Every layer is within the thresholds at the foot.</p>"
    else:
        intro = "<p>The worst first. Names in grey boxes are settings of the run.</p>"
    shown = "".join(_finding(finding) for finding in found[:_FINDINGS_SHOWN])
    rest = "".join(_finding(finding) for finding in found[_FINDINGS_SHOWN:])
    more = (
        f"<details><summary>{len(found) - _FINDINGS_SHOWN} more</summary>"
        f'<ul class="findings">{rest}</ul></details>'
        if rest
        else ""
    )
    return f"""<section aria-labelledby="findings-title">
<h2 id="findings-title">What to do</h2>{intro}<ul class="findings">{shown}</ul>{more}
</section>"""


def _finding(finding: Finding) -> str:
    key = html.escape(f"{finding.stack}:{finding.layer}")
    return f"""<li>{_badge(finding.severity)}
<button class="link" data-layer="{key}">{html.escape(finding.where)}</button>:
<span class="title">{html.escape(finding.title)}</span>
<p class="soft">{html.escape(finding.evidence)}</p>
<p>{_code(finding.cure)}</p></li>"""


def _code(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def stacks(report: LoadReport) -> str:
    """The heatmap of layers and experts of every stack."""
    charts = "".join(
        f"<div><h3>{html.escape(stack)}</h3>"
        + _figure(f"layers:{stack}", _stack_words(report, stack))
        + "</div>"
        for stack in report.loads
    )
    return f"""<section><h2>Load of every expert</h2>
<p class="soft">A row is a layer, a cell one expert's load over its fair share: 1 is balanced, 2 twice
the work, 0 none. Orange is too much, blue too little. Choose a layer by clicking its row.</p>
{_legend()}<div class="pair">{charts}</div></section>"""


def _stack_words(report: LoadReport, stack: str) -> str:
    words = [
        f"layer {x.layer}: expert {x.hottest} receives {x.max_over_mean:.2f} times its share, "
        f"{len(x.dead(report.thresholds.dead))} of {x.num_experts} experts dead"
        for x in report.layers
        if x.stack == stack
    ]
    return f"Load of the {stack}. " + "; ".join(words)


def _legend() -> str:
    return (
        '<div class="legend" aria-hidden="true"><span>¼ of the share or less</span><i></i>'
        "<span>4 times or more</span><span>(middle: balanced)</span></div>"
    )


def _figure(name: str, words: str, *, each: bool = False) -> str:
    """A chart, its text alternative and its numbers as a table; `each`: one for each layer."""
    per_layer = ' data-each="1"' if each else ""
    return (
        f'<div class="figure"><div class="chart" role="img" aria-label="{html.escape(words)}" '
        f'data-figure="{html.escape(name)}"{per_layer}></div>'
        "<details><summary>The numbers as a table</summary>"
        '<div class="scroll" tabindex="0"></div></details></div>'
    )


def layer_table(report: LoadReport) -> str:
    """One row a layer; needs no script."""
    head = [
        "layer",
        "verdict",
        "busiest over mean (expert)",
        "effective experts",
        "dead experts",
        "router entropy",
        "dropped in training",
        *(f"dropped at {factor:g}" for factor in CAPACITY_FACTORS),
        "direction bits",
    ]
    rows = "".join(_layer_row(report, layer) for layer in report.layers)
    return f"""<section><h2>Layers in numbers</h2>
<p class="soft">“Busiest over mean” is also the capacity factor at which nothing would be dropped;
“dropped at” predicts the drop rate of a capacity factor from the load measured here.</p>
<div class="scroll" tabindex="0"><table class="layers"><thead><tr>{_cells(head, "th")}</tr></thead>
<tbody>{rows}</tbody></table></div></section>"""


def _layer_row(report: LoadReport, layer: LayerSummary) -> str:
    dead = layer.dead(report.thresholds.dead)
    training = layer.training_drop_rate
    cells = [
        f"{layer.max_over_mean:.2f} ({layer.hottest})",
        f"{layer.effective_experts:.1f} of {layer.num_experts}",
        ", ".join(map(str, dead[:6])) + (" …" if len(dead) > 6 else "") if dead else "–",
        f"{layer.router_entropy:.2f}",
        "–" if training is None else percent(training),
        *(percent(layer.drop_rate_at[factor]) for factor in CAPACITY_FACTORS),
        f"{layer.specialisation_bits:.2f}",
    ]
    name = html.escape(layer.name)
    key = html.escape(f"{layer.stack}:{layer.layer}")
    button = f'<button class="link" data-layer="{key}">{name}</button>'
    return f"<tr><td>{button}</td><td>{_badge(report.verdict(layer))}</td>{_cells(cells)}</tr>"


def _cells(cells: Iterable[str], tag: str = "td") -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


def chooser(report: LoadReport) -> str:
    """Chooses the layer of the charts below; opens on the one that most needs a look."""
    order = ("fix", "watch", "fine")
    worst = min(report.layers, key=lambda x: (order.index(report.verdict(x)), -x.max_over_mean))
    options = "".join(
        f'<option value="{html.escape(f"{x.stack}:{x.layer}")}" data-name="{html.escape(x.name)}"'
        f"{' selected' if x is worst else ''}>{html.escape(x.name)} – {report.verdict(x)}, "
        f"{x.max_over_mean:.1f}×</option>"
        for x in report.layers
    )
    return f"""<div class="chooser"><label for="layer"><b>Look into layer</b></label>
<select id="layer">{options}</select></div>"""


def experts(report: LoadReport) -> str:
    """The bars of one layer."""
    training = (
        " next to the load at the end of training, where the dropped part had no slot"
        if report.history
        else ""
    )
    return f"""<section id="experts"><h2>Experts of <span class="layer-name"></span></h2>
<p class="soft">Load in evaluation{training}. The diamond is the mean router probability: far below
the bar, the expert wins many choices by little; far above, it loses many by little.</p>
{_figure("experts", "Load and router probability of each expert of the chosen layer", each=True)}
</section>"""


def directions(report: LoadReport) -> str:
    """The heatmap of directions and experts of one layer."""
    return f"""<section><h2>Directions in <span class="layer-name"></span></h2>
<p class="soft">A row is a translation direction, compared with its own fair share. The bars on the
right say how unlike the mean of all directions it is. Specialisation is no fault by itself: it
becomes one when a direction fills an expert in training.</p>
<p><label for="order">Order of rows</label> <select id="order"><option value="bits">most unusual first
</option><option value="name">by name</option></select></p>{_legend()}
{_figure("directions", "Load of each expert by direction in the chosen layer", each=True)}
</section>"""


def history(report: LoadReport) -> str:
    """Training: the heatmap of one layer, the lines of all."""
    if not report.history:
        return """<section><h2>Over training</h2><p>The run has no <code>load.jsonl</code>, so nothing
is known of its training.</p></section>"""
    trends = [
        ("imbalance", "Busiest expert over the mean"),
        ("drop_rate", "Dropped choices"),
        ("entropy", "Router entropy over log E"),
    ]
    lines = "".join(
        f"<div><h3>{title}</h3>{_figure(f'trend:{what}', f'{title} over training, a line a layer')}</div>"
        for what, title in trends
    )
    return f"""<section><h2>Over training: <span class="layer-name"></span></h2>
<p class="soft">A row is an expert, time runs to the right; a healthy layer
fades to the middle colour.</p>
{_legend()}{_figure("history", "Load of each expert of the chosen layer over training", each=True)}
<p class="soft">All layers; the thick line is the chosen one.</p>
<div class="trio">{lines}</div></section>"""


def capacity() -> str:
    """The chart of capacity factors."""
    words = "Predicted drop rate of each layer for capacity factors from 0.5 to 3"
    return f"""<section><h2>What would a capacity factor drop?</h2>
<p class="soft">Predicted from the load measured here for one large group; small groups are less even
and drop more. The thick line is the chosen layer. Computation grows with the factor, so balance
first and buy capacity for the rest.</p>
{_figure("capacity", words)}</section>"""


def reading(report: LoadReport) -> str:
    """What the words mean and when there is a finding."""
    limits = report.thresholds
    items = [
        (
            "Busiest over mean",
            "Load of the busiest expert over the mean load of the layer. 1 is balanced; "
            "E / K when all tokens choose the same K of E experts.",
        ),
        (
            "Effective experts",
            "The exponential of the load's entropy: how many evenly used experts would have it.",
        ),
        (
            "Router entropy",
            "How undecided the router is about a token, on average, over log E. Not the same as "
            "balance: a router may be certain of each token and balanced over all.",
        ),
        (
            "Dropped",
            "Choices that found no slot because the expert was full. Evaluation is dropless, "
            "training is not; “end of training” is the last fifth of the logged steps.",
        ),
        (
            "Direction bits",
            "Mutual information of direction and expert, each direction weighing the same. "
            "0: all directions use the experts alike; at most log2 of the smaller number.",
        ),
        (
            "Findings",
            f"watch from {limits.watch_imbalance:g} and fix from {limits.fix_imbalance:g} times "
            f"the mean; dead below {limits.dead:g} of the fair share; dropped in training: watch "
            f"from {limits.watch_drop_rate:.0%}, fix from {limits.fix_drop_rate:.0%}; growth to "
            f"{limits.growth:g} times since the middle of training; router entropy above "
            f"{limits.undecided:g} or below {limits.certain:g}; specialisation from "
            f"{limits.specialised_bits:g} bits; fewer than {limits.choices_per_expert} choices "
            "for each expert.",
        ),
    ]
    terms = "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in items)
    return f"<section><h2>How to read this</h2><dl>{terms}</dl></section>"
