import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from moe.analysis import (
    LoadReport,
    Settings,
    collect_load,
    findings_text,
    load_table,
    read_history,
    report_html,
    write_report,
)
from moe.errors import UserError

NASTY = "en-</script><b>&"


@pytest.fixture
def report(stats, line, tmp_path):
    """Encoder balanced, decoder layer 1 uneven; 250 steps of training of the decoder."""
    even, uneven = [100] * 4, [280, 80, 36, 4]
    loads = collect_load(
        [
            ("en-de", {"encoder": stats([even]), "decoder": stats([even, uneven])}),
            (NASTY, {"encoder": stats([even]), "decoder": stats([even, even])}),
        ]
    )
    path = tmp_path / "load.jsonl"
    path.write_text("".join(line(10 * step, [even, uneven]) for step in range(250)))
    return LoadReport(
        run="a <run>",
        loads=loads,
        history=read_history(path),
        step=2500,
        settings=Settings(capacity_factor=1.25),
    )


class Page(HTMLParser):
    """Collects the scripts, the addresses and the visible text of a page."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.addresses, self.text, self.ids, self._inside = [], [], "", set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self._inside = tag
        self.addresses += [
            attrs[name] for name in ("src", "href", "data", "action") if name in attrs
        ]
        self.ids.add(attrs.get("id"))

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.text += data


def figures_of(html):
    return json.loads(Page(html).scripts[0])


def test_the_page_needs_no_network(report):
    html = report_html(report)
    page = Page(html)
    assert page.addresses == []
    assert "default-src 'none'" in html
    plotly = max(page.scripts, key=len)
    assert len(plotly) > 1_000_000 and html.count(plotly) == 1
    ours = html.replace(plotly, "")
    assert not re.search(r"https?://|//cdn|@import|url\(", ours)


def test_everything_from_outside_is_escaped(report):
    html = report_html(report)
    page = Page(html)
    assert len(page.scripts) == 3  # figures, plotly, ours: no name closed or opened one
    assert "a <run>" in page.text
    names = figures_of(html)["directions:decoder:1"]["data"][0]["y"]
    assert names == ["en-de", "en-&lt;/script&gt;&lt;b&gt;&amp;"]  # plotly reads its text as HTML


def test_the_page_says_what_is_wrong_and_where(report):
    text = Page(report_html(report)).text
    # 380 of 800 choices on expert 0 of 4 is 1.9 times the fair share of 200
    assert "expert 0 receives 1.9 times its share" in text
    assert "1 of 3" in text and "layers to watch" in text


def test_a_balanced_run_says_that_there_is_nothing_to_fix(stats):
    loads = collect_load([("en-de", {"encoder": stats([[500] * 4])})])
    report = LoadReport(run="fine", loads=loads)
    text = Page(report_html(report)).text
    assert "Nothing to fix." in text and "no load.jsonl" in text
    assert findings_text(report).startswith("Nothing to fix")


def test_heatmaps_hold_the_measured_loads(report):
    figures = figures_of(report_html(report))
    trace = figures["layers:decoder"]["data"][0]
    # both directions: [380, 180, 136, 104] of 800, fair 200
    assert trace["customdata"][1] == [380, 180, 136, 104]
    assert trace["text"][1] == ["1.90", "0.90", "0.68", "0.52"]
    np.testing.assert_allclose(trace["z"][1], np.log2([1.9, 0.9, 0.68, 0.52]), rtol=1e-3)
    assert trace["z"][0] == [0, 0, 0, 0]
    by_direction = figures["directions:decoder:1"]["data"][0]
    assert by_direction["text"][0] == ["2.80", "0.80", "0.36", "0.04"]
    assert by_direction["z"][0][3] == -2  # clipped: a quarter and less has one colour


def test_every_layer_has_its_charts(report):
    figures = figures_of(report_html(report))
    layers = ["encoder:0", "decoder:0", "decoder:1"]
    for chart in ("experts", "directions"):
        assert {f"{chart}:{layer}" for layer in layers} <= set(figures)
    assert {"history:decoder:0", "history:decoder:1"} <= set(figures)
    assert "history:encoder:0" not in figures  # the log of the run lacks the encoder
    assert [line["name"] for line in figures["trend:imbalance"]["data"]] == [
        "decoder layer 0",
        "decoder layer 1",
    ]


def test_long_training_is_summed_into_few_columns(report):
    trace = figures_of(report_html(report))["history:decoder:1"]["data"][0]
    assert trace["x"][:3] == [0, 20, 40]  # 250 logged steps, two a column
    assert len(trace["x"]) == 125
    assert [row[0] for row in trace["customdata"]] == [560, 160, 72, 8]


def test_capacity_lines_follow_the_prediction(report):
    lines = figures_of(report_html(report))["capacity"]["data"]
    uneven = next(line for line in lines if line["name"] == "decoder layer 1")
    at = dict(zip(uneven["x"], uneven["y"], strict=True))
    assert at[1.0] == pytest.approx(0.225)  # (380 - 200) / 800
    assert at[0.5] == pytest.approx((280 + 80 + 36 + 4) / 800)  # each over 100


def test_json_holds_the_numbers_and_no_nan(report, stats):
    document = json.loads(json.dumps(report.as_json(), allow_nan=False))
    layer = document["stacks"]["decoder"]["layers"][1]
    assert layer["assigned_E"] == [380, 180, 136, 104]
    assert layer["max_over_mean"] == pytest.approx(1.9)
    assert layer["drop_rate_at"]["1.0"] == pytest.approx(0.225)
    assert layer["verdict"] == "watch" and layer["dead_experts"] == []
    assert layer["by_direction"]["en-de"]["assigned_E"] == [280, 80, 36, 4]
    assert layer["training"]["first_step"] == 2000  # the last 50 of 250 logged steps
    assert document["findings"][0]["stack"] == "decoder"
    silent = collect_load(
        [("en-de", {"encoder": stats([[500] * 4])}), ("en-fr", {"encoder": stats([[0] * 4])})]
    )
    quiet = LoadReport(run="r", loads=silent).as_json()["stacks"]["encoder"]["layers"][0]
    assert quiet["by_direction"]["en-fr"]["router_entropy"] is None


def test_a_direction_without_tokens_leaves_a_gap_and_not_an_error(stats):
    silent = [("en-de", {"s": stats([[500] * 4])}), ("en-fr", {"s": stats([[0] * 4])})]
    figures = figures_of(report_html(LoadReport(run="r", loads=collect_load(silent))))
    assert figures["directions:s:0"]["data"][0]["z"][1] == [None] * 4


def test_written_files_replace_older_ones_and_leave_nothing_else(report, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "load.html").write_text("old")
    page, document = write_report(report, folder)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(document.read_text())["run"] == "a <run>"
    assert sorted(path.name for path in folder.iterdir()) == ["load.html", "load.json"]


def test_a_log_of_another_model_is_a_user_error(report, stats):
    other = collect_load([("en-de", {"decoder": stats([[100] * 5])})])
    with pytest.raises(
        UserError, match=r"got \(2, 4\) layers and experts in the decoder, not \(1, 5\)"
    ):
        LoadReport(run="r", loads=other, history=report.history).layers  # noqa: B018


def test_the_terminal_shows_one_line_a_layer_and_what_to_do(report):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(load_table(report))
    text = console.export_text()
    assert re.search(r"decoder layer 1 +│ watch +│ 1.90 \(expert 0\)", text)
    assert findings_text(report).startswith("watch: decoder layer 1: expert 0 receives 1.9 times")


@pytest.mark.slow
def test_a_browser_draws_every_chart(report, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser on this machine")
    page, _ = write_report(report, tmp_path)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'b'}"]
    flags += [
        "--enable-logging=stderr",
        "--virtual-time-budget=8000",
        "--dump-dom",
        f"file://{page}",
    ]
    done = subprocess.run([browser, *flags], capture_output=True, text=True, timeout=100)
    assert "Uncaught" not in done.stderr and "Refused" not in done.stderr
    drawn = re.findall(r'class="chart js-plotly-plot"', done.stdout)
    # two stacks, experts, directions, history, three trends, capacity
    assert len(drawn) == 2 + 3 + 3 + 1
