"""The supervisor: the division of devices, restarts and ends, on processes that are not roles."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.settings import Supervisor
from jaxrl_async.runtime import disk, status, supervisor
from jaxrl_async.runtime.preemption import PREEMPTED
from jaxrl_async.runtime.workdir import GoneError

WAIT_SECS = 20.0


def test_a_cpu_is_not_divided_and_gives_the_learner_huge_pages(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert supervisor.divide_devices(("cpu", 0), num_servers=1) == {"learner": pages}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    assert supervisor.divide_devices(("cpu", 0), num_servers=1) == {}


def test_each_server_gets_a_gpu_and_the_learner_the_rest(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert supervisor.divide_devices(("gpu", 4), num_servers=1) == {
        "server-0": {"CUDA_VISIBLE_DEVICES": "3"},
        "learner": {"CUDA_VISIBLE_DEVICES": "0,1,2"},
    }


def test_gpus_are_named_as_the_environment_names_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert supervisor.divide_devices(("gpu", 2), num_servers=1) == {
        "server-0": {"CUDA_VISIBLE_DEVICES": "7"},
        "learner": {"CUDA_VISIBLE_DEVICES": "5"},
    }


def test_roles_share_the_memory_of_a_single_gpu():
    division = supervisor.divide_devices(("gpu", 1), num_servers=2)
    assert set(division) == {"learner", "server-0", "server-1"}
    fractions = [float(e["XLA_PYTHON_CLIENT_MEM_FRACTION"]) for e in division.values()]
    assert sum(fractions) <= 0.9 + 1e-9


def test_tpu_chips_are_divided_by_number():
    assert supervisor.divide_devices(("tpu", 2), num_servers=1) == {
        "server-0": {"TPU_VISIBLE_CHIPS": "1"},
        "learner": {"TPU_VISIBLE_CHIPS": "0"},
    }


@pytest.mark.parametrize(("devices", "num_servers"), [(("tpu", 1), 1), (("gpu", 2), 2)])
def test_too_few_chips_are_refused_with_both_numbers(devices, num_servers):
    with pytest.raises(
        ValueError, match=rf"need {num_servers + 1} .*this machine has {devices[1]}"
    ):
        supervisor.divide_devices(devices, num_servers=num_servers)


def test_servers_elsewhere_leave_all_devices_to_the_learner():
    assert supervisor.divide_devices(("gpu", 8), num_servers=0) == {}


def test_learner_processes_share_the_learners_gpus_evenly(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    division = supervisor.divide_devices(("gpu", 5), num_servers=1, num_learners=2)
    assert division == {
        "server-0": {"CUDA_VISIBLE_DEVICES": "4"},
        "learner-0": {"CUDA_VISIBLE_DEVICES": "0,1"},
        "learner-1": {"CUDA_VISIBLE_DEVICES": "2,3"},
    }
    division = supervisor.divide_devices(("gpu", 2), num_servers=0, num_learners=2)
    assert division == {f"learner-{i}": {"CUDA_VISIBLE_DEVICES": str(i)} for i in range(2)}


def test_a_cpu_shows_the_learner_as_many_devices_as_its_mesh_has(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    def divide(**values):
        return supervisor.divide_devices(("cpu", 0), num_servers=1, **values)

    two, four = (supervisor.HUGE_PAGES | {"JAX_NUM_CPU_DEVICES": str(count)} for count in (2, 4))
    assert divide(learner_devices=4) == {"learner": four}
    assert divide(learner_devices=4, num_learners=2) == {"learner-0": two, "learner-1": two}


@pytest.mark.parametrize(
    ("devices", "num_servers"), [(("gpu", 4), 1), (("gpu", 1), 1), (("tpu", 4), 0)]
)
def test_chips_that_learner_processes_cannot_share_are_refused(devices, num_servers):
    with pytest.raises(ValueError, match=rf"2 learner processes cannot share the {devices[1]} "):
        supervisor.divide_devices(devices, num_servers=num_servers, num_learners=2)


def test_a_role_leads_a_group_in_the_session_of_the_run(tmp_path, monkeypatch):
    program = tmp_path / "role"
    program.write_text(f"#!/bin/sh\nexec sleep {WAIT_SECS:g}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    role = supervisor._start("queue", tmp_path, [], {})
    try:
        assert os.getsid(role.process.pid) == os.getsid(0)
        assert os.getpgid(role.process.pid) == role.process.pid != os.getpgid(0)
    finally:
        role.process.kill()
        role.process.wait(WAIT_SECS)


def test_the_end_of_a_log_is_its_last_lines(tmp_path):
    log = tmp_path / "role.log"
    assert supervisor.last_lines(log, 2) == ""
    log.write_text("".join(f"line {i}\n" for i in range(5000)))
    assert supervisor.last_lines(log, 2) == "line 4998\nline 4999"


@pytest.fixture
def start(tmp_path):
    """Starts Python code as a role."""
    roles = []

    def start(code, name="server-0"):
        log = tmp_path / f"{name}.log"
        with open(log, "a") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdout=out, stderr=out, start_new_session=True
            )
        roles.append(supervisor.Role(name, process, log))
        return roles[-1]

    yield start
    supervisor.stop(roles)


def wait_for(condition):
    deadline = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


WITH_A_CHILD = """
import signal, subprocess, sys, time
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
{then}
"""


def child_of(role):
    wait_for(lambda: supervisor.last_lines(role.log, 1))
    return psutil.Process(int(supervisor.last_lines(role.log, 1)))


@pytest.mark.parametrize("deaf", [False, True])
def test_the_children_of_a_role_end_with_it(start, deaf, monkeypatch):
    monkeypatch.setattr(supervisor, "STOP_SECS", 0.5)
    role = start(WITH_A_CHILD.format(deaf=deaf, then="time.sleep(600)"))
    child = child_of(role)
    supervisor.stop([role])
    assert role.process.returncode is not None
    assert psutil.wait_procs([child], timeout=5)[1] == []


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def restarts(tmp_path, clock):
    """(restarts, the roles that they started): at most 2 in 100 s."""
    started = []
    made = supervisor._Restarts(
        Supervisor(max_restarts=2, restart_window_secs=100.0),
        tmp_path,
        lambda name, resume: started.append((name, resume)) or f"again {name}",
        clock=lambda: clock[0],
    )
    return made, started


def test_a_server_that_died_is_restarted_and_its_children_are_killed(start, restarts, capsys):
    restarts, started = restarts
    role = start(WITH_A_CHILD.format(deaf=False, then="os = __import__('os'); os._exit(3)"))
    wait_for(lambda: role.process.poll() is not None)
    child = child_of(role)
    assert restarts.of(role) == "again server-0"
    assert started == [("server-0", False)]
    assert psutil.wait_procs([child], timeout=5)[1] == []
    line = "role 'server-0' ended with exit code 3; restart 1 of at most 2 within 100 s"
    assert line in capsys.readouterr().out
    assert line in supervisor.last_lines(role.log, 1)


@pytest.mark.parametrize("name", ["queue", "rollout-0", "server-0"])
def test_a_role_that_was_killed_is_started_again(start, restarts, name):
    role = start("import os; os.kill(os.getpid(), 9)", name)
    wait_for(lambda: role.process.poll() is not None)
    assert restarts[0].of(role) == f"again {name}"


def test_restarts_are_bounded_within_a_window(start, restarts, clock):
    restarts, _ = restarts
    role = start("import os; print('out of memory'); os.kill(os.getpid(), 9)")
    wait_for(lambda: role.process.poll() is not None)
    for _ in range(5):  # One in 60 s is well.
        restarts.of(role)
        clock[0] += 60.0
    restarts.of(role)
    with pytest.raises(
        supervisor.RoleDiedError,
        match=r"after 2 restarts within 100 s \(supervisor.max_restarts = 2\): role 'server-0' ended by",
    ):
        restarts.of(role)


def test_the_roles_that_a_lost_host_ends_count_as_one_restart(start, restarts, clock):
    restarts, started = restarts
    role = start("import os; os.kill(os.getpid(), 9)")
    wait_for(lambda: role.process.poll() is not None)
    for host in "ab":  # 2 are allowed, and each has 8 servers.
        for _ in range(8):
            restarts.of(dataclasses.replace(role, host=host))
    assert len(started) == 16
    clock[0] += supervisor.EARLY_SECS  # The same host is lost again.
    with pytest.raises(supervisor.RoleDiedError, match="after 2 restarts within 100 s"):
        restarts.of(dataclasses.replace(role, host="b"))


@pytest.mark.parametrize("name", ["rollout-0", "server-0", "rewards-0"])
def test_a_worker_or_a_server_that_failed_is_started_again_unless_it_fails_at_once(
    start, restarts, clock, name
):
    restarts, _ = restarts
    role = start("raise SystemExit('no such task')", name)
    wait_for(lambda: role.process.poll() is not None)
    clock[0] += 1000.0
    assert restarts.of(role) == f"again {name}"
    clock[0] += 1.0
    assert restarts.of(role) == f"again {name}"
    clock[0] += 1.0
    with pytest.raises(
        supervisor.RoleDiedError, match=f"(?s)^role '{name}' ended with exit code 1.*no such task"
    ):
        restarts.of(role)


@pytest.mark.parametrize(("name", "code"), [("queue", 1), ("rollout-0", 2), ("server-0", 2)])
def test_a_queue_that_failed_or_a_role_with_bad_settings_ends_the_run(start, restarts, name, code):
    role = start(f"raise SystemExit({code})", name)
    wait_for(lambda: role.process.poll() is not None)
    with pytest.raises(
        supervisor.RoleDiedError, match=f"^role '{name}' ended with exit code {code}"
    ):
        restarts[0].of(role)


@pytest.mark.parametrize(
    ("started", "end"), [(False, "os.kill(os.getpid(), 9)"), (True, f"os._exit({PREEMPTED})")]
)
def test_all_processes_of_a_learner_are_started_again_where_one_was_killed_or_preempted(
    start, restarts, tmp_path, started, end
):
    if started:
        (tmp_path / "checkpoints" / "0").mkdir(parents=True)
    killed = start(f"import os; {end}", "learner-0")
    left = start("import time; time.sleep(600)", "learner-1")
    wait_for(lambda: killed.process.poll() is not None)
    assert restarts[0].of_learners([killed, left]) == ["again learner-0", "again learner-1"]
    assert restarts[1] == [("learner-0", started), ("learner-1", started)]
    assert left.process.poll() is not None


def test_a_learner_that_failed_ends_the_run(start, restarts):
    role = start("raise SystemExit('not finite')", "learner")
    wait_for(lambda: role.process.poll() is not None)
    with pytest.raises(supervisor.RoleDiedError, match="(?s)'learner' ended with exit code 1.*not"):
        restarts[0].of_learners([role])


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (True, "done"),
        (False, "left"),
        (KeyboardInterrupt(), "left"),
        (SystemExit(75), "left"),
        (ValueError(), "failed"),
        (GoneError(), None),
    ],
)
def test_the_end_of_a_run_is_written_when_no_role_is_left(outcome, end, tmp_path, monkeypatch):
    settings = settings_of(load_config("configs/quickstart.py:smoke"))

    def watch(*_):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def stop(roles):
        assert len(roles) == 4 and status.end_of(tmp_path) is None

    monkeypatch.setattr(supervisor, "_start", lambda *_, **__: None)
    monkeypatch.setattr(supervisor, "_watch", watch)
    monkeypatch.setattr(supervisor, "stop", stop)
    with contextlib.suppress(KeyboardInterrupt, SystemExit, ValueError, GoneError):
        assert supervisor.run(settings, workdir=tmp_path, resume=False) == outcome
    assert status.end_of(tmp_path) == end


def test_a_run_whose_workdir_is_renamed_ends_at_once(start, tmp_path):
    settings = settings_of(load_config("configs/quickstart.py:smoke"))
    workdir = tmp_path / "run"
    workdir.mkdir()
    threading.Timer(0.3, workdir.rename, [tmp_path / "other"]).start()
    roles = [start("import time; time.sleep(60)", "learner")]
    with pytest.raises(GoneError, match="run was deleted, renamed"):
        never, change = (lambda: False), (lambda roles: None)
        supervisor._watch(roles, 1, settings, workdir, "127.0.0.1:1", start, None, never, change)
    assert roles[0].process.poll() is None


def test_a_free_port_is_not_of_the_range_of_connections_and_not_taken(monkeypatch):
    assert supervisor.free_port() in supervisor.ROLE_PORTS
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(supervisor, "ROLE_PORTS", [port] * 64)
        assert supervisor.free_port() != port


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "journal  keeps all: at most 9.98 kB a step, "),
        (
            ["journal.max_bytes=5_000_000"],
            "journal  keeps all up to 5 MB: at most 9.98 kB a step, ",
        ),
        (["journal.keep=checkpointed"], "journal  keeps checkpointed: at most "),
    ],
)
def test_the_banner_says_what_the_journal_costs(flags, words, tmp_path):
    config = load_config("configs/quickstart.py:smoke")
    for flag in flags:
        key, _, value = flag.partition("=")
        block, _, name = key.partition(".")
        config[block][name] = int(value) if name == "max_bytes" else value
    banner = supervisor.banner(settings_of(config), tmp_path, "127.0.0.1:1", [], {})
    assert words in banner and banner.count(" are free") == 1


def test_the_banner_counts_the_record_of_a_token():
    settings = settings_of(load_config("configs/quickstart.py:smoke"))
    size = disk.size(disk.step_bytes(settings, 384))
    assert f"at most {size} a step" in supervisor.banner(settings, ".", "a:1", [], {}, 384)


def test_the_banner_names_reward_services(tmp_path):
    config = load_config("configs/quickstart.py:smoke")
    assert "rewards  " not in supervisor.banner(settings_of(config), tmp_path, "a:1", [], {})
    config.rollout.reward_addresses = ("127.0.0.1:7100",)
    shown = supervisor.banner(settings_of(config), tmp_path, "a:1", [], {})
    assert "  rewards  127.0.0.1:7100\n" in shown
