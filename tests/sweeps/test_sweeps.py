"""Sweeps: every point can be run as it is printed; skipped, resumed, retried and locked; gathered on one page.

The commands of most tests are those of a tiny program in the place of `python -m jaxrl_async`.
"""

import fcntl
import functools
import html
import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import yaml
from fixtures import browser
from fixtures.models import TINY

from jaxrl_async.cli import config as config_lib
from jaxrl_async.cli import sweep as script
from jaxrl_async.config.loss import ANCHORS
from jaxrl_async.config.settings import MODES, SettingsError
from jaxrl_async.models import hf
from jaxrl_async.roles import start
from jaxrl_async.runtime import workdir as workdir_lib
from jaxrl_async.sweeps import driver, page
from jaxrl_async.sweeps.points import Point, Sweep, seeded

ROOT = pathlib.Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.py"))
SEEDS = ROOT / "configs" / "sweeps" / "seeds.py"
TIMEOUT_SECS = 60.0
NUM_STEPS = 4

# `train` and `evaluate` of a point NAME, as the file DIR/NAME.plan has it; its calls are noted in DIR/calls.
FAKE = """
import json, os, pathlib, signal, sys, time

verb, *words = sys.argv[1:]
flags = {word.partition("=")[0]: word.partition("=")[2] for word in words}
workdir = pathlib.Path(flags["--workdir"])
directory, name = workdir.parent, workdir.name
workdir.mkdir(exist_ok=True)

def note(what):
    with open(directory / "calls", "a") as file:
        file.write(f"{what}\\n")

def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"{path} never came")
        time.sleep(0.01)

def end(*_):
    (workdir / "ended in order").touch()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
note(" ".join([name, verb, *(["resumed"] if "--resume" in flags else [])]))
(workdir / "pid").write_text(str(os.getpid()))
plan = directory / f"{name}.plan"
plan = plan.read_text() if plan.exists() else ""
if plan == f"{verb} fails":
    print("this is why")
    sys.exit(3)
if verb == "train":
    (workdir / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
    if plan.startswith("waits for "):
        wait_for(directory / plan.removeprefix("waits for "))
    note(f"{name} ends")
    (workdir / "checkpoints" / "STEPS").mkdir(exist_ok=True)
elif plan != "evaluate forgets":
    rows = [{"step": 0, "greedy": 0.25}, {"step": STEPS, "greedy": 0.5}]
    (workdir / "evaluation.json").write_text(json.dumps(rows))
""".replace("STEPS", str(NUM_STEPS))


@pytest.fixture
def program(tmp_path):
    """The words of the tiny program."""
    (tmp_path / "fake.py").write_text(FAKE)
    return (sys.executable, "-I", "-S", str(tmp_path / "fake.py"))


@pytest.fixture
def jobs(program, tmp_path):
    """Makes jobs of these names, in DIR."""

    def make(*names):
        return [driver.Job(name, tmp_path / "DIR", NUM_STEPS, program, ()) for name in names]

    (tmp_path / "DIR").mkdir()
    return make


@pytest.fixture
def sweep_file(tmp_path):
    """Writes a file of two points of four steps around the quickstart; its path."""
    path = tmp_path / "two.py"
    path.write_text(
        "from jaxrl_async.sweeps.points import Point, Sweep\n"
        "def get_sweep(arg):\n"
        "    points = tuple(Point(name, {'learner.num_steps': 4}) for name in 'ab')\n"
        f"    return Sweep('{ROOT}/configs/quickstart.py:smoke', points)\n"
    )
    return path


def plan(job, text):
    (job.directory / f"{job.name}.plan").write_text(text)


def calls(directory):
    path = directory / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line for line in lines if not line.endswith(" ends")]


def run(jobs, at_once=1):
    return driver.run(jobs, at_once=at_once, say=lambda line: None)


def wait_until(holds):
    deadline = time.monotonic() + TIMEOUT_SECS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ── points ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def loaded(path, arg):
    return config_lib.load_sweep(f"{path}:{arg}")


def settings_of_point(sweep, point):
    return config_lib.settings_of(config_lib.config_of_point(sweep, point))


