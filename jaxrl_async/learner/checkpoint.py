"""Checkpoints: the learner's state, its version and the queue's resume point, saved and restored as one (orbax).

Checkpoint s holds version s. Checkpoint 0, from which RL starts, and the best one are never pruned.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies


class CheckpointError(ValueError):
    """A checkpoint that is missing or does not fit; the message names the difference."""


class Checkpoints:
    """The checkpoints of one workdir."""

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep: int,
        best: Callable[[], int | None] = lambda: None,
    ):
        """Opens or makes the directory.

        Args:
          directory: `checkpoints/` of a workdir.
          keep: number of newest checkpoints to keep, besides checkpoint 0 and the best.
          best: the best step so far, or None; called at each save.
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
                preservation_policy=preservation, enable_async_checkpointing=False
            ),
        )

    def save(self, step: int, state: Any, resume_point: dict[str, Any]) -> None:
        """Saves the state after a step and the point where a resumed queue starts.

        Args:
          step: the version that `state` holds.
          state: pytree of jax arrays.
          resume_point: JSON values, the queue's answer to Commit(step).
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(resume_point)
            ),
        )

    def steps(self) -> list[int]:
        """The restorable steps, ascending."""
        return sorted(self._manager.all_steps())

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
        self._manager.close()

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
    return {_name(path): tuple(leaf.shape) for path, leaf in flat}


def _name(path) -> str:
    keys = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path)
    return ".".join(str(key) for key in keys)
