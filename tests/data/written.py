"""Files for sources to read, and what they are asked for."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

from moe.data.pairs import Direction

ALL_TRAIN = {"validation_fraction": 0.0, "test_fraction": 0.0}
EN_DE, DE_EN = Direction("en", "de"), Direction("de", "en")


def write(path: Path, text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress(data))
    return str(path)


def lines(*items: object) -> str:
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
