"""What `train` prints: stages before the first step, a bar that fits, an ETA without warm-up, lines, scores."""

import dataclasses
import io
import json
import re

import pytest

from jaxrl_async.cli import train
from jaxrl_async.records import NO_STATUS, RoleStatus, Wait
from jaxrl_async.runtime import status as statuses
from jaxrl_async.runtime import supervisor
from jaxrl_async.runtime.progress import Progress, score_of, stage_of, waits_of

WARM = "2026-01-01 10:00:00,000 INFO jaxrl_async.roles: warm start: step 100 of 1500, loss 1.4"


class Screen(io.StringIO):
    """A terminal: what its last line holds."""

    def last(self) -> str:
        return re.split(r"[\r\n]", self.getvalue().rstrip())[-1].rstrip()

    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def clock():
    now = [100.0]

    def read():
        return now[0]

    read.pass_secs = lambda secs: now.__setitem__(0, now[0] + secs)
    return read


def learner(what, on="the queue", secs=12.0, **values):
    wait = Wait(f"learner ({what})", on, secs)
    roles = (RoleStatus("learner-0", 0.0, (wait,), {}),)
    return dataclasses.replace(NO_STATUS, roles=roles, **values)


def row(step, **values):
    rates = {"rollout/tokens_per_sec": 123_456.0, "learner/tokens_per_sec": 9876.0}
    rates["time/step_secs"] = 2.0
    return {"step": step, "reward/mean": 0.873, "staleness/mean": 1.25} | rates | values


def make(clock, num_steps=5000, *, screen=None, columns=None, before=None):
    screen = screen or Screen()
    shown = Progress(
        num_steps,
        row=before,
        stream=screen,
        is_terminal=columns is not None,
        columns=lambda: columns,
        clock=clock,
    )
    return shown, screen


@pytest.mark.parametrize("columns", [80, 120])
def test_the_bar_fits_and_says_last_who_waits(clock, columns):
    shown, screen = make(clock, columns=columns)
    waiting = learner("wait_data", secs=123.0)
    for step in (1, 1234):
        clock.pass_secs(30.0)
        shown.show(row(step), waiting, "")
    last = screen.last()
    assert len(last) < columns
    assert last.endswith(", waits: learner for groups 123 s")
    for part in ("step 1234/5000", "reward 0.873", "ETA"):
        assert part in last
    assert ("tok/s 123k out 9.9k in" in last) == (columns == 120)
    shown.close()


def test_what_does_not_fit_is_cut_at_the_edge(clock):
    shown, screen = make(clock, columns=40)
    shown.show(row(4999), learner("wait_push", secs=1000.0), "")
    assert len(screen.last()) <= 39 and screen.last().endswith("…")
    shown.close()


def test_the_eta_leaves_warm_up_out(clock):
    shown, screen = make(clock, num_steps=11, columns=120)
    clock.pass_secs(600.0)  # Compilation.
    shown.show(row(1), None, "")
    assert "ETA" not in screen.last()
    for step in (2, 3):
        clock.pass_secs(2.0)
        shown.show(row(step), None, "")
    assert "ETA 0:16" in screen.last()
    shown.close()


def test_a_resumed_run_counts_from_its_first_new_step(clock):
    before = row(50)
    shown, screen = make(clock, num_steps=100, before=before)
    clock.pass_secs(300.0)
    shown.show(before, None, "")
    assert shown.step == 50 and not shown.is_warm
    shown.show(row(51), None, "")
    assert shown.is_warm
    for step in range(52, 62):
        clock.pass_secs(1.0)
        shown.show(row(step), None, "")
    assert "step 61/100" in screen.last() and "ETA 0:39" in screen.last()
    shown.close()


def test_the_stages_before_the_first_step_have_lines_of_their_own(clock):
    shown, screen = make(clock, columns=80)
    shown.show(None, None, "")
    for state in ("wait_push", "wait_data", "wait_data", "accumulate"):
        clock.pass_secs(5.0)
        shown.show(None, learner(state), "")
    clock.pass_secs(70.0)
    shown.show(row(1), learner("wait_data"), "")
    text = screen.getvalue()
    for line in (
        "0:00  start: the roles load, and compile\n",
        "0:05  servers: they start, compile and load the first version\n",
        "0:10  rollout: the first groups are generated\n",
        "0:20  first step: the learner compiles, and takes it\n",
        "the first step ended after 1:30\n",
    ):
        assert text.count(line) == 1, line
    shown.close()


def test_a_warm_start_is_a_stage_that_a_log_file_sees_move(clock):
    shown, screen = make(clock)
    for step in (100, 200, 300):
        shown.show(None, None, WARM.replace("100", str(step)))
        clock.pass_secs(6.0)
    assert screen.lines() == [
        "0:00  warm start: step 100 of 1500, loss 1.4",
        "0:12  warm start: step 300 of 1500, loss 1.4",
    ]
    assert stage_of(learner("wait_data"), WARM).startswith("rollout")


