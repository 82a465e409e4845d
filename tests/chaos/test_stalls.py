"""Ten stalls are planted in real runs; `python -m jaxrl_async status` names who is at the end of the chain."""

import contextlib
import pathlib
import re
import signal
import subprocess
import sys
import time

import attacked
import pytest
from fixtures import fake_sglang
from fixtures.fake_sglang import FakeServer

pytestmark = pytest.mark.long
ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIG = "configs/quickstart.py:smoke"
START_SECS = 300.0
SETTLE_SECS = 14.0  # Longer than a role may be silent.
NAMED_WITHIN_SECS = 60.0

PLANTED = """
import asyncio, time
from jaxrl_async.rollout.single_turn import single_turn

async def hanging_rollout(prompt, generate):
    if prompt.index >= 24:
        await asyncio.sleep(3600)
    return await single_turn(prompt, generate)

def hanging_reward(completion, answer):
    time.sleep(3600)

def constant_reward(completion, answer):
    return 0.5
"""


def ask(workdir) -> str:
    words = [sys.executable, "-m", "jaxrl_async", "status", f"--workdir={workdir}"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout


def named(workdir, culprit: str) -> bool:
    """Asks until the end of the chain matches, or too long."""
    deadline = time.monotonic() + NAMED_WITHIN_SECS
    while not re.search(rf"end of the chain: .*{culprit}", printed := ask(workdir)):
        assert time.monotonic() < deadline, f"{culprit!r} is not at the end of\n{printed}"
        time.sleep(1.0)
    return True


def test_a_stopped_role_is_named(tmp_path):
    with attacked.Run(tmp_path / "run", num_steps=100_000, config=CONFIG) as run:
        run.wait_for(3, START_SECS, "start")
        for role in attacked.ROLES:
            stopped = run.processes_of(role)
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            time.sleep(SETTLE_SECS)
            who = "the queue" if role == "queue" else rf"{role}(-\d)? \(pid \d+\) is stopped"
            assert named(run.workdir, who)
            for process in stopped:
                process.send_signal(signal.SIGCONT)
            run.wait_for(run.step + 2, 120.0, f"after {role} went on")


@contextlib.contextmanager
def planted(tmp_path, monkeypatch, *settings):
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wanted = [*attacked.SIZES, *settings]
    with attacked.Run(tmp_path / "run", num_steps=100, config=CONFIG, settings=wanted) as run:
        yield run


def test_a_rollout_function_that_hangs_is_named(tmp_path, monkeypatch):
    with planted(tmp_path, monkeypatch, "--config.rollout.function=planted:hanging_rollout") as run:
        run.wait_for(1, START_SECS, "start")
        assert named(run.workdir, r"its rollout function: group \d+\.0 waits")


@pytest.mark.parametrize(
    ("reward", "settings", "culprit"),
    [
        ("hanging_reward", ["--config.rollout.reward_timeout_secs=600.0"], "its reward, in the pool: group"),
        ("constant_reward", ["--config.rollout.drop_equal_rewards=True"], r"come back instead of .*equal_rewards"),
    ],
)  # fmt: skip
def test_a_reward_that_stalls_the_run_is_named(reward, settings, culprit, tmp_path, monkeypatch):
    task = f"""
from jaxrl_async.tasks import make_task

def task(**args):
    made = make_task("arithmetic", **args)
    type(made).reward = "planted:{reward}"
    return made
"""
    (tmp_path / "planted_task.py").write_text(task)
    with planted(tmp_path, monkeypatch, "--config.task.name=planted_task:task", *settings) as run:
        assert named_after_start(run, culprit)


def named_after_start(run, culprit):
    deadline = time.monotonic() + START_SECS
    while "lease of step 1" not in ask(run.workdir) or "version 0: pushed" not in _log(run):
        assert run.process.poll() is None, run.printed()
        assert time.monotonic() < deadline, run.printed()
        time.sleep(1.0)
    time.sleep(SETTLE_SECS)
    return named(run.workdir, culprit)


def _log(run) -> str:
    file = run.workdir / "logs" / "learner.log"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    ("route", "culprit"),
    [
        ("/generate", r"server http://127.0.0.1:\d+: group \d+\.0 waits for it"),
        ("/update_weights_from_disk", r"publisher: version 0 on the servers; http://127.0.0.1"),
        ("/model_info", r"publisher: version 0 on the servers; http://127.0.0.1:\d+ is (STALE|DEAD)"),
    ],
)  # fmt: skip
def test_a_server_that_hangs_is_named(route, culprit, tmp_path, monkeypatch):
    server = FakeServer().start()
    server.vocab_size = 14  # The model's, as the learner asks; the server samples of fewer.
    monkeypatch.setattr(fake_sglang, "VOCAB_SIZE", 10)
    if route != "/generate":  # The learner's first look at a server asks for a token.
        server.hang.add(route)
    try:
        with planted(
            tmp_path, monkeypatch, f"--config.server.addresses=('{server.address}',)"
        ) as run:
            if route == "/generate":
                run.wait_for(1, START_SECS, "start")
                server.hang.add(route)
                time.sleep(SETTLE_SECS)
                assert named(run.workdir, culprit)
            else:
                run_log = time.monotonic() + START_SECS
                while "wait_push" not in ask(run.workdir):
                    assert time.monotonic() < run_log and run.process.poll() is None, run.printed()
                    time.sleep(1.0)
                time.sleep(SETTLE_SECS)
                assert named(run.workdir, culprit)
    finally:
        server.stop()


def test_a_run_that_stalls_for_too_long_ends_with_the_chain(tmp_path):
    secs = {
        "rollout.request_timeout_secs": 30,
        "weights.push_timeout_secs": 30,
        "queue.permit_timeout_secs": 35,
        "learner.lease_timeout_secs": 40,
        "queue.outage_secs": 44,
        "supervisor.stall_secs": 45,
    }
    settings = [*attacked.SIZES, *(f"--config.{key}={value}" for key, value in secs.items())]
    with attacked.Run(tmp_path / "run", num_steps=100_000, config=CONFIG, settings=settings) as run:
        run.wait_for(1, START_SECS, "start")
        for process in run.processes_of("learner"):
            process.send_signal(signal.SIGSTOP)
        assert run.process.wait(START_SECS) == 1
        printed = run.printed()
        assert re.search(r"no step for 45 s \(supervisor.stall_secs = 45\):", printed)
        assert re.search(r"end of the chain: learner(-\d)? \(pid \d+\) is stopped", printed)
        assert run.step >= 1  # What was done is there.
