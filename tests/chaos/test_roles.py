"""Real runs whose roles are killed and frozen: they finish, nothing is lost or doubled, and they can be replayed."""

import contextlib
import functools
import json
import pathlib
import random
import subprocess
import sys

import attacked as attacks
import jax
import psutil
import pytest
from fixtures.queues import SOUND_AUDIT

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.metrics import read_metrics
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.tools import replay as replays

pytestmark = pytest.mark.optimised
ROOT = pathlib.Path(__file__).parent.parent.parent
START_SECS = 300.0
LEARNING = [
    *attacks.SIZES,
    "--config.warm_start.num_steps=400",
    "--config.checkpoint.every_steps=5",
]
ROLES = attacks.ROLES
STRIKES = (
    *(attacks.Strike("kill", (role,)) for role in ROLES),
    *(attacks.Strike("kill", (a, b)) for i, a in enumerate(ROLES) for b in ROLES[i + 1 :]),
    *(attacks.Strike("freeze", (role,), secs) for role in ROLES for secs in (5.0, 40.0, 120.0)),
)
SOUND = SOUND_AUDIT | {"stale": [], "foreign": []}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """(workdir, audit) of an asynchronous run of 80 steps, 2 servers and 2 workers, each of whose roles was killed."""
    workdir, rng = tmp_path_factory.mktemp("chaos") / "run", random.Random(0)
    with attacks.Run(workdir, num_steps=80, settings=LEARNING) as run:
        run.wait_for(2, START_SECS, "start")
        for role in ROLES:
            assert run.strike(attacks.Strike("kill", (role,)), rng)
            run.wait_for(run.step + 2, START_SECS, f"after {role} was killed")
        return workdir, run.finish(START_SECS)


def test_a_run_whose_roles_are_killed_finishes_and_nothing_is_lost_or_doubled(attacked):
    workdir, found = attacked
    assert found == SOUND
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == list(range(1, 81))
    assert sum(row["policy/grad_norm"] > 0 for row in rows) > 20  # There is something to replay.
    reader = JournalReader(workdir / "journal.sqlite")
    assert reader.steps() == list(range(1, 81)) and len(reader) == 80 * 8
    logs = "".join(file.read_text() for file in (workdir / "logs").iterdir())
    for role in ("queue", "learner", "rollout-", "server-"):
        assert f"role '{role}" in logs


def replay(workdir, *argv):
    words = [sys.executable, "-m", "jaxrl_async", "replay", f"--workdir={workdir}", *argv]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_its_replay_has_the_same_parameters_bit_for_bit(attacked):
    workdir, _ = attacked
    own = json.loads((workdir / "config.json").read_text())["loss"]["anchor"]
    code, printed = replay(workdir, f"--config.loss.anchor={own}")  # which changes nothing
    assert code == 0, printed
    assert "step 80: equal, bit for bit" in printed
    ours, theirs = read_metrics(workdir / "replay"), read_metrics(workdir)
    for name in ("reward/mean", "loss/policy", "policy/grad_norm", "staleness/mean"):
        assert [row[name] for row in ours] == [row[name] for row in theirs], name


