"""The page: one HTML file that shows where the load is uneven and what to do about it."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path

from moe.analysis import figures, sections
from moe.analysis.assets import SCRIPT, STYLE
from moe.analysis.summary import LoadReport, plain


def write_report(report: LoadReport, folder: Path | str) -> tuple[Path, Path]:
    """Writes load.html and load.json into `folder`, each at once or not at all; returns the paths."""
    folder = Path(folder)
    document = json.dumps(report.as_json(), indent=1, allow_nan=False)
    return _write(folder / "load.html", report_html(report)), _write(folder / "load.json", document)


def report_html(report: LoadReport) -> str:
    """The page. It needs no network, and its content security policy forbids it any."""
    from plotly.offline import get_plotlyjs  # 5 MB of text that only the page needs

    charts = json.dumps(plain(_figures(report)), allow_nan=False, separators=(",", ":"))
    title = f"Expert load of {html.escape(report.run)}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="soft">{sections.subtitle(report)}</p>
</header>
<main>
<noscript><p>The charts need JavaScript; the findings and the table of layers do not.</p></noscript>
{sections.tiles(report)}
{sections.findings(report)}
{sections.stacks(report)}
{sections.layer_table(report)}
{sections.chooser(report)}
{sections.experts(report)}
{sections.directions(report)}
{sections.history(report)}
{sections.capacity()}
{sections.reading(report)}
</main>
<script type="application/json" id="figures">{_inside_script(charts)}</script>
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _figures(report: LoadReport) -> dict[str, figures.Figure]:
    charts: dict[str, figures.Figure] = {}
    for stack, load in report.loads.items():
        layers = [layer for layer in report.layers if layer.stack == stack]
        history = report.history.get(stack)
        charts[f"layers:{stack}"] = figures.layers_figure(load, layers)
        for layer in layers:
            key = f"{stack}:{layer.layer}"
            charts[f"experts:{key}"] = figures.experts_figure(layer, history)
            charts[f"directions:{key}"] = figures.directions_figure(load, layer.layer)
            if history:
                charts[f"history:{key}"] = figures.history_figure(history, layer.layer)
    charts["capacity"] = figures.capacity_figure(report.layers, report.settings.capacity_factor)
    trained = [layer for layer in report.layers if layer.stack in report.history]
    for what in ("imbalance", "drop_rate", "entropy") if trained else ():
        charts[f"trend:{what}"] = figures.trend_figure(trained, dict(report.history), what)
    return charts


def _inside_script(document: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return document.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _write(path: Path, text: str) -> Path:
    """Replaces the file only when the new one is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path