@pytest.mark.parametrize("arg", ["", "smoke", "num_seeds=2"])
@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_every_point_can_be_run(path, arg):
    sweep = loaded(path, arg)
    runs = [settings_of_point(sweep, point) for point in sweep.points]
    assert len(set(map(repr, runs))) == len(runs) > 1, "two points are the same run"
    if arg == "smoke":
        assert {run.learner.num_steps for run in runs} == {2}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_what_is_printed_is_what_runs(path, tmp_path, capsys):
    assert script.main([f"--sweep={path}", f"--dir={tmp_path}/a b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sweep = loaded(path, "")
    assert len(lines) == len(sweep.points)
    for line, point in zip(lines, sweep.points, strict=True):
        words = shlex.split(line)
        train, evaluate = words[: words.index("&&")], words[words.index("&&") + 1 :]
        workdir = f"--workdir={tmp_path}/a b/{point.name}"
        assert evaluate == [sys.executable, "-m", "jaxrl_async", "evaluate", workdir]
        assert train[:4] == [sys.executable, "-m", "jaxrl_async", "train"] and workdir in train
        flags = config_lib.parse_flags("", train[4:], config=True, workdir=("", ""))
        assert config_lib.settings_of(flags.config) == settings_of_point(sweep, point)


def test_printing_is_the_default_and_what_dry_run_does(tmp_path, capsys):
    argv = [f"--sweep={SEEDS}", f"--dir={tmp_path}/DIR"]
    script.main(argv, ("false",))
    printed = capsys.readouterr().out
    assert script.main([*argv, "--run", "--dry-run"], ("false",)) == 0
    assert capsys.readouterr().out == printed != ""
    assert not (tmp_path / "DIR").exists()


def test_what_is_finished_is_marked_where_the_commands_are_printed(sweep_file, tmp_path, capsys):
    (tmp_path / "DIR" / "a").mkdir(parents=True)
    rows = '[{"step": 4, "greedy": 0.5}]'
    (tmp_path / "DIR" / "a" / "evaluation.json").write_text(rows)
    assert (
        script.main([f"--sweep={sweep_file}", f"--dir={tmp_path}/DIR", "--run", "--dry-run"]) == 0
    )
    finished, left = capsys.readouterr().out.splitlines()
    assert finished.startswith("# finished: ") and f"--workdir={tmp_path}/DIR/a " in finished
    assert shlex.split(left)[0] == sys.executable and f"--workdir={tmp_path}/DIR/b " in left


def test_help_says_what_a_task_of_an_array_is(capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a task is one whole run, all its roles, on one node" in text


def test_the_sweep_of_modes_has_what_the_settings_accept_and_nothing_else():
    sweep = loaded(ROOT / "configs" / "sweeps" / "modes.py", "")
    periodic = {"queue.chunk_groups": 16, "learner.num_minibatches": 1}
    accepted = set()
    for mode, eta, anchor in itertools.product(MODES, (0, 1, 2, 4, 8), ANCHORS):
        overrides = {"mode": mode, "queue.max_staleness": eta, "loss.anchor": anchor}
        overrides |= periodic if mode == "periodic" else {}
        try:
            settings_of_point(sweep, Point("x", overrides))
        except SettingsError:
            continue
        accepted.add((mode, eta, anchor))
    keys = ("mode", "queue.max_staleness", "loss.anchor")
    found = [tuple(point.overrides[key] for key in keys) for point in sweep.points]
    assert set(found) == accepted and len(found) == len(accepted) == 25


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss.dual_clip", None),
        ("loss.dual_clip", 3.0),
        ("queue.permit_timeout_secs", 1e-07),
        ("learner.num_steps", 7),
        ("model.remat", True),
        ("model.qk_norm", False),
        ("task.name", "it's a \"name\" of $HOME; * and ~"),
        ("task.name", "None"),
        ("task.name", ""),
        ("rollout.delay_steps", "uniform(3)"),
        ("server.addresses", ("https://a:1", "https://b:2")),
        ("server.addresses", ()),
        ("cpus.learner", (0,)),
    ],
)  # fmt: skip
def test_a_value_survives_the_shell_and_the_flags(key, value, tmp_path):
    (word,) = Point("x", {key: value}).words
    job = driver.Job("x", tmp_path, 1, ("echo",), (f"--config={ROOT}/configs/quickstart.py", word))
    train, _ = job.shell.split(" && ")
    out = subprocess.run(["bash", "-c", f"printf '%s\\0' {train}"], capture_output=True, check=True)
    _, verb, *words = out.stdout.decode().split("\0")[:-1]
    assert verb == "train"
    found = config_lib.parse_flags("", words, config=True, workdir=("", "")).config
    for part in key.split("."):
        found = found[part]
    assert found == value and type(found) is type(value)


def test_none_on_the_command_line_empties_a_number():
    flags = ["--config.loss.behavior_weight=none", "--config.loss.behavior_cap=None"]
    argv = [f"--config={ROOT}/configs/quickstart.py", "--config.loss.behavior_cap=2.0", *flags]
    settings = config_lib.settings_of(config_lib.parse_flags("", argv, config=True).config)
    assert settings.loss.behavior_cap is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"learner.num_stepz": 1}, r"point 'x': unknown config key .*'num_steps'"),
        ({"learner.num_steps": 1.5}, r"point 'x': .*num_steps=1.5"),
        ({"rollout.delay_steps": 4}, r"point 'x': config.rollout.delay_steps = 4 would come through as '4'"),
        ({"task.name": None}, r"config.task.name = None would come through as 'None'"),
        ({"cpus.learner": [0]}, r"point 'x': config.cpus.learner cannot be set to \[0\]"),
        ({"queue.max_staleness": 0}, r"point 'x': mode 'async' needs queue.max_staleness"),
    ],
)  # fmt: skip
def test_a_point_that_cannot_be_run_is_named(overrides, message):
    sweep = Sweep(f"{ROOT}/configs/quickstart.py", (Point("x", overrides),))
    with pytest.raises((config_lib.UsageError, SettingsError), match=message):
        settings_of_point(sweep, sweep.points[0])


