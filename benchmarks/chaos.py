"""Chaos: kills and freezes the roles of real runs at random moments, and counts what was lost or trained twice.

    python benchmarks/chaos.py --trials=100

A run of the quickstart's size is hit by one fault after another: a role killed (SIGKILL), two at once, or one frozen
for a few seconds (SIGSTOP). A trial is survived when the next step ends; its recovery is the time from the fault to
that end. When a run is over, its journal is audited (`JournalReader.audit`): an index in no state is lost, one trained
in two places is doubled.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import psutil

from jaxrl_async.metrics import last_metrics
from jaxrl_async.queue.journal import JournalReader

ROOT = pathlib.Path(__file__).parent.parent
ROLES = ("queue", "learner", "rollout", "server")
FAULTS = (
    *(("kill", (role,)) for role in ROLES),
    *(("kill", (a, b)) for i, a in enumerate(ROLES) for b in ROLES[i + 1 :]),
    *(("freeze", (role,)) for role in ROLES),
)
FREEZE_SECS = 5.0
RECOVERY_LIMIT_SECS = 180.0
START_LIMIT_SECS = 300.0
SETTINGS = (  # of both sizes
    "--config.warm_start.num_steps=400",
    "--config.rollout.num_workers=2",
    "--config.server.num_local=2",
    "--config.supervisor.max_restarts=1000",
    "--config.checkpoint.every_steps=5",
    "--config.weights.poll_secs=0.5",
    "--config.queue.max_failures=100000",
)


class ChaosError(RuntimeError):
    """A run did not survive; the message has the fault and the end of what it printed."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One fault that a run was hit by."""

    fault: str  # "kill queue+server"
    step: int  # the last one done when it struck
    recovery_secs: float  # until the next step ended


class Run:
    """A training run under attack; use as a context manager."""

    def __init__(self, workdir: pathlib.Path, *, num_steps: int, config: str, settings=SETTINGS):
        self.workdir, self._output = workdir, workdir.with_suffix(".out")
        words = [sys.executable, "-m", "jaxrl_async", "train", f"--config={config}"]
        words += [f"--workdir={workdir}", f"--config.learner.num_steps={num_steps}", *settings]
        # The devices that tests make up for themselves are not the run's.
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        with open(self._output, "w") as out:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=out, stderr=out
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    @property
    def step(self) -> int:
        """The last step that is done, 0 before the first."""
        row = last_metrics(self.workdir)
        return int(row["step"]) if row else 0

    def wait_for(self, step: int, limit_secs: float, why: str) -> bool:
        """Until a step is done; False when the run is over before it.

        Raises:
          ChaosError: neither, within limit_secs; or the run failed.
        """
        deadline = time.monotonic() + limit_secs
        while self.step < step:
            if self.process.poll() is not None:
                if self.process.returncode:
                    raise ChaosError(f"{why}: the run failed:\n{self.printed()}")
                return self.step >= step
            if time.monotonic() > deadline:
                raise ChaosError(
                    f"{why}: no step {step} within {limit_secs:g} s:\n{self.printed()}"
                )
            time.sleep(0.05)
        return True

    def strike(self, kind: str, roles: tuple[str, ...], rng: random.Random) -> Trial | None:
        """One fault, and the wait for the step after it; None when the run ended before the fault."""
        alive = [self.processes_of(role) for role in roles]
        if not all(alive):
            return None
        found = [rng.choice(processes) for processes in alive]
        step, start, fault = self.step, time.monotonic(), f"{kind} {'+'.join(roles)}"
        for process in found:
            process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "freeze":
            time.sleep(FREEZE_SECS)
            for process in found:
                process.send_signal(signal.SIGCONT)
        # What was dispatched before the fault may still end: two steps on is after it.
        self.wait_for(step + 2, RECOVERY_LIMIT_SECS, fault)
        return Trial(fault, step, time.monotonic() - start)

    def finish(self, limit_secs: float) -> dict[str, list[int]]:
        """Waits for the end; what the journal says is wrong.

        Raises:
          ChaosError: the run failed, or did not end.
        """
        try:
            code = self.process.wait(limit_secs)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"no end within {limit_secs:g} s:\n{self.printed()}") from None
        if code:
            raise ChaosError(f"the run ended with exit code {code}:\n{self.printed()}")
        return JournalReader(self.workdir / "journal.sqlite").audit()

    def printed(self) -> str:
        """The end of what the run printed."""
        return self._output.read_text(errors="replace")[-3000:]

    def processes_of(self, role: str) -> list[psutil.Process]:
        """The processes of a role, [] when the run is over."""
        try:
            children = psutil.Process(self.process.pid).children()
            return [c for c in children if f"--role={role}" in c.cmdline()]
        except psutil.NoSuchProcess:
            return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--trials_per_run", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--steps_between", type=int, default=3)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "chaos.json"))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    faults = [FAULTS[i % len(FAULTS)] for i in range(args.trials)]
    rng.shuffle(faults)
    trials: list[Trial] = []
    wrong: dict[str, int] = {"lost": 0, "doubled": 0, "gap": 0, "stray": 0}
    num_runs = groups = 0
    while faults:
        some, faults = faults[: args.trials_per_run], faults[args.trials_per_run :]
        # Long enough for all of them; the last steps are undisturbed.
        num_steps = (args.steps_between + 6) * (len(some) + 1)
        with tempfile.TemporaryDirectory() as directory:
            workdir = pathlib.Path(directory) / "run"
            with Run(workdir, num_steps=num_steps, config=args.config) as run:
                run.wait_for(1, START_LIMIT_SECS, "start")
                for kind, roles in some:
                    run.wait_for(run.step + rng.randint(1, args.steps_between), 60.0, "between")
                    time.sleep(rng.random())
                    if (trial := run.strike(kind, roles, rng)) is None:
                        faults.append((kind, roles))
                        continue
                    trials.append(trial)
                    print(
                        f"{len(trials):4} {trial.fault:22} step {trial.step:4} {trial.recovery_secs:6.1f} s",
                        flush=True,
                    )
                audit = run.finish(600.0)
            num_runs += 1
            reader = JournalReader(workdir / "journal.sqlite")
            groups += len(reader)
            assert len(reader.steps()) == num_steps, (reader.steps(), num_steps)
            for name, indexes in audit.items():
                wrong[name] += len(indexes)
                if indexes:
                    print(f"{name}: {indexes}", flush=True)
    rows = _table(trials)
    result = {
        "trials": len(trials),
        "runs": num_runs,
        "groups_trained": groups,
        "wrong": wrong,
        "faults": rows,
    }
    pathlib.Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{num_runs} runs finished, {groups} groups trained on; {wrong}")
    print(f"{'fault':24} {'trials':>6} {'median s':>9} {'longest s':>9}")
    for name, row in rows.items():
        print(f"{name:24} {row['trials']:6} {row['median_secs']:9.1f} {row['max_secs']:9.1f}")


def _table(trials: list[Trial]) -> dict[str, dict[str, float]]:
    rows = {}
    for fault in sorted({trial.fault for trial in trials}):
        secs = sorted(t.recovery_secs for t in trials if t.fault == fault)
        rows[fault] = {
            "trials": len(secs),
            "median_secs": secs[len(secs) // 2],
            "max_secs": secs[-1],
        }
    return rows


if __name__ == "__main__":
    main()
