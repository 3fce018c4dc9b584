"""Imports run down only, and what must be light is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A room may import the rooms after it in its row, itself, and moe.errors.
ROOMS = {
    "cli": {
        "training",
        "decoding",
        "evaluation",
        "analysis",
        "data",
        "bench",
        "upcycle",
        "planning",
        "sharding",
    },
    "planning": {"training", "models", "data", "sharding"},
    "bench": {"layers", "routing", "sharding"},
    "upcycle": {"training", "models", "layers", "routing"},
    "convert": {"layers", "routing"},
    "training": {"models", "layers", "routing", "data", "sharding"},
    "decoding": {"models", "data", "sharding"},
    "evaluation": {"data"},
    "analysis": {"layers", "routing"},
    "models": {"layers", "routing", "sharding"},
    "layers": {"routing", "sharding"},
    "data": set(),
    "routing": set(),
    "sharding": set(),
    "dims": set(),
    "errors": set(),
}


def imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "moe":
            names |= {f"moe.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[1] for name in names - {"moe.__version__"} if name.startswith("moe.")}


def modules():
    return [
        p for p in sorted((ROOT / "moe").rglob("*.py")) if p.parent.name != "moe" or p.stem in ROOMS
    ]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_down_only(path):
    room = path.relative_to(ROOT / "moe").parts[0].removesuffix(".py")
    upward = imported_rooms(path) - ROOMS[room] - {room, "errors", "dims"}
    assert not upward, f"{room} must not import {upward}"


def test_routing_and_data_know_neither_flax_models_nor_meshes():
    for room, forbidden in (("routing", "flax"), ("data", "jax"), ("data", "flax")):
        for path in (ROOT / "moe" / room).glob("*.py"):
            roots = {
                (
                    node.module if isinstance(node, ast.ImportFrom) else node.names[0].name or ""
                ).split(".")[0]
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Import | ast.ImportFrom)
            }
            assert forbidden not in roots, f"{path} imports {forbidden}"


LIGHT = """
import sys, time
class Refuse:
    # Whatever is installed beside them, only jax, flax and what those need may be imported.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {
            "grain", "tensorflow_datasets", "sentencepiece", "sacrebleu", "plotly", "tyro",
            "pydantic", "tensorboardX", "polib", "scipy.sparse",
        }:
            raise ImportError(name)
import jax, flax.nnx
sys.meta_path.insert(0, Refuse())
start = time.perf_counter()
import moe, moe.routing, moe.layers, moe.models
print(time.perf_counter() - start)
"""


def test_layers_import_within_a_second_and_need_only_jax_and_flax():
    result = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1.0
