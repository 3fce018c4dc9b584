"""How many slots an expert has for the tokens of one group."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.errors import UserError
from moe.routing import expert_capacity


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "options", "slots"),
    [
        pytest.param(64, 8, {"capacity_factor": 1.0}, 16, id="the paper's 2S/E is factor 1"),
        pytest.param(64, 8, {"capacity_factor": 1.25}, 20, id="room to spare"),
        pytest.param(64, 8, {"capacity_factor": 1.0, "num_choices": 1}, 8, id="one choice"),
        pytest.param(65, 8, {"capacity_factor": 1.0}, 17, id="16.25 is rounded up"),
        pytest.param(16, 16, {"capacity_factor": 1.0}, 4, id="2 is raised to the minimum"),
        pytest.param(
            *(16, 16, {"capacity_factor": 1.0, "min_capacity": 1}, 2), id="a lower minimum"
        ),
        pytest.param(3, 16, {"capacity_factor": 1.0}, 3, id="never more slots than tokens"),
        pytest.param(12, 4, {"capacity_factor": 100.0}, 12, id="dropless"),
        # 1.1 * 100 * 2 / 10 is 22.000000000000004 in floating point.
        pytest.param(100, 10, {"capacity_factor": 1.1}, 22, id="no slot for a rounding error"),
    ],
)
def test_capacity_by_hand(num_tokens, num_experts, options, slots):
    capacity = expert_capacity(num_tokens, num_experts, **options)
    assert isinstance(capacity, int)
    assert capacity == slots


@given(
    num_tokens=st.integers(1, 2**20),
    num_experts=st.integers(2, 4096),
    hundredths=st.integers(1, 2000),
    num_choices=st.integers(1, 4),
    min_capacity=st.integers(1, 8),
)
def test_capacity_is_the_exact_ceiling_for_decimal_factors(
    num_tokens, num_experts, hundredths, num_choices, min_capacity
):
    exact = ceil(Fraction(hundredths, 100) * num_tokens * num_choices / num_experts)
    assert expert_capacity(
        num_tokens,
        num_experts,
        capacity_factor=hundredths / 100,
        num_choices=num_choices,
        min_capacity=min_capacity,
    ) == min(max(exact, min_capacity), num_tokens)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_capacity_factor_that_is_not_positive_is_an_error_that_shows_it(factor):
    with pytest.raises(UserError, match=rf"capacity_factor must .*{factor}"):
        expert_capacity(64, 8, capacity_factor=factor)
