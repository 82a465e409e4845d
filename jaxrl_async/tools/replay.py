"""Replay: the learner again, from a run's config, checkpoint and journal. No servers and no rewards.

The prompts are the journal's. A task that is here and has others than the run is refused all the same.

With the run's settings, devices and libraries the parameters are equal bit for bit, also those of an asynchronous run:
the journal has the groups of every step, in order. Another objective is trained on the identical data.
"""

import contextlib
import dataclasses
import logging
import pathlib
import shutil
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jaxrl_async import parts
from jaxrl_async.config.fields import StartError
from jaxrl_async.config.settings import Settings
from jaxrl_async.learner import learner as learners
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.learner.train_step import TrainState, mesh_of
from jaxrl_async.metrics import MetricsWriter, Timers
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.queue.replay import ReplayQueue
from jaxrl_async.runtime import libraries
from jaxrl_async.runtime.workdir import checkpoint_steps
from jaxrl_async.tasks import digest

log = logging.getLogger(__name__)


class ReplayError(ValueError):
    """A run that cannot be replayed; the message names the missing part."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A checkpoint of the run beside the same step of its replay."""

    step: int
    max_difference: float  # over parameters and the optimizer's state; 0 where all bits are equal
    where: str  # the array that differs most, "" where none does

    @property
    def equal(self) -> bool:
        return not self.where


def replay(
    settings: Settings,
    workdir: pathlib.Path,
    *,
    out: pathlib.Path,
    first: int = 0,
    until: int | None = None,
    changed: bool = False,
) -> list[Comparison]:
    """Trains again on a run's groups.

    Args:
      settings: the run's, or with another objective, optimizer or packing.
      workdir: of the run; nothing in it is changed.
      out: receives metrics.jsonl, tensorboard/, checkpoints/ and the run's tokenizer/, base/ and task_digest.json.
      first: the checkpoint to start from.
      until: the last step; None for the last one that was committed.
      changed: the settings are not the run's, so weights and samples are not of the same versions.

    Returns:
      A comparison with each checkpoint of the run between the two steps; none with `changed`.

    Raises:
      ReplayError: the journal lacks a step, ends before the last checkpoint, or contradicts itself.
      JournalError: groups are forgotten or damaged.
      CheckpointError: no checkpoint `first`.
      StartError: the task is not the run's.
    """
    _check_task(settings, workdir)
    if found := libraries.changes(workdir):
        log.warning("%s", found)
    journal = pathlib.Path(settings.journal.path or workdir / "journal.sqlite")
    reader = JournalReader(journal)
    known = set(checkpoint_steps(workdir))
    last = steps_of(reader, journal, first, until, known)
    for version, epoch in reader.run_epochs():
        if epoch:
            log.warning(
                "version %d was published in run epoch %d: the run came to other weights under a version after a "
                "resume, so a replay cannot equal it from before on",
                version,
                epoch,
            )
            break
    if not changed:
        _say_changes(workdir, first)
    config = parts.model_config_of(settings, parts.tokenizer_of(settings, workdir))
    mesh = mesh_of(settings.learner)
    train_step = parts.train_step_of(settings, config, mesh)
    out.mkdir(parents=True, exist_ok=True)
    for part in ("tokenizer", "base"):
        if (workdir / part).exists():
            shutil.copytree(workdir / part, out / part)
    for path in workdir.glob(digest.FILES):
        shutil.copy(path, out)
    comparisons: list[Comparison] = []
    with contextlib.ExitStack() as stack:
        keep, closing = settings.checkpoint.keep, contextlib.closing
        theirs = stack.enter_context(
            closing(Checkpoints(parts.checkpoint_directory(settings, workdir), keep=keep))
        )
        ours = stack.enter_context(closing(Checkpoints(out / "checkpoints", keep=keep)))
        train_step.freeze(parts.base_params(settings, workdir, config, mesh))
        abstract = train_step.abstract_state()
        state, position = theirs.restore(first, abstract)
        reference = parts.reference_of(
            settings, config, mesh, lambda: theirs.restore(0, abstract)[0].params
        )
        metrics = stack.enter_context(contextlib.closing(MetricsWriter(out)))

        def save(step: int, state: TrainState, _: Any) -> None:
            if step in known and not changed:
                comparisons.append(_compare(step, state, theirs.restore(step, abstract)[0]))
            if step == last:
                ours.save(step, state, position)

        num_steps = max(last, settings.learner.num_steps)  # Rates follow from those of the run.
        replayed = dataclasses.replace(
            settings,
            learner=dataclasses.replace(settings.learner, num_steps=num_steps),
            checkpoint=dataclasses.replace(settings.checkpoint, every_steps=1),
        )
        learners.train(
            state,
            first_step=first + 1,
            settings=replayed,
            train_step=train_step,
            pack=parts.packer_of(settings),
            queue=ReplayQueue(reader, last),
            publisher=_Nobody(),
            save=save,
            metrics=metrics,
            timers=Timers(),
            reference=reference,
            own_samples=not changed,
        )
    reader.close()
    return comparisons


