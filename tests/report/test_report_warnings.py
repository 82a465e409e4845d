"""Each warning is given beyond its bound, with the number and the key, and not at it."""

import re

import pytest

from jaxrl_async.report import warnings as room


def rows(num, **values):
    """Healthy rows; a value may be a list, one for each row."""
    healthy = {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "time/step_secs": 1.0,
        "time/checkpoint_secs": 0.1,
        "policy/ess": 0.9,
        "compile/count": 4.0,
    }
    made = []
    for i in range(num):
        changes = {
            n.replace("__", "/"): v[i] if isinstance(v, list) else v for n, v in values.items()
        }
        made.append({"step": i + 1} | healthy | changes)
    return made


def without(name, made):
    return [{n: v for n, v in row.items() if n != name} for row in made]


NAMES = {check: name for name, check in vars(room).items() if check in room.WARNINGS}
RISEN = [0.1] * 10 + [0.5] * 10

CASES = [  # (check, rows beyond its bound, a pattern of the warning, rows at the bound)
    (
        room.not_finite,
        rows(4, loss__policy=[0.0, None, None, 0.0]),
        r"loss/policy \(step 2\)",
        rows(4),
    ),
    (
        room.mismatch,
        rows(3, mismatch__mean_abs=[0.01, 0.021, 0.0]),
        r"0\.021 nats .* step 2.*parity",
        rows(3, mismatch__mean_abs=[0.01, 0.02, 0.0]),
    ),
    (
        room.no_checkpoint,
        without("time/checkpoint_secs", rows(3)),
        r"No checkpoint .* 3 steps.*checkpoint\.every_steps",
        rows(3),
    ),
    (
        room.reward_fell,
        rows(30, reward__mean=RISEN + [0.2] * 10),
        r"fell: .*0\.500 in steps 11 to 13, 0\.200 in the last 3",
        rows(30, reward__mean=RISEN + [0.31] * 10),
    ),
    (
        room.equal_rewards,
        rows(4, reward__std=[0.0, 0.0, 0.0, 0.5]),
        "equal in 3 of 4 steps",
        rows(4, reward__std=[0.0, 0.0, 0.5, 0.5]),
    ),
    (
        room.exhausted,
        rows(2, retired__exhausted=[0, 1], retired__invalid=[0, 2]),
        r"1 prompt exhausted .*queue\.max_attempts and 2 groups .*invalid",
        rows(2, retired__exhausted=0, retired__equal_rewards=9),
    ),
    (
        room.failures,
        rows(5, returned__timeout=3, returned__server_error=2, returned__equal_rewards=9),
        r"5 groups \(2 server_error, 3 timeout\)",
        rows(5, returned__timeout=4, returned__equal_rewards=9),
    ),
    (
        room.fairness,
        rows(1, fairness__completion__dropped=15.0, fairness__completion__trained=10.0),
        r"completions of 15\.0 tokens .* 10\.0",
        rows(1, fairness__completion__dropped=14.9, fairness__completion__trained=10.0),
    ),
    (
        room.truncated,
        rows(8, tokens__truncated_share=[0.0] * 6 + [0.2, 0.3]),
        r"25 % .*completions .*rollout\.max_new_tokens",
        rows(8, tokens__truncated_share=[0.9] * 6 + [0.2, 0.2]),
    ),
    (
        room.clipping,
        rows(4, policy__clip_fraction=0.4),
        r"40 % .*clipped.*loss\.clip_low",
        rows(4, policy__clip_fraction=0.3),
    ),
    (
        room.sample_size,
        rows(4, policy__ess=0.4),
        r"effective sample size .*40 %.*queue\.max_staleness",
        rows(4, policy__ess=0.5),
    ),
    (
        room.dropped_by_cap,
        rows(4, policy__dropped_by_cap=0.11),
        r"loss\.behavior_cap .*11 %",
        rows(4, policy__dropped_by_cap=0.1),
    ),
    (
        room.waiting,
        rows(2, time__wait_data_secs=[0.2, 0.7], time__wait_push_secs=[0.0, 0.2]),
        "waited 55 % .*for groups",
        rows(2, time__wait_data_secs=0.4, time__wait_push_secs=0.1),
    ),
    (
        room.waiting,
        rows(2, time__wait_data_secs=0.6, rollout__scoring=9.0, rollout__generating=8.0),
        r"for rewards.*rollout\.reward_processes",
        rows(2, time__wait_data_secs=0.4, rollout__scoring=9.0, rollout__generating=8.0),
    ),
    (
        room.waiting,
        rows(2, time__wait_data_secs=0.6, rollout__scoring=8.0, rollout__generating=9.0),
        "for groups",
        rows(2),
    ),
    (
        room.waiting,
        rows(2, time__wait_data_secs=0.1, time__wait_push_secs=0.5),
        r"for pushes .*weights\.transport",
        without("time/step_secs", rows(2)),
    ),
    (
        room.padding,
        rows(4, pack__padding_share=0.6),
        r"60 % .*padding.*learner\.packing",
        rows(4, pack__padding_share=0.5),
    ),
    (
        room.recompiled,
        rows(3, compile__count=[4, 4, 5]),
        "compiled .* step 3",
        rows(3, compile__count=[5, 4, 4]),
    ),
]


@pytest.mark.parametrize(
    ("check", "bad", "pattern", "good"), CASES, ids=[NAMES[case[0]] for case in CASES]
)
def test_a_warning_is_given_where_it_is_due_and_there_only(check, bad, pattern, good):
    assert re.search(pattern, check(bad))
    assert check(good) is None
    assert room.warnings(bad) == [check(bad)]


def test_every_warning_is_tried_here():
    assert {case[0] for case in CASES} == set(room.WARNINGS)


def test_nothing_is_said_of_a_healthy_run_or_of_one_that_measured_little():
    assert room.warnings(rows(40)) == []
    assert room.warnings([{"step": 1, "time/checkpoint_secs": 1.0}] * 40) == []


def test_prompts_may_be_dropped_unfairly_too():
    found = rows(1, fairness__prompt__dropped=10.0, fairness__prompt__trained=20.0)
    assert re.search(r"prompts of 10\.0 tokens .* 20\.0", room.fairness(found))


def test_a_short_run_is_not_judged_by_its_trend():
    assert room.reward_fell(rows(19, reward__mean=[0.9] * 10 + [0.0] * 9)) is None
