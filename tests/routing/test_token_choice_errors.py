"""Wrong arguments of the token-choice routers end in one sentence that holds the values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing.noisy_top_k import noisy_top_k
from moe.routing.sigmoid_top_k import sigmoid_top_k
from moe.routing.top1 import jittered, top1
from moe.routing.top_k import top_k
from moe.routing.two_level import two_level_logits
from tests.routing.token_routers import METHODS, route

LOGITS = jnp.zeros((2, 3, 6))
GROUPS = {"num_choices": 2, "capacity": 2, "num_expert_groups": 3}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0}, ["capacity", "0"]),
        ({"token_mask_GS": np.ones((3, 2), bool)}, ["token_mask_GS", "(3, 2)", "(2, 3, 6)"]),
        ({"slot_rule": "codes"}, ["slot_rule", "codes", "paper"]),
    ],
    ids=["no capacity", "mask of another shape", "unknown slot rule"],
)
def test_every_router_names_a_wrong_argument_with_its_value(method, options, words):
    with pytest.raises(UserError) as error:
        route(method, LOGITS, **({"capacity": 2} | options))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "top1"])
@pytest.mark.parametrize("num_choices", [0, 7])
def test_more_choices_than_experts_or_none_is_an_error(method, num_choices):
    with pytest.raises(UserError, match=rf"num_choices={num_choices}, num_experts=6"):
        route(method, LOGITS, capacity=2, num_choices=num_choices)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: top1(jnp.zeros((2, 3, 1)), capacity=1), "at least 2 experts: got shape"),
        (lambda: top_k(LOGITS, num_choices=2, capacity=1, gates="top"), "gates must .*'top'"),
        (
            lambda: top_k(LOGITS, **(GROUPS | {"num_expert_groups": 4})),
            "num_expert_groups=4, num_experts=6",
        ),
        (
            lambda: top_k(LOGITS, **(GROUPS | {"num_expert_groups": 0})),
            "num_expert_groups=0, num_experts=6",
        ),
        (
            lambda: top_k(LOGITS, **GROUPS, num_kept_groups=4),
            "num_kept_groups=4, num_expert_groups=3",
        ),
        (
            lambda: top_k(LOGITS, **(GROUPS | {"num_choices": 3})),
            "num_choices=3, num_kept_groups=1 of 2 experts",
        ),
        (lambda: top_k(LOGITS, **GROUPS, group_score="mean"), "group_score must .*'mean'"),
        (
            lambda: sigmoid_top_k(
                LOGITS, jnp.zeros(6), num_choices=1, capacity=1, num_expert_groups=6
            ),
            "group_score must .*'top2_sum', num_expert_groups=6",
        ),
        (
            lambda: sigmoid_top_k(LOGITS, jnp.zeros(5), num_choices=1, capacity=1),
            r"bias_E must .*\(5,\)",
        ),
        (
            lambda: sigmoid_top_k(LOGITS, jnp.zeros(6), num_choices=1, capacity=1, scale=0),
            "scale must be positive: got 0",
        ),
        (
            lambda: noisy_top_k(LOGITS, LOGITS, num_choices=1, capacity=1),
            "key must be given for noise: got .*key=None",
        ),
        (
            lambda: noisy_top_k(
                LOGITS, LOGITS[:1], num_choices=1, capacity=1, key=jax.random.key(0)
            ),
            r"noise_logits_GSE must .*\(1, 3, 6\)",
        ),
        (lambda: jittered(LOGITS, 0.1), "key must be given for jitter: got jitter=0.1, key=None"),
        (lambda: jittered(LOGITS, 1.0), r"jitter must be in \[0, 1\): got 1.0"),
        (lambda: jittered(LOGITS, -0.1), r"jitter must be in \[0, 1\): got -0.1"),
        (
            lambda: two_level_logits(jnp.zeros((2, 3, 4)), LOGITS),
            r"groups divide the experts: got \(2, 3, 4\) and \(2, 3, 6\)",
        ),
        (
            lambda: two_level_logits(jnp.zeros((2, 4, 3)), LOGITS),
            r"of the tokens of inner_GSE.*\(2, 4, 3\)",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(call, message):
    with pytest.raises(UserError, match=message):
        call()
