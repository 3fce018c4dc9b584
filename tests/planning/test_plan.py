"""What a plan says of a small run on simulated devices, checked by arithmetic."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re

import jax
import pytest

from moe.cli import main, read_experiment
from moe.errors import UserError
from moe.planning import legal_meshes, plan, plan_page, planned_devices, search, simulated_devices
from moe.sharding import MeshConfig
from tests.training.small import small_config

E, M, H, PAIRS = 8, 16, 32, 2  # small_config: experts, widths, one pair in each of two stacks


def config(**changes):
    return small_config("unused", mesh=MeshConfig(expert=8), **changes)


@pytest.fixture(scope="module")
def made():
    return plan(config(), simulated_devices(8), name="small")


def test_expert_weights_are_counted_and_a_token_meets_two_experts(made):
    experts = PAIRS * E * 2 * M * H
    assert made.parameters.experts == experts == 16384
    assert made.parameters.total - made.parameters.active == experts * (E - 2) // E


def test_a_device_holds_its_share_of_the_experts_and_all_else_whole(made):
    dense = made.parameters.total - made.parameters.experts
    assert made.memory.weights == 4 * (dense + made.parameters.experts // 8)
    # AdamW has two moments as large as the weights, and a few counters.
    assert 0 <= made.memory.optimizer - 2 * made.memory.weights < 64


def test_the_step_has_four_all_to_alls_a_moe_layer_and_no_all_gather(made):
    # Forward there and back, backward there and back; two MoE layers of one expert axis.
    assert made.collectives("all-to-all") == 4 * PAIRS
    assert made.collectives("all-gather") == 0
    assert all(one.axes == ("expert",) for one in made.exchanges if one.kind == "all-to-all")
    # 8 rows of 48 tokens on 8 devices: a group of 48 each, C = max(4, ceil(2 * 48 / 8)) = 12 slots.
    one_layer = E * 12 * M * 4
    assert made.bytes_per_device("all-to-all") == 4 * PAIRS * one_layer


def test_the_document_is_json_and_says_where_figures_come_from(made):
    document = json.loads(json.dumps(made.as_json()))
    assert document["memory"]["total"] == made.memory.total
    assert document["found"]["memory"] == "compiled"
    assert document["time"] is None  # nothing is modelled for an unknown chip


def test_the_page_needs_no_network(made):
    page = plan_page(made)
    assert page.count('class="plotly-graph-div"') == 2
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="http', page)


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


def test_the_search_puts_what_fits_and_sends_least_first(made, monkeypatch):
    small, large = made.memory.total, made.memory.total + 1
    sending = dataclasses.replace(made, memory_limit=large)
    silent = dataclasses.replace(made, memory_limit=large, exchanges=())
    too_large = dataclasses.replace(silent, memory_limit=small - 1)
    plans = iter([too_large, sending, silent])
    module = importlib.import_module(
        "moe.planning.search"
    )  # the room gives its name to the function
    monkeypatch.setattr(module, "plan", lambda *_, **__: next(plans))
    three = [MeshConfig(data=1, expert=8), MeshConfig(data=8), MeshConfig(data=2, expert=4)]
    monkeypatch.setattr(module, "legal_meshes", lambda *_: iter(three))
    assert search(config(), simulated_devices(8)) == [silent, sending, too_large]


def test_no_legal_mesh_is_told_with_both_sides():
    with pytest.raises(UserError, match="got 7 for 8 experts, 2 heads, 8 rows of 48"):
        search(config(), jax.devices()[:7])


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
    options = f"--devices 8 --model two --model.d-hidden 64 --output {output} --page {page}"
    code = main(["plan", str(experiment), *options.split()])
    assert code == 0
    assert "all-to-all" in capsys.readouterr().out
    assert json.loads(output.read_text())["parameters"]["experts"] == PAIRS * E * 2 * M * 64
    assert "two on 8 x cpu" in page.read_text()
    assert read_experiment(experiment, "two").seed == 2


def test_a_model_for_an_experiment_without_models_is_told(tmp_path, capsys):
    experiment = tmp_path / "tiny.py"
    experiment.write_text("def config():\n    raise AssertionError\n")
    assert main(["plan", str(experiment), "--model", "two"]) == 2
    assert "got 'two' for" in capsys.readouterr().err


@pytest.mark.slow  # needs the extra [tpu]; `pip install '.[tpu]'`
def test_the_tpu_compiler_plans_chips_that_are_not_here():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra [tpu]")
    where, chips = planned_devices("v5p:2x2x2", None)
    found = plan(config(), chips, where=where)
    assert found.fits and found.memory_limit == 95 * 2**30
    assert found.collectives("all-to-all") == 4 * PAIRS and found.collectives("all-gather") == 0
    # 8 chips at $4.20 an hour, for six steps of the modelled time.
    assert found.dollars == pytest.approx(found.time.step * 6 / 3600 * 8 * 4.20)
    assert 0 < found.time.utilisation < 1


def test_a_slice_the_compiler_does_not_have_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="got v5p:2x2x2 without libtpu"):
        planned_devices("v5p:2x2x2", None)
