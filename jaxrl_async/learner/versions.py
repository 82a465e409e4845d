"""Versions: turns a training state into the weights that servers sample with.

The learner copies and casts on the device and continues; the publisher's thread gathers and writes. With several
processes, all gather together before they continue, and the thread of each writes a part, or process 0's all of it. An
experiment may delay the servers: each version is written, and an older one is pushed.
"""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_async.learner import processes
from jaxrl_async.learner.train_step import TrainState
from jaxrl_async.models import hf, transformer
from jaxrl_async.publishing.publisher import Publisher
from jaxrl_async.records import QueueStatus, ResumePoint
from jaxrl_async.sealed import DamagedError
from jaxrl_async.versions.memory import MemoryStore, MemoryVersion
from jaxrl_async.versions.store import ADAPTER, StoredVersion, WeightStore, WeightStoreError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Delay:
    """The delay of the servers' weights behind the published version n.

        held(n) = max(0, n − d),    d = D, or d ~ uniform{0 … D} by (seed, n)

    With drawn delays the servers may go back to older weights.
    """

    max_steps: int  # D ≥ 0; 0 for none
    uniform: bool  # draw d for every version
    seed: int  # ≥ 0, of the draws

    def held(self, version: int) -> int:
        """The version that the servers shall hold when `version` is published."""
        steps = self.max_steps
        if self.uniform:
            steps = int(np.random.default_rng([self.seed, version]).integers(steps + 1))
        return max(0, version - steps)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A process's part of a version."""

    # By their names in files; iterate once, in any thread.
    tensors: Iterable[tuple[str, np.ndarray]]
    scores: jax.Array | None  # as of `TrainStep.score_prompts`


