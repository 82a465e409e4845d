"""Checkpoints: the learner's state, its version and the queue's resume point, saved and restored as one (orbax).

Checkpoint s holds version s. Checkpoint 0, from which RL starts, and the best one are never pruned. A checkpoint is
copied to host memory when it is saved, and written in the background: it gets its name, and older ones are pruned,
when all of it is on disk. It has a digest of each tensor, as it was in memory, against which a restored one is checked:

    checkpoints/S/digests/process_P.json    of the shards that process P wrote: their places in the tensor, and SHA-256
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import fsspec
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from jaxrl_async import sealed
from jaxrl_async.learner import s3
from jaxrl_async.versions.layout import tensor_digest

WRITE_TIMEOUT_SECS = 3600  # of one checkpoint, on all processes
_NEVER_SECS = 10**8  # in Orbax, whose deadlines are of the wall clock, which may step
DAMAGED = "damaged-checkpoint-{}"  # in the workdir: a checkpoint that a fallback put aside

log = logging.getLogger(__name__)
Place = tuple[slice, ...]


def _waiting(deserialize: Callable[..., Any]) -> Callable[..., Any]:
    """Reads tensors, and where one fails waits for the others: TensorStore answers in the loop, which orbax closes."""

    @functools.wraps(deserialize)
    async def wait(*args: Any, **kwargs: Any) -> Any:
        before = asyncio.all_tasks()
        try:
            return await deserialize(*args, **kwargs)
        finally:
            await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)

    return wait


_arrays = ocp.type_handlers.get_type_handler(jax.Array)
_arrays.deserialize = _waiting(_arrays.deserialize)
s3.install()


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
          directory: `checkpoints/` of a workdir, or gs://BUCKET/PATH or s3://BUCKET/PATH.
          keep: number of newest checkpoints to keep, besides checkpoint 0 and the best.
          best: the best step so far, or None; called at each save.
          remove_unfinished: remove what a process that was killed had written of a checkpoint; for the learner alone,
            while another process may read.
        """
        self._directory = epath.Path(directory)
        self._in_bucket, self._keep = "://" in str(directory), keep
        if not self._in_bucket:
            self._directory = self._directory.absolute()
        preservation = policies.AnyPreservationPolicy(
            [policies.LatestN(keep), policies.CustomSteps([0]), _Best(best)]
        )
        if not self._in_bucket:
            _check_metadata(self._directory)
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={  # Without handlers a manager that has saved nothing cannot read shapes.
                "state": ocp.StandardCheckpointHandler(),
                "position": ocp.JsonCheckpointHandler(),
                "digests": _DigestsHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation,
                async_options=ocp.AsyncOptions(timeout_secs=_NEVER_SECS),
            ),
        )
        if remove_unfinished and jax.process_index() == 0:
            # The manager would do it in a thread, which a process that ends soon interrupts with a traceback.
            for unfinished in ocp.path.step.all_temporary_paths(self._directory):
                unfinished.get().rmtree()
        self._writing: tuple[int, concurrent.futures.Future[Written]] | None = None
        self._failed = False

    def save(
        self,
        step: int,
        state: Any,
        resume_point: dict[str, Any],
        beside: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Copies the state after a step, and the point where a resumed queue starts; begins to write them.

        The state may be donated afterwards. Waits for the checkpoint before, if it is still being written.

        Args:
          step: the version that `state` holds.
          state: pytree of jax arrays.
          resume_point: JSON values, the queue's answer to Commit(step).
          beside: called meanwhile with the step; the checkpoint counts once it has returned.

        Raises:
          CheckpointError: the checkpoint before was not written, or this one cannot be; names the step.
        """
        self.written(wait=True)
        start = time.monotonic()
        told = {"step": step, "position": _json_digest(resume_point)}
        shards = shards_on_host(state)  # Orbax makes the same copies, and keeps them as long.

        def table() -> dict[str, Any]:
            beside(step)
            return told | {"tensors": digests_of(shards)}

        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    position=ocp.args.JsonSave(resume_point),
                    digests=_Digests(table),
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
            return future.result(WRITE_TIMEOUT_SECS)
        except Exception as error:
            late = TimeoutError(f"no end within {WRITE_TIMEOUT_SECS:g} s")
            raise self._not_written(step, error if future.done() else late) from error

    def settle(self) -> None:
        """Waits for the checkpoint that is being written, and leaves its error to `written`."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing[1]], WRITE_TIMEOUT_SECS)

    def steps(self) -> list[int]:
        """The restorable steps, ascending; without one that is still being written."""
        steps = set(self._manager.all_steps())
        if self._writing is not None:
            step, future = self._writing
            if not future.done() or future.exception() is not None:
                steps.discard(step)
        return sorted(steps)

    def latest(self) -> int:
        """The last restorable step. Raises CheckpointError: there is none."""
        if not (steps := self.steps()):
            raise CheckpointError(f"no checkpoint in {self._directory}")
        return steps[-1]

    def oldest(self) -> int:
        """The first restorable step after 0 of the newest `keep`, else 0: a run goes on from no earlier one.

        The best step may be earlier, and is kept for its weights.
        """
        return min([step for step in self.steps() if step][-self._keep :], default=0)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Restores a checkpoint into the shardings of `like`, and checks it by its digests.

        Args:
          step: one of `steps()`.
          like: pytree of jax arrays or ShapeDtypeStructs with shardings.

        Returns:
          The state and the queue's resume point.

        Raises:
          CheckpointError: no such step, a tensor of another shape, named with both shapes, or a damaged one, named with
            an intact checkpoint.
        """
        if self._writing is not None and self._writing[0] == step:
            concurrent.futures.wait([self._writing[1]])
        if step not in self.steps():
            raise CheckpointError(
                f"no checkpoint {step} in {self._directory}; it holds {self.steps()}"
            )
        try:
            return self._read(step, like)
        except _DamagedError as error:
            raise _DamagedError(f"{error}; {self._remedy(step, like)}") from error

    def restore_last(
        self, like: Any, *, fallback: bool = False
    ) -> tuple[int, Any, dict[str, Any], list[str]]:
        """Restores the last checkpoint; with `fallback` the last intact one, and those after it are put aside.

        Returns:
          Its step, the state, the queue's resume point, and a sentence for each checkpoint that was put aside.

        Raises:
          CheckpointError: as of `restore`; with `fallback`, none is intact.
        """
        last = self.latest()
        if not fallback:
            return last, *self.restore(last, like), []
        said: list[str] = []
        for step in reversed(self.steps()):
            try:
                state, resume_point = self._read(step, like)
            except _DamagedError as error:
                said.append(str(error))
                continue
            self._put_aside([later for later in self.steps() if later > step])
            return step, state, resume_point, said
        raise _DamagedError(f"{'; '.join(said)}; none is intact: start in another --workdir")

    def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Raises _DamagedError, in all processes where it is so in one; CheckpointError where it does not fit."""
        error: Exception | None = None
        result: Any = None
        try:
            result = self._read_here(step, like)
        except CheckpointError:
            raise
        except Exception as found:  # Orbax and TensorStore raise whatever the bytes lead to.
            error = found
        if jax.process_count() > 1:
            failed = multihost_utils.process_allgather(np.int32(error is not None))
            if error is None and np.any(failed):
                result, error = None, ValueError("as another process of the learner found")
        if error is not None:
            cause = _first_words(error) or type(error).__name__
            where = self._directory / str(step)
            raise _DamagedError(f"checkpoint {step}, {where}, is damaged: {cause}") from error
        return result

    def _read_here(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        directory = self._directory / str(step)
        tables = _read_tables(directory / "digests", step)
        saved = {
            name: (tuple(entry["shape"]), entry["dtype"])
            for table in tables
            for name, entry in table["tensors"].items()
        }
        if not tables:
            log.warning(
                "%s is of an earlier version, without digests: it is not checked", directory
            )
            found = _shapes(self._manager.item_metadata(step)["state"].tree)
            saved = {name: (shape, None) for name, shape in found.items()}
        self._check_shapes(step, {name: shape for name, (shape, _) in saved.items()}, like)
        position = _read_json(path := directory / "position" / "metadata")
        # The other processes were given no position.
        if tables and tables[0]["position"] != _json_digest(position):
            raise ValueError(f"{path} is not as it was written, by its digest")

        def restored(dtype_of: Callable[[str, Any], Any]) -> Any:
            def kind(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
                dtype = dtype_of(_name(path), leaf)
                return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

            abstract = jax.tree_util.tree_map_with_path(kind, like)
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            return self._manager.restore(step, args=args)["state"]

        state = restored(lambda name, leaf: saved[name][1] or leaf.dtype)
        if difference := _difference(directory / "state", state, tables):
            del state  # An error would hold it, in device memory, while another checkpoint is read.
            raise ValueError(difference)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(like)]
        if dtypes != [leaf.dtype for leaf in jax.tree.leaves(state)]:  # A setting changed them.
            state = restored(lambda name, leaf: leaf.dtype)
        return state, position

    def _remedy(self, step: int, like: Any) -> str:
        """The remedy of a damaged checkpoint: the intact one before it, or else after it; each is read to know."""
        steps = self.steps()
        for other in [*(s for s in reversed(steps) if s < step), *(s for s in steps if s > step)]:
            try:
                self._read(other, like)
            except CheckpointError:
                continue
            if other > step:
                return f"checkpoint {other} is intact"
            return (
                f"checkpoint {other} is intact: `train --resume --fallback` continues from it, other verbs take its "
                "number"
            )
        return "no other checkpoint is intact: restore a copy, or start in another --workdir"

    def _put_aside(self, steps: list[int]) -> None:
        """Moves checkpoints into directories of the workdir, or the bucket's directory, that nobody reads."""
        if jax.process_index() == 0:
            for step in steps:
                place = self._directory if self._in_bucket else self._directory.parent
                aside = place / DAMAGED.format(step)
                aside.rmtree(missing_ok=True)
                source = self._directory / str(step)
                if not self._in_bucket:
                    source.rename(aside)
                    continue
                store, path = fsspec.url_to_fs(str(source))
                store.copy(path, str(aside), recursive=True)  # s3fs moves no directory.
                source.rmtree()
        multihost_utils.sync_global_devices("damaged checkpoints are put aside")
        self._manager.reload()

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

    def _check_shapes(self, step: int, saved: dict[str, tuple[int, ...]], like: Any) -> None:
        wanted = _shapes(like)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"checkpoint {step} in {self._directory} does not fit: {name} has shape "
                    f"{saved.get(name, 'nothing')}, the model of the config needs {wanted.get(name, 'nothing')}"
                )


class _DamagedError(CheckpointError, sealed.DamagedError):
    """A checkpoint that is not as it was written."""


@dataclasses.dataclass
class _Best:
    """Orbax's policy that preserves the best step."""

    best: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = self.best()
        return [checkpoint.step == best for checkpoint in checkpoints]


def _check_metadata(directory: Any) -> None:
    """Raises DamagedError where the metadata of a step is no object: Orbax reads it before anything else."""
    for path in sorted(directory.glob("[0-9]*/_CHECKPOINT_METADATA")):
        try:
            found = json.loads(path.read_text())
        except ValueError:
            continue  # Orbax does without.
        if not isinstance(found, dict):
            raise sealed.DamagedError(f"{path} is damaged: it is no JSON object; delete {path}")


class _DigestsHandler(ocp.JsonCheckpointHandler):
    """Orbax's handler of digests: each process writes a file of its own, computed in the background."""

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> list[Any]:
        async def write() -> None:
            process = {"process": jax.process_index(), "num_processes": jax.process_count()}
            path = directory / f"process_{jax.process_index()}.json"
            path.write_text(json.dumps(sealed.sealed(process | args.table())))

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="digests")]