def test_a_point_may_give_a_setting_its_old_name():
    sweep = Sweep(
        f"{ROOT}/configs/quickstart.py", (Point("x", {"loss.behavior_cap_mode": "clamp"}),)
    )
    assert settings_of_point(sweep, sweep.points[0]).loss.behavior_weight == "clamp"


def test_points_that_cannot_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="two points named 'x'"):
        Sweep("c.py", (Point("x", {}), Point("y", {}), Point("x", {"seed": 1})))
    with pytest.raises(ValueError, match="has no points"):
        Sweep("c.py", ())
    with pytest.raises(ValueError, match="name must be made of .* got '../x'"):
        Point("../x", {})


def test_seeds_multiply_points_and_leave_their_label():
    points = list(seeded([Point("a", {"mode": "sync"}), Point("b", {})], 2))
    assert [point.name for point in points] == ["a-seed0", "a-seed1", "b-seed0", "b-seed1"]
    assert points[1].overrides == {"mode": "sync", "seed": 1, "task.seed": 1}
    assert [point.label for point in points] == ["a", "a", "b", "b"]
    assert list(seeded([Point("a", {})], 0)) == [Point("a", {})]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--sweep=FILE"),
        (["--sweep=nowhere.py"], "no sweep at .*nowhere.py"),
        ([f"--sweep={ROOT}/configs/quickstart.py"], r"has no get_sweep\(arg\)"),
        ([f"--sweep={SEEDS}:smoek"], "'smoek', did you mean 'smoke'"),
        ([f"--sweep={SEEDS}:mode=asink"], "'asink', did you mean 'async'"),
        ([f"--sweep={SEEDS}", "--run", "--gather"], "--run and --gather are two actions"),
        ([f"--sweep={SEEDS}", "--run", "--jobs=-1"], "--jobs must be ≥ 1, got -1"),
        ([f"--sweep={SEEDS}", "--point=5"], r"--point must be in \[0, 5\), got 5"),
        ([f"--sweep={SEEDS}", "--submit=slrm"], "--submit=slrm, did you mean 'slurm'"),
        ([f"--sweep={SEEDS}", "--submit=jobset", "--claim=c"], "needs --image"),
        ([f"--sweep={SEEDS}", "--submit=slurm", "--sbatch='"], "--sbatch: No closing quotation"),
    ],
)  # fmt: skip
def test_bad_usage_is_named(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert script.main(argv) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "place"),
    [("checkpoint.directory", "gs://bucket/a"), ("journal.path", "/disk/j.sqlite")],
)
def test_points_that_share_a_bucket_or_a_journal_are_refused(key, place, sweep_file, capsys):
    text = sweep_file.read_text()
    sweep_file.write_text(text.replace("4}", f"4, {key!r}: {place!r}}}"))
    assert script.main([f"--sweep={sweep_file}"]) == 2
    said = f"points 'a' and 'b' have the same config.{key}, {place!r}: give each its own"
    assert said in capsys.readouterr().err
    each = f"4, {key!r}: {place!r} + name}}"
    sweep_file.write_text(text.replace("4}", each))
    assert script.main([f"--sweep={sweep_file}"]) == 0


# ── driver ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_point_is_trained_then_evaluated_and_not_run_again(jobs, tmp_path):
    two = jobs("a", "b")
    assert [job.state() for job in two] == ["waiting", "waiting"]
    assert run(two) == {"a": "finished", "b": "finished"}
    assert calls(tmp_path / "DIR") == ["a train", "a evaluate", "b train", "b evaluate"]
    assert [job.state() for job in two] == ["finished", "finished"]
    assert run(two) == {"a": "finished", "b": "finished"}
    assert calls(tmp_path / "DIR") == []


def test_one_at_a_time_where_one_is_asked_for(jobs, tmp_path):
    run(jobs("a", "b", "c"))
    trains = [
        line for line in (tmp_path / "DIR" / "calls").read_text().splitlines() if "ev" not in line
    ]
    assert trains == ["a train", "a ends", "b train", "b ends", "c train", "c ends"]


def test_two_at_a_time_where_two_are_asked_for(jobs, tmp_path):
    three = jobs("a", "b", "c")
    plan(three[0], "waits for b/checkpoints/1")  # Neither ends before the other has begun …
    plan(three[1], "waits for a/checkpoints/1")
    assert set(run(three, at_once=2).values()) == {"finished"}
    lines = (tmp_path / "DIR" / "calls").read_text().splitlines()
    assert lines.index("c train") > min(lines.index("a ends"), lines.index("b ends"))


