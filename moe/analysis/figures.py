"""The charts of the page as plotly figures in plain dicts; the page's script adds the colours.

A heatmap's colour is log2 of the load over the fair share 1 / E, clipped at a quarter and four
times, so that half and double are equally far from balance and colours mean the same in every run.
Its `text` holds the load itself.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from moe.analysis import balance
from moe.analysis.layers import LayerSummary, recent
from moe.analysis.load import StackLoad

Figure = dict[str, Any]

CLIP = 2.0
"""Colours end at 2**-CLIP and 2**CLIP times the fair share."""
TIME_COLUMNS = 200
"""Columns of a chart over training: more logged steps are summed."""
_MAX_CELLS_WITH_TEXT = 16


def layers_figure(load: StackLoad, layers: list[LayerSummary]) -> Figure:
    """Layer by expert: the load of each expert over all directions."""
    total = load.total
    trace = _heatmap(
        total.share_RYE[0] * load.num_experts,
        y=[f"layer {layer.layer}" for layer in layers],
        counts=total.assigned_RYE[0],
        hover="%{y}, expert %{x}<br><b>%{text}</b> times its share<br>%{customdata:,} choices",
    )
    return {
        "data": [trace],
        "layout": _layout(34 * load.num_layers + 90, xaxis=_experts(load.num_experts)),
    }


def directions_figure(load: StackLoad, layer: int) -> Figure:
    """Direction by expert for one layer, and beside it how unusual each direction is."""
    names = [escape(str(row)) for row in load.rows]
    bits_R = np.nan_to_num(load.divergence_RY[:, layer])
    heatmap = _heatmap(
        load.share_RYE[:, layer] * load.num_experts,
        y=names,
        counts=load.assigned_RYE[:, layer],
        hover="%{y}, expert %{x}<br><b>%{text}</b> times its share<br>%{customdata:,} choices",
    )
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": "bits from the mean",
        "x": _rounded(bits_R),
        "y": names,
        "xaxis": "x2",
        "hovertemplate": "%{y}: %{x:.2f} bits from the mean of all directions<extra></extra>",
    }
    layout = _layout(
        20 * len(names) + 100,
        xaxis=_experts(load.num_experts) | {"domain": [0, 0.8]},
        xaxis2={"domain": [0.83, 1], "title": {"text": "bits"}, "nticks": 4, "tickangle": 0},
    )
    layout["meta"] = {
        "orders": {
            "bits": np.argsort(-bits_R, kind="stable").tolist(),
            "name": sorted(range(len(names)), key=names.__getitem__),
        }
    }
    return {"data": [heatmap, bars], "layout": layout}


def experts_figure(layer: LayerSummary, history: StackLoad | None) -> Figure:
    """One layer's experts: load in evaluation, load kept and dropped in training, probability."""
    experts = list(range(layer.num_experts))
    scale = layer.num_experts

    def bar(name: str, share_E: np.ndarray, group: str, **more: Any) -> dict[str, Any]:
        hover = "expert %{x}: <b>%{y:.2f}</b> times its share<extra>%{fullData.name}</extra>"
        return {
            "type": "bar",
            "name": name,
            "x": experts,
            "y": _rounded(share_E * scale),
            "offsetgroup": group,
            "hovertemplate": hover,
        } | more

    data = [bar("evaluation", layer.share_E, "evaluation", meta="main")]
    if history is not None:
        end = recent(history).total
        choices = max(int(end.assigned_RYE[0, layer.layer].sum()), 1)
        kept_E = end.kept_RYE[0, layer.layer] / choices
        dropped_E = end.assigned_RYE[0, layer.layer] / choices - kept_E
        base = _rounded(kept_E * scale)
        data.append(bar("end of training, kept", kept_E, "training", meta="second"))
        data.append(bar("end of training, dropped", dropped_E, "training", meta="bad", base=base))
    probability = bar("router probability", layer.mean_prob_E, "")
    del probability["offsetgroup"]
    data.append(probability | {"type": "scatter", "mode": "markers", "meta": "marker"})
    layout = _layout(
        320,
        xaxis=_experts(scale) | {"range": [-0.6, scale - 0.4]},
        yaxis={"title": {"text": "times the fair share"}, "rangemode": "tozero"},
        shapes=[_rule(y0=1, y1=1, x0=0, x1=1, xref="paper")],
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        barmode="group",
        bargap=0.25,
        margin={"l": 56, "r": 8, "t": 56, "b": 44},
    )
    return {"data": data, "layout": layout}


def capacity_figure(layers: list[LayerSummary], now: float | None) -> Figure:
    """The drop rate that each capacity factor would cause, a line for each layer."""
    factors = np.linspace(0.5, 3, 51)
    data = [
        _line(layer, factors, [balance.drop_rate_at(layer.share_E, x) for x in factors], "%{y:.1%}")
        for layer in layers
    ]
    layout = _layout(
        320,
        xaxis={"title": {"text": "capacity factor"}},
        yaxis={"tickformat": ".0%", "rangemode": "tozero", "title": {"text": "dropped"}},
        margin={"l": 64, "r": 8, "t": 28, "b": 44},
    )
    if now is not None:
        layout["shapes"] = [_rule(x0=now, x1=now, y0=0, y1=1, yref="paper")]
        layout["annotations"] = [
            {"x": now, "y": 1, "yref": "paper", "text": f"now {now:g}", "showarrow": False}
            | {"xanchor": "left", "yanchor": "top", "xshift": 4}
        ]
    return {"data": data, "layout": layout}


