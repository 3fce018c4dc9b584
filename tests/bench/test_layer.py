"""`moe bench layer` without peers: what is measured, how it is divided, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

from moe.bench import (
    GPU_CONFIG,
    LayerBenchConfig,
    LayerBenchmark,
    Row,
    Section,
    Timing,
    bench_layer,
    case_names,
    show,
)
from moe.bench.measure import Case, CaseSkipped, in_turns, warm_up
from moe.bench.worker import measure_section
from moe.errors import UserError
from tests.bench.small import WORKLOAD

CASES = ("matmul", "dense-jax", "moe-gather")  # moe-auto compiles for seconds


def row(name, forward, train=None, **more):
    timings = [
        s and Timing(cpu_s=tuple(s), wall_s=tuple(10 * t for t in s)) for s in (forward, train)
    ]
    return Row(name=name, forward=timings[0], train=timings[1], forward_flops=8.0, **more)


def section(*rows, **sizes):
    workload = dataclasses.replace(WORKLOAD, **sizes)
    return Section(workload=workload, rows=rows, busiest=1.0)


def test_our_layer_is_timed_beside_the_dense_layer():
    workload = dataclasses.replace(WORKLOAD, capacity_factor=2.0)  # room for all
    measured = measure_section(workload, names=CASES, rounds=2)
    assert tuple(r.name for r in measured.rows) == CASES
    for r in measured.rows:
        assert r.forward and len(r.forward.cpu_s) == 2 and min(r.forward.wall_s) > 0, r
        assert (r.train is None) == (r.name == "matmul")
        assert r.name == "matmul" or r.memory_bytes > 64 * 16 * 4, (
            r
        )  # the tokens' gradient at least
    _, dense, ours = measured.rows
    assert (ours.computed, dense.computed) == (1, None)
    assert measured.eff(dense, "train") == 1
    # 2 products of 64 x 16 x (2 x 32), 2 operations each
    assert ours.forward_flops == 2 * 2 * 64 * 16 * 64


def test_drops_are_counted():
    # A huge skew sends every token to the same two experts. Their C is 1.25 * 64 * 2 / 4 = 40.
    workload = dataclasses.replace(WORKLOAD, skew=1000.0)
    assert workload.busiest() == 2  # 64 of 128 assignments over a mean of 32
    (gather,) = measure_section(workload, names=["moe-gather"], rounds=1).rows
    assert gather.computed == 40 / 64
    assert gather.note == "capacity factor 1.25, groups of 64"


def test_decoding_is_forward_only_and_dropless_with_every_back_end():
    workload = dataclasses.replace(
        WORKLOAD, training=False, dtype="bfloat16", tokens=3, skew=1000.0
    )
    names = [name for name in case_names() if name.startswith(("moe", "dense-jax"))]
    rows = measure_section(workload, names=names, rounds=1).rows
    assert {"moe-auto", "moe-sorted", "moe-gather", "moe-einsum"} < {r.name for r in rows}
    for r in rows:
        assert r.forward and r.train is None, r
        assert r.name.startswith("dense") or (r.computed, r.note) == (1, "dropless")


def test_skew_makes_experts_popular():
    busiest = [
        dataclasses.replace(WORKLOAD, tokens=997, d_model=512, num_experts=16, skew=skew).busiest()
        for skew in (0.0, 1.0, 30.0)
    ]
    # At random 125 +- 11 tokens an expert; the largest of 16 stays below 1.5 of the mean.
    assert 1 <= busiest[0] < 1.5 < busiest[1] < busiest[2] <= 8


def test_eff_is_the_median_of_the_rounds_ratios():
    # Ratios of the rounds: 2/1, 2/4, 9/3; their median is 2, the ratio of the medians 2/3.
    case = row("moe-auto", [1.0, 4.0, 3.0])
    assert section(row("dense-jax", [2.0, 2.0, 9.0]), case).eff(case, "forward") == 2
    assert section(row("dense-jax", [2.0, 2.0, 9.0]), case).eff(case, "train") is None
    assert section(case).eff(case, "forward") is None


def test_a_case_is_divided_by_the_dense_layer_of_its_kind_torch_first():
    plain, gated = row("moe-auto", [1.0]), row("moe-auto-swiglu", [1.0], gated=True)
    rows = [row("dense-jax", [3.0]), row("dense-torch", [2.0])]
    assert section(plain, gated, *rows).eff(plain, "forward") == 2
    assert section(plain, gated, *rows).eff(gated, "forward") is None
    swiglu = row("dense-jax-swiglu", [5.0], gated=True)
    assert section(plain, gated, *rows, swiglu).eff(gated, "forward") == 5


def test_the_clock_is_the_processors_on_one_core_only():
    case = row("moe-auto", [1.0])
    assert section(case).seconds(case, "forward") == 1
    assert section(case, threads=2).seconds(case, "forward") == 10
    assert section(case, device="gpu").seconds(case, "forward") == 10
    assert section(case).cores() == 0.1


def test_the_share_of_the_ceiling_counts_three_products_in_training():
    case, ceiling = row("moe-auto", [2.0], [4.0]), row("matmul", [1.0])
    measured = section(case, ceiling)
    assert measured.of_ceiling(case, "forward") == 0.5
    assert measured.of_ceiling(case, "train") == 0.75
    assert measured.of_ceiling(ceiling, "forward") is None


def recorded(log, name, *, train=True):
    return Case(
        name=name,
        note="",
        forward=lambda: log.append((name, "forward")),
        train=(lambda: log.append((name, "train"))) if train else None,
        wait=lambda result: None,
        memory=lambda: None,
        forward_flops=1.0,
    )


def test_cases_take_turns_and_odd_rounds_go_backwards():
    log = []
    cases = [recorded(log, "a"), recorded(log, "b", train=False)]
    repeats = [{"forward": 1, "train": 2}, {"forward": 1}]
    timings = in_turns(cases, repeats, rounds=2, on_sample=lambda: None)
    there = [("a", "forward"), ("a", "train"), ("a", "train"), ("b", "forward")]
    assert log == there + there[::-1]
    assert [len(t["forward"].wall_s) for t in timings] == [2, 2]
    assert "train" not in timings[1]


def test_short_calls_are_repeated():
    _, repeats = warm_up(recorded([], "a", train=False))
    assert repeats["forward"] > 50  # a call of less than 0.1 ms fills 10 ms


def test_a_case_that_cannot_run_says_why_and_the_others_go_on(monkeypatch):
    from moe.bench import jax_layers

    def too_large(workload):
        raise CaseSkipped("needs 9 GiB")

    def broken(workload):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore lines")

    monkeypatch.setitem(jax_layers.CASES, "dense-jax", too_large)
    monkeypatch.setitem(jax_layers.CASES, "moe-auto", broken)
    rows = measure_section(WORKLOAD, names=["matmul", "dense-jax", "moe-auto"], rounds=1).rows
    by_name = {r.name: r for r in rows}
    assert by_name["dense-jax"].note == "not measured: needs 9 GiB"
    assert (
        by_name["moe-auto"].note == "not measured: RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    )
    assert by_name["moe-auto"].forward is None
    assert by_name["matmul"].forward is not None


@pytest.fixture(scope="module")
def benchmark():
    config = LayerBenchConfig(
        experts=(4,),
        tokens=(64,),
        decode_tokens=(5,),
        d_model=16,
        d_hidden=32,
        threads=(1,),
        rounds=2,
        cases=CASES,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # one device, as users have
        return bench_layer(config, console=Console(file=io.StringIO()))


def test_a_process_for_each_section_on_one_core(benchmark):
    training, decoding = benchmark.sections
    assert training.workload.training and not decoding.workload.training
    assert tuple(r.name for r in training.rows) == CASES
    assert all(s.cores() < 1.1 for s in benchmark.sections)
    assert benchmark.environment["jax"] == jax.__version__


def test_json_holds_samples_and_what_follows(benchmark):
    document = json.loads(json.dumps(benchmark.as_json()))
    assert document["settings"]["experts"] == [4]
    rows = {r["name"]: r for r in document["sections"][0]["rows"]}
    times = {name: np.array(rows[name]["train"]["cpu_s"]) for name in ("dense-jax", "moe-gather")}
    assert rows["moe-gather"]["reference"] == "dense-jax"
    assert rows["moe-gather"]["eff_train"] == pytest.approx(
        np.median(times["dense-jax"] / times["moe-gather"])
    )


def test_the_table_says_what_it_was_divided_by(benchmark):
    out = io.StringIO()
    show(benchmark, Console(file=out, width=200))
    text = out.getvalue()
    assert "training, 64 tokens, 4 experts, 1 thread(s)" in text
    assert "eff is against the dense layer in JAX" in text
    assert "Threads were not limited" not in text
    assert "100%" in text


def test_cores_beyond_the_limit_are_told():
    measured = section(row("dense-jax", [1.0]))
    busy = Timing(cpu_s=(2.0,), wall_s=(1.0,))
    measured = dataclasses.replace(
        measured, rows=(dataclasses.replace(measured.rows[0], forward=busy),)
    )
    out = io.StringIO()
    show(
        LayerBenchmark(settings={}, environment={}, missing=(), sections=(measured,)),
        Console(file=out, width=200),
    )
    assert "Threads were not limited" in out.getvalue()
    assert "2.00 cores" in out.getvalue()


def test_a_busy_machine_is_told():
    out = io.StringIO()
    slow = section(row("dense-jax", [1.0]))  # a tenth of a core
    show(
        LayerBenchmark(settings={}, environment={}, missing=(), sections=(slow,)),
        Console(file=out, width=200),
    )
    assert "no case had more than 0.10 of a core" in out.getvalue()


def test_peers_that_are_not_installed_are_listed(monkeypatch):
    from moe.bench import layer

    monkeypatch.setattr(layer.importlib.util, "find_spec", lambda name: None)
    assert layer._missing(("dense-torch", "switch", "moe-auto")) == (
        "torch is not installed (dense-torch): pip install 'moe-jax[parity]'",
        "transformers is not installed (switch): pip install 'moe-jax[parity]'",
    )
    assert layer._missing(("moe-auto",)) == ()


def test_a_gpu_that_is_not_there_is_an_error():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    config = dataclasses.replace(GPU_CONFIG, tokens=(8,), experts=(4,), d_model=8, d_hidden=8)
    with pytest.raises(UserError, match="device must be attached: got gpu, JAX sees cpu"):
        bench_layer(config, console=Console(file=io.StringIO()))


def test_more_threads_than_cores_are_an_error():
    config = LayerBenchConfig(experts=(4,), tokens=(8,), decode_tokens=(), threads=(4096,))
    with pytest.raises(UserError, match=r"threads must be at most the cores.*got 4096"):
        bench_layer(config, console=Console(file=io.StringIO()))


def test_want_of_memory_is_told(monkeypatch, tmp_path):
    killed = tmp_path / "python"  # as the system does when memory ends
    killed.write_text("#!/bin/sh\ncat > /dev/null\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    config = LayerBenchConfig(experts=(128,), cases=("moe-*",))
    with pytest.raises(UserError, match=r"fit into memory together: got killed at .*128 experts"):
        bench_layer(config, console=Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": (8, 1)}, r"experts must be at least 2 each: got \(8, 1\)"),
        ({"tokens": (0,)}, r"tokens must be at least 1 each: got \(0,\)"),
        ({"rounds": 0}, "rounds must be at least 1: got 0"),
        ({"skew": -1.0}, "skew must be at least 0: got -1.0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be positive: got 0.0"),
        ({"tokens": (), "decode_tokens": ()}, r"must name something to measure: got .*tokens=\(\)"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(UserError, match=message):
        LayerBenchConfig(**settings)


def test_unknown_cases_are_refused_with_the_names_there_are():
    with pytest.raises(UserError, match=r"got 'gshard'\. There are .*moe-gather.*nllb-corrected"):
        case_names(("moe-*", "gshard"))


def test_cases_are_named_by_patterns():
    assert case_names(("switch", "dense-*-swiglu")) == (
        "dense-jax-swiglu",
        "dense-torch-swiglu",
        "switch",
    )
    assert set(GPU_CONFIG.cases) == set(case_names(GPU_CONFIG.cases))