def test_an_interrupted_point_is_resumed(jobs, tmp_path):
    (job,) = jobs("a")
    (job.workdir / "checkpoints" / "2").mkdir(parents=True)
    (job.workdir / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()
    run([job])
    assert calls(tmp_path / "DIR") == ["a train resumed", "a evaluate"]


def test_a_trained_point_is_only_evaluated(jobs, tmp_path):
    (job,) = jobs("a")
    (job.workdir / "checkpoints" / str(NUM_STEPS)).mkdir(parents=True)
    run([job])
    assert calls(tmp_path / "DIR") == ["a evaluate"]


def test_a_point_without_a_checkpoint_begins_anew(jobs, tmp_path):
    (job,) = jobs("a")
    job.workdir.mkdir()
    (job.workdir / "config.json").write_text("{}")
    (job.workdir / "journal.sqlite").write_text("")
    run([job])
    assert calls(tmp_path / "DIR") == ["a train", "a evaluate"]
    assert not (job.workdir / "journal.sqlite").exists()


@pytest.mark.parametrize("text", ['[{"step": 3, "greedy": 1.0}]', '[{"step": 4, "gre', "[]"])
def test_an_evaluation_of_an_earlier_step_or_half_of_one_is_no_result(text, jobs, tmp_path):
    (job,) = jobs("a")
    (job.workdir / "checkpoints" / "3").mkdir(parents=True)
    (job.workdir / "evaluation.json").write_text(text)
    assert run([job]) == {"a": "finished"}
    assert calls(tmp_path / "DIR") == ["a train resumed", "a evaluate"]
    assert job.scored()[-1] == {"step": NUM_STEPS, "greedy": 0.5}


@pytest.mark.parametrize(
    ("failure", "why", "again"),
    [
        ("train fails", "train ended with exit code 3", ["a train", "a evaluate"]),
        ("evaluate fails", "evaluate ended with exit code 3", ["a evaluate"]),
        ("evaluate forgets", f"no result of step {NUM_STEPS} in ", ["a evaluate"]),
    ],
)
def test_a_point_that_fails_is_reported_and_tried_again_by_the_next_driver(
    failure, why, again, jobs, tmp_path
):
    two = jobs("a", "b")
    plan(two[0], failure)
    ends = run(two)
    assert ends["b"] == "finished" and ends["a"].startswith(f"failed: {why}")
    assert two[0].state() == ends["a"]
    calls(tmp_path / "DIR")
    log = two[0].log.read_text()
    assert ("this is why" in log) == ("fails" in failure) and log.startswith("$ ")
    (tmp_path / "DIR" / "a.plan").unlink()
    assert run(two) == {"a": "finished", "b": "finished"}
    assert calls(tmp_path / "DIR") == again
    assert two[0].state() == "finished"


def test_a_command_that_was_killed_is_a_failure(jobs):
    (job,) = jobs("a")
    plan(job, "waits for ever")
    thread = threading.Thread(target=lambda: ends.update(run([job])))
    ends = {}
    thread.start()
    wait_until(lambda: (job.workdir / "checkpoints" / "1").exists())
    assert job.state() == "running"
    os.kill(int((job.workdir / "pid").read_text()), signal.SIGKILL)
    thread.join(TIMEOUT_SECS)
    assert ends["a"].startswith("failed: train ended by signal SIGKILL")


def test_a_point_that_another_driver_holds_is_left_alone(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "LOCK_SECS", 0.0)
    two = jobs("a", "b")
    with open(two[0].lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(two) == {"a": "runs elsewhere", "b": "finished"}
    assert calls(tmp_path / "DIR") == ["b train", "b evaluate"]


def test_a_point_whose_command_runs_by_itself_is_left_alone(jobs, tmp_path):
    (job,) = jobs("a")
    with workdir_lib.lock(job.workdir):  # Before its first checkpoint, as in a warm start.
        (job.workdir / "config.json").write_text("{}")
        assert run([job]) == {"a": "runs elsewhere"}
        assert (job.workdir / "config.json").exists() and calls(tmp_path / "DIR") == []
    assert run([job]) == {"a": "finished"}


def test_two_drivers_at_once_run_each_point_once(jobs, tmp_path):
    six = jobs(*"abcdef")
    threads = [threading.Thread(target=run, args=(six,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECS)
    assert sorted(calls(tmp_path / "DIR")) == sorted(
        f"{n} {v}" for n in "abcdef" for v in ("train", "evaluate")
    )
    assert {job.state() for job in six} == {"finished"}


def start_script(argv, program):
    """The verb with another program, as a process."""
    code = "import sys; from jaxrl_async.cli import sweep; "
    code += f"sys.exit(sweep.main({argv!r}, {program!r}))"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_commands_and_the_next_driver_goes_on(
    number, program, sweep_file, tmp_path
):
    directory = tmp_path / "DIR"
    argv = [f"--sweep={sweep_file}", f"--dir={directory}", "--point=0"]
    directory.mkdir()
    (directory / "a.plan").write_text("waits for ever")
    process = start_script(argv, program)
    wait_until(lambda: (directory / "a" / "checkpoints" / "1").exists())
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 1 and "the same command" in err
    assert (directory / "a" / "ended in order").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((directory / "a" / "pid").read_text()), 0)
    assert driver.Job("a", directory, NUM_STEPS, program, ()).state() == "interrupted"
    calls(directory)
    (directory / "a.plan").unlink()
    assert script.main(argv, program) == 0
    assert calls(directory) == ["a train resumed", "a evaluate"]


def test_a_killed_driver_leaves_its_point_locked_for_as_long_as_it_runs(
    program, sweep_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(driver, "LOCK_SECS", 0.0)
    directory = tmp_path / "DIR"
    directory.mkdir()
    (directory / "a.plan").write_text("waits for ever")
    process = start_script([f"--sweep={sweep_file}", f"--dir={directory}", "--point=0"], program)
    job = driver.Job("a", directory, NUM_STEPS, program, ())
    wait_until(lambda: (job.workdir / "checkpoints" / "1").exists())
    process.kill()
    process.communicate(timeout=TIMEOUT_SECS)
    assert job.state() == "running"
    assert run([job]) == {"a": "runs elsewhere"}
    os.kill(int((job.workdir / "pid").read_text()), signal.SIGKILL)
    wait_until(lambda: job.state() == "interrupted")


def test_the_script_runs_all_points_and_gathers_them(program, sweep_file, tmp_path, capsys):
    argv = [f"--sweep={sweep_file}", f"--dir={tmp_path}/DIR", "--run"]
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR" / "a.plan").write_text("train fails")
    assert script.main(argv, program) == 1
    out, err = capsys.readouterr()
    assert "a failed: train ended with exit code 3" in err and "[2/2] b finished" in out
    assert "1 failed, 1 finished" in (tmp_path / "DIR" / "index.html").read_text()
    (tmp_path / "DIR" / "a.plan").unlink()
    assert script.main(argv, program) == 0
    assert "2 finished" in (tmp_path / "DIR" / "index.html").read_text()


def test_one_point_is_run_alone(program, sweep_file, tmp_path):
    argv = [f"--sweep={sweep_file}", f"--dir={tmp_path}/DIR", "--point=1"]
    assert script.main(argv, program) == 0
    assert calls(tmp_path / "DIR") == ["b train", "b evaluate"]


def test_a_workdir_of_another_config_is_refused(program, sweep_file, tmp_path, capsys):
    workdir = tmp_path / "DIR" / "a"
    workdir.mkdir(parents=True)
    config = config_lib.load_config(f"{ROOT}/configs/quickstart.py:smoke")
    config.learner.num_steps = 4
    (workdir / "config.json").write_text(config.to_json())
    argv = [f"--sweep={sweep_file}", f"--dir={tmp_path}/DIR"]
    assert script.main([*argv, "--gather"], program) == 0
    config.learner.num_steps = 5
    (workdir / "config.json").write_text(config.to_json())
    assert script.main([*argv, "--run"], program) == 2
    err = capsys.readouterr().err
    assert "DIR/a holds another run: its config.learner" in err and "--dir" in err
    assert calls(tmp_path / "DIR") == []
    # Its score is of another run, too: it is not left out of an array as finished.
    (workdir / "evaluation.json").write_text('[{"step": 4, "greedy": 0.5}]')
    for submit in (["slurm"], ["jobset", "--image=i", "--claim=c"]):
        assert script.main([*argv, f"--submit={submit[0]}", *submit[1:], "--dry-run"]) == 2
        assert "DIR/a holds another run: its config.learner" in capsys.readouterr().err


def test_a_point_that_starts_from_a_checkpoint_is_gathered_after_it_began(
    program, sweep_file, tmp_path, capsys
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf.write_config(TINY)))
    path = {"model.path": f"{tmp_path}/model", "warm_start.num_steps": 0}
    sweep_file.write_text(sweep_file.read_text().replace("4}", f"4, **{path}}}"))
    config = config_lib.config_of_point(
        sweep := config_lib.load_sweep(str(sweep_file)), sweep.points[0]
    )
    settings = config_lib.settings_of(config)
    argv = [f"--sweep={sweep_file}", f"--dir={tmp_path}/DIR", "--gather"]
    assert start.begin(config, settings, tmp_path / "DIR" / "a", resume=False)
    assert script.main(argv, program) == 0
    (tmp_path / "DIR" / "b").mkdir()
    config.model.path = "another"
    (tmp_path / "DIR" / "b" / "config.json").write_text(config.to_json())
    assert script.main(argv, program) == 2
    assert "DIR/b holds another run: its config.model.path is 'another'" in capsys.readouterr().err


# ── clusters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_script_for_slurm_is_one_array_of_what_is_missing(sweep_file, tmp_path, capsys):
    workdir = tmp_path / "DIR" / "a"
    argv = [f"--sweep={sweep_file}", f"--dir={tmp_path}/DIR", "--submit=slurm", "--dry-run"]
    assert script.main([*argv, "--jobs=3"]) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --array=0,1%3\n" in text
    command = f'-m jaxrl_async sweep --sweep={sweep_file} --dir={tmp_path}/DIR \\\n  --point="$SLURM_ARRAY_TASK_ID"'
    assert command in text
    assert not (tmp_path / "DIR").exists()
    workdir.mkdir(parents=True)
    (workdir / "evaluation.json").write_text('[{"step": 4, "greedy": 0.5}]')
    assert script.main([*argv, "--sbatch=--partition=gpu --time=1:00"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --array=1\n" in text
    assert text.splitlines()[-2:] == [
        "# finished, not in the array: a",
        f"sbatch --partition=gpu --time=1:00 {tmp_path}/DIR/sweep.sbatch",
    ]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_finished_sweep_and_a_path_with_spaces_are_not_submitted(sweep_file, tmp_path, capsys):
    argv = [f"--sweep={sweep_file}", "--submit=slurm"]
    assert script.main([*argv, f"--dir={tmp_path}/a b"]) == 2
    assert "cannot hold the path" in capsys.readouterr().err
    for name in "ab":
        (tmp_path / "DIR" / name).mkdir(parents=True)
        (tmp_path / "DIR" / name / "evaluation.json").write_text('[{"step": 4, "greedy": 0.5}]')
    assert script.main([*argv, f"--dir={tmp_path}/DIR"]) == 2
    assert "nothing to submit" in capsys.readouterr().err


def test_sbatch_gets_the_script_and_the_words_for_it(sweep_file, tmp_path, monkeypatch):
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "sbatch").write_text('#!/bin/sh\necho "$@" > "$0.words"\nexit 7\n')
    (bin / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    argv = [f"--sweep={sweep_file}", f"--dir={tmp_path}/DIR", "--submit=slurm"]
    assert script.main([*argv, "--sbatch=--partition=gpu --time=1:00"]) == 7
    path = tmp_path / "DIR" / "sweep.sbatch"
    assert (bin / "sbatch.words").read_text() == f"--partition=gpu --time=1:00 {path}\n"
    assert path.read_text().startswith("#!/bin/bash\n#SBATCH ")


def test_the_jobset_has_an_index_for_each_point(sweep_file, tmp_path, capsys):
    argv = [f"--sweep={sweep_file}:a b", "--dir=/sweep", "--submit=jobset", "--dry-run"]
    assert script.main([*argv, "--image=i:1", "--claim=c", "--jobs=1"]) == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    assert (jobset["kind"], jobset["metadata"]["name"]) == ("JobSet", "sweep-two")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 1)
    (container,) = job["template"]["spec"]["containers"]
    shell, flag, line = container["command"]
    assert (shell, flag, container["image"]) == ("sh", "-c", "i:1")
    line = line.replace("exec python", "printf '%s\\0'")
    out = subprocess.run(
        [shell, flag, line], env={"JOB_COMPLETION_INDEX": "1"}, capture_output=True, check=True
    )
    words = out.stdout.decode().split("\0")[:-1]
    assert words == [
        "-m",
        "jaxrl_async",
        "sweep",
        f"--sweep={sweep_file}:a b",
        "--dir=/sweep",
        "--point=1",
    ]


# ── page ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_workdir(job, rows, greedy=None):
    """Metrics of (step, secs, tokens/s, reward), and a result."""
    job.workdir.mkdir(parents=True)
    names = ("step", "time/step_secs", "learner/tokens_per_sec", "reward/mean")
    lines = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows]
    (job.workdir / "metrics.jsonl").write_text("".join(lines))
    if greedy is not None:
        results = [{"step": 0, "greedy": 0.25}, {"step": NUM_STEPS, "greedy": greedy}]
        (job.workdir / "evaluation.json").write_text(json.dumps(results))


def test_without_a_score_of_version_0_there_is_none_before(jobs, tmp_path):
    sweep, (job,) = Sweep("c.py", (Point("a", {}),)), jobs("a")
    write_workdir(job, [(1, 2.0, 10.0, 0.5)], 0.9)
    path = job.workdir / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text())[1:]))
    (result,) = page.read_results(sweep, [job])
    assert result.before is None and result.after["greedy"] == 0.9
    table = re.search(
        r"<table[^>]*>.*?</table>",
        page.write_page(sweep, [job], tmp_path / "D").read_text(),
        re.DOTALL,
    )[0]
    assert cells(table)[2] == ["a", "1 of 1", "–", "0.900"]


