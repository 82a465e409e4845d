"""A preempted run finishes its step, saves it and exits; resumed, it equals an uninterrupted one."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from fixtures.queues import SOUND_AUDIT
from fixtures.recorded_run import Recorder
from fixtures.recorded_run import train as train_recorded
from fixtures.runs import (
    QUICKSTART,
    RUN_TIMEOUT_SECS,
    assert_same,
    params_of,
    roles_of,
    wait_for_step,
)
from fixtures.small_learner import flat

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.learner.processes import Agreement
from jaxrl_async.metrics import read_metrics
from jaxrl_async.queue.calls import Glance
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.runtime import keys, status
from jaxrl_async.runtime.preemption import PREEMPTED, plan
from jaxrl_async.versions.store import WeightStore

WAIT_SECS = 60.0

LISTENS = """
import os, signal, threading, time
from jaxrl_async.runtime import preemption
from jaxrl_async.runtime.preemption import StopRequest

preemption.CLEANUP_SECS = 0.1
if {hangs}:
    threading.Thread(target=time.sleep, args=(600,)).start()
stop = StopRequest(grace_secs={grace_secs})
stop.listen(signal.SIGTERM, signal.SIGHUP)
print("listens", flush=True)
while not (stop.received() and {stops}):
    time.sleep(0.01)
os.write(1, b"stopped\\n")  # In one piece: the thread that received the signal writes too.
"""


@pytest.fixture
def listens():
    """Starts a process that listens to SIGTERM, and stops on it or runs on; its deadline is WAIT_SECS."""
    started = []

    def start(*, stops=True, hangs=False, grace_secs=600.0, sighup=signal.SIG_DFL):
        code = LISTENS.format(stops=stops, hangs=hangs, grace_secs=grace_secs)
        before = signal.signal(signal.SIGHUP, sighup)  # The tests may run under nohup themselves.
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        finally:
            signal.signal(signal.SIGHUP, before)
        deadline = threading.Timer(WAIT_SECS, process.kill)
        deadline.start()
        started.append((process, deadline))
        assert process.stdout.readline() == "listens\n"
        return process

    yield start
    for process, deadline in started:
        deadline.cancel()
        process.kill()
        process.communicate()


def test_a_signal_is_a_request_that_ends_nothing_by_itself(listens):
    process = listens()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=WAIT_SECS)
    assert process.returncode == 0 and "stopped\n" in output


def test_a_second_signal_ends_the_process_at_once_with_the_code_of_preemption(listens):
    process = listens(stops=False)
    process.send_signal(signal.SIGTERM)
    line = process.stdout.readline()
    assert line == "SIGTERM: stopping after this step, or in 600 s\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=WAIT_SECS)
    assert process.returncode == PREEMPTED == 75 and "stopped" not in output


def test_a_terminal_that_closes_is_one_request_however_many_signals_it_sends(listens):
    process = listens(stops=False)
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "SIGHUP: stopping after this step, or in 600 s\n"
    for _ in range(2):  # One by one: those that are pending at once are one.
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_SECS)
    assert process.returncode == PREEMPTED


def test_the_grace_period_holds_after_sighup_too(listens):
    process = listens(stops=False, grace_secs=0.1)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=WAIT_SECS)
    assert process.returncode == PREEMPTED


def test_a_process_under_nohup_goes_on(listens):
    process = listens(sighup=signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)


WRITES = """
import signal, sys, time
from jaxrl_async.runtime.preemption import StopRequest, outputs_may_close

with outputs_may_close():
    stop = StopRequest(grace_secs=60.0)
    stop.listen(signal.SIGTERM, signal.SIGHUP)
    print("writes", flush=True)
    while not stop.received():
        time.sleep(0.01)
    print("a line that nobody reads", flush=True)
    print("nor this one", file=sys.stderr, flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_an_output_that_is_closed_is_a_request_and_no_error(opened):
    reader, writer = opened()
    command = [sys.executable, "-c", WRITES]
    with subprocess.Popen(command, stdout=writer, stderr=writer) as process:
        os.close(writer)
        assert os.read(reader, 6) == b"writes"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        os.close(reader)
        assert process.wait(WAIT_SECS) == PREEMPTED


def test_the_grace_period_ends_the_process_with_the_code_of_preemption(listens):
    process = listens(stops=False, grace_secs=0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=WAIT_SECS)
    assert process.returncode == PREEMPTED
    assert "still running 0.1 s after SIGTERM" in output


def test_a_second_signal_waits_for_no_thread(listens):
    process = listens(stops=False, hangs=True)
    process.send_signal(signal.SIGTERM)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_SECS)
    assert process.returncode == PREEMPTED


def test_the_plan_names_size_rate_and_grace_period_and_says_whether_it_fits():
    text, fits = plan(91 * 10**9, 2e9, 60.0)
    assert fits and text.endswith(
        "91 GB at 2 GB/s (measured): 45.5 s of checkpoint.grace_secs = 60"
    )
    text, fits = plan(91 * 10**9, None, 60.0)
    assert not fits and "91 GB at 1 GB/s (assumed until one is written): 91 s" in text


