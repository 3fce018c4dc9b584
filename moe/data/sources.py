"""Every kind of data source, under one roof.

A source is a small configuration with a method `pairs(split)`; its field `kind` tells the kinds
apart in a stored configuration.
"""

from __future__ import annotations

from typing import TypeAlias

from moe.data.generated import Generated
from moe.data.gettext_files import Gettext
from moe.data.text_files import JsonLines, ParallelText, TabSeparated
from moe.data.tfds_source import TfdsSource

DataSource: TypeAlias = TfdsSource | JsonLines | TabSeparated | ParallelText | Gettext | Generated

__all__ = [
    "DataSource",
    "Generated",
    "Gettext",
    "JsonLines",
    "ParallelText",
    "TabSeparated",
    "TfdsSource",
]