def test_the_interval_is_students():
    # 0.8, 0.9, 1.0: mean 0.9; s² = (0.01 + 0 + 0.01)/2, s = 0.1; t₀.₉₇₅(2) = 4.302653 (a table's), so that half the
    # width is 4.302653 · 0.1/√3 = 0.248414.
    interval = page.interval_of([0.8, 0.9, 1.0])
    assert interval.mean == pytest.approx(0.9) and interval.count == 3
    assert interval.half_width == pytest.approx(0.248414, abs=1e-6)
    assert str(interval) == "0.900 ± 0.248"
    # 0, 1: mean 0.5; s² = 0.25 + 0.25; t₀.₉₇₅(1) = 12.706205, · 0.707107/√2 = 6.353102.
    assert page.interval_of([0.0, 1.0]).half_width == pytest.approx(6.353102, abs=1e-6)


def test_seeds_of_equal_scores_have_the_interval_of_their_prompts():
    # Greedy 0 of 8 prompts, by every seed: Wilson's high end.
    rows = [{"greedy": 0.0, "greedy_low": 0.0, "greedy_high": 0.324}] * 3
    assert str(page.score_interval(rows, "greedy")) == "0.000 ± 0.324"
    assert str(page.score_interval(rows[:1], "greedy")) == "0.000 ± 0.324"
    apart = [{"greedy": v, "greedy_low": v - 0.1, "greedy_high": v + 0.1} for v in (0.8, 0.9, 1.0)]
    assert str(page.score_interval(apart, "greedy")) == "0.900 ± 0.248"


