import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.analysis import balance

BALANCED = np.full(5, 0.2)
COLLAPSED = np.array([0, 0, 1.0, 0, 0])


def test_balanced_load_has_the_stated_values():
    assert balance.max_over_mean(BALANCED) == pytest.approx(1)
    assert balance.variation(BALANCED) == pytest.approx(0, abs=1e-12)
    assert balance.entropy(BALANCED) == pytest.approx(math.log(5))
    assert balance.effective_experts(BALANCED) == pytest.approx(5)


def test_collapsed_load_has_the_stated_values():
    assert balance.max_over_mean(COLLAPSED) == pytest.approx(5)  # E
    assert balance.variation(COLLAPSED) == pytest.approx(2)  # sqrt(E - 1)
    assert balance.entropy(COLLAPSED) == pytest.approx(0)
    assert balance.effective_experts(COLLAPSED) == pytest.approx(1)


def test_collapse_of_two_choices_reads_as_stated_for_k_2():
    share_E = np.array([0.5, 0.5, 0, 0, 0])
    assert balance.max_over_mean(share_E) == pytest.approx(5 / 2)  # E / K
    assert balance.variation(share_E) == pytest.approx(math.sqrt(5 / 2 - 1))
    assert balance.effective_experts(share_E) == pytest.approx(2)


def test_shares_of_an_empty_row_are_nan_and_of_others_sum_to_one():
    share_RE = balance.shares(np.array([[1, 3, 0], [0, 0, 0]]))
    np.testing.assert_array_equal(share_RE, [[0.25, 0.75, 0], [np.nan] * 3])


def test_drop_rate_is_the_load_above_the_room():
    share_E = np.array([0.5, 0.25, 0.125, 0.125])
    # factor 1: room 1/4 each, expert 0 is 1/4 over; factor 1.5: room 3/8, it is 1/8 over
    assert balance.drop_rate_at(share_E, 1.0) == pytest.approx(0.25)
    assert balance.drop_rate_at(share_E, 1.5) == pytest.approx(0.125)
    assert balance.drop_rate_at(share_E, 2.0) == 0


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=7).filter(any))
def test_nothing_drops_from_a_factor_of_max_over_mean_on(counts):
    share_E = balance.shares(np.array(counts))
    factor = float(balance.max_over_mean(share_E))
    assert balance.drop_rate_at(share_E, factor) == pytest.approx(0, abs=1e-12)
    assert balance.drop_rate_at(share_E, 0.9 * factor) > 0


def test_directions_that_share_no_expert_are_one_bit_apart():
    # two directions on experts of their own: the mean is 1/2 each, so log2(1 / 0.5) = 1 bit
    share_RE = np.array([[1.0, 0, 0], [0, 0.5, 0.5]])
    np.testing.assert_allclose(balance.divergence_bits(share_RE), [1, 1])
    np.testing.assert_allclose(balance.divergence_bits(np.array([BALANCED] * 3)), 0, atol=1e-12)


def test_a_direction_without_tokens_changes_no_other():
    share_RE = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]])
    with_empty_RE = np.vstack([share_RE, np.full(3, np.nan)])
    bits_R = balance.divergence_bits(with_empty_RE)
    np.testing.assert_allclose(bits_R[:2], balance.divergence_bits(share_RE))
    assert np.isnan(bits_R[2])


def test_mean_divergence_is_the_mutual_information_of_direction_and_expert():
    share_RE = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
    information = 0.0
    for r in range(3):
        for e in range(3):
            joint = share_RE[r, e] / 3
            expert = sum(share_RE[i, e] for i in range(3)) / 3
            information += joint * math.log2(joint / (expert / 3))
    assert balance.divergence_bits(share_RE).mean() == pytest.approx(information)
