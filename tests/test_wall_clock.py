"""The wall clock may step or be wrong: nothing but labels depends on it."""

import ast
import contextlib
import os
import pathlib
import subprocess
import sys
import time

import attacked
import pytest
from fixtures import wall_clock
from fixtures.queues import SOUND_AUDIT

import jaxrl_async
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.metrics import read_metrics
from jaxrl_async.queue.calls import Glance
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.report import write_report
from jaxrl_async.runtime import keys, status

WAIT_SECS, RUN_SECS = 60.0, 500.0  # deadlines of a wait, and of one for a run
ROOT = pathlib.Path(jaxrl_async.__file__).parent
# File → how often it reads the wall clock, or the time of a file, which is the wall clock of a host. All are labels:
# for people, for other programs, or beside others to be equal.
LABELS = {
    "extras/conform/verb.py": 1,  # the date of a measurement
    "extras/sglang_jax/checkpoints.py": 1,  # whether a file is another one
    "inference/texts.py": 1,  # "created" of OpenAI's answers
    "metrics.py": 1,  # of a row
    "pods/remote.py": 2,  # of a host's clock beside this one's, which is a refusal
    "pods/survey.py": 1,  # the other
    "queue/journal.py": 3,  # of rows
    "report/page.py": 1,  # the end of a run
    "roles/start.py": 1,  # the name of a workdir
    "rollout/chat.py": 1,  # "created" of OpenAI's answers
    "security.py": 1,  # of a line in a log
    "sweeps/driver.py": 1,  # of a lock, for people
    "runtime/supervisor.py": 1,  # of a line in a log
    "tracker.py": 1,  # of a row
}
OF_TIME = {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "CLOCK_REALTIME"}
OF_OTHERS = {"now", "utcnow", "today", "fromtimestamp", "getmtime", "getctime"}
OF_STAT = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns"}


def reads(source: str) -> int:
    """How often code names the wall clock."""
    found = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += sum(name.name in OF_TIME for name in node.names)
        if isinstance(node, ast.Attribute):
            owner = (
                node.value.id
                if isinstance(node.value, ast.Name)
                else getattr(node.value, "attr", "")
            )
            is_clock = owner in ("datetime", "date", "path") and node.attr in OF_OTHERS
            is_clock |= owner == "time" and node.attr in OF_TIME
            found += is_clock or node.attr in OF_STAT
    return found


def test_nothing_but_labels_reads_the_wall_clock():
    found = {str(p.relative_to(ROOT)): reads(p.read_text("utf-8")) for p in ROOT.rglob("*.py")}
    assert {path: count for path, count in found.items() if count} == LABELS


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.time() + 3",
        "import datetime\ndatetime.datetime.now()",
        "p.stat().st_mtime",
        "from time import time",
        "os.path.getmtime(p)",
        "deadline = time.time_ns() + 1",
    ],
)
def test_such_a_reading_is_found(code):
    assert reads(code) == 1 and reads("import time\ntime.monotonic() + queue.now()") == 0


def test_a_queue_whose_clock_steps_by_an_hour_expires_nothing_and_ends_no_wait(
    tmp_path, monkeypatch
):
    lie = wall_clock.lying(tmp_path / "clock", wall_clock.STEPS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([lie, str(ROOT.parent), *sys.path]))
    words = [sys.executable, "-m", "fixtures.wall_clock"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECS)
    assert done.returncode == 0, done.stderr


# Whole runs.


@pytest.mark.long
@pytest.mark.parametrize(
    ("offset", "roles"),
    [
        (wall_clock.STEPS, None),
        (wall_clock.FAST, ("learner",)),
        (wall_clock.FAST, ("server", "rollout")),
    ],
    ids=["all clocks step", "the learner's is an hour fast", "those of servers and workers are"],
)
def test_a_run_ends_as_ever_whatever_the_wall_clock_says(offset, roles, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", wall_clock.lying(tmp_path / "clock", offset, roles))
    began, settings = time.monotonic(), [attacked.PACED]
    with attacked.Run(tmp_path / "run", num_steps=12, settings=settings) as run:
        run.wait_for(4, RUN_SECS, "start")
        settings = settings_of(load_config(str(run.workdir / "config.json")))
        access = queue_access_of(keys.found(settings, run.workdir))
        with contextlib.closing(Glance(status.address_of(run.workdir), **access)) as glance:
            looks = (glance() for _ in range(60))  # Each has a second.
            found = next(filter(None, looks))
        ages = [role.silent_secs for role in found.roles]
        ages += [wait.secs for role in found.roles for wait in role.waits]
        assert ages and all(0 <= age < RUN_SECS for age in [*ages, found.last_push_age_secs])
        chain = status.explain(found, status.processes_of(run.workdir), run.step)
        assert "end of the chain: " in chain and "is dead" not in chain
        assert run.finish(RUN_SECS) == SOUND_AUDIT | {"stale": [], "foreign": []}
    secs = time.monotonic() - began
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    times = {v for row in rows for n, v in row.items() if n.endswith("_secs") and v is not None}
    assert times and all(0 <= value < secs for value in times)
    lies = {round((row["unix_time"] - time.time()) / wall_clock.HOUR) for row in rows}
    assert lies & {1, -1} if roles in (None, ("learner",)) else lies == {0}  # The clock did lie.
    assert len(JournalReader(tmp_path / "run" / "journal.sqlite")) == 12 * 8
    write_report(tmp_path / "run")