def test_a_single_seed_has_no_interval():
    assert str(page.interval_of([0.5])) == "0.500"


def cells(table):
    return [
        [html.unescape(c) for c in re.findall(r"<td[^>]*>(?:<a[^>]*>)?([^<]*)", line)]
        for line in table.split("<tr>")
    ]


def test_the_page_shows_what_the_workdirs_hold(jobs, tmp_path):
    points = (
        *seeded([Point("fast", {"learner.learning_rate": 1e-3})], 3),
        Point("slow", {"task.name": "a<b"}),
    )
    sweep = Sweep("/configs/quickstart.py:smoke", points)
    made = jobs(*(point.name for point in points))
    # Seconds 2 + 3 = 5; tokens 2 · 10 + 3 · 20 = 80.
    for job, greedy in zip(made, (0.8, 0.9, 1.0), strict=False):
        write_workdir(job, [(1, 2.0, 10.0, 0.5), (2, 3.0, 20.0, 0.625)], greedy)
    write_workdir(made[3], [(1, 2.0, 10.0, None)])
    text = page.write_page(sweep, made, tmp_path / "DIR").read_text()
    assert "4 points around quickstart.py:smoke: 3 finished, 1 waiting." in text
    scores, points = (
        cells(table) for table in re.findall(r"<table[^>]*>.*?</table>", text, re.DOTALL)
    )
    assert scores[2:] == [
        ["fast", "3 of 3", "0.250 ± 0.000", "0.900 ± 0.248"],
        ["slow", "0 of 1", "–", "–"],
    ]
    overrides = "learner.learning_rate=0.001, seed=0, task.seed=0"
    assert points[2] == ["fast-seed0", "2", "5.0", "80", "0.625", "0.800", "finished", overrides]
    assert points[5] == ["slow", "1", "2.0", "20", "not finite", "–", "waiting", "task.name=a<b"]
    assert "a&lt;b" in text and "a<b" not in text
    assert text.count("<svg") == 3
    for outside in ("<script", "<link", "<img", "src=", "@import"):
        assert outside not in text


