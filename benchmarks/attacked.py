"""Runs to be attacked: as one supervised command, or with roles that are started one by one, as on the hosts of a pod.

The settings are those that ship; only sizes differ. `chaos.py` and tests/chaos say what is done to the runs. Steps are
paced (`paced.py`) until `hurry`.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import psutil

from jaxrl_async.metrics import last_metrics
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.runtime.supervisor import free_port, last_lines
from jaxrl_async.runtime.workdir import checkpoint_steps

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = "configs/quickstart.py:smoke"
ROLES = ("queue", "learner", "rollout", "server")
SIZES = ("--config.rollout.num_workers=2", "--config.server.num_local=2")
PACED = "--config.rollout.function=paced:paced"
MAX_STALENESS = 2  # queue.max_staleness of the quickstart
POLL_SECS = 0.05
STOP_SECS = 30.0  # from SIGTERM to SIGKILL


class ChaosError(RuntimeError):
    """A run did not survive; the message has the fault and the end of what it printed."""


@dataclasses.dataclass(frozen=True)
class Strike:
    """A fault of a supervised run: one process of each role is killed or frozen."""

    kind: str  # "kill" | "freeze"
    roles: tuple[str, ...]
    secs: float = 0.0  # that it is frozen

    def __str__(self) -> str:
        words = [self.kind, f"{self.secs:g} s" * (self.kind == "freeze"), "+".join(self.roles)]
        return " ".join(filter(None, words))


class Attacked:
    """A training run under attack; a context manager that ends its processes."""

    def __init__(self, workdir: pathlib.Path):
        self.workdir, self._fast = workdir, workdir.with_suffix(".fast")
        self._stepped = time.monotonic()  # when the last step was seen
        self._step = 0
        self.longest_secs = 0.0  # without a step, since the caller set it to 0
        paths = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | {
            "CHAOS_FAST": str(self._fast),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The last step that is done, 0 before the first."""
        return self.look()

    def look(self) -> int:
        """Reads the last step, and keeps the time for `longest_secs`."""
        row, now = last_metrics(self.workdir), time.monotonic()
        step = int(row["step"]) if row else 0
        self.longest_secs = max(self.longest_secs, now - self._stepped)
        if step != self._step:
            self._step, self._stepped = step, now
        return step

    def wait_for(self, step: int, limit_secs: float, why: str) -> bool:
        """Until a step is done; False when the run is over before it.

        Raises:
          ChaosError: neither, within limit_secs; or the run failed.
        """
        deadline = time.monotonic() + limit_secs
        while self.step < step:
            if self.is_over(why):
                return self.step >= step
            if time.monotonic() > deadline:
                raise ChaosError(
                    f"{why}: no step {step} within {limit_secs:g} s:\n{self.printed()}"
                )
            time.sleep(POLL_SECS)
        return True

    def hold(self, secs: float, why: str) -> None:
        """Lets time pass.

        Raises:
          ChaosError: the run failed in that time.
        """
        deadline = time.monotonic() + secs
        while time.monotonic() < deadline and not self.is_over(why):
            self.look()
            time.sleep(POLL_SECS)

    def hurry(self) -> None:
        """Ends the pace."""
        self._fast.touch()

    def dawdle(self) -> None:
        """Paces the steps."""
        self._fast.unlink(missing_ok=True)

    def finish(self, limit_secs: float, max_staleness: int = MAX_STALENESS) -> dict[str, list[int]]:
        """Waits for the end at full speed; what `audit` found, each list empty where all is well.

        Raises:
          ChaosError: the run failed, or did not end.
        """
        self.hurry()
        deadline = time.monotonic() + limit_secs
        while not self.is_over("the end"):
            if time.monotonic() > deadline:
                raise ChaosError(f"no end within {limit_secs:g} s:\n{self.printed()}")
            time.sleep(POLL_SECS)
        self.close()
        return audit(self.workdir, max_staleness)


