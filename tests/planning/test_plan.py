"""What a plan says of a small run on simulated devices, checked by arithmetic."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import jax
import pytest

from moe.cli import main, read_experiment
from moe.errors import UserError
from moe.models.config import Remat
from moe.planning import (
    compile_step,
    legal_meshes,
    plan,
    plan_of,
    plan_page,
    planned_devices,
    search,
    simulated_devices,
)
from moe.planning.program import _sizes
from moe.planning.search import POLICIES
from moe.sharding import MeshConfig
from tests.training.small import small_config

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
E, M, H, PAIRS = 8, 16, 32, 2  # small_config: experts, widths, one pair in each of two stacks
V = 96  # its own vocabulary would be most of the work


def config(**changes):
    small = small_config("unused", mesh=MeshConfig(expert=8))
    model = dataclasses.replace(small.model, vocab_size=V)
    return dataclasses.replace(small, **{"model": model, **changes})


@pytest.fixture(scope="module")
def step():
    return compile_step(config(), simulated_devices(8))


@pytest.fixture(scope="module")
def made(step):
    return plan_of(step, name="small", where=None)


def test_expert_weights_are_counted_and_a_token_meets_two_experts(made):
    experts = PAIRS * E * 2 * M * H
    assert made.parameters.experts == experts == 16384
    assert made.parameters.total - made.parameters.active == experts * (E - 2) // E


def test_a_device_holds_its_share_of_the_experts_and_all_else_whole(made):
    dense = made.parameters.total - made.parameters.experts
    assert made.memory.weights == 4 * (dense + made.parameters.experts // 8)
    # AdamW has two moments as large as the weights, and a few counters.
    assert 0 <= made.memory.optimizer - 2 * made.memory.weights < 64


def test_memory_is_told_apart_and_adds_up(step, made):
    memory, program = made.memory, step.program
    assert memory.total == program.arguments + program.results + program.temporaries + program.code
    assert memory.activations + memory.temporaries == program.temporaries
    # Kept of a device's row of 48 tokens: its logits, and at least each layer's input.
    assert memory.activations > 4 * 48 * (V + 2 * PAIRS * M)
    assert memory.temporaries > memory.weights  # the gradients, with a replicated update


def test_the_step_has_four_all_to_alls_a_moe_layer_and_no_all_gather(made):
    # Forward there and back, backward there and back; two MoE layers of one expert axis.
    assert made.collectives("all-to-all") == 4 * PAIRS
    assert made.collectives("all-gather") == 0
    assert all(one.axes == ("expert",) for one in made.exchanges if one.kind == "all-to-all")
    # 8 rows of 48 tokens on 8 devices: a group of 48 each, C = max(4, ceil(2 * 48 / 8)) = 12 slots.
    one_layer = E * 12 * M * 4
    assert made.bytes_per_device("all-to-all") == 4 * PAIRS * one_layer


def test_the_memory_of_a_device_may_be_given(step, made):
    fitting, not_fitting = (
        plan_of(step, name="small", where=None, memory_limit=made.memory.total + more)
        for more in (0, -1)
    )
    assert fitting.fits and not_fitting.fits is False and made.fits is None


def test_the_document_is_json_and_says_where_figures_come_from(made):
    document = json.loads(json.dumps(made.as_json()))
    assert document["memory"]["total"] == made.memory.total
    assert document["found"]["memory"] == "compiled"
    assert document["time"] is None  # nothing is modelled for an unknown chip


def test_the_page_needs_no_network(made):
    page = plan_page(made)
    assert page.count('class="plotly-graph-div"') == 2
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="http', page)


@pytest.mark.slow
def test_a_policy_that_computes_more_again_keeps_less():
    def activations(remat):
        model = dataclasses.replace(config().model, remat=remat)
        return plan(config(model=model), simulated_devices(8)).memory.activations

    kept = [activations(remat) for remat in POLICIES]
    assert kept == sorted(kept, reverse=True) and kept[-1] < kept[0] / 3


@pytest.mark.slow
def test_more_layers_run_more_exchanges_but_the_program_has_as_many(made):
    deeper = dataclasses.replace(config().model, num_encoder_layers=6, num_decoder_layers=6)
    found = plan(config(model=deeper), simulated_devices(8))
    assert found.collectives("all-to-all") == made.collectives("all-to-all")
    assert found.bytes_per_device("all-to-all") == 3 * made.bytes_per_device("all-to-all")
    assert found.flops_per_device > made.flops_per_device


def test_legal_meshes_divide_experts_heads_and_rows():
    meshes = list(legal_meshes(config(), 8))
    assert {(m.data, m.expert, m.model) for m in meshes} == {
        (data, expert, model)
        for data in (1, 2, 4, 8)
        for expert in (1, 2, 4, 8)
        for model in (1, 2)  # two heads
        if data * expert * model == 8
    }


def test_stages_divide_the_layers_of_a_model_with_micro_batches():
    deep = dataclasses.replace(config().model, num_encoder_layers=8, num_microbatches=2)
    meshes = list(legal_meshes(config(model=deep), 8))
    # One pair in the decoder: two stages cannot share it.
    assert {mesh.stage for mesh in meshes} == {1}
    deep = dataclasses.replace(deep, num_decoder_layers=4)
    meshes = list(legal_meshes(config(model=deep), 8))
    assert {mesh.stage for mesh in meshes} == {1, 2}
    # 8 rows in two parts: 4 rows over the devices of data x expert.
    assert all(mesh.data * mesh.expert <= 4 for mesh in meshes)
    assert all(math.prod((m.data, m.stage, m.expert, m.model)) == 8 for m in meshes)


def test_every_policy_is_tried():
    assert set(POLICIES) == set(get_args(Remat))


def searched(monkeypatch, made, answers, meshes):
    """A search in which `answers` stand for the compiler; the lines it tells, and its result."""
    module = importlib.import_module("moe.planning.search")  # the function has the room's name
    tried, told = iter(answers), []

    def plan(attempt, *_, **__):
        answer = next(tried)
        if isinstance(answer, Exception):
            raise answer
        return dataclasses.replace(answer, remat=attempt.model.remat)

    monkeypatch.setattr(module, "plan", plan)
    monkeypatch.setattr(module, "legal_meshes", lambda *_: iter(meshes))
    found = search(config(), simulated_devices(8), tell=told.append)
    assert next(tried, None) is None, "every answer was asked for"
    return found, told


def test_the_search_puts_what_fits_and_sends_least_first(made, monkeypatch):
    small, large = made.memory.total, made.memory.total + 1
    sending = dataclasses.replace(made, memory_limit=large)
    silent = dataclasses.replace(made, memory_limit=large, exchanges=())
    too_large = dataclasses.replace(silent, memory_limit=small - 1)
    meshes = [MeshConfig(data=1, expert=8), MeshConfig(data=8), MeshConfig(data=2, expert=4)]
    # The first mesh fits with no policy; a second and a third are done when one fits.
    answers = [*[too_large] * 4, sending, too_large, silent]
    found, told = searched(monkeypatch, made, answers, meshes)
    assert [one.fits for one in found] == [True, True, *[False] * 5]
    assert not found[0].exchanges and found[1].exchanges
    assert [one.remat for one in found[:2]] == ["dots", "none"]
    assert told[0] == "mesh 1 of 3: data 1 x stage 1 x expert 8 x model 1"
    assert told[1].startswith("  remat none: ") and told[1].endswith("does not fit")


def test_a_mesh_that_does_not_compile_does_not_end_the_search(made, monkeypatch):
    fits = dataclasses.replace(made, memory_limit=2**40)
    answers = [*[ValueError("a shard of 3\nand a trace")] * 4, fits]
    found, told = searched(monkeypatch, made, answers, [MeshConfig(expert=8), MeshConfig(data=8)])
    assert len(found) == 1 and "  remat full failed: a shard of 3" in told
    with pytest.raises(UserError, match="got none of 1 meshes on 8 devices"):
        searched(monkeypatch, made, [ValueError("no")] * 4, [MeshConfig(data=8)])


def test_no_legal_mesh_is_told_with_both_sides():
    with pytest.raises(UserError, match="got 7 for 8 experts, 2 heads, 8 rows of 48"):
        search(config(), jax.devices()[:7])


BUFFERS = """BufferAssignment:
allocation 0: size 4, color 8, page 0, thread-local:
allocation 1: size 700, page 0, thread-local:
 value: <33158 call-start.4{2} @8> (size=700,offset=0): u32[175]
