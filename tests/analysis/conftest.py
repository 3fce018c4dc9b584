"""Statistics of imaginary models, in the form in which real ones return them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest


def make_stats(assigned_YE, *, kept_YE=None, mean_prob_YE=None, entropy=0.4, choices=2):
    """Statistics of one stack for one batch; `choices` is K, so tokens = choices made / K."""
    assigned_YE = np.asarray(assigned_YE, np.int32)
    kept_YE = assigned_YE if kept_YE is None else np.asarray(kept_YE, np.int32)
    totals_Y1 = np.maximum(assigned_YE.sum(-1, keepdims=True), 1)
    return SimpleNamespace(
        assigned_E=assigned_YE,
        kept_E=kept_YE,
        dropped_E=assigned_YE - kept_YE,
        mean_prob_E=np.asarray(
            assigned_YE / totals_Y1 if mean_prob_YE is None else mean_prob_YE, np.float32
        ),
        entropy=np.full(len(assigned_YE), entropy, np.float32),
        num_tokens=assigned_YE.sum(-1) // choices,
    )


def make_line(step, assigned_YE, *, kept_YE=None, entropy=0.4, stack="decoder", choices=2):
    """One line of load.jsonl."""
    stats = make_stats(assigned_YE, kept_YE=kept_YE, entropy=entropy, choices=choices)
    arrays = {
        "assigned": stats.assigned_E.tolist(),
        "kept": stats.kept_E.tolist(),
        "mean_prob": stats.mean_prob_E.tolist(),
        "entropy": stats.entropy.tolist(),
        "num_tokens": stats.num_tokens.tolist(),
    }
    return json.dumps({"step": step, "stacks": {stack: arrays}}) + "\n"


@pytest.fixture
def stats():
    return make_stats


@pytest.fixture
def line():
    return make_line
