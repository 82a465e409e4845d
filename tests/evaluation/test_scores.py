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
    # pass@2 of the prompts: 1, 0, 1, 1, as greedy. pass@1: 1/2, 0, 1, 1/2, a mean of 1/2: Wilson's of 2 of 4.
    for end in ("low", "high"):
        assert row[f"pass@2_{end}"] == row[f"greedy_{end}"]
    assert row["pass@1_low"] == pytest.approx(0.15004, abs=1e-4)
    assert row["num_prompts"] == 4


@pytest.mark.parametrize(("is_right", "low", "high"), [(False, 0.0, 0.3244), (True, 0.6756, 1.0)])
def test_no_interval_of_few_prompts_has_zero_width(is_right, low, high):
    # n = 8: (z²/n)/(1 + z²/n) = .4802/1.4802 = .3244.
    row = scores.row(np.full(8, is_right), np.full((8, 4), is_right))
    for name in ("greedy", "pass@1", "pass@4"):
        assert row[f"{name}_low"] == pytest.approx(low, abs=1e-4)
        assert row[f"{name}_high"] == pytest.approx(high, abs=1e-4)


def test_intervals_hold_the_truth_in_19_of_20_evaluations():
    rng = np.random.default_rng(0)
    held = {name: [] for name in ("greedy", "pass@1", "pass@4")}
    for mean in (0.02, 0.1, 0.5, 0.95):  # A prompt's chance is Beta's, of that mean.
        chances = rng.beta(mean, 1 - mean, (400, 32))
        large = rng.beta(mean, 1 - mean, 200_000)
        truth = {"greedy": mean, "pass@1": mean, "pass@4": float(np.mean(1 - (1 - large) ** 4))}
        for of_prompts in chances:
            sampled = rng.random((32, 5)) < of_prompts[:, None]
            row = scores.row(sampled[:, 0], sampled[:, 1:])
            for name, found in held.items():
                found.append(row[f"{name}_low"] <= truth[name] <= row[f"{name}_high"])
    for name, found in held.items():
        assert np.mean(found) >= 0.93, name
