"""Wrong arguments end in one sentence that holds the values, when `top2` is called or traced."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing import top2

LOGITS = np.zeros((2, 3, 5), np.float32)
ALL = {"second_policy": "all"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({}, ["key", "random"], id="the default policy without a key"),
        pytest.param({"second_policy": "sampling"}, ["key", "sampling"], id="sampling, no key"),
        pytest.param({"second_policy": "al"}, ["second_policy", "al", "all"], id="unknown policy"),
        pytest.param(
            ALL | {"slot_rule": "codes"}, ["slot_rule", "codes", "paper"], id="unknown slot rule"
        ),
        pytest.param(ALL | {"capacity": 0}, ["capacity", "0"], id="no capacity"),
        pytest.param(ALL | {"capacity": -7}, ["capacity", "-7"], id="negative capacity"),
        pytest.param(
            ALL | {"token_mask_GS": np.ones((3, 2), bool)},
            ["token_mask_GS", "(3, 2)", "(2, 3"],
            id="mask of another shape",
        ),
        pytest.param(
            ALL | {"token_mask_GS": np.ones((3,), bool)},
            ["token_mask_GS", "(3,)", "(2, 3"],
            id="mask that would broadcast",
        ),
        pytest.param(
            ALL | {"importance_GS": np.ones((2, 5), np.float32)},
            ["importance_GS", "(2, 5)", "(2, 3"],
            id="importance of another shape",
        ),
    ],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["called", "traced"])
def test_a_wrong_argument_is_named_with_its_value(options, words, transform):
    arguments = {"capacity": 2} | options
    with pytest.raises(UserError) as error:
        transform(lambda logits_GSE: top2(logits_GSE, **arguments))(LOGITS)
    for word in words:
        assert word in str(error.value)


def test_one_expert_is_an_error_that_says_so():
    with pytest.raises(UserError, match="1"):
        top2(np.zeros((2, 3, 1), np.float32), capacity=2, second_policy="all")