# The loop.


class Saving(Recorder):
    """Keeps what is saved."""

    saved = None

    def save(self, step, state, resume_point):
        super().save(step, state, resume_point)
        self.saved = jax.tree.map(jnp.copy, state)


def test_a_synchronous_run_stops_before_a_step_and_saves_the_one_before():
    recorder = Recorder()
    train_recorded(recorder, num_steps=5, should_stop=lambda step, chunk_arrived: step == 3)
    assert recorder.events == [
        "wait", "lease 1.0", "commit 1", "publish 1",
        "wait", "lease 2.0", "commit 2", "publish 2",
        "wait", "lease 3.0", "save 2",
    ]  # fmt: skip
    assert len(recorder.rows) == 2


def test_an_asynchronous_run_ends_the_step_under_way_without_a_push():
    recorder = Recorder(staleness=1)
    train_recorded(
        recorder, wait=False, num_steps=5, should_stop=lambda step, chunk_arrived: step == 3
    )
    assert recorder.events == [
        "lease 1.0", "lease 2.0", "commit 1", "publish 1", "lease 3.0", "commit 2", "save 2",
    ]  # fmt: skip
    assert len(recorder.rows) == 2


def test_a_run_does_not_wait_for_a_step_that_it_will_not_train():
    recorder, calls = Recorder(staleness=1, waits_for=[2, 3]), []

    def should_stop(step, chunk_arrived):
        calls.append((step, chunk_arrived))
        return (step, chunk_arrived) == (3, False)

    train_recorded(recorder, wait=False, num_steps=5, should_stop=should_stop)
    assert calls == [(1, True), (2, False), (2, True), (3, False)]
    assert recorder.events[-2:] == ["publish 2", "save 2"]


def test_a_run_does_not_wait_for_a_push_to_servers_that_hang():
    class Hanging(Recorder):
        def wait(self, should_stop):
            super().wait(should_stop)
            if "publish 2" in self.events:
                while not should_stop():
                    self.events.append("waits on")

    answers = iter([False, True])
    recorder = Hanging(waits_for=[3])

    def should_stop(step, chunk_arrived):
        return step == 3 and (chunk_arrived or next(answers, True))

    train_recorded(recorder, num_steps=5, should_stop=should_stop)
    assert recorder.events[-4:] == ["publish 2", "wait", "waits on", "save 2"]


def test_a_step_that_was_saved_is_not_saved_again():
    recorder = Recorder()
    train_recorded(
        recorder,
        num_steps=5,
        checkpoint_every_steps=2,
        should_stop=lambda step, chunk_arrived: step == 3,
    )
    assert recorder.events.count("save 2") == 1


def test_a_run_that_stops_before_its_first_step_saves_nothing():
    recorder = Recorder()
    train_recorded(recorder, should_stop=lambda step, chunk_arrived: True)
    assert recorder.events == ["wait", "lease 1.0"]


def test_a_run_that_stopped_and_resumed_equals_an_uninterrupted_one_bit_for_bit():
    whole, first, second = Saving(), Saving(), Saving()
    train_recorded(whole, num_steps=5)
    train_recorded(first, num_steps=5, should_stop=lambda step, chunk_arrived: step == 3)
    assert int(first.events[-1].split()[1]) == 2
    stopped = flat(first.saved.params)  # The state is donated to the resumed run.
    train_recorded(second, num_steps=5, state=first.saved, first_step=3)
    np.testing.assert_array_equal(flat(second.saved.params), flat(whole.saved.params))
    assert np.any(flat(second.saved.params) != stopped)


# Several processes.


class Coordinator:
    """The key-value store of JAX's coordinator."""

    def __init__(self):
        self.values, self._changed = {}, threading.Condition()
        self.waited_for = threading.Event()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get(self, key, timeout_ms):
        self.waited_for.set()
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key):
        self.values.pop(key, None)


@pytest.fixture
def agreements(monkeypatch):
    """(agreements of two processes, the processes with a stop request, the store)"""
    stopping, coordinator = set(), Coordinator()
    monkeypatch.setattr(
        "jaxrl_async.learner.processes.multihost.get_jax_distributed_client", lambda: coordinator
    )
    made = [
        Agreement(lambda i=i: i in stopping, process=i, num_processes=2, timeout_secs=WAIT_SECS)
        for i in range(2)
    ]
    return made, stopping, coordinator


@pytest.mark.parametrize("who", [0, 1])
def test_all_processes_stop_before_the_same_step_whichever_has_the_request(agreements, who):
    (first, second), stopping, _ = agreements
    assert not first.should_stop(1, True) and not second.should_stop(1, True)
    assert not first.should_stop(2, True)
    stopping.add(who)
    # Process 0 has decided step 2 already; step 3 is the next decision.
    assert not second.should_stop(2, True)
    assert first.should_stop(3, True) and second.should_stop(3, True)