class Run(Attacked):
    """One command that starts and supervises every role."""

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        num_steps: int,
        config: str = CONFIG,
        settings: Sequence[str] = SIZES,
    ):
        super().__init__(workdir)
        self._output = workdir.with_suffix(".out")
        words = [sys.executable, "-m", "jaxrl_async", "train", f"--config={config}"]
        words += [f"--workdir={workdir}", f"--config.learner.num_steps={num_steps}", *settings]
        with open(self._output, "w") as out:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=self._environment, stdout=out, stderr=out
            )

    def close(self) -> None:
        """Ends the run."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(120)

    def is_over(self, why: str) -> bool:
        """Whether the command has ended; raises ChaosError where it failed."""
        if self.process.poll():
            raise ChaosError(
                f"{why}: the run ended with exit code {self.process.returncode}:\n{self.printed()}"
            )
        return self.process.returncode == 0

    def strike(self, strike: Strike, rng: random.Random) -> bool:
        """Strikes; ends when a frozen process goes on. Whether the run was still there to be struck."""
        alive = [self.processes_of(role) for role in strike.roles]
        if not all(alive):
            return False
        found = [rng.choice(processes) for processes in alive]
        for process in found:
            process.send_signal(signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP)
        if strike.kind == "freeze":
            self.hold(strike.secs, str(strike))
            for process in found:
                process.send_signal(signal.SIGCONT)
        return True

    def printed(self) -> str:
        """The end of what the run printed."""
        return self._output.read_text(errors="replace")[-3000:]

    def processes_of(self, role: str) -> list[psutil.Process]:
        """The processes of a role, [] when the run is over."""
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []
        found = []
        for child in children:
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # It has just ended, of another role perhaps.
                if f"--role={role}" in child.cmdline():
                    found.append(child)
        return found


class Pod(Attacked):
    """Roles that run alone, "queue", "learner", "server-0", "rollout-0", …; nobody but the caller restarts one."""

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        num_steps: int,
        num_servers: int = 1,
        num_workers: int = 1,
        addresses: Sequence[str] = (),
        config: str = CONFIG,
        settings: Sequence[str] = (),
        discover: pathlib.Path | None = None,
    ):
        """Starts every role.

        Args:
          workdir: of the run.
          num_steps: learner.num_steps.
          num_servers: embedded servers to start.
          num_workers: rollout workers to start.
          addresses: of servers that run already; none are started then.
          config: of the run.
          settings: further flags of every role.
          discover: file of the servers' addresses, with only the first one in it and only the first one started.
        """
        super().__init__(workdir)
        self.addresses = tuple(addresses) or tuple(
            f"http://127.0.0.1:{free_port()}" for _ in range(num_servers)
        )
        self._settings = [
            f"--config={config}",
            f"--workdir={workdir}",
            f"--config.learner.num_steps={num_steps}",
            f"--config.queue.address=127.0.0.1:{free_port()}",
            *settings,
        ]
        self._listed = [f"--config.server.addresses={self.addresses!r}"]
        self._found = [f"--config.server.discover=file:{discover}"] if discover else self._listed
        self.processes: dict[str, subprocess.Popen] = {}
        self._former: list[subprocess.Popen] = []
        self._lost: set[str] = set()  # whose end is the caller's doing
        workdir.mkdir(parents=True)
        (workdir / "logs").mkdir()
        if discover is not None:
            discover.write_text(self.addresses[0] + "\n")
            num_servers = 1
        names = ["queue", *(f"server-{i}" for i in range(0 if addresses else num_servers))]
        for name in [*names, *(f"rollout-{i}" for i in range(num_workers)), "learner"]:
            self.start(name)

    def start(self, name: str, *, log: str = "", settings: Sequence[str] = ()) -> subprocess.Popen:
        """Starts a role, or starts it again, as a scheduler does: a learner resumes where there is a checkpoint.

        Args:
          name: of the role.
          log: name of its log; "" for that of the role.
          settings: flags of this process alone.
        """
        role, _, index = name.partition("-")
        words = [sys.executable, "-m", "jaxrl_async", "train", f"--role={role}"]
        words += [f"--index={index or 0}", *self._settings]
        words += [*(self._listed if role == "server" else self._found), *settings]
        words += ["--resume"] if role == "learner" and checkpoint_steps(self.workdir) else []
        if name in self.processes:
            self._former.append(self.processes[name])
        with open(self.workdir / "logs" / f"{log or name}.log", "a") as out:
            # A session of its own: a host fails with all its processes.
            self.processes[name] = subprocess.Popen(
                words,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._lost.discard(name)
        return self.processes[name]

    def lose(self, name: str) -> None:
        """The host of a role is gone."""
        self._lost.add(name)
        self.send(name, signal.SIGKILL)
        self.processes[name].wait()

    def send(self, name: str, number: int) -> None:
        """Signals all processes of a role."""
        os.killpg(self.processes[name].pid, number)

    def leave(self, name: str) -> None:
        """Ends a role that the run can do without."""
        self._lost.add(name)
        self.processes[name].terminate()
        self.processes[name].wait(STOP_SECS)

    def is_over(self, why: str) -> bool:
        """Whether the learner is done; raises ChaosError where a role ended that was not lost."""
        for name, process in self.processes.items():
            code = process.poll()
            if code is not None and name not in self._lost and (name, code) != ("learner", 0):
                raise ChaosError(f"{why}: {name} ended with exit code {code}:\n{self.printed()}")
        return "learner" not in self._lost and self.processes["learner"].poll() == 0

    def printed(self) -> str:
        """The end of every log."""
        logs = sorted((self.workdir / "logs").iterdir())
        return "\n".join(f"--- {log.name}\n{last_lines(log, 12)}" for log in logs)

    def close(self) -> None:
        """Ends every role, as a scheduler ends a job."""
        processes = [*self.processes.values(), *self._former]
        left = [process for process in processes if process.poll() is None]
        for process in left:
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
        deadline = time.monotonic() + STOP_SECS
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def audit(workdir: pathlib.Path, max_staleness: int = MAX_STALENESS) -> dict[str, list[int]]:
    """What is wrong in the journal of a run that ended: `JournalReader.audit`, and by the groups' tokens

    "stale": indexes with a token over the staleness bound; "foreign": with a token of no version of the run before its
    step.
    """
    reader = JournalReader(workdir / "journal.sqlite")
    try:
        found: Mapping[str, list[int]] = reader.audit() | {"stale": [], "foreign": []}
        for step in reader.steps():
            for chunk in range(reader.num_chunks(step)):
                for group in reader.chunk(step, chunk)[0]:
                    rows = group.trajectories
                    versions = np.concatenate([row.versions[row.mask] for row in rows])
                    if np.any(step - 1 - versions > max_staleness):
                        found["stale"].append(group.prompt_index)
                    if np.any((versions < 0) | (versions > step - 1)):
                        found["foreign"].append(group.prompt_index)
        return dict(found)
    finally:
        reader.close()