@dataclasses.dataclass(eq=False, repr=False)
class Versions:
    """Passes versions to the publisher, one push in flight at a time.

    Whatever the stores of the other processes hold, they write a version when process 0 does.
    """

    publisher: Publisher  # a FollowerPublisher in processes other than 0
    # It keeps at least delay.max_steps + 2 versions: a late server may still read that of the push before.
    store: WeightStore | MemoryStore
    _: dataclasses.KW_ONLY
    config: transformer.ModelConfig
    dtype: str  # of versions
    base: str = ""  # name of the frozen weights beside adapters, in the files of a version
    timeout_secs: float  # deadline of every wait for a push
    delay: Delay  # of the servers; with one every version must be published, without a gap
    # trained parameters → the table of `publishing.scored`, or None where no server is compared with it
    score: Callable[[nnx.State], jax.Array | None] = lambda params: None
    process: int = 0
    num_processes: int = 1
    num_parts: int = 1  # of a version, by the first processes; several need a store that they share

    def __post_init__(self):
        self._version: int | None = None
        self._run_epoch = 0
        # The last version that an earlier learner published; up to it nothing is published again.
        self._restored = -1
        self._known = False  # whether its files are still in the store, for comparison

    def begin(self, state: TrainState, status: QueueStatus) -> None:
        """Starts the first push of a new run, of version 0.

        Raises:
          DamagedError: the queue's journal is of another run.
        """
        if self.process == 0 and status.v_pub is not None:
            raise DamagedError(
                f"this run begins, and the queue's journal is of one that has published version {status.v_pub}, and "
                "whose checkpoints are gone or elsewhere: name another --workdir or journal.path, or move the journal "
                "away, with its -wal and -shm"
            )
        self.publish(0, self.snapshot(state))

    def resume(
        self,
        version: int,
        state: TrainState,
        status: QueueStatus,
        resume_point: ResumePoint,
        *,
        forked: bool = False,
    ) -> None:
        """Starts the first push after a learner was restored to the state of a version.

        If a later version was published already, the servers get that version again, from its files: published
        versions never go back, and the steps up to it are trained again without a push. If it is this version, its
        weights are compared with those that were published.

        Args:
          resume_point: of the checkpoint, for a queue without a journal.
          forked: later checkpoints were damaged: a new run epoch begins.

        Raises:
          DamagedError: the queue's journal ends before the checkpoint.
        """
        self._run_epoch = status.run_epoch + forked
        point = None
        if status.v_pub is None:
            log.warning(
                "the queue has no journal of the %d steps before: replays and reports know those from here on",
                version,
            )
            point = resume_point
        elif status.committed_step < version:
            raise DamagedError(
                f"the checkpoint is of step {version}, but the queue's journal ends at step {status.committed_step}: "
                "its end did not reach the disk, or is damaged. Remove the later checkpoints, or move the journal "
                "away, with its -wal and -shm: the run then goes on from the checkpoint with a new one"
            )
        if status.v_pub in (None, version) and self._is_kept(version):
            path = self._compare(version, self.snapshot(state))
            self._push(version, lambda: path, point)
            return
        if status.v_pub is None or status.v_pub <= version:
            self.publish(version, self.snapshot(state), point)
            return
        known = self._is_kept(status.v_pub)
        self._restored = status.v_pub
        self._known = known and self._is_kept(self._held(status.v_pub), whole=True)
        if not self._known:
            self._restored -= 1  # It is published after it is trained again.
            log.warning(
                "the weights of published version %d are no longer in the store: servers wait until it is trained "
                "again",
                status.v_pub,
            )
            return
        log.info(
            "servers get published version %d again; steps %d to %d are trained again without a push",
            status.v_pub,
            version + 1,
            status.committed_step,
        )
        self._push(self._restored, self._read_restored, None)

    def _read_restored(self) -> Any:
        """The version of an earlier learner, without its scores: the settings that they are of may have changed."""
        files = self.store.get(self._held(self._restored))
        if isinstance(files, StoredVersion):
            files.forget_scores()
        return files

    def snapshot(self, state: TrainState) -> "Snapshot":
        """This process's part of a state, which may be donated afterwards."""
        # All gather all tensors; those that write none drop them.
        part = {"part": self.process, "num_parts": self.num_parts}
        copy = _cast(state.params, self.dtype)
        tensors = hf.to_tensors(copy, self.config, self.dtype, **part)
        # Scoring and gathering are programs of all processes: each dispatches them at one place among its others.
        scores = self.score(state.params)
        return Snapshot(tensors if self.num_processes == 1 else list(tensors), scores)

    def publish(
        self,
        version: int,
        snapshot: Any,
        resume_point: ResumePoint | None = None,
    ) -> None:
        """Starts the push of a version, after the push before it is done.

        Args:
          version: ≥ 0.
          snapshot: its weights, from `snapshot`.
          resume_point: start of a new queue, for the first publication after a restore.
        """
        if version == self._restored and self._known:
            epoch, path = self._run_epoch, self._compare(version, snapshot)
            if self._run_epoch != epoch:
                self._push(version, lambda: path, None)
        if version > self._restored:
            self._push(version, functools.partial(self._write, version, snapshot), resume_point)

    def _push(
        self,
        version: int,
        write: Callable[[], pathlib.Path | None],
        resume_point: ResumePoint | None,
    ) -> None:
        self.publisher.publish(
            version,
            write,
            timeout_secs=self.timeout_secs,
            resume_point=resume_point,
            run_epoch=self._run_epoch,
        )
        self._version = version

    def _is_kept(self, version: int, *, whole: bool = False) -> bool:
        """Whether the store has a version, whose manifest (or all of it) is sound."""
        if version not in self.store.versions():
            return False
        try:
            self.store.manifest(version)
            if whole:
                self.store.get(version).verify()
        except WeightStoreError as error:
            log.warning("%s: its files are not used", error)
            return False
        return True

    def _compare(self, version: int, snapshot: Any) -> StoredVersion | None:
        """Writes a published version again. If its weights differ, a new run epoch begins with it."""
        before = self.store.manifest(version)["digest"]
        path = self._write(version, snapshot)
        digest = self.store.manifest(version)["digest"]
        if self.process == 0 and digest != before:
            self._run_epoch += 1
            log.warning(
                "fork: version %d has digest %s here, but was published with %s (another device count, process count, "
                "setting or library?). Run epoch %d begins and the version is pushed again",
                version,
                digest[:12],
                before[:12],
                self._run_epoch,
            )
        return path

    def wait(self, should_stop: Callable[[], bool]) -> None:
        """Waits until the servers hold the newest version, or its delayed one, or until `should_stop`."""
        if self._version is not None:
            self.publisher.wait(
                self._version, timeout_secs=self.timeout_secs, should_stop=should_stop
            )

    def check(self) -> None:
        """Raises the failure of the publisher, if it failed."""
        self.publisher.check()

    def metrics(self) -> dict[str, float]:
        """weights/version, weights/push_secs and weights/bytes of the last push; with a delay, weights/delay too."""
        metrics = self.publisher.metrics()
        if not self.delay.max_steps:
            metrics.pop("weights/delay", None)
        return metrics

    def _write(self, version: int, snapshot: "Snapshot") -> StoredVersion | None:
        """Writes a version with the other processes; process 0 returns the version to push."""
        if self.process == 0:
            self.store.begin(version)
        processes.barrier(f"version {version} is begun", timeout_secs=self.timeout_secs)
        if self.process < self.num_parts:
            self.store.write_part(version, self.process, snapshot.tensors)
        processes.barrier(f"version {version} is written", timeout_secs=self.timeout_secs)
        if self.process != 0:
            return None
        if lora := self.config.lora:
            config, prefix = hf.write_adapter_config(lora, self.base), ADAPTER
        else:
            config, prefix = hf.write_config(self.config), ""
        scores = None if snapshot.scores is None else np.asarray(snapshot.scores)
        self.store.finish(version, self.num_parts, config, prefix=prefix, scores=scores)
        return self.store.get(self._held(version))

    def _held(self, version: int) -> int:
        """The version to push, or the oldest newer one if the store has lost it."""
        wanted = self.delay.held(version)
        held = min(kept for kept in self.store.versions() if kept >= wanted)
        if held != wanted:
            # After a restore: the run had gone on after the checkpoint, and its store pruned older versions.
            log.warning(
                "version %d is published with the weights of version %d: those of version %d, by its delay, are no "
                "longer in the store",
                version,
                held,
                wanted,
            )
        return held


class MemoryVersions(Versions):
    """Versions for engines in this process, in a MemoryStore. The train step keeps the parameters: none is copied."""

    def snapshot(self, state: TrainState) -> nnx.State:
        """The trained parameters themselves, or a copy in the dtype of versions where that is another."""
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state.params)}
        return state.params if dtypes == {self.dtype} else _cast(state.params, self.dtype)

    def _write(self, version: int, params: nnx.State) -> MemoryVersion:
        total_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        self.store.put(version, params, total_bytes)
        return self.store.get(self._held(version))


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params: nnx.State, dtype: str) -> nnx.State:
    """A copy in buffers of its own: the learner donates the parameters to the next update."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)
