"""The command as a user runs it: a process of its own, on one device."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe import cli

ROOT = Path(__file__).parent.parent
EXPERIMENT = """
from moe.data import Generated, MixtureConfig, TokenizerConfig
from moe.models import TransformerConfig
from moe.training import CheckpointConfig, OptimizerConfig, TrainConfig


def config():
    return TrainConfig(
        run_dir="run",
        steps=8,
        source=Generated(languages=("qaa",), sentences=300),
        tokenizer=TokenizerConfig(vocab_size=400),
        mixture=MixtureConfig(batch_size=8, source_length=48, target_length=48),
        model=TransformerConfig(
            d_model=16, d_hidden=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=2,
            num_experts=4, dispatch="einsum",
        ),
        optimizer=OptimizerConfig(warmup_steps=2),
        checkpoint=CheckpointConfig(every=4),
        validation_sentences=4,
        log_every=1,
    )
"""


def environment():
    flags = "--xla_backend_optimization_level=0"  # and one device, not conftest's eight
    return os.environ | {"XLA_FLAGS": flags, "COLUMNS": "100"}


def moe(*arguments, cwd, stdin="", check=None):
    result = subprocess.run(
        [sys.executable, "-m", "moe.cli", *arguments],
        cwd=cwd,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if check is not None:
        assert result.returncode == check, result.stderr
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an experiment and its trained run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "small.py").write_text(EXPERIMENT)
    moe("train", "small.py", cwd=folder, check=0)
    return folder


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_training_leaves_a_run_and_says_where(folder):
    assert list(metrics(folder / "run")) == list(range(1, 9))
    again = moe("train", "small.py", cwd=folder, check=0)
    assert "Trained run to step 8" in again.stderr


def test_a_killed_run_goes_on_with_the_bits_of_an_uninterrupted_one(folder):
    arguments = ["train", "small.py", "--run-dir", "killed"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moe.cli", *arguments],
        cwd=folder,
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    log = folder / "killed" / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= 6, process)
    process.kill()
    process.wait()
    moe(*arguments, cwd=folder, check=0)
    assert metrics(folder / "killed") == metrics(folder / "run")


def test_sigterm_saves_and_the_same_command_goes_on(folder):
    arguments = [
        "train",
        "small.py",
        "--run-dir",
        "ended",
        "--steps",
        "100000",
        "--checkpoint.every",
        "90000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "moe.cli", *arguments],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    log = folder / "ended" / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= 3, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    step = int(re.search(r"Stopped at step (\d+)", errors)[1])
    assert [int(p.name) for p in (folder / "ended" / "checkpoints").iterdir()] == [step]
    arguments[arguments.index("100000")] = str(step + 1)
    assert f"Resuming ended at step {step}" in moe(*arguments, cwd=folder, check=0).stderr


def wait_for(condition, process):
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None, "the process ended before it was to be stopped"
        time.sleep(0.1)
    raise AssertionError("waited two minutes")


def test_translate_reads_lines_and_writes_as_many(folder):
    text = "the king helped a cat\n\nthe birds slowly follow the boat\n"
    result = moe(
        "translate", "run", "--to", "qaa", "--beam-size", "2", cwd=folder, stdin=text, check=0
    )
    lines = result.stdout.split("\n")
    assert len(lines) == 4
    assert lines[1] == ""
    (folder / "in.txt").write_text(text)
    arguments = ["--input", "in.txt", "--output", "out.txt", "--beam-size", "2"]
    moe("translate", "run", "--to", "qaa", *arguments, cwd=folder, check=0)
    assert (folder / "out.txt").read_text() == result.stdout


def test_evaluate_writes_scores_of_every_direction_beside_two_baselines(folder):
    result = moe("evaluate", "run", "--limit", "3", "--beam-size", "1", cwd=folder, check=0)
    assert "chrF++" in result.stdout
    scores = json.loads((folder / "run" / "evaluation.json").read_text())
    assert [d["direction"] for d in scores["directions"]] == ["en-qaa", "qaa-en"]
    assert set(scores["directions"][0]["scores"]) == {"model", "copy", "nearest"}
    assert "nw:2" in scores["directions"][0]["signatures"]["chrf"]


def test_analyze_writes_a_page_that_needs_no_network(folder):
    result = moe("analyze", "run", "--limit", "5", cwd=folder, check=0)
    assert "load.html" in result.stdout
    page = (folder / "run" / "load.html").read_text()
    assert "<script src" not in page
    load = json.loads((folder / "run" / "load.json").read_text())
    assert load["directions"] == ["en-qaa", "qaa-en"]


def test_help_lists_every_field_with_its_meaning(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "small.py", "--help"])
    assert end.value.code in (0, None)
    text = capsys.readouterr().out
    for field in ("--model.num-experts", "--model.router.capacity-factor", "--mixture.temperature"):
        assert field in text
    assert "Room of an expert in training" in text


MISTAKES = [
    (["train", "absent.py"], "experiment must be a Python file that exists: got absent.py"),
    (["train", "empty.py"], r"must define config\(\).*no config\(\)"),
    (["train", "small.py", "--model.num-experts", "1"], "num_experts must be 0 .* got 1"),
    (
        ["train", "small.py", "--mesh.expert", "3"],
        r"mesh must fit the devices: got data=any x stage=1 x expert=3",
    ),
    (["train", "small.py", "--source.languages", "xx"], "xx"),
    (["train", "small.py", "--model.d-model", "32"], "model.d_model must stay .* got 32, not 16"),
    (
        ["translate", "absent", "--to", "qaa"],
        "run must be a folder made by `moe train`: got absent",
    ),
    (["translate", "run", "--to", "xx"], "xx"),
    (
        ["translate", "run", "--to", "qaa", "--input", "absent.txt"],
        "got absent.txt, which does not exist",
    ),
    (
        ["translate", "run", "--to", "qaa", "--input", "latin1.txt"],
        "must be UTF-8: got byte 0xe9 in line 2",
    ),
    (
        ["translate", "run", "--to", "qaa", "--input", "empty.py", "--checkpoint", "3"],
        r"best, last or one of \[4, 8\]: got '3'",
    ),
    (["evaluate", "run", "--directions", "en-xx"], "en-xx"),
    (["evaluate", "run", "--split", "tset"], "split must be .* got 'tset'"),
    (["analyze", "absent"], "run must be a folder made by `moe train`: got absent"),
    (["fly"], "command must be one of train, translate, evaluate, analyze, .*: got 'fly'"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_a_mistake_ends_with_one_sentence_exit_code_2_and_an_untouched_run(
    folder, arguments, message, monkeypatch, capsys
):
    (folder / "empty.py").write_text("")
    (folder / "latin1.txt").write_bytes("fine\ncaf\u00e9\n".encode("latin-1"))
    monkeypatch.chdir(folder)
    before = contents(folder / "run")
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code
    errors = capsys.readouterr().err
    assert code == 2
    assert re.search(message, errors.replace("\n", " ")), errors
    assert "Traceback" not in errors
    assert contents(folder / "run") == before


def contents(run):
    return {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_command_says_what_it_can_do(arguments, capsys):
    assert cli.main(arguments) == (0 if arguments else 2)
    output = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"  {command}" in output
