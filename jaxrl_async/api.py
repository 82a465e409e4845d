"""The Python API: a config in, a run out, as with the verbs `train`, `evaluate`, `replay`, `export` and `report`."""

import copy
import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from jaxrl_async import report, sealed
from jaxrl_async.cli.config import load_config, refuse_bucket, settings_of
from jaxrl_async.metrics import read_metrics
from jaxrl_async.preflight import machine
from jaxrl_async.roles import start

__all__ = ["Run", "load_config", "run"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run in its directory, running or done."""

    workdir: pathlib.Path
    last_step: int | None = None  # of `metrics`; None for all so far

    def __post_init__(self):
        refuse_bucket("workdir", self.workdir)
        object.__setattr__(self, "workdir", pathlib.Path(self.workdir).absolute())

    @property
    def config(self) -> ml_collections.ConfigDict:
        """The resolved config of the run."""
        return load_config(str(self.workdir / "config.json"))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One row per step so far; the names are those of jaxrl_async.metrics.METRICS."""
        rows, last = read_metrics(self.workdir), self.last_step
        return rows if last is None else [row for row in rows if row["step"] <= last]

    def evaluate(self, steps: Sequence[int | str] = (0, "last")) -> list[dict[str, float]]:
        """Scores checkpoints on held-out prompts, in a process of its own.

        Args:
          steps: checkpoints; "last" is the newest, "best" the one with the best evaluation during training.

        Returns:
          One row per checkpoint: step, greedy, pass@1 and pass@n, with their intervals.

        Raises:
          RuntimeError: it failed; the message is the end of its output.
        """
        self._verb("evaluate", f"--steps={','.join(map(str, steps))}")
        path = self.workdir / "evaluation.json"
        return sealed.read(path, remedy="evaluate again", keys=("step",), kind=list)

    def replay(self, out: str | os.PathLike, overrides: Mapping[str, Any] | None = None) -> "Run":
        """Trains again on the groups that this run trained on, in a process of its own.

        Args:
          out: empty directory of the replay.
          overrides: config keys and values, {"loss.anchor": "behavior"}: another objective on identical data. Without
            any, every checkpoint must equal the run's, bit for bit.

        Returns:
          The replay.

        Raises:
          RuntimeError: it failed, or a bit differs; the message is the end of its output.
        """
        out = pathlib.Path(out).absolute()
        changes = [f"--config.{key}={value}" for key, value in (overrides or {}).items()]
        self._verb("replay", f"--out={out}", *changes)
        return Run(out)

    def report(self) -> pathlib.Path:
        """Writes report.html and returns its path."""
        return report.write_report(self.workdir)

    def export(self, out: str | os.PathLike) -> pathlib.Path:
        """Writes the newest checkpoint as a Hugging Face directory, new or empty, in a process of its own.

        Returns:
          Its path.

        Raises:
          RuntimeError: it failed; the message is the end of its output.
        """
        out = pathlib.Path(out).absolute()
        self._verb("export", f"--out={out}")
        return out

    def _verb(self, verb: str, *flags: str) -> None:
        words = [sys.executable, "-m", "jaxrl_async", verb, f"--workdir={self.workdir}", *flags]
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(f"{verb}: {(done.stdout + done.stderr).strip()[-2000:]}")


def run(
    config: ml_collections.ConfigDict,
    *,
    workdir: str | os.PathLike | None = None,
    resume: bool = False,
    on_step: Callable[[Run], None] | None = None,
) -> Run:
    """Trains, with every role on this machine, and returns when the run is done.

    Args:
      config: of a file in configs/ (`load_config`), with your changes.
      workdir: of the run; runs/TASK-TIME for None.
      resume: continue from the last checkpoint in the workdir. Changes to the run's config are printed.
      on_step: called once for each step, in this thread, with the run up to it: `run.metrics[-1]` is the step's row.

    Raises:
      SettingsError: the config contradicts itself.
      StartError: the workdir holds a run, its run cannot take such a config, or the task cannot be read.
      RoleDiedError, StalledError: the run failed.
    """
    config = copy.deepcopy(config)  # The parts of its preset are written into it.
    settings = settings_of(config)
    run = Run(pathlib.Path(workdir or start.default_workdir(settings)))
    machine.check_access(settings, "all", 0)
    start.check_workdir(config, run.workdir, resume=resume)
    with start.locked(run.workdir):
        if start.begin(config, settings, run.workdir, resume=resume):
            called = (lambda step: on_step(Run(run.workdir, step))) if on_step else None
            start.run(settings, workdir=run.workdir, resume=resume, on_step=called)
    return run