def test_the_page_has_a_column_a_score_links_and_the_reports_colors(jobs, tmp_path):
    (job,) = jobs("a")
    write_workdir(job, [(1, 2.0, 10.0, 0.5)], 0.5)
    scores = [
        {"step": s, "greedy": 0.5, "greedy_low": 0.4, "greedy_high": 0.6, "num_prompts": 8}
        | {"num_fit": 8, "num_questions": 40, "num_failed": 2}
        | {"hard/greedy": 0.25, "hard/num_prompts": 3, "hard/num_fit": 3, "hard/num_questions": 5}
        for s in (0, NUM_STEPS)
    ]
    (job.workdir / "evaluation.json").write_text(json.dumps(scores))
    sweep = Sweep("c.py", (Point("a", {}),))
    text = page.write_page(sweep, [job], tmp_path / "DIR").read_text()
    assert "after: greedy" in text and "_low" not in text and "_high" not in text
    assert "num_prompts" not in text
    assert ">8 of 40, 2 answers failed<" in text and ">3 of 5<" in text and "hard/prompts" in text
    way = os.path.relpath(job.workdir, tmp_path / "DIR")
    assert f'<a href="{way}">a</a>' in text
    (job.workdir / "report.html").touch()
    text = page.write_page(sweep, [job], tmp_path / "DIR").read_text()
    assert f'<a href="{way}/report.html">a</a>' in text
    assert "prefers-color-scheme: dark" in text and "currentColor" in text
    for column in (
        "finished",
        "after: greedy",
        "state",
        "overrides",
    ):  # named beside a phone's cells
        assert f' data-label="{column}">' in text


