"""Runs the points of a sweep as commands, n at a time, and resumes where an earlier driver stopped.

The workdirs alone say which points are finished. A point's lock file keeps a second driver off it, and holds the
outcome of the last attempt. The driver has commands, files and processes; it reads no config.
"""

import dataclasses
import fcntl
import os
import pathlib
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from jaxrl_async import sealed
from jaxrl_async.runtime.supervisor import how_it_ended, kill
from jaxrl_async.runtime.workdir import checkpoint_steps, is_held

POLL_SECS = 0.1
LOCK_SECS = 1.0  # `Job.state` holds a lock for a moment, a driver for minutes.
STOP_SECS = 15.0  # `train` needs a few seconds to end its roles in order.

FINISHED, ELSEWHERE = "finished", "runs elsewhere"


@dataclasses.dataclass(frozen=True)
class Job:
    """One point, which runs in DIR/NAME with the log DIR/NAME.log and the lock DIR/NAME.lock."""

    name: str
    directory: pathlib.Path  # DIR, absolute
    num_steps: int  # a result of this step finishes it
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
        """The commands of a point that never ran: train, then evaluate."""
        workdir = f"--workdir={self.workdir}"
        train = (*self.program, "train", *self.words, workdir)
        return train, (*self.program, "evaluate", workdir)

    @property
    def shell(self) -> str:
        """The commands as one line for a shell."""
        return " && ".join(shlex.join(command) for command in self.commands)

    def scored(self) -> list[dict]:
        """The rows of evaluation.json; none if it is missing or of an earlier checkpoint."""
        try:
            rows = sealed.read(self.workdir / "evaluation.json", remedy="", kind=list)
        except sealed.DamagedError:  # Missing, or half written: it is written again.
            return []
        return rows if rows and rows[-1]["step"] == self.num_steps else []

    def missing(self) -> list[tuple[str, ...]]:
        """The commands left to run; none if the point is finished."""
        if self.scored():
            return []
        train, evaluate = self.commands
        steps = checkpoint_steps(self.workdir)
        if self.num_steps in steps[-1:]:
            return [evaluate]
        return [(*train, "--resume") if steps else train, evaluate]

    def state(self) -> str:
        """ "finished" | "running" | "failed: WHY" | "interrupted" | "waiting"."""
        if self.scored():
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
    """Runs the missing commands of each job. A failed job does not stop the others.

    An interrupt (KeyboardInterrupt, SystemExit, …) ends the running commands and is raised again.

    Returns:
      Name → "finished", "failed: WHY", or "runs elsewhere" if another driver holds its lock.
    """
    waiting, attempts, ends = list(jobs), [], {}

    def ended(job: Job, how: str) -> None:
        ends[job.name] = how
        say(f"[{len(ends)}/{len(jobs)}] {job.name} {how}")

    try:
        while waiting or attempts:
            while waiting and len(attempts) < at_once:
                job = waiting.pop(0)
                # A printed command runs without a driver.
                if is_held(job.workdir) or (lock := _take(job.lock)) is None:
                    ended(job, ELSEWHERE)
                else:
                    attempts.append(_Attempt(job, lock, say))
            for attempt in list(attempts):
                if (how := attempt.poll()) is not None:
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
        # Under the lock: another driver may just have finished some.
        self._commands = job.missing()
        self._process: subprocess.Popen | None = None
        self._verb = ""
        _write(lock, f"running since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        new = self._commands and not checkpoint_steps(job.workdir)
        if new and (job.workdir / "config.json").exists():
            shutil.rmtree(job.workdir)  # Without a checkpoint there is nothing to resume.

    def poll(self) -> str | None:
        """The outcome of the attempt, None while a command runs; starts the next command."""
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
        if not self.job.scored():
            return f"failed: no result of step {self.job.num_steps} in {self.job.workdir}/evaluation.json"
        return FINISHED

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self, deadline: float) -> None:
        """Waits until the deadline, then kills the command and its process group."""
        if self._process is not None:
            kill(self._process, deadline)

    def close(self, how: str) -> None:
        _write(self._lock, how)
        os.close(self._lock)

    def _start(self, command: tuple[str, ...]) -> None:
        self._verb = command[len(self.job.program)]
        resumed = " (resumed)" if command[-1] == "--resume" else ""
        self._say(f"{self.job.name}: {self._verb}{resumed}, log {self.job.log}")
        with open(self.job.log, "a", encoding="utf-8") as log:
            print(f"$ {shlex.join(command)}", file=log, flush=True)
            # A group of its own: Ctrl-C reaches the driver alone, which ends the command in order. The command
            # inherits the lock, so that the point stays locked while it runs, even if the driver is killed.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                pass_fds=(self._lock,),
            )


def _take(path: pathlib.Path) -> int | None:
    """Takes a lock file; returns its descriptor, None if another process holds it."""
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
