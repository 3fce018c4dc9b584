"""Expert load: collect it, summarise it, and show where it is uneven and what to do."""

from moe.analysis.advice import Finding, Settings, Thresholds
from moe.analysis.history import read_history
from moe.analysis.layers import LayerSummary
from moe.analysis.load import StackLoad, collect_load
from moe.analysis.report import report_html, write_report
from moe.analysis.summary import LoadReport
from moe.analysis.terminal import findings_text, load_table

__all__ = [
    "Finding",
    "LayerSummary",
    "LoadReport",
    "Settings",
    "StackLoad",
    "Thresholds",
    "collect_load",
    "findings_text",
    "load_table",
    "read_history",
    "report_html",
    "write_report",
]