def test_the_rates_are_over_the_time_of_the_last_steps(clock):
    shown, screen = make(clock, num_steps=2)
    # A step whose groups lay in the queue samples nothing: 3 s without a token, 1 s of 400.
    slow = {"rollout/tokens_per_sec": 0.0, "time/step_secs": 3.0}
    shown.show(row(1, **slow), None, "")
    shown.show(row(2, **{"rollout/tokens_per_sec": 400.0, "time/step_secs": 1.0}), None, "")
    assert "tok/s 0 out" in screen.lines()[-2] and "tok/s 100 out" in screen.lines()[-1]


def test_a_warm_start_that_goes_on_is_no_stall(clock, monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(supervisor.time, "monotonic", clock)
    monkeypatch.setattr(supervisor.tqdm.tqdm, "write", written.append)
    stalls = supervisor._Stalls(lambda: None, tmp_path, 1000.0)
    for step in range(100, 800, 100):  # 40 s each
        stalls.check(0, f"warm start: step {step}")
        clock.pass_secs(40.0)
    assert written == []
    clock.pass_secs(20.0)
    stalls.check(0, "warm start: step 700")
    assert written.pop().startswith("no step for 300 s:\n")
    stalls.check(1, "")
    clock.pass_secs(30.0)
    stalls.check(1, "")
    assert written.pop().startswith("no step for 30 s:\nlast step done: 1\n")
    clock.pass_secs(970.0)
    with pytest.raises(supervisor.StalledError, match="no step for 1000 s"):
        stalls.check(1, "")


def test_without_a_terminal_a_line_is_printed_every_so_many_steps(clock):
    shown, screen = make(clock, num_steps=100)
    for step in range(1, 101):
        clock.pass_secs(1.0)
        for _ in range(3):
            shown.show(row(step), None, "")
    steps = [int(s) for s in re.findall(r"^step (\d+)/100", screen.getvalue(), re.M)]
    assert steps == [*range(1, 100, 5), 100]
    assert "\r" not in screen.getvalue() and "\x1b" not in screen.getvalue()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, ""),
        (NO_STATUS, ""),
        (learner("wait_data"), "learner for groups 12 s"),
        (learner("publish"), "learner for a push 12 s"),
        (learner("update", capacity=3), "nobody"),
        (learner("update", running_groups=3), "nobody"),
        (learner("update"), "rollout for the learner"),
    ],
)
def test_who_waits_is_said_in_a_few_words(status, said):
    assert waits_of(status) == said


def test_a_role_at_work_does_not_wait_for_itself():
    chain = statuses.explain(learner("pack", on="itself", secs=0.2), (), None)
    assert "learner (pack) is at work for 0 s" in chain and "itself" not in chain


def test_the_score_is_of_evaluations_or_of_the_first_and_last_rewards():
    rows = [row(i, **{"reward/mean": float(i)}) for i in range(1, 13)]
    # Means of 1 to 5 and of 8 to 12.
    assert score_of(rows) == "mean reward in training 3.000 → 10.000 (first and last 5 steps)"
    assert score_of(rows[:2]) == "mean reward in training 1.000 → 2.000 (first and last step)"
    rows[2] |= {"eval/greedy": 0.25, "eval/version": 0.0}
    rows[5] |= {"eval/version": 4.0}  # It failed.
    rows[9] |= {"eval/greedy": 0.75, "eval/version": 8.0}
    assert score_of(rows) == "test split: greedy accuracy 0.250 → 0.750 (version 0 and 8)"
    rows[9] |= {"eval/num_prompts": 8, "eval/num_fit": 8, "eval/num_questions": 40}
    rows[9] |= {"eval/validation": 1.0, "eval/hard/num_failed": 3.0}
    for i, value in ((2, 0.0), (9, 0.5)):
        rows[i] |= {"eval/hard/greedy": value}
    assert score_of(rows) == (
        "validation split: greedy accuracy 0.250 → 0.750 (version 0 and 8; 8 of 40 prompts, 32 do not fit "
        "rollout.max_prompt_tokens); "
        "hard: greedy accuracy 0.000 → 0.500 (version 0 and 8; 3 answers failed)"
    )
    assert score_of([]) == score_of([{"step": 1, "reward/mean": None}]) == ""


def test_the_end_names_the_score_and_the_next_command(tmp_path):
    workdir = tmp_path / "my run"
    workdir.mkdir()
    assert train.ending(workdir).splitlines()[0] == f"done: {workdir}"
    text = "".join(json.dumps(row(i, **{"reward/mean": i / 4})) + "\n" for i in (1, 2))
    (workdir / "metrics.jsonl").write_text(text)
    assert train.ending(workdir).splitlines() == [
        f"done: {workdir}",
        "score: mean reward in training 0.250 → 0.500 (first and last step)",
        f"next: python -m jaxrl_async report '--workdir={workdir}'",
    ]


def test_a_figure_that_is_none_does_not_stop_the_bar(clock):
    shown, screen = make(clock, columns=120)
    shown.show(row(1, **{"reward/mean": None, "learner/tokens_per_sec": None}), None, "")
    assert "reward nan" in screen.last() and "out ? in" in screen.last()
    shown.close()
