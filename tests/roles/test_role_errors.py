"""How a role ends that cannot go on: a line where the message says all, a traceback where nobody foresaw it."""

import errno
import os
import signal
import sys
import types

import pytest

from jaxrl_async.cli import train
from jaxrl_async.config.fields import StartError
from jaxrl_async.config.settings import Settings, SettingsError
from jaxrl_async.learner.learner import TooManyFailuresError
from jaxrl_async.publishing.publisher import PublisherError
from jaxrl_async.queue.journal import JournalError
from jaxrl_async.records import RunFailedError, SupersededError
from jaxrl_async.rewards.pool import PoolError
from jaxrl_async.roles import learner
from jaxrl_async.rollout.failures import UserCodeError


def caused(error, cause):
    error.__cause__ = cause
    return error


FORESEEN = [
    ConnectionError("no trajectory queue answers at localhost:1 within 60 s"),
    PermissionError("the queue localhost:1 asks for a token"),
    OSError("the queue cannot listen on localhost:1: is the port taken?"),
    OSError(errno.EADDRINUSE, "cannot listen on localhost:1"),
    JournalError("journal a is in use"),
    PoolError("no reward service answers at localhost:1 within 30 s"),
    PublisherError("version 0 did not reach every inference server within 3 s"),
    caused(PublisherError("the publisher failed: no server"), PublisherError("no server")),
    SettingsError("server.api_key_env names THE_KEY, which is unset"),
    RunFailedError("the run's own code fails: a reward that is broken"),
    TooManyFailuresError("11 groups were returned for failures, the last reward_error: None"),
    UserCodeError("the first 8 groups all failed with the same error"),
]
UNFORESEEN = [
    RuntimeError("bad"),
    ValueError("bad"),
    ConnectionResetError(),
    OSError(errno.ENOENT, "bad"),
    caused(PublisherError("the publisher failed: bad"), TypeError("bad")),
]


@pytest.fixture
def end_with(monkeypatch, tmp_path):
    """Runs a role that raises, in this process, whose signals and log stay as they are; its exit code."""
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(train.logging, "basicConfig", lambda **_: None)

    def end_with(error):
        def run(*_, **__):
            raise error

        monkeypatch.setattr(train.start, "run_role", run)
        words = ["--config=configs/quickstart.py:smoke", "--config.queue.address=localhost:1"]
        return train.main(["--role=queue", f"--workdir={tmp_path}/run", *words])

    return end_with


@pytest.mark.parametrize("error", FORESEEN, ids=lambda error: type(error).__name__)
def test_a_foreseen_error_is_a_line(error, end_with, capsys, caplog):
    assert end_with(error) == 1
    assert capsys.readouterr().err == f"queue: {error}\n"
    assert caplog.text == ""


@pytest.mark.parametrize(
    "error",
    [
        SupersededError("superseded: learner generation 1"),
        caused(PublisherError("the publisher failed"), SupersededError("superseded: generation 1")),
    ],
)
def test_a_superseded_learner_is_not_to_be_started_again(error, end_with, capsys):
    assert end_with(error) == 2
    assert capsys.readouterr().err == f"queue: {error.__cause__ or error}\n"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "checkpoints/3"),
        OSError(errno.EROFS, "Read-only file system"),
        JournalError("journal a: database or disk is full"),
        caused(RuntimeError("it could not be saved"), OSError(errno.ENOSPC, "No space left")),
        ValueError("RESOURCE_EXHAUSTED: No space left on device [file='a']\nSource locations: 1"),
    ],
    ids=str,
)
def test_a_full_disk_is_a_line_that_names_the_workdir(error, end_with, capsys, caplog, tmp_path):
    assert end_with(error) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--workdir={tmp_path}/run must have space" in line and caplog.text == ""
    assert str(error).partition("\n")[0] in line or str(error.__cause__) in line


@pytest.mark.parametrize("supervised", [False, True])
def test_a_role_without_memory_ends_as_the_kernel_ends_one_so_that_it_is_started_again(
    supervised, end_with, monkeypatch, caplog
):
    killed = []
    monkeypatch.setattr(train.os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(train.os, "_exit", sys.exit)
    if supervised:
        monkeypatch.setenv("JAXRL_PARENT", str(os.getppid()))
    with pytest.raises(SystemExit) as found:
        end_with(MemoryError())
    assert found.value.code == 1
    assert killed == ([(os.getpid(), signal.SIGKILL)] if supervised else [])
    assert "role queue is out of memory" in caplog.text and "MemoryError" in caplog.text


@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
def test_an_unforeseen_error_keeps_its_traceback(error, end_with, capsys, caplog):
    assert end_with(error) == 1
    assert "role queue failed" in caplog.text and "Traceback" in caplog.text
    assert capsys.readouterr().err.count("queue:") == 0


def test_a_role_whose_task_is_another_is_not_to_be_started_again(end_with):
    """`main` prints it, and the exit code 2 of bad usage ends the run at once."""
    with pytest.raises(StartError, match="not the one that the run"):
        end_with(StartError("task 'a' is not the one that the run in b began with"))


def test_a_learner_that_fails_writes_the_checkpoint_under_way_before_it_ends(monkeypatch, tmp_path):
    """Else its process ends beneath, and "cannot schedule new futures" is logged below the cause."""
    closed = []
    checkpoints = types.SimpleNamespace(close=lambda: closed.append("checkpoints"))
    monkeypatch.setattr(learner.parts, "checkpoints_of", lambda *_, **__: checkpoints)

    def fail(*_, **__):
        raise RuntimeError("the worker's own")

    monkeypatch.setattr(learner, "_Process", fail)
    options = {"process": 0, "coordinator": "", "resume": False, "stop_requested": lambda: False}
    with pytest.raises(RuntimeError, match="the worker's own"):
        learner.run(Settings(), tmp_path, links=object(), **options)
    assert closed == ["checkpoints"]