@ocp.args.register_with_handler(_DigestsHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _Digests(ocp.args.CheckpointArgs):
    table: Callable[[], dict[str, Any]]


def shards_on_host(state: Any) -> dict[str, tuple[Any, list[tuple[Place, np.ndarray]]]]:
    """Name → (tensor's shape and dtype, the shards of it that this process holds first, with their places)."""
    leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    firsts = {
        name: [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        for name, leaf in leaves.items()
    }
    for shards in firsts.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    return {
        name: (
            jax.ShapeDtypeStruct(leaves[name].shape, leaves[name].dtype),
            [(shard.index, np.asarray(shard.data)) for shard in shards],
        )
        for name, shards in firsts.items()
    }


def digests_of(tensors: dict[str, tuple[Any, list[tuple[Place, np.ndarray]]]]) -> dict[str, Any]:
    """Name → {shape, dtype, shards: {place: SHA-256}}."""
    return {
        name: {
            "shape": kind.shape,
            "dtype": str(kind.dtype),
            "shards": {_text(place, kind.shape): tensor_digest(data) for place, data in shards},
        }
        for name, (kind, shards) in tensors.items()
    }


def _first_words(error: Exception) -> str:
    """An error of TensorStore without its specification, of which the tensor is named; another one as it is."""
    said, *specification = re.split(r" (?:\[tensorstore_spec|See full TensorStore)", str(error))
    names = re.findall(r"'path': '([^/'][^']*)/'", "".join(specification))
    return said + (f" Its tensor is {names[0]}" if names else "")


def _read_tables(directory: epath.Path, step: int) -> list[dict[str, Any]]:
    """The tables of digests of a checkpoint, one a process, or []; raises ValueError for a wrong or missing one."""
    if not directory.exists():
        return []
    first = _read_table(directory, 0, step)
    return [first, *(_read_table(directory, p, step) for p in range(1, first["num_processes"]))]


def _read_table(directory: epath.Path, process: int, step: int) -> dict[str, Any]:
    path = directory / f"process_{process}.json"
    table = _read_json(path)
    if (found := (table.get("step"), table.get("process"))) != (step, process):
        raise ValueError(f"{path} is of step and process {found}, expected {(step, process)}")
    return table


def _read_json(path: epath.Path) -> dict[str, Any]:
    """Raises ValueError, with the file's name, where it is no JSON object or has the seal of another one."""
    try:
        return sealed.unsealed(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _difference(directory: epath.Path, state: Any, tables: list[dict[str, Any]]) -> str:
    """A sentence, with the names of directory and tensor, where a shard here differs from its digest, else ""."""
    leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}

    def of_tensor(name: str) -> str:
        leaf = leaves[name]
        written = dict(p for table in tables for p in table["tensors"][name]["shards"].items())
        shards = {_text(s.index, leaf.shape): s.data for s in leaf.addressable_shards}
        if not shards.keys() <= written.keys():  # It was written in other shards.
            if not leaf.is_fully_addressable:
                leaf = multihost_utils.process_allgather(leaf, tiled=True)
            shards = {place: np.asarray(leaf)[_place(place)] for place in written}
        for place, data in shards.items():
            if (found := tensor_digest(np.asarray(data))) != written[place]:
                return f"{directory}: tensor {name} has digest {found[:12]}, was written with {written[place][:12]}"
        return ""

    if not tables:
        return ""
    if jax.process_count() > 1:  # All gather in one order.
        return next(filter(None, list(map(of_tensor, leaves))), "")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return next(filter(None, pool.map(of_tensor, leaves)), "")


def _text(place: Place, shape: tuple[int, ...]) -> str:
    """ "0:4,8:16" for the slices of a shard; "" of a scalar."""
    ranges = (part.indices(size)[:2] for part, size in zip(place, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop in ranges)


def _place(text: str) -> Place:
    """The inverse of `_text`."""
    ranges = (part.split(":") for part in text.split(",") if part)
    return tuple(slice(int(start), int(stop)) for start, stop in ranges)


def _json_digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _name(path: Any) -> str:
    """The name of a leaf, which does not depend on the types of containers."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path): tuple(leaf.shape) for path, leaf in flat}