allocation 2: size 40, page 0, parameter 29, shape |f32[10]| at ShapeIndex {}, maybe-live-out:
allocation 3: size 8, page 0, parameter 30, shape |f32[2]| at ShapeIndex {}:
allocation 4: size 12, page 0, maybe-live-out:
allocation 5: size 100, page 0, preallocated-temp:
allocation 6: size 3, page 0, constant:
allocation 7: size 9, color 1, page 0, preallocated-temp:
"""


def test_buffers_are_counted_once_and_in_the_main_memory_alone():
    assert _sizes(BUFFERS) == {"arguments": 48, "results": 12, "temporaries": 100}


def test_devices_and_a_topology_exclude_each_other():
    with pytest.raises(UserError, match="devices=8, topology=v5p:2x2x2"):
        planned_devices("v5p:2x2x2", 8)


def test_too_many_simulated_devices_are_told():
    with pytest.raises(UserError, match="got 9999 wanted, 8 there"):
        simulated_devices(9999)


EXPERIMENT = """
from tests.planning.test_plan import config as small
def config(model="one"):
    return small(seed={"one": 1, "two": 2}[model])
"""


def test_the_command_writes_json_and_a_page(tmp_path, capsys):
    experiment = tmp_path / "tiny.py"
    experiment.write_text(EXPERIMENT)
    output, page = tmp_path / "plan.json", tmp_path / "plan.html"
    dense = "--model.num-experts 0 --mesh.expert 1 --model.d-hidden 64"
    options = f"--devices 8 --model two {dense} --memory 1 --output {output} --page {page}"
    code = main(["plan", str(experiment), *options.split()])
    assert code == 0
    assert "all-reduce" in capsys.readouterr().out
    document = json.loads(output.read_text())
    assert document["parameters"]["experts"] == 0 and document["num_devices"] == 8
    assert document["fits"] and document["memory_limit"] == 2**30
    assert "two on 8 x cpu" in page.read_text()
    assert read_experiment(experiment, "two").seed == 2


def test_a_model_for_an_experiment_without_models_is_told(tmp_path, capsys):
    experiment = tmp_path / "tiny.py"
    experiment.write_text("def config():\n    raise AssertionError\n")
    assert main(["plan", str(experiment), "--model", "two"]) == 2
    assert "got 'two' for" in capsys.readouterr().err


@pytest.fixture(scope="module")
def slice_of_four(tpu_slice):
    return tpu_slice("v5e:2x2")


@pytest.mark.slow  # needs the extra [tpu]; `pip install '.[tpu]'`
def test_the_tpu_compiler_plans_chips_that_are_not_here(slice_of_four):
    where, chips = slice_of_four
    run = config(mesh=MeshConfig(expert=4))
    found = plan(run, chips, where=where)
    assert found.fits and found.memory_limit == 16 * 2**30
    assert found.collectives("all-to-all") == 4 * PAIRS and found.collectives("all-gather") == 0
    # 4 chips at $1.20 an hour, for six steps of the modelled time.
    assert found.dollars == pytest.approx(found.time.step * 6 / 3600 * 4 * 1.20)
    assert 0 < found.time.utilisation < 1

    # The machine code adds its own bytes. The compiler's report then counts some constants of a few
    # kilobytes as temporaries: 0.2 % of this small step, nothing of one of GShard's.
    whole = plan(run, chips, where=where, machine_code=True)
    assert found.memory.program is None and whole.memory.program > 0
    assert whole.memory.temporaries == pytest.approx(found.memory.temporaries, rel=0.01)
    same = {"program": None, "temporaries": 0}
    assert dataclasses.replace(whole.memory, **same) == dataclasses.replace(found.memory, **same)
    assert whole.exchanges == found.exchanges


@pytest.mark.slow
def test_the_search_compiles_for_chips_and_ends_a_mesh_that_fits(slice_of_four):
    where, chips = slice_of_four
    small = dataclasses.replace(config().model, num_experts=2)
    told = []
    plans = search(config(model=small), chips, where=where, tell=told.append)
    # Two experts and two heads: four meshes, of which each fits without computing anything again.
    assert len(plans) == 4 and {one.remat for one in plans} == {"none"}
    assert [one.time.step for one in plans] == sorted(one.time.step for one in plans)
    assert told[0] == "mesh 1 of 4: data 2 x stage 1 x expert 2 x model 1"


@pytest.mark.slow
def test_a_step_too_large_for_a_chip_is_told(slice_of_four):
    where, chips = slice_of_four
    wide = dataclasses.replace(config().model, d_model=2**14, d_hidden=2**16)
    with pytest.raises(UserError, match="fit into the memory of a chip: got RESOURCE_EXHAUSTED"):
        plan(config(model=wide, mesh=MeshConfig(expert=4)), chips, where=where)


@pytest.mark.slow
def test_gradients_of_a_shared_update_are_reduced_to_parts_along_the_sides_of_a_torus(tpu_slice):
    where, chips = tpu_slice("v5p:4x4x4")
    gshard = read_experiment(EXPERIMENTS / "gshard.py", "128e_12l")
    run = dataclasses.replace(
        gshard,
        mesh=MeshConfig(data=4, expert=4, model=4, weight_update="sharded"),
        model=dataclasses.replace(gshard.model, num_experts=16),
        mixture=dataclasses.replace(gshard.mixture, batch_size=1024),
    )
    found = plan(run, chips, where=where)
    along_data = [one for one in found.exchanges if "data" in one.axes]

    def mebibytes(*kinds):
        return sum(one.bytes_per_device for one in along_data if one.kind in kinds) / 2**20

    # Of each layer a chip has a quarter: 88 M weights outside of experts and 101 M within, 718 MiB.
    assert mebibytes("all-reduce") < 2  # norms, statistics, Adafactor's means
    assert mebibytes("reduce-scatter", "collective-permute") > 600
    assert mebibytes("all-gather") > 600  # the new weights


@pytest.mark.slow
def test_a_browser_draws_every_chart(made, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser on this machine")
    page = tmp_path / "plan.html"
    page.write_text(plan_page(made), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-sync"
    more = f"--enable-logging=stderr --virtual-time-budget=8000 --user-data-dir={tmp_path / 'b'}"
    command = [browser, *flags.split(), *more.split(), "--dump-dom", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "Uncaught" not in done.stderr
    assert len(re.findall(r'class="plotly-graph-div js-plotly-plot"', done.stdout)) == 2


def test_a_slice_the_compiler_does_not_have_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="got v5p:2x2x2 without libtpu"):
        planned_devices("v5p:2x2x2", None)