def _check_task(settings: Settings, workdir: pathlib.Path) -> None:
    """Compares the task with the run's, where it can be read: nothing else of a replay needs it."""
    try:
        parts.same_task_of(settings, workdir, keep=False)
    except StartError:
        raise
    except Exception as error:
        log.warning("the task is not compared with the run's: %s", error)


def _say_changes(workdir: pathlib.Path, first: int) -> None:
    """Warns where a resume changed the settings after checkpoint `first`: a replay has those of the last steps."""
    kept = workdir.glob("config.until-step-*.json")
    until = max((int(path.stem.rpartition("-")[2]) for path in kept), default=0)
    if until > first:
        log.warning(
            "the settings of the run changed after step %d, and a replay has those of now: it cannot equal the steps "
            "before where they count. --first=%d begins with them, config.until-step-%d.json has those before",
            *(until, until, until),
        )


def steps_of(
    reader: JournalReader,
    journal: pathlib.Path,
    first: int,
    until: int | None,
    known: Collection[int],
) -> int:
    """The last step of a replay from `first`; `known` has the run's checkpoints.

    Raises:
      ReplayError: the journal contradicts itself, lacks a step or, without `until`, ends before the last checkpoint.
    """
    if damage := {name: found[:5] for name, found in reader.audit().items() if found}:
        raise ReplayError(f"{journal} contradicts itself, {damage}: restore a copy of it")
    steps = set(reader.steps())
    last = max(steps, default=first) if until is None else until
    missing = sorted(set(range(first + 1, last + 1)) - steps)
    if missing or last <= first:
        held = f"{min(steps)} to {max(steps)}" if steps else "none"
        raise ReplayError(
            f"steps {first + 1} to {last} are asked for, the journal {journal} has {held}"
            + (f", and lacks {missing[:5]}" if missing and steps else "")
            + "; restore a copy of it, or take --first and --until of what it has"
        )
    if until is None and max(known, default=0) > last:
        raise ReplayError(
            f"{journal} ends at step {last}, and the run has a checkpoint of step {max(known)}: its end is "
            f"lost. Restore a copy of it; --until={last} replays the rest"
        )
    return last


def _compare(step: int, state: TrainState, theirs: TrainState) -> Comparison:
    worst, where = 0.0, ""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    for (path, leaf), other in zip(pairs, jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(leaf), np.asarray(other)
        if a.tobytes() != b.tobytes():
            difference = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
            if not where or difference > worst:
                worst, where = difference, jax.tree_util.keystr(path)
    return Comparison(step, worst, where)


class _Nobody:
    """A publisher without servers."""

    def snapshot(self, state: TrainState) -> None:
        return None

    def publish(self, version: int, snapshot: Any) -> None: ...

    def wait(self, should_stop) -> None: ...

    def check(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}
