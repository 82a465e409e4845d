"""Checkpoints: the learner's state, its version and the queue's resume point, saved and restored as one (orbax).

Checkpoint s holds version s. Checkpoint 0, from which RL starts, and the best one are never pruned. A checkpoint is
copied to host memory when it is saved, and written in the background: it gets its name, and older ones are pruned,
when all of it is on disk.
"""

import concurrent.futures
import dataclasses
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

WRITE_TIMEOUT_SECS = 3600  # of one checkpoint, on all processes


class CheckpointError(ValueError):
    """A checkpoint that is missing, does not fit or was not written; the message names the step and the cause."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A checkpoint that is on disk."""

    step: int
    num_bytes: int  # of the state, over all processes
    secs: float  # from `save` until it was on disk


class Checkpoints:
    """The checkpoints of one workdir; at most one is being written at a time."""

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep: int,
        best: Callable[[], int | None] = lambda: None,
        remove_unfinished: bool = False,
    ):
        """Opens or makes the directory.

        Args:
          directory: `checkpoints/` of a workdir.
          keep: number of newest checkpoints to keep, besides checkpoint 0 and the best.
          best: the best step so far, or None; called at each save.
          remove_unfinished: remove what a process that was killed had written of a checkpoint; for the learner alone,
            while another process may read.
        """
        self._directory = pathlib.Path(directory).absolute()
        preservation = policies.AnyPreservationPolicy(
            [policies.LatestN(keep), policies.CustomSteps([0]), _Best(best)]
        )
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={  # Without handlers a manager that has saved nothing cannot read shapes.
                "state": ocp.StandardCheckpointHandler(),
                "position": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation,
                cleanup_tmp_directories=remove_unfinished,
                async_options=ocp.AsyncOptions(timeout_secs=WRITE_TIMEOUT_SECS),
            ),
        )
        self._writing: tuple[int, concurrent.futures.Future[Written]] | None = None
        self._failed = False

    def save(self, step: int, state: Any, resume_point: dict[str, Any]) -> None:
        """Copies the state after a step, and the point where a resumed queue starts; begins to write them.

        The state may be donated afterwards. Waits for the checkpoint before, if it is still being written.

        Args:
          step: the version that `state` holds.
          state: pytree of jax arrays.
          resume_point: JSON values, the queue's answer to Commit(step).

        Raises:
          CheckpointError: the checkpoint before was not written, or this one cannot be; names the step.
        """
        self.written(wait=True)
        start = time.monotonic()
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(resume_point)
                ),
            )
        except Exception as error:
            raise self._not_written(step, error) from error
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        future: concurrent.futures.Future[Written] = concurrent.futures.Future()
        self._writing = step, future

        def wait() -> None:
            try:
                self._manager.wait_until_finished()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(Written(step, num_bytes, time.monotonic() - start))

        threading.Thread(target=wait, name="checkpoint", daemon=True).start()

    def written(self, *, wait: bool = False) -> Written | None:
        """The last saved checkpoint, once, when it is on disk; None before, unless it is to `wait`, and without news.

        Raises:
          CheckpointError: it was not written; names the step.
        """
        if self._writing is None or not (wait or self._writing[1].done()):
            return None
        (step, future), self._writing = self._writing, None
        try:
            return future.result()
        except Exception as error:
            raise self._not_written(step, error) from error

    def steps(self) -> list[int]:
        """The restorable steps, ascending; without one that is still being written."""
        steps = set(self._manager.all_steps())
        if self._writing is not None:
            step, future = self._writing
            if not future.done() or future.exception() is not None:
                steps.discard(step)
        return sorted(steps)

    def latest(self) -> int:
        """The last restorable step.

        Raises:
          CheckpointError: there is none.
        """
        if not (steps := self.steps()):
            raise CheckpointError(f"no checkpoint in {self._directory}")
        return steps[-1]

    def oldest(self) -> int:
        """The first restorable step after 0, else 0: nothing resumes from before it."""
        return min((step for step in self.steps() if step), default=0)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Restores a checkpoint into the shardings of `like`.

        Args:
          step: one of `steps()`.
          like: pytree of jax arrays or ShapeDtypeStructs with shardings.

        Returns:
          The state and the queue's resume point.

        Raises:
          CheckpointError: no such step, or a tensor of another shape; names it with both shapes.
        """
        if self._writing is not None and self._writing[0] == step:
            concurrent.futures.wait([self._writing[1]])
        if step not in self.steps():
            raise CheckpointError(
                f"no checkpoint {step} in {self._directory}; it holds {self.steps()}"
            )
        self._check_shapes(step, like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), position=ocp.args.JsonRestore()
            ),
        )
        return restored["state"], restored["position"]

    def close(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
          CheckpointError: it was not written; names the step.
        """
        self.written(wait=True)
        if not self._failed:  # The manager would raise the failure again, without the step.
            self._manager.close()

    def _not_written(self, step: int, error: Exception) -> CheckpointError:
        self._failed = True
        return CheckpointError(
            f"checkpoint {step} was not written to {self._directory}: {type(error).__name__}: {error}"
        )

    def _check_shapes(self, step: int, like: Any) -> None:
        saved = _shapes(self._manager.item_metadata(step)["state"].tree)
        wanted = _shapes(like)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"checkpoint {step} in {self._directory} does not fit: {name} has shape "
                    f"{saved.get(name, 'nothing')}, the model of the config needs {wanted.get(name, 'nothing')}"
                )


@dataclasses.dataclass
class _Best:
    """Orbax's policy that preserves the best step."""

    best: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = self.best()
        return [checkpoint.step == best for checkpoint in checkpoints]


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Path → shape, with paths that do not depend on the types of containers."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): tuple(leaf.shape) for path, leaf in flat}
