"""A run is evaluated, analysed and used by many devices and processes as by one device."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from moe import cli, decoding, evaluation
from moe.analysis import collect_load
from moe.models import Transformer
from moe.sharding import MeshConfig, make_mesh
from moe.training import load_model
from moe.training.measure import measure
from moe.training.run import begin_run, start_run
from tests.training.small import small_config

ROOT = Path(__file__).parents[2]
LINES = "the king helped a cat\n\nthe birds slowly follow the boat\na cat\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a model that says something else to each sentence, at step 0."""
    folder = tmp_path_factory.mktemp("distributed")
    config = small_config(folder / "tokenizer")
    model = dataclasses.replace(config.model, num_experts=4, tied_embeddings=False)
    config = dataclasses.replace(config, model=model)
    first = start_run(config, config.source.pairs("train"))
    transformer = Transformer(first.model_config, rngs=nnx.Rngs(0))
    # Sharper than at the start: the next best hypothesis is further away than other rounding goes.
    transformer.output_VM[...] = transformer.output_VM[...] * 6
    config = dataclasses.replace(config, run_dir=str(folder / "run"))
    return begin_run(config, tokenizer_of=first, params=nnx.state(transformer), data_state=None)


def measured(run, mesh=None):
    with jax.set_mesh(mesh) if mesh else jax.default_device(jax.devices()[0]):
        model, _ = load_model(run, mesh=mesh)
        return list(measure(model, run.batches("validation", 5)))


def test_a_model_is_restored_in_parts_to_the_devices_that_hold_them(run):
    model, step = load_model(run, mesh=make_mesh(MeshConfig(data=2, expert=2, model=2)))
    assert step == 0
    whole, _ = load_model(run)
    experts, as_one = (m.encoder.pairs.sparse.ffn.experts.wi_EMH[...] for m in (model, whole))
    assert as_one.shape == (1, 4, 16, 32)
    assert len(as_one.devices()) == 1
    assert {shard.data.shape for shard in experts.addressable_shards} == {(1, 2, 16, 16)}
    np.testing.assert_array_equal(experts, as_one)


def test_a_mesh_measures_the_loss_and_the_load_of_one_device(run):
    alone, together = measured(run), measured(run, make_mesh(MeshConfig(data=4, expert=2)))
    assert [one.direction for one in alone] == [one.direction for one in together]
    assert [one.num_tokens for one in alone] == [one.num_tokens for one in together]
    # Float32 sums of some hundred terms, in another order.
    np.testing.assert_allclose(
        [one.loss for one in together], [one.loss for one in alone], rtol=1e-5
    )
    loads = [collect_load((m.direction, m.stats) for m in each) for each in (alone, together)]
    for stack in ("encoder", "decoder"):
        np.testing.assert_array_equal(*(load[stack].assigned_RYE for load in loads))
        np.testing.assert_array_equal(*(load[stack].num_tokens_RY for load in loads))
        np.testing.assert_allclose(*(load[stack].prob_RYE for load in loads), rtol=1e-5)


class Processes:
    """One command in several processes with 8 devices in all, and what they printed."""

    def __init__(
        self,
        count: int,
        *arguments: str,
        stdin: str = "",
        own: Mapping[int, list[str]] | None = None,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = f"--xla_force_host_platform_device_count={8 // count}"
        environment = os.environ | {"XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0"}
        processes = []
        for process in range(count):
            command = [sys.executable, "-m", "moe.cli", *arguments, *(own or {}).get(process, [])]
            command += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count)]
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            pipes |= {"cwd": ROOT, "env": environment, "text": True}
            processes.append(subprocess.Popen([*command, "--process-id", str(process)], **pipes))
        self.outputs, self.errors = [], []
        try:
            for process, text in zip(processes, [stdin, *[""] * (count - 1)], strict=True):
                assert process.stdin is not None
                process.stdin.write(text)
                process.stdin.close()
                process.stdin = None
            for process in processes:
                output, error = process.communicate(timeout=400)
                self.outputs.append(output)
                self.errors.append(error)
        finally:
            for process in processes:
                process.kill()
        self.codes = [process.returncode for process in processes]

    def succeeded(self) -> Processes:
        assert set(self.codes) == {0}, "\n".join(self.errors)
        assert set(self.outputs[1:]) == {""}  # process 0 alone prints
        return self


@pytest.fixture(scope="module")
def model(run):
    return load_model(run)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(2, "2"), (4, "4")])
def test_processes_evaluate_as_one_device(count, mesh, run, model):
    def translate(sentences, languages):
        config = decoding.DecodingConfig(beam_size=2)
        return decoding.translate(
            model, run.tokenizer, sentences, target_lang=languages, config=config
        )

    source, config = run.config.source, evaluation.EvaluationConfig(limit=9, directions=("en-qaa",))
    alone = evaluation.evaluate(
        translate, source.pairs("train"), source.pairs("test"), config=config
    )
    expected = json.loads(json.dumps(alone.as_json()))
    assert all(sample["output"] for sample in expected["directions"][0]["samples"])

    arguments = ["evaluate", str(run.path), "--limit", "9", "--directions", "en-qaa"]
    arguments += ["--beam-size", "2"]
    ran = Processes(count, *arguments, "--mesh.expert", mesh).succeeded()
    assert "chrF++" in ran.outputs[0]
    found = json.loads((run.path / "evaluation.json").read_text())
    assert found["directions"] == expected["directions"]
    assert found["averages"] == expected["averages"]


@pytest.mark.slow
def test_process_0_reads_and_writes_the_text_that_all_translate(run, model):
    expected = decoding.translate(model, run.tokenizer, LINES.splitlines(), target_lang="qaa")
    arguments = ["translate", str(run.path), "--to", "qaa", "--mesh.expert", "2"]
    ran = Processes(2, *arguments, stdin=LINES).succeeded()
    assert ran.outputs[0].splitlines() == expected


@pytest.mark.slow
def test_processes_analyse_as_one_device(run):
    Processes(2, "analyze", str(run.path), "--limit", "5", "--mesh.expert", "2").succeeded()
    load = collect_load((one.direction, one.stats) for one in measured(run))
    found = json.loads((run.path / "load.json").read_text())
    for stack in ("encoder", "decoder"):
        assigned_YE = [layer["assigned_E"] for layer in found["stacks"][stack]["layers"]]
        assert assigned_YE == load[stack].total.assigned_RYE[0].tolist()


@pytest.mark.slow
def test_processes_that_would_translate_something_else_are_told_so(run):
    ran = Processes(2, "evaluate", str(run.path), own={0: ["--limit", "3"], 1: ["--limit", "2"]})
    assert ran.codes == [2, 2], "\n".join(ran.errors)
    for error in ran.errors:
        assert "moe: process 1 of 2: the SHA-256 of the sentences must be the same" in error


def test_a_mesh_that_does_not_fit_is_told_so(run, capsys):
    assert cli.main(["translate", str(run.path), "--to", "qaa", "--mesh.expert", "3"]) == 2
    assert "mesh must fit the devices: got data=any x" in capsys.readouterr().err
