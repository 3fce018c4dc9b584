"""`top2` compiled once for each shape and set of options, and its plan beside the oracle's."""

from __future__ import annotations

import jax
import numpy as np

from moe import routing

top2 = jax.jit(
    routing.top2,
    static_argnames=(
        "capacity",
        "second_policy",
        "slot_rule",
        "renormalize_after_drop",
        "batch_priority",
    ),
)


def assert_same_plan(plan, expected) -> None:
    """The decisions of a plan are the oracle's, its numbers too as far as float32 goes.

    Expert and slot mean nothing where a choice is not assigned.
    """
    choices = expected.choices
    np.testing.assert_array_equal(plan.assigned_GSK, choices.assigned_GSK)
    np.testing.assert_array_equal(plan.kept_GSK, choices.kept_GSK)
    for name in ["expert_GSK", "slot_GSK"]:
        ours, theirs = np.asarray(getattr(plan, name)), getattr(choices, name)
        assert ours.dtype == np.int32
        np.testing.assert_array_equal(
            ours[choices.assigned_GSK], theirs[choices.assigned_GSK], err_msg=name
        )
    for name in ["probs_GSE", "gate_GSK", "aux_loss", "z_loss"]:
        ours = np.asarray(getattr(plan, name))
        theirs = np.asarray(getattr(expected, name))
        assert ours.dtype == np.float32
        if name == "probs_GSE":  # of padding they are uniform, whatever it holds
            real_GS = np.asarray(plan.token_mask_GS)
            ours, theirs = ours[real_GS], theirs[real_GS]
        # An exponential, a sum and a quotient: a few units in the seventh digit.
        np.testing.assert_allclose(ours, theirs, 3e-6, 1e-7, err_msg=name)
