"""A plan as one HTML page with charts, that needs no network."""

from __future__ import annotations

import dataclasses
import html

from moe.planning.plan import Plan
from moe.planning.report import rows
from moe.planning.step_time import MODEL

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 0 auto; padding: 20px; }
table { border-collapse: collapse; } td, th { padding: 2px 14px 2px 0; text-align: left; }
td:first-child { white-space: pre; }
td:nth-child(2) { text-align: right; white-space: nowrap; } .soft { opacity: .7; max-width: 90ch; }
.chart { background: #fff; border-radius: 8px; }
"""


def plan_page(plan: Plan) -> str:
    """The page: the figures, where memory goes, what travels, and where the time would go."""
    from plotly.offline import get_plotlyjs  # 5 MB of text that only the page needs

    title = html.escape(f"{plan.name} on {plan.where}")
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows(plan)
    )
    charts = "\n".join(f'<div class="chart">{chart}</div>' for chart in _charts(plan))
    assumed = f'<p class="soft">Modelled: {html.escape(MODEL)}</p>' if plan.time else ""
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>
<body><h1>{title}</h1>
<table><tr><th>figure</th><th>value</th><th>found</th></tr>
{body}
</table>
{charts}
{assumed}
</body></html>
"""


def _charts(plan: Plan) -> list[str]:
    import plotly.graph_objects as go

    memory = dataclasses.asdict(plan.memory)
    stores = [
        go.Bar(x=[size / 2**30], y=["device"], name=name, orientation="h")
        for name, size in memory.items()
        if size is not None
    ]
    figures = [_figure("Memory of a device (compiled)", "GiB", stores)]
    if plan.memory_limit is not None:
        figures[0].add_vline(x=plan.memory_limit / 2**30, line_dash="dash")
    sent: dict[str, float] = {}
    for one in plan.exchanges:
        label = f"{one.kind} along {' '.join(one.axes)}"
        sent[label] = sent.get(label, 0) + one.bytes_per_device / 2**20
    bars = [go.Bar(x=list(sent.values()), y=list(sent), orientation="h", showlegend=False)]
    figures.append(_figure("Sent by a device in a step (compiled)", "MiB", bars))
    if plan.time is not None:
        parts = dataclasses.asdict(plan.time)
        times = [
            go.Bar(
                x=[1e3 * x for x in parts.values()],
                y=list(parts),
                orientation="h",
                showlegend=False,
            )
        ]
        figures.append(_figure("Time of a step (modelled)", "ms", times))
    return [figure.to_html(full_html=False, include_plotlyjs=False) for figure in figures]


def _figure(title: str, unit: str, bars):
    import plotly.graph_objects as go

    layout = {
        "title": title,
        "barmode": "stack",
        "height": 300,
        "xaxis": {"title": unit},
        "yaxis": {"automargin": True},
    }
    return go.Figure(bars, layout=layout)
