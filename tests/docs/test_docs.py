"""The documentation is true: its code runs, and what it names exists."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from moe.bench import LayerBenchOptions
from moe.cli.analyze import AnalyzeArguments
from moe.cli.evaluate import EvaluateArguments
from moe.cli.plan import PlanArguments
from moe.cli.translate import TranslateArguments
from moe.cli.upcycle import UpcycleArguments
from moe.training import HostsConfig, TrainConfig

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# What its code should have made, beside running without an error.
EXECUTED = {
    "README.md": (),
    "docs/data.md": (),
    "docs/parity.md": (),
    "docs/routing.md": (),
    "docs/sharding.md": (),
    "docs/three-ways-to-use.md": (),
    "docs/tutorial-add-a-layer.md": (),
    "docs/tutorial-analyse.md": ("runs/balanced/load.html", "load.html"),
    "docs/tutorial-train.md": ("runs/own/evaluation.json", "runs/own/checkpoints/400"),
    "docs/tutorial-upcycle.md": ("runs/sparse/checkpoints/60",),
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


SLOW = {
    "docs/parity.md",
    "docs/three-ways-to-use.md",
    "docs/tutorial-analyse.md",
    "docs/tutorial-train.md",
    "docs/tutorial-upcycle.md",
}


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow) if p in SLOW else p for p in EXECUTED]
)
def test_the_code_of_a_page_runs(page, tmp_path):
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["JAX_PLATFORMS"] = "cpu"  # one device: a reader's machine, not eight simulated ones
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests/docs/run_page.py"), str(ROOT / page)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    for made in EXECUTED[page]:
        assert (tmp_path / made).exists(), run.stdout[-3000:]


def test_every_page_with_code_to_run_is_run():
    with_code = {
        name_of(page) for page in PAGES if re.search(r"(?m)^```(python|bash)$", page.read_text())
    }
    assert with_code == set(EXECUTED)


def anchors(page: Path) -> set[str]:
    """The names that headings get on GitHub."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page):
    for named in re.findall(
        r"`((?:moe|tests|experiments|docs)/[\w/.-]*)", page.read_text(encoding="utf-8")
    ):
        assert (ROOT / named).exists(), named


def fields_of(cls: type, prefix: str = "") -> set[str]:
    """Dotted names of the fields of a configuration and of those in it; a source is any of them."""
    names = set()
    for name, hint in typing.get_type_hints(cls).items():
        kinds = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
        for kind in kinds:
            names |= fields_of(kind, f"{prefix}{name}.")
        names.add(prefix + name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_that_a_page_names_exist(page):
    commands = (
        TrainConfig,
        TranslateArguments,
        EvaluateArguments,
        AnalyzeArguments,
        UpcycleArguments,
        PlanArguments,
        LayerBenchOptions,
        HostsConfig,
    )
    known = {name for command in commands for name in fields_of(command)}
    known |= {"help", "xla_force_host_platform_device_count", "xla"}
    for option in re.findall(
        r"(?<![\w-])--([a-z][\w-]*(?:\.[\w-]+)*)", page.read_text(encoding="utf-8")
    ):
        assert re.sub(r"(^|\.)no-", r"\1", option).replace("-", "_") in known, option


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_folded(page):
    outputs = re.compile(r"^```text\n.*?^```$", re.MULTILINE | re.DOTALL)  # are as they are
    written = outputs.sub("", page.read_text(encoding="utf-8"))
    assert not [line for line in written.splitlines() if len(line) > 110]
