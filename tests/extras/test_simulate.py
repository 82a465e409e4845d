"""The planner: steps by pencil, the bound on staleness at every event, lengths of a journal, what is refused."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import planner
import pytest
from fixtures.queues import group, journaled

from jaxrl_async.cli import main
from jaxrl_async.extras.planner import simulate as simulation
from jaxrl_async.extras.planner.simulate import Plan, StallError, lengths_of, simulate

ROOT = pathlib.Path(__file__).parents[2]

ALONE = dict(request_rate=100.0, server_rate=math.inf)  # 100 tokens take 1 s, whatever else runs
SHARED = dict(request_rate=math.inf, server_rate=100.0)  # 100 tokens take 1 s for all requests


def make(**values) -> Plan:
    """B = 4 groups of 2 samples; free learner and pushes."""
    defaults = dict(
        mode="async",
        num_steps=10,
        warm_steps=4,
        groups_per_step=4,
        group_size=2,
        max_staleness=1,
        push_every_steps=1,
        chunk_groups=0,
        max_running_groups=1000,
        permit_timeout_secs=math.inf,
        max_attempts=1,
        num_servers=2,
        num_slots=64,
        step_secs=0.0,
        token_secs=0.0,
        push_secs=0.0,
        pause_secs=0.0,
        drop_share=0.0,
        seed=0,
    )
    return Plan(**defaults | ALONE | values)


def sync(**values) -> Plan:
    return make(mode="sync", max_staleness=0, **values)


def in_turn(*groups):
    """Lengths: the groups given, then the last one for ever. Of prompts below 1024."""
    rows = np.array([*groups, *[groups[-1]] * (1024 - len(groups))], float)
    return lambda rng, num_groups, group_size: rows


def test_a_synchronous_step_is_generation_then_training_then_the_push():
    # 100 tokens at 100 a second: T_inf = 1. T_train = .5 + 4·2·100 tokens · 1 ms = 1.3. Push: .25.
    plan = sync(warm_steps=1, step_secs=0.5, token_secs=1e-3, push_secs=0.25)
    outcome = simulate(plan, lengths_of("constant:100"))
    assert 1 / outcome.steps_per_sec == pytest.approx(2.55, rel=1e-12)
    assert outcome.wait_data_share == pytest.approx(1 / 2.55)
    assert outcome.wait_push_share == pytest.approx(0.25 / 2.55)
    assert outcome.servers_idle_share == pytest.approx(1.55 / 2.55)
    assert outcome.slots_used_share == pytest.approx(4 * 2 / (2 * 64) / 2.55)
    assert outcome.staleness == {0: 1.0}
    assert outcome.trained_tokens_per_sec == pytest.approx(800 / 2.55)
    assert (outcome.length_bias, outcome.drop_share) == (1, 0)


def test_a_servers_requests_share_its_rate():
    # Two groups, 4 requests a server: 1/100 + 4/400 = .02 s a token, so 100 tokens take 2 s.
    plan = sync(request_rate=100.0, server_rate=400.0)
    assert 1 / simulate(plan, lengths_of("constant:100")).steps_per_sec == pytest.approx(2)


def test_groups_beyond_a_servers_slots_wait_their_turn():
    # One server with slots for one group: four turns of 1 s.
    plan = sync(num_servers=1, num_slots=2)
    outcome = simulate(plan, lengths_of("constant:100"))
    assert 1 / outcome.steps_per_sec == pytest.approx(4)
    assert outcome.slots_used_share == pytest.approx(1)


def test_a_full_server_loses_no_token_to_unequal_lengths():
    # Where the rate is shared, the tokens of a step take tokens / rate, in whatever order they come.
    plan = sync(num_servers=1, num_slots=3, warm_steps=0, **SHARED)
    outcome = simulate(plan, lengths_of("lognormal:50:1"))
    assert outcome.trained_tokens_per_sec == pytest.approx(100)


@pytest.mark.parametrize(
    ("step_secs", "expected"), [(0.4, 1.0), (1.0, 1.0), (1.3, 1.3), (5.0, 5.0)]
)
def test_an_asynchronous_step_takes_what_the_slower_side_takes(step_secs, expected):
    # At most B groups at once, 1 s each: T_inf = 1. Staleness is no bound.
    plan = make(max_staleness=100, max_running_groups=4, step_secs=step_secs)
    outcome = simulate(plan, lengths_of("constant:100"))
    assert 1 / outcome.steps_per_sec == pytest.approx(expected)


def test_a_periodic_step_trains_a_chunk_while_the_next_is_generated():
    # One server with slots for one group: groups of 200 tokens end at 1, 2, 3 and 4 s; a chunk of two trains for
    # .8 s. The first chunk is there at 2 s, the second at 4 s, trained at 4.8 s; then .1 s for the step.
    plan = make(mode="periodic", max_staleness=0, chunk_groups=2, num_servers=1, num_slots=2)
    plan = dataclasses.replace(plan, step_secs=0.1, token_secs=0.002)
    outcome = simulate(plan, lengths_of("constant:100"))
    assert 1 / outcome.steps_per_sec == pytest.approx(4.9)
    assert outcome.wait_data_share == pytest.approx((2 + 4 - 2.8) / 4.9)


@pytest.mark.parametrize("eta", [1, 2, 5])
def test_behind_a_slow_learner_every_token_is_eta_old(eta):
    # Groups are admitted when version v is there, generated at once, and trained in step v + η + 1.
    plan = make(max_staleness=eta, step_secs=3.0, num_steps=20, warm_steps=10)
    assert simulate(plan, lengths_of("constant:100")).staleness == {eta: 1.0}


def test_weights_change_under_a_group_that_is_being_generated():
    # One group at a time, 10 s; a step of 3 s. Step s begins when group s is there, at 10·s, and ends 3 s later, so
    # its two samples of 10 and 4 tokens have 3 + 3 tokens of the version before and 7 + 1 of the newest.
    plan = make(
        groups_per_step=1, max_running_groups=1, num_servers=1, step_secs=3.0, request_rate=1.0
    )
    outcome = simulate(plan, in_turn((10, 4)))
    assert outcome.staleness == pytest.approx({0: 8 / 14, 1: 6 / 14})
    assert outcome.staleness_mean == pytest.approx(6 / 14)


def test_a_push_stops_generation_for_its_pause():
    # As above with a push of 2 s, of which 1 s is a pause: a group takes 11 s, and the new version is there after 3
    # + 2 − 1 = 4 tokens of each sample.
    plan = make(
        groups_per_step=1, max_running_groups=1, num_servers=1, step_secs=3.0, request_rate=1.0
    )
    plan = dataclasses.replace(plan, push_secs=2.0, pause_secs=1.0)
    outcome = simulate(plan, in_turn((10, 4)))
    assert 1 / outcome.steps_per_sec == pytest.approx(11)
    assert outcome.servers_paused_share == pytest.approx(1 / 11)
    assert outcome.staleness == pytest.approx({0: 6 / 14, 1: 8 / 14})


def test_a_push_that_is_under_way_holds_up_the_next():
    # Steps of 1 s, pushes of 3 s: the learner hands over a version when the one before is there. The last version is
    # not pushed, so steps 5 to 10 take 5·3 + 1 s.
    plan = make(max_staleness=4, step_secs=1.0, push_secs=3.0)
    outcome = simulate(plan, lengths_of("constant:100"))
    assert 6 / outcome.steps_per_sec == pytest.approx(16)
    assert outcome.wait_push_share == pytest.approx(10 / 16)


@pytest.mark.parametrize(
    "changes",
    [
        dict(mode="sync", max_staleness=0),
        dict(mode="periodic", max_staleness=0, chunk_groups=3),
        dict(max_staleness=3, push_every_steps=3, push_secs=1.0, pause_secs=0.5),
        dict(max_staleness=8, drop_share=0.3, max_running_groups=7),
        dict(max_staleness=2, permit_timeout_secs=3.0, max_attempts=3),
        dict(max_staleness=2, turns="uniform:1:4", tool_secs=0.5, tool_sigma=1.0, push_secs=0.1),
    ],
)
def test_accepted_and_running_groups_keep_the_bound_at_every_event(changes):
    plan, events = make(num_steps=30, step_secs=0.5, token_secs=1e-3, **changes), []

    def watch(admission):
        bound = (plan.max_staleness + admission.v_pub + 1) * plan.groups_per_step
        assert admission.accepted + admission.running <= bound
        assert admission.running <= plan.max_running_groups
        events.append(admission.accepted)

    outcome = simulate(plan, lengths_of("pareto:100:1.5", 1000), watch)
    assert len(events) >= plan.num_steps * plan.groups_per_step
    assert sum(outcome.staleness.values()) == pytest.approx(1)


def test_the_seed_decides_everything():
    plan = make(drop_share=0.2, num_steps=30, turns="1.5", tool_secs=0.1, tool_sigma=1.0)
    first, again = (simulate(plan, lengths_of("lognormal:100:1")) for _ in range(2))
    assert first == again
    other = simulate(dataclasses.replace(plan, seed=1), lengths_of("lognormal:100:1"))
    assert other.steps_per_sec != first.steps_per_sec


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_more_servers_are_not_slower(mode):
    eta = 0 if mode == "sync" else 2
    base = make(mode=mode, max_staleness=eta, num_steps=40, step_secs=0.2, server_rate=400.0)
    rates = [
        simulate(
            dataclasses.replace(base, num_servers=n), lengths_of("lognormal:100:1")
        ).steps_per_sec
        for n in (1, 2, 4, 8)
    ]
    assert (
        rates == sorted(rates) and rates[-1] > 1.1 * rates[0]
    )  # A tail is no faster with more servers.


def test_a_timeout_drops_long_groups_and_the_trained_ones_are_shorter():
    plan = make(permit_timeout_secs=2.0, num_steps=40)
    outcome = simulate(plan, lengths_of("lognormal:100:1"))
    assert outcome.dropped.keys() == {"timeout"} and 0.05 < outcome.drop_share < 0.5
    assert outcome.mean_trained < 100 and outcome.length_bias < 0.9


def test_equal_rewards_drop_their_share_whatever_the_length():
    plan = make(drop_share=0.4, num_steps=400)
    outcome = simulate(plan, lengths_of("lognormal:100:0.5"))
    # 1600 of 2667 groups; three deviations of a share of .4 are .028.
    assert outcome.drop_share == pytest.approx(0.4, abs=0.03)
    assert outcome.dropped.keys() == {"equal_rewards"}
    assert outcome.length_bias == pytest.approx(1, abs=0.03)


def test_a_run_whose_groups_all_time_out_is_named_and_ends():
    plan = make(permit_timeout_secs=0.5)  # of groups that take 1 s
    with pytest.raises(StallError, match=r"1201 groups in a row .*timeout.*step 1: 0 of 4 groups"):
        simulate(plan, lengths_of("constant:100"))


# steps_per_sec, slots_used_share, staleness_mean and length_bias of the planner before it had turns.
ONE_TURN = [
    (
        dict(max_staleness=2),
        (0.3158958115019143, 0.7697562717726995, 1.4797551940724258, 0.9961298667033824),
    ),
    (
        dict(mode="sync", max_staleness=0),
        (0.1613988660870845, 0.2907979686813628, 0.0, 0.9999999999999999),
    ),
    (
        dict(mode="periodic", max_staleness=0, chunk_groups=2),
        (0.17340370061054414, 0.31242749792411695, 0.0, 1.0),
    ),
    (
        dict(
            max_staleness=3,
            push_every_steps=2,
            drop_share=0.3,
            permit_timeout_secs=8.0,
            max_attempts=2,
        ),
        (0.23584795114032717, 0.7713215192998452, 1.8616871569611444, 1.036118736530032),
    ),
]


@pytest.mark.parametrize(("changes", "figures"), ONE_TURN)
@pytest.mark.parametrize("turns", [{}, dict(turns="1", tool_secs=3.0, max_turns=2)])
def test_one_turn_is_the_planner_without_turns_to_the_bit(changes, figures, turns):
    """A tool runs between two turns, so with one turn its time changes nothing."""
    sizes = dict(group_size=3, num_steps=20, warm_steps=6, num_slots=8, max_running_groups=9)
    costs = dict(server_rate=400.0, step_secs=0.5, token_secs=1e-3, push_secs=0.4, pause_secs=0.1)
    o = simulate(make(**sizes | costs | changes | turns), lengths_of("uniform:20:200"))
    assert (o.steps_per_sec, o.slots_used_share, o.staleness_mean, o.length_bias) == figures
    assert o.tools_running == 0


def test_in_completion_order_no_step_waits_for_its_slowest_and_no_token_is_too_old():
    sizes = dict(
        num_steps=300, warm_steps=20, max_staleness=2, max_attempts=3, max_running_groups=64
    )
    by_prompt, by_completion = (
        simulate(make(order=order, **sizes), lengths_of("pareto:100:1.5"))
        for order in ("prompt", "completion")
    )
    assert by_completion.steps_per_sec > 1.2 * by_prompt.steps_per_sec
    assert by_completion.staleness_max <= 2 and by_prompt.dropped == {}
    assert by_completion.dropped.keys() == {"overtaken"}
    assert by_completion.length_bias < 0.95 < by_prompt.length_bias


def test_the_order_is_of_mode_async():
    with pytest.raises(ValueError, match="order must be one of .'prompt',. in mode sync"):
        sync(order="completion")


def test_a_synchronous_step_waits_for_every_turn_and_tool():
    # Two turns of 50 tokens, .5 s each, and 2 s of a tool between them: 3 s. Of the 128 slots 8 are taken for 1 s.
    outcome = simulate(sync(turns="2", tool_secs=2.0), lengths_of("constant:100"))
    assert 1 / outcome.steps_per_sec == pytest.approx(3)
    assert outcome.slots_used_share == pytest.approx(8 * 1 / (2 * 64 * 3))
    assert outcome.servers_idle_share == pytest.approx(2 / 3)
    assert outcome.tools_running == pytest.approx(8 * 2 / 3)
    assert outcome.trained_tokens_per_sec == pytest.approx(800 / 3)


def test_while_a_tool_runs_its_slot_is_for_others():
    # One server, 2 slots, 4 groups of 2 samples, two turns of .5 s each. The first turns fill 0 to 2 s, and the tools
    # of the first group end at 1.5 s, so the second turns follow without a gap: 4 s, as without tools.
    plan = sync(num_servers=1, num_slots=2, turns="2", tool_secs=1.0)
    outcome = simulate(plan, lengths_of("constant:100"))
    assert 1 / outcome.steps_per_sec == pytest.approx(4)
    assert outcome.slots_used_share == pytest.approx(1)


def test_while_a_tool_runs_its_group_keeps_its_permit():
    # One permit: the four groups of a step one after another, 3 s each; with tools twice as fast, 2 s each.
    plan = make(turns="2", tool_secs=2.0, max_running_groups=1, max_staleness=2)
    limit = simulation.limit_of(plan, lengths_of("constant:100"))
    assert limit.secs == pytest.approx(12)
    assert limit.relaxed_secs["the tools"] == pytest.approx(8)
    assert limit.by == "the groups generated at once"
    wide = simulation.limit_of(sync(turns="2", tool_secs=2.0), lengths_of("constant:100"))
    assert wide.by == "the tools" and wide.relaxed_secs[wide.by] == pytest.approx(2)


@pytest.mark.parametrize(
    ("step_secs", "old"),
    [
        (3.5, 3.5 + 2 + 0.5),  # during the turns
        (5.5, 5 + 2 + 2),  # while the tool of the longer sample runs
        (7.0, 6 + 2 + 2),  # in its second turn
    ],
)
def test_weights_change_between_the_turns_of_a_sample(step_secs, old):
    # One group at a time, of 10 and 4 tokens: turns from 0 to 5 and 6 to 11 s, and from 0 to 2 and 3 to 5 s. A step
    # begins with the group after its own, so `old` of the 14 tokens are of the version before.
    plan = make(groups_per_step=1, max_running_groups=1, num_servers=1, request_rate=1.0)
    plan = dataclasses.replace(plan, step_secs=step_secs, turns="2", tool_secs=1.0)
    outcome = simulate(plan, in_turn((10, 4)))
    assert 1 / outcome.steps_per_sec == pytest.approx(11)
    assert outcome.staleness == pytest.approx({0: 1 - old / 14, 1: old / 14})


def test_a_tools_seconds_are_log_normal_about_their_median():
    # One sample after another, whose tokens take no time: a step takes median · exp(σ²/2) on average, .5667 s. Of 2,000
    # the mean is within 4 %, more than three deviations.
    plan = sync(
        groups_per_step=1,
        group_size=1,
        num_steps=2100,
        warm_steps=100,
        turns="2",
        tool_secs=0.5,
        tool_sigma=0.5,
    )
    plan = dataclasses.replace(plan, request_rate=math.inf)
    secs = 1 / simulate(plan, lengths_of("constant:1")).steps_per_sec
    assert secs == pytest.approx(0.5 * math.exp(0.125), rel=0.04)
    faster = dataclasses.replace(plan, tool_secs=0.25)  # the same draws
    assert 1 / simulate(faster, lengths_of("constant:1")).steps_per_sec == pytest.approx(secs / 2)


def test_turns_beyond_the_bound_are_cut_with_their_tokens():
    # Of four turns of 25 tokens, one and then three.
    one = simulate(sync(turns="4", tool_secs=1.0, max_turns=1), lengths_of("constant:100"))
    assert (one.mean_trained, 1 / one.steps_per_sec) == pytest.approx((25, 0.25))
    three = simulate(sync(turns="4", tool_secs=1.0, max_turns=3), lengths_of("constant:100"))
    assert (three.mean_trained, 1 / three.steps_per_sec) == pytest.approx((75, 2.75))
    four = simulate(sync(turns="4", tool_secs=1.0, max_turns=9), lengths_of("constant:100"))
    assert (four.mean_trained, 1 / four.steps_per_sec) == pytest.approx((100, 4))


@pytest.mark.parametrize(
    ("spec", "mean", "values"),
    [
        ("1", 1, {1}),
        ("2.25", 2.25, {2, 3}),
        ("uniform:1:4", 2.5, {1, 2, 3, 4}),
        ("lognormal:9:0.5", 9, None),
    ],
)
def test_turns_are_whole_and_keep_their_mean(spec, mean, values):
    drawn = simulation.turns_of(spec)(np.random.default_rng(0), 20_000, 4)
    assert drawn.shape == (20_000, 4) and drawn.min() >= 1
    assert (drawn == np.floor(drawn)).all()
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert values is None or set(np.unique(drawn)) == values


@pytest.mark.parametrize(
    ("spec", "mean", "low", "high"),
    [
        ("constant:7", 7, 7, 7),
        ("uniform:10:30", 20, 10, 30),
        ("lognormal:50:0.5", 50, 1, math.inf),
        ("pareto:50:3", 50, 100 / 3, math.inf),
    ],
)
def test_lengths_have_the_mean_that_they_are_given(spec, mean, low, high):
    drawn = lengths_of(spec)(np.random.default_rng(0), 20_000, 4)
    assert drawn.shape == (20_000, 4) and low <= drawn.min() and drawn.max() <= high
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert lengths_of(spec, 20)(np.random.default_rng(0), 100, 4).max() <= 20


async def test_lengths_are_read_from_a_journal_group_by_group(tmp_path):
    async with journaled(tmp_path / "j") as queue:
        await queue.publish(0)
        for permit in await queue.client.admit(4, 5.0):
            await queue.client.submit(group(permit, num_tokens=4 + permit.prompt_index))
        chunks = await queue.lease(1)
        await queue.commit(1)
    rows = [[len(t.completion) for t in g.trajectories] for c in chunks for g in c.groups]
    assert simulation.journal_lengths(tmp_path / "j") == rows
    assert [row[0] for row in rows] == [2, 3, 4, 5]  # behind prompts of two tokens
    drawn = lengths_of(f"journal:{tmp_path}/j")(np.random.default_rng(0), 50, len(rows[0]))
    assert {tuple(row) for row in drawn.tolist()} == set(map(tuple, rows))
    wrong = rf"group_size must be {len(rows[0])}, that of the groups measured, got 7"
    with pytest.raises(ValueError, match=wrong):
        simulate(make(group_size=7), lengths_of(f"journal:{tmp_path}/j"))


REFUSED = [
    (dict(groups_per_step=0), "groups_per_step must be ≥ 1, got 0"),
    (dict(num_servers=0), "num_servers must be ≥ 1, got 0"),
    (dict(request_rate=0.0), "request_rate must be > 0, got 0.0"),
    (dict(server_rate=math.nan), "server_rate must be > 0, got nan"),
    (dict(step_secs=-1.0), "step_secs must be ≥ 0 and finite, got -1.0"),
    (dict(token_secs=math.inf), "token_secs must be ≥ 0 and finite, got inf"),
    (dict(drop_share=1.0), "drop_share must be in [0, 1), got 1.0"),
    (dict(push_secs=1.0, pause_secs=2.0), "pause_secs must be ≤ push_secs = 1, got 2.0"),
    (dict(warm_steps=10), "warm_steps must be in [0, num_steps = 10), got 10"),
    (dict(num_slots=1), "num_slots must be ≥ group_size = 2, got 1"),
    (dict(tool_secs=-1.0), "tool_secs must be ≥ 0 and finite, got -1.0"),
    (dict(tool_sigma=math.nan), "tool_sigma must be ≥ 0 and finite, got nan"),
    (dict(max_turns=-1), "max_turns must be ≥ 0 and finite, got -1"),
    (dict(turns="0.5"), "turns 'constant:0.5': constant must be ≥ 1, got 0.5"),
    (dict(turns="few:2"), "turns 'few:2': the kind 'few' is none of constant, uniform, lognormal"),
    (dict(mode="lazy"), "mode must be one of sync, periodic, async; got 'lazy'"),
    (
        dict(mode="sync"),
        "queue.max_staleness = 0 and weights.push_every_steps = 1, got 1 and 1",
    ),
    (
        dict(chunk_groups=2),
        "chunk_groups must be ≥ 1 in mode 'periodic' and 0 in the others, got 2",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_plan_out_of_bounds_is_refused_with_the_bound(changes, message):
    with pytest.raises(ValueError) as refusal:
        make(**changes)
    assert message in str(refusal.value)


def test_a_plan_that_would_deadlock_is_refused():
    with pytest.raises(ValueError, match=r"max_staleness 2 < push_every_steps 4 − 1"):
        simulate(make(max_staleness=2, push_every_steps=4), lengths_of("constant:1"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("normal:5", "the kind 'normal' is none of constant, uniform, lognormal, pareto, journal"),
        ("constant", "constant takes 1 numbers, constant:X"),
        ("uniform:1", "uniform takes 2 numbers, uniform:X:X"),
        ("lognormal:5:nan", "lognormal takes 2 numbers"),
        ("uniform:9:5", "uniform LOW must be in [1, HIGH = 5], got 9.0"),
        ("constant:0.5", "lengths 'constant:0.5': constant must be ≥ 1, got 0.5"),
        ("pareto:5:1", "pareto ALPHA must be > 1, got 1.0"),
    ],
)
def test_lengths_that_are_none_are_refused(spec, message):
    with pytest.raises(ValueError) as refusal:
        lengths_of(spec)
    assert message in str(refusal.value)


def test_devices_are_split_where_both_sides_are_equally_fast():
    # n servers generate at most 4 groups of 2 × 100 tokens at 100·n tokens a second: 8/n s. The learner takes 800
    # tokens · .01 s / (8 − n) devices = 8/(8 − n) s. Both are 2 s at n = 4.
    plan = make(
        max_staleness=20, max_running_groups=16, num_steps=60, warm_steps=20, token_secs=0.01
    )
    plan = dataclasses.replace(plan, **SHARED)
    rows = dict(simulation.split(plan, lengths_of("constant:100"), devices=8))
    assert list(rows) == [1, 2, 3, 4, 5, 6, 7]
    assert max(rows, key=lambda n: rows[n].steps_per_sec) == 4
    assert 1 / rows[6].steps_per_sec == pytest.approx(4)  # 8/(8 − 6)
    assert 1 / rows[1].steps_per_sec == pytest.approx(8, rel=0.1)
    two = simulation.split(plan, lengths_of("constant:100"), devices=8, devices_per_server=3)
    assert [n for n, _ in two] == [1, 2]
    with pytest.raises(ValueError, match=r"devices must be ≥ devices_per_server \+ 1 = 4, got 3"):
        simulation.split(plan, lengths_of("constant:100"), devices=3, devices_per_server=3)


COSTS = ["--lengths=uniform:1:9", "--request_rate=50", "--server_rate=900", "--step_secs=0.1"]
COSTS += ["--token_secs=1e-4", "--num_steps=20"]
SHORT = [*COSTS[:-1], "--num_steps=3"]  # where little is asked of the outcome


def test_the_command_takes_sizes_from_a_config_and_flags_before_them(tmp_path, capsys):
    out = tmp_path / "plan.json"
    config = ["--config=configs/quickstart.py", "--config.queue.max_staleness=3"]
    assert main.main(["simulate", *config, *COSTS, "--group_size=4", f"--out={out}"]) == 0
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    plan = found["plan"]
    assert (plan["groups_per_step"], plan["group_size"], plan["max_staleness"]) == (64, 4, 3)
    assert (plan["max_running_groups"], plan["max_new_tokens"], plan["num_steps"]) == (128, 4, 20)
    assert f"{found['outcome']['steps_per_sec']:.4g}" in printed and "staleness" in printed
    assert sum(found["outcome"]["staleness"].values()) == pytest.approx(1)


def test_the_command_plans_the_turns_of_an_environment(tmp_path, capsys):
    config, words = ["--config=configs/tools.py"], ["--turns=2.5", "--tool_secs=2:1", *SHORT]
    found = planned(tmp_path, *config, *words, "--config.environment.max_turns=3")
    plan, printed = found["plan"], capsys.readouterr().out
    assert (plan["turns"], plan["max_turns"]) == ("2.5", 3)
    assert (plan["tool_secs"], plan["tool_sigma"]) == (2.0, 1.0)
    assert f"run for {found['outcome']['tools_running']:.1f} samples" in printed
    assert found["limit"]["by"] == "the tools" and "limited by         the tools" in printed
    found = planned(tmp_path, "--config=configs/quickstart.py", *SHORT, "--tool_secs=2")
    assert (found["plan"]["turns"], found["plan"]["max_turns"]) == ("1", 0)
    assert (found["plan"]["tool_secs"], found["plan"]["tool_sigma"]) == (2.0, 0.0)
    assert "tools" not in capsys.readouterr().out


SIZES = ["--groups_per_step=8", "--group_size=2", "--max_staleness=2", "--num_slots=16"]


def test_the_command_names_the_best_split(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main.main(["simulate", *COSTS, *SIZES, "--devices=4", f"--out={out}"]) == 0
    found = json.loads(out.read_text())
    rates = {row["num_servers"]: row["steps_per_sec"] for row in found["splits"]}
    assert list(rates) == [1, 2, 3]
    assert rates[found["best_num_servers"]] == max(rates.values())
    best = next(line for line in capsys.readouterr().out.splitlines() if "best" in line)
    assert best.split()[0] == str(found["best_num_servers"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*COSTS, *SIZES], "--num_servers must be given"),
        ([*COSTS, *SIZES, "--num_servers=two"], "--num_servers must be int, got 'two'"),
        ([*COSTS, *SIZES, "--num_servers=1", "--push_every_steps=4"], "2 < push_every_steps 4 − 1"),
        ([*COSTS, *SIZES, "--num_servers=1", "--lengths=journal:none"], "no journal at"),
        ([*COSTS, *SIZES, "--num_server=1"], "num_server"),
        (
            [*COSTS, *SIZES, "--tool_secs=1:x"],
            "--tool_secs must be MEDIAN or MEDIAN:SIGMA, got '1:x'",
        ),
    ],
)
def test_bad_usage_of_the_command_is_named(argv, message, capsys):
    assert main.main(["simulate", *argv]) == 2
    assert message in capsys.readouterr().err


def test_the_benchmark_finds_the_costs_of_synchronous_runs_again():
    # Two runs that the planner itself made, by costs that the benchmark is not told.
    told = dict(
        request_rate=60.0, server_rate=1500.0, step_secs=0.2, token_secs=1e-4, push_secs=0.3
    )
    rows = simulation.lengths_of("uniform:1:40")(np.random.default_rng(0), 64, planner.GROUP_SIZE)
    runs = {}
    for groups in (8, 16):
        plan = sync(
            groups_per_step=groups,
            group_size=planner.GROUP_SIZE,
            num_servers=1,
            num_steps=40,
            **told,
        )
        o = simulate(plan, simulation.measured(rows))
        secs, tokens = 1 / o.steps_per_sec, o.mean_trained
        row = {"time/step_secs": secs, "tokens/completion_mean": tokens}
        row["time/wait_data_secs"] = secs * o.wait_data_share
        row["time/wait_push_secs"] = secs * o.wait_push_share
        runs[groups] = {"metrics": [row], "lengths": rows.tolist()}
    found = planner.costs_of(planner.calibrated(runs)[0])
    assert found == pytest.approx(told | {"pause_secs": 0.0}, rel=0.05)


def test_the_benchmark_compares_in_shares_of_what_was_measured():
    predicted = simulate(
        make(step_secs=2.0, num_steps=20, warm_steps=10), lengths_of("constant:100")
    )
    rows = [
        {"time/step_secs": 1.0, "staleness/mean": 0.5},
        {"time/step_secs": 2.0, "staleness/mean": 1.5},
    ]
    row = planner.compared(predicted, rows)  # predicted .5 steps/s and 1; measured 1/1.5 and 1
    assert (row["steps_error"], row["staleness_error"]) == pytest.approx((-0.25, 0.0))


def test_a_plan_may_be_asynchronous_without_staleness():
    """The limit of small bounds, which a run calls mode 'sync'."""
    plan = make(mode="async", max_staleness=0, push_every_steps=1, chunk_groups=0)
    assert plan.max_staleness == 0


@pytest.mark.long
@pytest.mark.parametrize("part", ["calibrate", "turns", "areal", "scale"])
def test_the_benchmark_runs_and_writes_where_it_is_told(part, tmp_path):
    """Its figures are not checked here: a machine that does other work has others."""
    command = [sys.executable, ROOT / "benchmarks" / "planner.py", f"--part={part}"]
    command += [f"--out={tmp_path}", "--steps=12"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=1500)
    found = json.loads((tmp_path / "planner.json").read_text("utf-8"))[part]
    if part in ("calibrate", "turns"):
        assert len(found["settings"]) == {"calibrate": 6, "turns": 3}[part]
        assert all(math.isfinite(row["steps_error"]) for row in found["settings"].values())
    else:
        assert (tmp_path / f"planner_{part}.png").stat().st_size > 10_000


def fit_file(path, secs):
    plan = {"microbatch_rows": 4, "row_tokens": 100, "num_minibatches": 2}
    programs = [
        {"name": name, "secs": secs * n}
        for name, n in (("score", 1), ("accumulate", 3), ("update", 1))
    ]
    programs[1]["kernel_secs"] = 0.4  # of attention; a file of before has none
    path.write_text(json.dumps({"target": "v5e-4", "plan": plan, "programs": programs}))
    return path


def test_the_learners_times_may_be_those_of_a_fit(tmp_path, capsys):
    sizes = ["--num_servers=1", "--num_slots=64", "--groups_per_step=4", "--group_size=2"]
    sizes += ["--max_staleness=1", "--num_steps=20", "--request_rate=1e9", "--server_rate=1e9"]
    words = ["simulate", *sizes, "--lengths=constant:100", f"--fit={fit_file(tmp_path / 'f', 0.5)}"]
    assert main.main([*words, f"--out={tmp_path / 'o'}"]) == 0
    plan = json.loads((tmp_path / "o").read_text())["plan"]
    assert plan["token_secs"] == (2.0 + 0.4) / 400 and plan["step_secs"] == 1.0
    assert main.main([*words, "--step_secs=7", f"--out={tmp_path / 'o'}"]) == 0
    assert json.loads((tmp_path / "o").read_text())["plan"]["step_secs"] == 7.0
    assert "is of an earlier version: transfers cost nothing in it" in capsys.readouterr().err
    found = json.loads((tmp_path / "f").read_text())
    for program in found["programs"]:
        program["total_secs"] = [program["secs"], program["secs"] + 0.25]
    (tmp_path / "f").write_text(json.dumps(found))
    assert main.main([*words, f"--out={tmp_path / 'o'}"]) == 0
    plan = json.loads((tmp_path / "o").read_text())["plan"]
    assert plan["token_secs"] == (2.0 + 0.25) / 400 and plan["step_secs"] == 2 * (0.5 + 0.125)
    assert "earlier version" not in capsys.readouterr().err
    fit_file(tmp_path / "f", 0.0)
    assert main.main(words) == 2
    assert "predicts no times" in capsys.readouterr().err
    (tmp_path / "f").write_text("{}")
    assert main.main(words) == 2
    assert "is no fit.json" in capsys.readouterr().err


SLOTS = ["--groups_per_step=32", "--group_size=4", "--mode=async", "--max_staleness=4", "--seed=1"]
SLOTS += ["--num_servers=2", "--lengths=lognormal:100:0.5", "--request_rate=50"]
SLOTS += ["--server_rate=100000", "--step_secs=0.1", "--token_secs=1e-6", "--num_steps=40"]


def planned(tmp_path, *words):
    assert main.main(["simulate", *words, f"--out={tmp_path / 'o'}"]) == 0
    return json.loads((tmp_path / "o").read_text())


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        (["--config.server.addresses=('http://127.0.0.1:1',)"], 256),
        (["--config.server.command=python -m sgl --port {port}"], 256),
        (["--servers=sglang"], 256),
        (["--servers=embedded"], 16),
        ([], 16),
        (["--servers=sglang", "--num_slots=7"], 7),
    ],
)
def test_slots_are_those_of_the_kind_of_server(words, slots, tmp_path):
    config = ["--config=configs/quickstart.py", "--config.server.num_slots=16", "--group_size=4"]
    found = planned(tmp_path, *config, *SHORT, *words)
    assert found["plan"]["num_slots"] == slots


def test_the_servers_of_a_config_are_those_that_it_starts_or_names(tmp_path, capsys):
    config = ["--config=configs/quickstart.py", *SHORT]
    for words, num in ((["--config.server.devices=3"], 3), (["--config.server.num_local=2"], 2)):
        assert planned(tmp_path, *config, *words)["plan"]["num_servers"] == num
    assert main.main(["simulate", *config, "--config.server.discover=file:servers"]) == 2
    assert "--num_servers must be given" in capsys.readouterr().err


def test_the_answer_names_what_limits_the_step(tmp_path, capsys):
    found = planned(tmp_path, *SLOTS, "--num_slots=16")
    assert found["limit"]["by"] == "the slots of the servers"
    assert found["limit"]["relaxed_secs"]["the slots of the servers"] < 0.6 * found["limit"]["secs"]
    printed = capsys.readouterr().out.splitlines()[-1]
    assert "limited by" in printed and "the slots of the servers, 16 of each embedded" in printed
    slow = planned(tmp_path, *SLOTS, "--num_slots=512", "--step_secs=30")
    assert slow["limit"]["by"] == "the learner"
    push = planned(tmp_path, *SLOTS, "--num_slots=512", "--push_secs=30")
    assert push["limit"]["by"] == "the pushes"


def test_where_two_bounds_hold_the_step_together_no_one_of_them_is_named():
    # A step takes the learner 1 s, and four groups at once, of 1 s each, take 1 s beside it.
    plan = make(max_staleness=4, max_running_groups=4, step_secs=1.0, num_steps=40)
    found = simulation.limit_of(plan, lengths_of("constant:100"))
    assert found.by == "" and found.secs == pytest.approx(1.0)
    slower = dataclasses.replace(plan, step_secs=1.5)
    found = simulation.limit_of(slower, lengths_of("constant:100"))
    assert found.by == "the learner" and found.relaxed_secs[found.by] == pytest.approx(1.0)


def test_the_bound_on_staleness_is_relaxed_where_the_mode_has_one():
    found = simulation.limit_of(sync(step_secs=1.0), lengths_of("constant:100"))
    assert found.secs == pytest.approx(2.0) and "the bound on staleness" not in found.relaxed_secs


def test_a_preset_gives_the_rates_of_a_chip_for_the_model(tmp_path, capsys):
    config = ["--config=configs/quickstart.py", "--lengths=constant:4", "--num_steps=20"]
    config += ["--config.model.num_layers=1", "--config.model.model_dim=64"]
    config += ["--config.model.num_heads=4", "--config.model.num_kv_heads=2"]
    config += ["--config.model.head_dim=16", "--config.model.mlp_dim=100"]
    plan = planned(tmp_path, *config, "--preset=h100", "--step_secs=3")["plan"]
    # 64·16·2·(4 + 2) + 3·64·100 + 64·V parameters, two bytes each, at half of 3.35 TB/s.
    vocab = (3.35e12 / 4 / plan["request_rate"] - 12_288 - 19_200) / 64
    assert vocab == pytest.approx(round(vocab)) and 10 < vocab < 30
    assert plan["step_secs"] == 3.0 and plan["token_secs"] > 0 and plan["pause_secs"] > 0
    assert "an assumption" in capsys.readouterr().out
    assert main.main(["simulate", *config, "--preset=h99"]) == 2
    assert "--preset must be one of v5e" in capsys.readouterr().err
    assert main.main(["simulate", *SIZES, "--lengths=constant:4", "--preset=h100"]) == 2
    assert "--preset needs --config" in capsys.readouterr().err
