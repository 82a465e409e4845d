"""Metrics: rows are read as they were written, and names stand in one table."""

import json

import pytest
from fixtures.tensorboard import events

from jaxrl_async import metrics


def row(**values):
    return {name.replace("__", "/"): value for name, value in values.items()}


def test_what_is_written_is_read_back(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write(1, row(reward__mean=0.25, returned__timeout=2))
    writer.write(2, row(reward__mean=0.5))
    writer.close()
    rows = metrics.read_metrics(tmp_path)
    assert [(r["step"], r["reward/mean"]) for r in rows] == [(1, 0.25), (2, 0.5)]
    assert metrics.last_metrics(tmp_path) == rows[-1]
    board = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    assert board.count(b"reward/mean") == 2


def test_a_step_run_again_after_a_resume_counts_once(tmp_path):
    for values in ((1, 0.1), (2, 0.2)), ((2, 0.9), (3, 0.3)):
        writer = metrics.MetricsWriter(tmp_path)
        for step, reward in values:
            writer.write(step, row(reward__mean=reward))
        writer.close()
    assert [r["reward/mean"] for r in metrics.read_metrics(tmp_path)] == [0.1, 0.9, 0.3]
    # TensorBoard hides what stands before this, of step 2 and later ones.
    found = [event for path in (tmp_path / "tensorboard").iterdir() for event in events(path)]
    assert 2 in [e.step for e in found if e.session_log.status == e.session_log.START]


def test_a_name_outside_the_table_is_refused(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    with pytest.raises(KeyError, match="reward/maen"):
        writer.write(1, row(reward__maen=0.25))
    writer.close()


def test_every_line_is_json_also_when_a_value_is_not_finite(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write(1, row(loss__policy=float("nan")))
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["loss/policy"] is None


def test_a_line_still_being_written_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
    assert metrics.read_metrics(tmp_path) == [{"step": 1}]
    assert metrics.last_metrics(tmp_path) == {"step": 1}


def test_new_steps_are_given_once_each_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    new_steps = metrics.NewSteps(tmp_path)
    assert new_steps() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert new_steps() == [1, 2] and new_steps() == []
    with open(path, "a") as file:
        file.write('ep": 3}\n{"step": 2}\n')  # A restart repeats a step.
    assert new_steps() == [3, 2] and new_steps() == []
    assert metrics.NewSteps(tmp_path)() == []  # of a resumed run


def test_after_half_a_line_the_writer_begins_a_fresh_one_and_readers_say_what_they_leave_out(
    tmp_path,
):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')  # A full disk left it.
    new_steps, writer, said = metrics.NewSteps(tmp_path), metrics.MetricsWriter(tmp_path), []
    writer.write(2, row(reward__mean=0.5))
    writer.close()
    assert new_steps() == [2]
    rows = metrics.read_metrics(tmp_path, said.append)
    assert [r["step"] for r in rows] == [1, 2] and rows[1]["reward/mean"] == 0.5
    assert len(said) == 1 and "metrics.jsonl:2 is damaged, and left out" in said[0]
    assert metrics.last_metrics(tmp_path) == rows[1]


@pytest.mark.parametrize(
    "damage", [lambda text: text.replace("0.25", "0.75"), lambda text: text.replace("{", "", 1)]
)
def test_an_altered_line_is_said_and_left_out(tmp_path, damage, caplog):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write(1, row(reward__mean=0.5))
    writer.write(2, row(reward__mean=0.25))
    writer.close()
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{damage(second)}\n")
    assert [r["step"] for r in metrics.read_metrics(tmp_path)] == [1]
    assert "metrics.jsonl:2 is damaged" in caplog.text
    assert metrics.last_metrics(tmp_path)["step"] == 1


@pytest.mark.parametrize("line", ["[]", "1", '{"version": 2}', '{"step": "1"}'])
def test_a_line_of_another_file_is_no_row(tmp_path, line, caplog):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    assert metrics.read_metrics(tmp_path) == [{"step": 1}] == [metrics.last_metrics(tmp_path)]
    assert "metrics.jsonl" in caplog.text


def test_timers_add_up_under_each_name_and_pop_resets():
    now = 0.0
    timers = metrics.Timers(clock=lambda: now)
    for name, secs in (("update", 1.0), ("update", 2.0), ("pack", 0.5)):
        with timers(name):
            now += secs
        now += 10.0  # under no name
    assert timers.pop() == {"time/update_secs": 3.0, "time/pack_secs": 0.5}
    assert timers.pop() == {}


def test_a_name_within_another_takes_its_seconds_from_it_across_a_pop_too():
    now = 0.0
    timers = metrics.Timers(clock=lambda: now)
    with timers("wait_data"):
        now += 1.0
        with timers("update"):
            now += 2.0
        assert timers.pop() == {"time/wait_data_secs": 1.0, "time/update_secs": 2.0}
        now += 4.0
    assert timers.pop() == {"time/wait_data_secs": 4.0}