def history_figure(history: StackLoad, layer: int) -> Figure:
    """Expert by step for one layer; neighbouring steps are summed to TIME_COLUMNS columns."""
    binned = over_time(history)
    trace = _heatmap(
        binned.share_RYE[:, layer].T * history.num_experts,
        y=[f"expert {expert}" for expert in range(history.num_experts)],
        counts=binned.assigned_RYE[:, layer].T,
        hover="%{y} from step %{x}<br><b>%{text}</b> times its share<br>%{customdata:,} choices",
    )
    trace["x"] = list(binned.rows)
    trace.pop("texttemplate", None)
    trace["xgap"] = trace["ygap"] = 0
    height = min(26 * history.num_experts, 640) + 78
    return {"data": [trace], "layout": _layout(height, xaxis={"title": {"text": "step"}})}


def trend_figure(layers: list[LayerSummary], histories: dict[str, StackLoad], what: str) -> Figure:
    """One number over training, a line for each layer.

    Args:
      layers: those to draw, of any stack.
      histories: stack to load over training.
      what: "imbalance", "drop_rate" or "entropy".
    """
    data = []
    for layer in layers:
        binned = over_time(histories[layer.stack])
        values_RY = {
            "imbalance": balance.max_over_mean(binned.share_RYE),
            "drop_rate": binned.drop_rate_RY,
            "entropy": binned.mean_entropy_RY,
        }[what]
        shown = "%{y:.1%}" if what == "drop_rate" else "%{y:.2f}"
        data.append(_line(layer, np.array(binned.rows), values_RY[:, layer.layer], shown))
    yaxis = {"tickformat": ".0%" if what == "drop_rate" else None}
    if what == "imbalance":
        limits = {"shapes": [_rule(y0=1, y1=1, x0=0, x1=1, xref="paper")]}
    else:
        limits, yaxis = {}, yaxis | {"rangemode": "tozero"}
    return {
        "data": data,
        "layout": _layout(240, xaxis={"title": {"text": "step"}}, yaxis=yaxis, **limits),
    }


def over_time(history: StackLoad) -> StackLoad:
    """At most TIME_COLUMNS rows, each the sum of neighbouring logged steps."""
    steps = len(history.rows)
    return history.merged(list(range(0, steps, -(-steps // TIME_COLUMNS))))


def _heatmap(
    ratio_RE: np.ndarray, *, y: list[str], counts: np.ndarray, hover: str
) -> dict[str, Any]:
    """Loads over the fair share, and the choices they were counted from."""
    colour_RE = np.log2(np.clip(ratio_RE, 2**-CLIP, 2**CLIP))
    trace = {
        "type": "heatmap",
        "x": list(range(ratio_RE.shape[1])),
        "y": y,
        "z": _rounded(colour_RE),
        "zmin": -CLIP,
        "zmax": CLIP,
        "text": [[_ratio_text(x) for x in row] for row in ratio_RE],
        "customdata": counts.tolist(),
        "hovertemplate": hover + "<extra></extra>",
        "showscale": False,
        "meta": "diverging",
        "xgap": 1,
        "ygap": 1,
    }
    if ratio_RE.shape[1] <= _MAX_CELLS_WITH_TEXT:
        trace["texttemplate"] = "%{text}"
    return trace


def _line(layer: LayerSummary, x: np.ndarray, y: Any, shown: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": layer.name,
        "x": x.tolist(),
        "y": _rounded(np.asarray(y)),
        "meta": {"layer": f"{layer.stack}:{layer.layer}"},
        "hovertemplate": f"%{{fullData.name}}<br>at %{{x}}: <b>{shown}</b><extra></extra>",
    }


def _layout(height: int, **more: Any) -> dict[str, Any]:
    xaxis = {"automargin": True} | more.pop("xaxis", {})
    yaxis = {"automargin": True} | more.pop("yaxis", {"autorange": "reversed"})
    return {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 28, "b": 44},
        "showlegend": "legend" in more,
        "hovermode": "closest",
        "xaxis": xaxis,
        "yaxis": yaxis,
    } | more


def _experts(num_experts: int) -> dict[str, Any]:
    return {"title": {"text": "expert"}, "tick0": 0, "dtick": -(-num_experts // 16)}


def _rule(**where: Any) -> dict[str, Any]:
    return {"type": "line", "line": {"width": 1, "dash": "dot"}} | where


def _rounded(array: np.ndarray) -> list:
    """Four significant digits are more than a screen shows, and half the bytes; nan is a gap."""
    with np.errstate(all="ignore"):
        return [
            _rounded(x) if np.ndim(x) else (float(f"{x:.4g}") if np.isfinite(x) else None)
            for x in array
        ]


def _ratio_text(ratio: float) -> str:
    if not np.isfinite(ratio):
        return ""
    return f"{ratio:.1f}" if ratio >= 9.95 else f"{ratio:.2f}"
