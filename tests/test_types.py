"""The alignment law and the bounds, checked where a trajectory enters."""

import dataclasses

import numpy as np
import pytest

from jaxrl_async.types import (
    Choices,
    Group,
    InvalidTrajectoryError,
    Trajectory,
    Turn,
    check_trajectory,
)

GOOD = Trajectory(
    tokens=np.array([1, 2, 3, 4, 5], np.int32),
    logprobs=np.array([0, 0, -0.5, 0, -1.5], np.float32),
    versions=np.array([-1, -1, 7, -1, 8], np.int32),  # sampled, tool output, sampled
    mask=np.array([False, False, True, False, True]),
    prompt_length=2,
    reward=0.5,
)


def check(**changes):
    check_trajectory(dataclasses.replace(GOOD, **changes), vocab_size=6, max_tokens=5)


def test_tool_output_between_sampled_tokens_is_allowed():
    check()
    assert GOOD.completion.tolist() == [3, 4, 5]


def test_turns_that_end_one_after_another_and_sum_to_the_reward_are_allowed():
    check(turns=(Turn(3, 0.5), Turn(5, 0.0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tokens=np.array([1, 2, 3, 4, 6], np.int32)), r"token id 6 is outside \[0, 6\)"),
        (dict(tokens=np.array([1, 2, 3, 4, -1], np.int32)), r"token id -1"),
        (dict(tokens=np.array([1, 2, 3, 4], np.int32)), r"logprobs must be float32 \[4\], got float32 \[5\]"),
        (dict(tokens=np.zeros(5, np.int64)), r"tokens must be int32 \[5\], got int64 \[5\]"),
        (dict(logprobs=np.array([0, 0, 0.1, 0, -1], np.float32)), r"finite and ≤ 0, got 0.1"),
        (dict(logprobs=np.array([0, 0, np.nan, 0, -1], np.float32)), r"finite and ≤ 0, got nan"),
        (dict(logprobs=np.array([0, 0, -np.inf, 0, -1], np.float32)), r"finite and ≤ 0, got -inf"),
        (dict(logprobs=np.array([0, -1, -1, 0, -1], np.float32)), r"not sampled must have version −1"),
        (dict(versions=np.array([-1, -1, -1, -1, 8], np.int32)), r"sampled token is -1, must be ≥ 0"),
        (dict(versions=np.array([-1, -1, 7, 7, 8], np.int32)), r"not sampled must have version −1"),
        (dict(mask=np.array([False, True, True, False, True])), r"mask is True on a prompt token"),
        (dict(prompt_length=0), r"prompt_length 0 is outside \[1, 5\]"),
        (dict(prompt_length=6), r"prompt_length 6 is outside \[1, 5\]"),
        (dict(reward=float("nan")), r"reward must be finite, got nan"),
        (dict(reward=-1e39), r"reward must be in ±9.*e\+15, got -1e\+39: scale it down"),
        (dict(turns=(Turn(3, 0.5), Turn(3, 0.0))), r"turns must end one after another in \(2, 5\], got \[3, 3\]"),
        (dict(turns=(Turn(2, 0.5), Turn(5, 0.0))), r"in \(2, 5\], got \[2, 5\]"),
        (dict(turns=(Turn(3, 0.5), Turn(6, 0.0))), r"in \(2, 5\], got \[3, 6\]"),
        (dict(turns=(Turn(3, 0.0), Turn(4, 0.5))), r"last turn ends at 4, and a token after it was sampled"),
        (dict(turns=(Turn(3, 0.5), Turn(5, 0.1))), r"rewards of turns must sum to the reward 0.5, got 0.6"),
        (dict(turns=(Turn(3, 0.5), Turn(5, float("nan")))), r"must sum to the reward 0.5, got nan"),
        (dict(finish_reason="abort"), r"finish_reason must be 'stop' or 'length', got 'abort'"),
    ],
)  # fmt: skip
def test_what_breaks_the_law_is_refused_with_field_value_and_bound(changes, message):
    with pytest.raises(InvalidTrajectoryError, match=message):
        check(**changes)


def routes(shape=(5, 3, 2), dtype=np.uint8):
    return Choices(routes=np.zeros(shape, dtype))


def kept(*ids, dtype=np.int32, length=5):
    """The kept ids of token 2, which is 3; of no other."""
    array = np.full((length, 3), -1, dtype)
    array[2, : len(ids)] = ids
    return Choices(kept=array)


def test_the_choices_of_an_engine_are_allowed():
    check(choices=routes())
    check(choices=routes((5, 1, 8), np.uint16))
    check(choices=kept(0, 3, 5))
    check(choices=kept(3))
    check(choices=kept())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (routes(dtype=np.int32), r"routes must be uint8 or uint16 \[5, L, K\], got int32 \[5, 3, 2\]"),
        (routes((4, 3, 2)), r"routes must be .* \[5, L, K\], got uint8 \[4, 3, 2\]"),
        (routes((5, 3)), r"got uint8 \[5, 3\]"),
        (routes((5, 0, 2)), r"got uint8 \[5, 0, 2\]"),
        (Choices(routes=[1]), r"got <class 'list'> \[1\]"),  # type: ignore[arg-type]
        (kept(3, dtype=np.int64), r"kept must be int32 \[5, M\], got int64 \[5, 3\]"),
        (kept(3, length=4), r"kept must be int32 \[5, M\], got int32 \[4, 3\]"),
        (kept(3, 6), r"kept id 6 is outside \[−1, 6\)"),
        (kept(-2, 3), r"kept id -2 is outside"),
        (kept(3, 1), r"kept ids of a token must ascend"),
        (kept(3, 3), r"kept ids of a token must ascend"),
        (kept(-1, 3), r"kept ids of a token must ascend"),
        (kept(1, 4), r"token 3 at 2 is none of the 2 kept ids"),
        (Choices(kept=np.full((5, 1), [[-1], [2], [-1], [-1], [-1]], np.int32)), r"token 1, which was not sampled"),
    ],
)  # fmt: skip
def test_choices_that_break_the_law_are_refused_by_name(choices, message):
    with pytest.raises(InvalidTrajectoryError, match=message):
        check(choices=choices)


def test_a_row_longer_than_the_bound_is_refused():
    with pytest.raises(InvalidTrajectoryError, match=r"length 5 is outside \[1, 4\]"):
        check_trajectory(GOOD, vocab_size=6, max_tokens=4)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ((0.5, 0.5), True),
        ((0.1 + 0.2, 0.3), True),  # but for rounding
        ((0.5, 0.5 + 1e-7), False),
        ((1e8, 1e8 + 1), False),  # In float32 they are equal.
    ],
)
def test_rewards_of_a_group_are_equal_where_no_sample_has_an_advantage(rewards, equal):
    group = Group(0, 0, tuple(dataclasses.replace(GOOD, reward=reward) for reward in rewards))
    assert group.has_equal_rewards == equal
