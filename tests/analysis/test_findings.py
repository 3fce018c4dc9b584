import dataclasses

import numpy as np
import pytest

from moe.analysis import LoadReport, Settings, collect_load, read_history

KNOWN = Settings(
    capacity_factor=1.0, balance_weight=0.01, z_weight=0.001, batch_priority=False, temperature=1.5
)


@pytest.fixture
def report(stats, tmp_path):
    """Builds a report of a decoder from counts by direction and lines of training."""

    def build(by_direction, lines=(), *, settings=KNOWN, **more):
        loads = collect_load(
            (name, {"decoder": stats(counts_YE, **more)})
            for name, counts_YE in by_direction.items()
        )
        (tmp_path / "load.jsonl").write_text("".join(lines))
        return LoadReport(
            run="r", loads=loads, history=read_history(tmp_path / "load.jsonl"), settings=settings
        )

    return build


def test_a_balanced_model_has_no_findings(report, line):
    even = [[500] * 8] * 2
    lines = [line(step, even) for step in range(20)]
    balanced = report({"en-de": even, "de-en": even}, lines)
    assert balanced.findings == []
    assert [balanced.verdict(layer) for layer in balanced.layers] == ["fine", "fine"]


def test_a_busy_and_two_dead_experts_are_one_finding_with_its_cure(report):
    # 4000 choices of 8 experts: a fair share is 500; 1550 / 500 = 3.1; 20 / 500 = 0.04 < 0.1 is dead
    uneven = [600, 20, 600, 10, 600, 1550, 310, 310]
    found = report({"en-de": [[500] * 8, uneven]}).findings
    assert [(x.severity, x.where) for x in found] == [("fix", "decoder layer 1")]
    assert found[0].title == "expert 5 receives 3.1 times its share; experts 1 and 3 are dead"
    assert "38.8 % of the choices instead of 12.5 %" in found[0].evidence
    assert "Raise `objective.balance_weight` from 0.01 to 0.02" in found[0].cure
    assert "`model.num_experts`" in found[0].cure


def test_a_dead_expert_beside_even_ones_is_a_finding_without_a_busy_one(report):
    # 7 of 8 experts share all: 4000 / 7 = 571, 1.14 times the mean
    found = report({"en-de": [[572, 572, 0, 572, 571, 571, 571, 571]]}).findings
    assert [x.title for x in found] == ["expert 2 is dead"]


def test_a_collapsed_layer_names_its_experts_and_the_z_loss(report):
    found = report({"en-de": [[0, 1980, 10, 0, 1980, 10, 10, 10]]}).findings
    # 3960 of 4000
    assert found[0].title == "collapsed: experts 1 and 4 receive 99.0 % of all choices"
    assert "Raise `objective.z_weight` from 0.001 to 0.002" in found[0].cure


def test_a_zero_weight_is_given_a_first_value_and_an_unknown_one_none(report):
    uneven = {"en-de": [[1500, 500, 500, 500, 250, 250, 250, 250]]}
    none = report(uneven, settings=dataclasses.replace(KNOWN, balance_weight=0.0))
    assert "Raise `objective.balance_weight` from 0 to 0.01" in none.findings[0].cure
    assert (
        "Raise `objective.balance_weight` and train on"
        in report(uneven, settings=Settings()).findings[0].cure
    )