def test_a_process_waits_for_the_decision_of_process_0(agreements):
    (first, second), _, coordinator = agreements
    decided = []
    waiting = threading.Thread(target=lambda: decided.append(second.should_stop(1, True)))
    waiting.start()
    assert coordinator.waited_for.wait(WAIT_SECS) and decided == []
    assert not first.should_stop(1, True)
    waiting.join(WAIT_SECS)
    assert decided == [False]


def test_during_the_wait_for_a_chunk_no_process_stops_before_process_0_decides(agreements):
    (first, second), stopping, _ = agreements
    stopping.add(1)
    assert not second.should_stop(1, False)
    assert first.should_stop(1, False)
    assert second.should_stop(1, False) and second.should_stop(1, True)


def test_a_decision_is_deleted_when_all_processes_have_read_it(agreements):
    (first, second), _, coordinator = agreements
    for step in range(1, 9):
        assert not first.should_stop(step, True) and not second.should_stop(step, True)
    assert len(coordinator.values) == 2


# The whole path.

SYNC = f"--config={QUICKSTART}:smoke,mode=sync"


@pytest.mark.long
@pytest.mark.parametrize(
    "learner", [(), ("--config.learner.num_processes=2", "--config.learner.data=2")]
)
def test_a_command_ended_by_sigterm_resumes_to_the_same_weights(learner, command, run, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ["train", "--role=auto", SYNC, "--config.learner.num_steps=30", *learner]
    code, output = run(*words, workdir=whole)
    assert code == 0, output
    process = command(*words, workdir=parts)
    wait_for_step(parts, 3)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_SECS)
    assert process.returncode == PREEMPTED, output
    resume_command = f"python -m jaxrl_async train --resume --workdir={parts}"
    assert f"stopped early; resume with: {resume_command}\n" in output
    assert psutil.wait_procs(children, timeout=5)[1] == []
    steps = sorted(int(path.name) for path in (parts / "checkpoints").iterdir())
    rows = read_metrics(parts)
    assert steps == [0, rows[-1]["step"]] and 3 <= steps[1] < 30
    code, output = run(*words, workdir=parts)
    assert code == 0, output
    rows, expected = read_metrics(parts), read_metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, 31))
    for name in ("loss/policy", "policy/grad_norm", "reward/mean"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name
    digests = {WeightStore(d / "weights", keep=2).manifest(29)["digest"] for d in (whole, parts)}
    assert len(digests) == 1
    if not learner:  # orbax reads what one process wrote.
        assert_same(params_of(whole, 30), params_of(parts, 30))
    nothing = {"lost": [], "doubled": [], "gap": [], "stray": []}
    assert JournalReader(parts / "journal.sqlite").audit() == nothing


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_a_run_ended_by_sigterm_at_5_random_moments_has_the_same_weights(
    seed, command, run, tmp_path
):
    """Of five processes one in three is ended as it starts, the others at or beside a step."""
    whole, parts, rng = tmp_path / "whole", tmp_path / "parts", random.Random(seed)
    words = ["train", "--role=auto", SYNC, "--config.learner.num_steps=30"]
    code, output = run(*words, workdir=whole)
    assert code == 0, output
    num_signals = 0
    for number in range(5):
        process = command(*words, workdir=parts)
        if rng.random() < 1 / 3:
            time.sleep(rng.uniform(0, 10))
        else:
            wait_for_step(parts, rng.randint(4 * number, 4 * number + 3))
            time.sleep(rng.uniform(0, 0.2))
        num_signals += process.poll() is None
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=RUN_TIMEOUT_SECS)
        # By the signal: it came before anything was started.
        assert process.returncode in (PREEMPTED, 0, -signal.SIGTERM), output
    code, output = run(*words, workdir=parts)
    assert code == 0, output
    assert num_signals >= 4
    rows, expected = read_metrics(parts), read_metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, 31))
    for name in ("loss/policy", "policy/grad_norm", "reward/mean"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name
    assert_same(params_of(whole, 30), params_of(parts, 30))
    assert JournalReader(parts / "journal.sqlite").audit() == SOUND_AUDIT


@pytest.mark.long
def test_a_learner_that_waits_for_groups_that_never_come_stops_too(command, tmp_path):
    process = command("train", SYNC, "--config.learner.num_steps=100000")
    wait_for_step(tmp_path / "run", 2)
    worker = roles_of(process.pid)["rollout"]
    worker.suspend()
    log = tmp_path / "run" / "logs" / "learner.log"
    deadline = time.monotonic() + WAIT_SECS
    while learner_is_at(tmp_path / "run") != "learner (wait_data)":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_SECS)
    assert process.returncode == PREEMPTED, output
    assert re.search(r"stopped early after step \d+", log.read_text())


def learner_is_at(workdir):
    """The learner's stage in its last report; "" where it began less than three seconds ago."""
    settings = keys.found(settings_of(load_config(str(workdir / "config.json"))), workdir)
    access = queue_access_of(settings)
    with contextlib.closing(Glance(status.address_of(workdir), **access)) as glance:
        found = glance()
    waits = [w for role in found.roles if role.role == "learner-0" for w in role.waits]
    return waits[0].what if waits and waits[0].secs > 3 else ""
