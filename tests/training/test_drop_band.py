from __future__ import annotations

import dataclasses
import json

import pytest

from moe.errors import UserError
from moe.training import ObjectiveConfig, train
from tests.training.small import small_config


def logged(run_dir, name):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {x["step"]: x[name] for x in map(json.loads, lines) if name in x}


@pytest.mark.slow
def test_the_adapted_weight_goes_on_where_a_stopped_run_left_it(tmp_path):
    # Nothing stays below 0 %: the weight grows by 2 % in each step that drops anything.
    objective = ObjectiveConfig(balance_weight=0.01, drop_band=(0.0, 0.0))
    whole = small_config(tmp_path / "whole", steps=4, objective=objective)
    train(whole)
    first = dataclasses.replace(whole, run_dir=str(tmp_path / "cut"), steps=2)
    train(first)
    train(dataclasses.replace(first, steps=4))
    expected = logged(tmp_path / "whole", "balance_weight")
    assert logged(tmp_path / "cut", "balance_weight") == expected
    assert 0.01 < expected[1] < expected[4] <= 0.01 * 1.02**4 * 1.000001


@pytest.mark.slow
def test_a_band_may_be_set_and_taken_away_in_a_run_under_way(tmp_path):
    config = small_config(tmp_path / "run", steps=1)
    train(config)
    band = ObjectiveConfig(drop_band=(0.0, 0.0))
    train(dataclasses.replace(config, steps=2, objective=band))
    train(dataclasses.replace(config, steps=3))
    assert list(logged(tmp_path / "run", "balance_weight")) == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_band": (0.2, 0.1)}, r"drop_band must .* got \(0.2, 0.1\)"),
        ({"drop_band": (0.0, 0.1), "balance_weight": 0.0}, "drop_band must .* balance_weight=0.0"),
    ],
)
def test_a_malformed_band_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        ObjectiveConfig(**options)