def test_the_direction_behind_a_busy_expert_is_named(report):
    # Fair is 500 for each; en-de alone gives expert 0 an excess of 2000, the other one of 0
    found = report(
        {"en-de": [[2500] + [1500 // 7 + 1] * 7], "de-en": [[500] * 8]},
    ).findings
    assert "100% of that expert's excess comes from en-de." in found[0].evidence
    assert "a higher `mixture.temperature` (now 1.5)" in found[0].cure


def test_drops_of_a_balanced_layer_ask_for_capacity(report, line):
    # shares 1.4, 1.2, then 0.9 of the mean: at factor 1.0 the mean load drops 0.6 / 8 = 7.5 %,
    # at 1.25 it drops 0.15 / 8 = 1.9 %, at 1.5 nothing
    counts = [[700, 600, 450, 450, 450, 450, 450, 450]]
    kept = [[500, 500, 400, 400, 400, 400, 400, 400]]
    lines = [line(step, counts, kept_YE=kept) for step in range(20)]
    found = report({"en-de": [[500] * 8]}, lines).findings
    assert found[0].title == "15.0 % of the choices are dropped in training"  # 600 of 4000
    assert found[0].severity == "fix"
    assert "explains 7.5 % at a capacity factor of 1" in found[0].evidence
    assert "Raise `model.router.capacity_factor` (now 1.0) to 1.5" in found[0].cure
    assert "`model.router.batch_priority=True`" in found[0].cure


def test_drops_of_an_uneven_layer_ask_for_balance_first(report, line):
    lines = [line(step, [[2400, 1600]], kept_YE=[[2000, 1600]]) for step in range(20)]
    settings = dataclasses.replace(KNOWN, batch_priority=True)
    uneven = [
        line(step, [[2500, 500, 500, 500]], kept_YE=[[1000, 500, 500, 500]]) for step in range(9)
    ]
    assert "Balance" not in report({"en-de": [[500] * 2]}, lines).findings[0].cure
    found = report({"en-de": [[500] * 4]}, uneven, settings=settings).findings
    assert found[0].cure.startswith("Balance the layer first.")
    assert "batch_priority" not in found[0].cure


def test_only_the_last_fifth_of_training_counts_as_its_drop_rate(report, line):
    early = [line(step, [[500] * 2], kept_YE=[[100] * 2]) for step in range(80)]
    late = [line(step, [[500] * 2]) for step in range(80, 100)]
    even = report({"en-de": [[500] * 2]}, early + late)
    assert even.layers[0].training_drop_rate == 0
    assert even.findings == []


def test_drops_in_evaluation_are_to_be_fixed(report):
    found = report({"en-de": [[500, 500]]}, kept_YE=[[500, 400]]).findings
    assert found[0].title == "10.0 % of the choices are dropped in evaluation"
    assert "`model.router.eval_capacity_factor`" in found[0].cure


def test_a_load_that_drifts_apart_is_watched(report, line):
    # busiest over mean 1.2 up to step 59, then 1.8
    lines = [line(step, [[600, 400]]) for step in range(60)]
    lines += [line(step, [[900, 100]]) for step in range(60, 100)]
    found = report({"en-de": [[520, 480]]}, lines).findings
    assert [(x.severity, x.title) for x in found] == [("watch", "the load grows more uneven")]
    assert "grew from 1.2 (middle) to 1.8 times its share (end)" in found[0].evidence


def test_a_load_that_evens_out_says_so(report, line):
    lines = [line(step, [[900, 50, 50]]) for step in range(60)]
    lines += [line(step, [[500, 250, 250]]) for step in range(60, 100)]
    found = report({"en-de": [[510, 245, 245]]}, lines).findings
    # 3 * 0.9 = 2.7, then 3 * 0.5 = 1.5
    assert "fell from 2.7 (middle) to 1.5" in found[0].evidence
    assert found[0].cure.startswith("Training on may be enough")


@pytest.mark.parametrize(
    ("entropy", "title"),
    [(0.995, "the router hardly tells"), (0.01, "the router is certain of one expert")],
)
def test_a_router_without_opinion_or_without_doubt_is_watched(report, entropy, title):
    found = report({"en-de": [[500] * 4]}, entropy=entropy * np.log(4)).findings
    assert [x.severity for x in found] == ["watch"]
    assert found[0].title.startswith(title)


def test_few_tokens_are_noted(report):
    found = report({"en-de": [[25] * 4]}).findings
    assert (found[0].severity, found[0].title) == ("note", "measured on few tokens")
    assert "about 20%" in found[0].evidence  # 1 / sqrt(25)


def test_specialisation_is_a_note_and_no_fault(report):
    # each direction has a pair of experts of its own: 1 bit of at most 1
    own = report({"en-de": [[1000, 1000, 0, 0]], "en-fr": [[0, 0, 1000, 1000]]})
    assert own.layers[0].specialisation_bits == pytest.approx(1)
    assert own.layers[0].max_specialisation_bits == pytest.approx(1)
    assert [x.severity for x in own.findings] == ["note"]
    assert "en-de puts 50% on expert 0" in own.findings[0].evidence
    assert "capacity factor of up to 2.0" in own.findings[0].cure
    assert own.verdict(own.layers[0]) == "fine"


def test_the_worst_comes_first(report):
    layers = [[500] * 4, [800, 400, 400, 400], [1400, 200, 200, 200], [1000, 400, 300, 300]]
    found = report({"en-de": layers}).findings
    # 1.6, 2.8 and 2.0 times the mean
    assert [(x.severity, x.layer) for x in found] == [("fix", 2), ("fix", 3), ("watch", 1)]


def test_router_settings_named_in_cures_exist():
    from moe.layers import Top2

    fields = {field.name for field in dataclasses.fields(Top2)}
    assert {"capacity_factor", "eval_capacity_factor", "batch_priority"} <= fields
