"""Scores: pass@k and its intervals, by hand."""

import numpy as np
import pytest

from jaxrl_async.evaluation import scores


def test_pass_at_k_is_the_chance_that_one_of_k_is_right():
    assert scores.pass_at_k(4, 1, 1) == 0.25
    assert scores.pass_at_k(4, 1, 4) == 1.0
    assert scores.pass_at_k(4, 0, 4) == 0.0
    assert scores.pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)


def test_wilsons_interval_of_a_half_and_of_nothing():
    # n = 4, p = 1/2, z² = 3.8416: z²/n = .9604, center (.5 + .4802)/1.9604 = .5,
    # half z·√(.25/4 + 3.8416/64)/1.9604 = 1.96·.35003/1.9604 = .34996.
    assert scores.wilson(2, 4) == pytest.approx((0.15004, 0.84996), abs=1e-4)
    # p = 0: center .4802, half 1.96·√(3.8416/64) = .4802, so from 0 to .9604/1.9604.
    assert scores.wilson(0, 4) == pytest.approx((0.0, 0.4899), abs=1e-4)


def test_a_row_has_greedy_and_pass_at_1_and_n_with_intervals():
    greedy = np.array([True, False, True, True])
    sampled = np.array([[1, 0], [0, 0], [1, 1], [1, 0]], bool)
    row = scores.row(greedy, sampled)
    assert row["greedy"] == 0.75 and row["greedy_low"] < 0.75 < row["greedy_high"]
    assert row["pass@1"] == 0.5 and row["pass@2"] == 0.75
    # pass@2 of the prompts: 1, 0, 1, 1; deviation √(3/16) = .4330, of the mean .2165: ± .4244, cut at 1.
    assert row["pass@2_low"] == pytest.approx(0.75 - 0.4244, abs=1e-4)
    assert row["pass@2_high"] == 1.0