def test_the_page_has_the_scores_that_only_a_later_point_has(jobs, tmp_path):
    made = jobs("a", "b")
    for job, name in zip(made, ("pass@4", "pass@8"), strict=True):
        write_workdir(job, [(1, 2.0, 10.0, 0.5)])
        row = {"step": NUM_STEPS, "greedy": 0.5, name: 0.75}
        (job.workdir / "evaluation.json").write_text(json.dumps([row]))
    sweep = Sweep("c.py", (Point("a", {}), Point("b", {"evaluate.num_samples": 8})))
    text = page.write_page(sweep, made, tmp_path / "DIR").read_text()
    table = re.search(r"<table[^>]*>.*?</table>", text, re.DOTALL)[0]
    assert cells(table)[2:] == [
        ["a", "1 of 1", "–", "0.500", "0.750", "–"],
        ["b", "1 of 1", "–", "0.500", "–", "0.750"],
    ]


async def test_the_page_fits_into_a_phone(jobs, tmp_path):
    browser.require()
    overrides = {"learner.learning_rate": 1e-3, "rollout.function": "a_module_of_mine:a_function"}
    sweep = Sweep("c.py", tuple(seeded([Point("a-rate-and-a-function", overrides)], 2)))
    made = jobs(*(point.name for point in sweep.points))
    for job in made:
        write_workdir(job, [(1, 2.0, 10.0, 0.5), (2, 3.0, 20.0, 0.625)], 0.5)
    path = page.write_page(sweep, made, tmp_path / "DIR")
    async with browser.browsing() as shown:
        for width in (1280, 500, 390):
            await shown.open(path, width=width, dark=False)
            widths = (
                "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
            )
            assert max(await shown.evaluate(widths)) <= 1, width
            assert await shown.evaluate("document.documentElement.scrollWidth") <= width


def test_a_sweep_that_never_ran_has_a_page_without_plots(jobs, tmp_path):
    sweep = Sweep("c.py", (Point("a", {}),))
    text = page.write_page(sweep, jobs("a"), tmp_path / "DIR").read_text()
    assert "1 points around c.py: 1 waiting." in text and "<svg" not in text


def test_the_curves_are_those_of_the_results(jobs, tmp_path):
    (job,) = jobs("a")
    write_workdir(job, [(1, 2.0, 10.0, 0.5), (2, 3.0, 20.0, 0.625), (2, 4.0, 20.0, 0.75)])
    (result,) = page.read_results(Sweep("c.py", (Point("a", {}),)), [job])
    # Step 2 was run twice, after a resume: the second counts.
    assert result.secs.tolist() == [2.0, 6.0]
    assert result.tokens.tolist() == [20.0, 100.0]
    assert result.rewards.tolist() == [0.5, 0.75]


def test_the_mean_curve_goes_as_far_as_the_shortest_and_is_smoothed_over_a_twentieth():
    long = (np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.5, 1.0]))
    short = (np.array([3.0, 6.0]), np.array([1.0, 0.0]))
    x, y = page._mean_curve([long, short])
    assert (x.tolist(), y.tolist()) == ([2.0, 4.0], [0.5, 0.25])
    # 40 steps: windows of two, so 0, 1, 0, 1, … becomes 0.5 everywhere, from the second x on.
    x, y = page._smoothed(np.arange(40.0), np.arange(40) % 2)
    assert x[0] == 1 and len(x) == len(y) == 39 and set(y) == {0.5}


def test_a_page_is_gathered_while_a_point_runs(jobs, tmp_path):
    (job,) = jobs("a")
    with open(job.lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = page.write_page(
            Sweep("c.py", (Point("a", {}),)), [job], tmp_path / "DIR"
        ).read_text()
    assert "1 running" in text


@pytest.mark.long
def test_two_small_points_from_the_command_to_the_page(tmp_path):
    argv = [
        *script.PROGRAM,
        "sweep",
        f"--sweep={SEEDS}:smoke,num_seeds=2",
        f"--dir={tmp_path}/DIR",
    ]
    subprocess.run([*argv, "--run", "--jobs=2"], cwd=ROOT, check=True, timeout=600)
    text = (tmp_path / "DIR" / "index.html").read_text()
    assert "2 finished" in text and text.count("<svg") == 3
    again = subprocess.run(
        [*argv, "--run"],
        cwd=ROOT,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert "train" not in again.stdout and again.stdout.count("finished") == 2
