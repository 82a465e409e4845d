"""Runs the points of a sweep as commands, n at a time, and goes on where an earlier driver stopped.

What is done is read from the workdirs alone. A point's lock file keeps a second driver off it, and says how the last
attempt ended. The driver knows commands, files and processes; it knows nothing of configs or of what is trained.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from jaxrl_async.runtime.supervisor import how_it_ended
from jaxrl_async.runtime.workdir import checkpoint_steps

POLL_SECS = 0.1
LOCK_SECS = 1.0  # `Job.state` holds a lock for a moment too; a driver holds it for minutes.
STOP_SECS = 15.0  # `train` needs a few seconds to end its roles in order.

FINISHED, ELSEWHERE = "finished", "runs elsewhere"


@dataclasses.dataclass(frozen=True)
class Job:
    """One point and where it runs: in DIR/NAME, with the log DIR/NAME.log and the lock DIR/NAME.lock."""

    name: str
    directory: pathlib.Path  # DIR, absolute
    num_steps: int  # with a result of this step it is finished
    program: tuple[str, ...]  # the words before `train` and `evaluate`
    words: tuple[str, ...]  # --config=… and the overrides

    @property
    def workdir(self) -> pathlib.Path:
        return self.directory / self.name

    @property
    def log(self) -> pathlib.Path:
        return self.directory / f"{self.name}.log"

    @property
    def lock(self) -> pathlib.Path:
        return self.directory / f"{self.name}.lock"

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """What a point that was never run needs: train, then evaluate."""
        workdir = f"--workdir={self.workdir}"
        train = (*self.program, "train", *self.words, workdir)
        return train, (*self.program, "evaluate", workdir)

    @property
    def shell(self) -> str:
        """The commands as one line for a shell."""
        return " && ".join(shlex.join(command) for command in self.commands)

    def result(self) -> dict | None:
        """The last row of evaluation.json, None where it is not there or of an earlier checkpoint."""
        try:
            rows = json.loads((self.workdir / "evaluation.json").read_text("utf-8"))
        except (OSError, ValueError):  # Not there, or half written.
            return None
        return rows[-1] if rows and rows[-1]["step"] == self.num_steps else None

    def missing(self) -> list[tuple[str, ...]]:
        """The commands that are left to run; none where the point is finished."""
        if self.result() is not None:
            return []
        train, evaluate = self.commands
        steps = checkpoint_steps(self.workdir)
        if self.num_steps in steps[-1:]:
            return [evaluate]
        return [(*train, "--resume") if steps else train, evaluate]

    def state(self) -> str:
        """ "finished" | "running" | "failed: WHY" | "interrupted" | "waiting"."""
        if self.result() is not None:
            return FINISHED
        if not self.lock.exists():
            return "waiting"
        with open(self.lock, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return "running"
            said = file.read()
        return said if said.startswith("failed: ") else "interrupted"


def run(jobs: Sequence[Job], *, at_once: int, say: Callable[[str], None] = print) -> dict[str, str]:
    """Runs what is missing of each job. A job that fails does not stop the others.

    An interrupt (KeyboardInterrupt, SystemExit, …) ends the commands that run, and goes on to the caller.

    Args:
      jobs: in the order in which they are started.
      at_once: how many run at the same time.
      say: receives a line for each job that starts or ends.

    Returns:
      Name → "finished", "failed: WHY", or "runs elsewhere" where another driver holds its lock.
    """
    waiting, attempts, ends = list(jobs), [], {}

    def ended(job: Job, how: str) -> None:
        ends[job.name] = how
        say(f"[{len(ends)}/{len(jobs)}] {job.name} {how}")

    try:
        while waiting or attempts:
            while waiting and len(attempts) < at_once:
                job = waiting.pop(0)
                if (lock := _take(job.lock)) is None:
                    ended(job, ELSEWHERE)
                else:
                    attempts.append(_Attempt(job, lock, say))
            for attempt in list(attempts):
                if (how := attempt.look()) is not None:
                    attempts.remove(attempt)
                    attempt.close(how)
                    ended(attempt.job, how)
            if attempts:
                time.sleep(POLL_SECS)
    finally:
        for attempt in attempts:
            attempt.terminate()
        deadline = time.monotonic() + STOP_SECS
        for attempt in attempts:
            attempt.kill(deadline)
            attempt.close("interrupted")
    return ends


class _Attempt:
    """A job whose lock is held: its missing commands, one after another."""

    def __init__(self, job: Job, lock: int, say: Callable[[str], None]):
        self.job, self._lock, self._say = job, lock, say
        self._commands = job.missing()  # Under the lock: another driver may have ended it just now.
        self._process: subprocess.Popen | None = None
        self._verb = ""
        _write(lock, f"running since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        new = self._commands and not checkpoint_steps(job.workdir)
        if new and (job.workdir / "config.json").exists():
            shutil.rmtree(job.workdir)  # It never got to a checkpoint: there is nothing to resume.

    def look(self) -> str | None:
        """How the attempt ended, None while a command runs; starts the next one."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return None
            self.kill(time.monotonic())
            if code:
                return f"failed: {self._verb} ended {how_it_ended(code)}, see {self.job.log}"
        if self._commands:
            self._start(self._commands.pop(0))
            return None
        if self.job.result() is None:
            return f"failed: no result of step {self.job.num_steps} in {self.job.workdir}/evaluation.json"
        return FINISHED

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self, deadline: float) -> None:
        """Waits until the deadline, then kills what is left of the command and of its process group."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, how: str) -> None:
        _write(self._lock, how)
        os.close(self._lock)

    def _start(self, command: tuple[str, ...]) -> None:
        self._verb = command[len(self.job.program)]
        resumed = " (resumed)" if command[-1] == "--resume" else ""
        self._say(f"{self.job.name}: {self._verb}{resumed}, log {self.job.log}")
        with open(self.job.log, "a", encoding="utf-8") as log:
            print(f"$ {shlex.join(command)}", file=log, flush=True)
            # A session of its own: Ctrl-C reaches the driver, which ends it in order. It inherits the lock: a driver
            # that is killed leaves the point locked for as long as its command runs.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(self._lock,),
            )


def _take(path: pathlib.Path) -> int | None:
    """The descriptor of a lock file that is now held, None where another holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_SECS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                return None
            time.sleep(POLL_SECS)


def _write(lock: int, text: str) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, text.encode(), 0)