@pytest.mark.long
def test_another_objective_is_trained_on_the_same_data(attacked, tmp_path):
    workdir, _ = attacked
    loss = "--config.loss.anchor=behavior"
    code, printed = replay(workdir, "--until=5", f"--out={tmp_path}/b", loss)
    assert code == 0 and f"not compared: {loss}" in printed
    assert "engine and learner differ" not in printed
    ours, theirs = read_metrics(tmp_path / "b"), read_metrics(workdir)[:5]
    assert "mismatch/mean_abs" in theirs[0] and not any("mismatch/" in name for name in ours[0])
    assert [r["reward/mean"] for r in ours] == [r["reward/mean"] for r in theirs]
    assert [r["policy/grad_norm"] for r in ours[1:]] != [r["policy/grad_norm"] for r in theirs[1:]]
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["loss"]["anchor"] == "behavior"
    words = ["-m", "jaxrl_async", "evaluate", f"--workdir={tmp_path}/b"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    (row,) = json.loads((tmp_path / "b" / "evaluation.json").read_text())
    assert row["step"] == 5


def test_a_replay_that_differs_in_the_last_bits_is_found_out(attacked, tmp_path, monkeypatch):
    workdir, _ = attacked
    one = functools.partial(replays.mesh_of, devices=jax.devices()[:1])
    monkeypatch.setattr(replays, "mesh_of", one)
    config = load_config(str(workdir / "config.json"))
    config.learner.learning_rate *= 1.0001
    found = replays.replay(settings_of(config), workdir, out=tmp_path / "b", first=75)[-1]
    assert found.step == 80 and not found.equal and 0 < found.max_difference < 1e-5


def test_what_cannot_be_replayed_is_said(attacked, tmp_path):
    workdir, _ = attacked
    code, printed = replay(workdir, "--until=90", f"--out={tmp_path}/c")
    assert code == 1
    assert "steps 1 to 90 are asked for, the journal " in printed
    assert " has 1 to 80, and lacks [81, 82" in printed
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "something").touch()
    code, printed = replay(workdir, f"--out={tmp_path}/d")
    assert code == 2 and "is not empty" in printed


@pytest.mark.long
@pytest.mark.parametrize("strike", STRIKES, ids=str)
def test_every_fault_is_survived(strike, tmp_path):
    num_steps = 30 + int(strike.secs / 2)
    settings = [*attacks.SIZES, attacks.PACED]
    with attacks.Run(tmp_path / "run", num_steps=num_steps, settings=settings) as run:
        run.wait_for(3, START_SECS, "start")
        assert run.strike(strike, random.Random(1))
        assert run.step < num_steps
        assert run.finish(START_SECS) == SOUND
    assert len(JournalReader(tmp_path / "run" / "journal.sqlite")) == num_steps * 8


@pytest.mark.long
def test_a_role_that_gets_no_memory_is_started_again_or_ends_its_run_by_name(tmp_path):
    """Every allocation fails from a moment on, as under a limit of a job; the run goes on, or resumes."""
    num_steps, settings = 40, [*attacks.SIZES, attacks.PACED]

    def start(*words):
        return attacks.Run(tmp_path / "run", num_steps=num_steps, settings=[*settings, *words])

    with contextlib.ExitStack() as stack:
        run = stack.enter_context(start())
        for role in ROLES:
            run.wait_for(run.step + 2, START_SECS, f"before {role}")
            for process in run.processes_of(role)[:1]:
                process.rlimit(psutil.RLIMIT_AS, (1 << 20, psutil.RLIM_INFINITY))
            try:
                run.wait_for(run.step + 4, START_SECS, f"{role} without memory")
            except attacks.ChaosError as error:  # It ended by itself, and not as killed.
                assert "the run ended with exit code 1:" in str(error), error
                assert f"role '{role}" in str(error), error
                run = stack.enter_context(start("--resume"))
        assert run.finish(START_SECS) == SOUND
    assert len(JournalReader(tmp_path / "run" / "journal.sqlite")) == num_steps * 8


@pytest.mark.long
def test_a_sync_run_whose_learner_was_killed_equals_the_undisturbed_one_bit_for_bit(tmp_path):
    config, rng = f"{attacks.CONFIG},mode=sync", random.Random(2)
    settings = ["--config.warm_start.num_steps=400"]
    for name in ("whole", "killed"):
        with attacks.Run(tmp_path / name, num_steps=25, config=config, settings=settings) as run:
            if name == "killed":
                for role in ("learner", "queue", "rollout"):
                    run.wait_for(run.step + 2, START_SECS, "start")
                    assert run.strike(attacks.Strike("kill", (role,)), rng)
            assert run.finish(START_SECS, max_staleness=0) == SOUND
    ours, theirs = (read_metrics(tmp_path / name) for name in ("whole", "killed"))
    for name in ("reward/mean", "loss/policy", "policy/grad_norm"):
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
