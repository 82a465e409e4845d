"""Versions: a training state becomes the weights that servers sample with.

The learner copies and casts on the device and goes on; gathering and writing happen in the publisher's thread.
With several processes each gathers with the others before it goes on, and its thread writes a part.
An experiment may delay the servers: each version is written, and an older one is handed out.
"""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_async.learner import processes
from jaxrl_async.learner.train_step import TrainState
from jaxrl_async.models import hf, transformer
from jaxrl_async.queue.records import QueueStatus, ResumePoint
from jaxrl_async.weights.publisher import Publisher
from jaxrl_async.weights.store import WeightStore

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Delay:
    """How much older than the published version n the weights of the servers are.

        held(n) = max(0, n − d),    d = D, or d ~ uniform{0 … D} by (seed, n)

    Drawn delays let the servers go back to older weights than they had.
    """

    max_steps: int  # D ≥ 0; 0 for none
    uniform: bool  # d is drawn anew for every version
    seed: int  # ≥ 0, of the draws

    def held(self, version: int) -> int:
        """The version that the servers are to hold when `version` is published."""
        steps = self.max_steps
        if self.uniform:
            steps = int(np.random.default_rng([self.seed, version]).integers(steps + 1))
        return max(0, version - steps)


class Versions:
    """Hands versions to the publisher, one push in flight at a time."""

    def __init__(
        self,
        publisher: Publisher,
        store: WeightStore,
        *,
        config: transformer.ModelConfig,
        dtype: str,
        timeout_secs: float,
        delay: Delay,
        process: int = 0,
        num_processes: int = 1,
    ):
        """Publishes nothing yet.

        Args:
          publisher: pushes to the servers; in a process other than 0 a FollowerPublisher.
          store: where versions are written. It keeps delay.max_steps + 2 of them or more: a late server may still
            be reading what the push before gave it.
          config: of the model.
          dtype: of the written tensors.
          timeout_secs: bound on every wait for a push.
          delay: which version the servers are given; every version must be published then, without a gap.
          process: of the learner, this one.
          num_processes: of the learner; each writes its part of a version.
        """
        self._publisher = publisher
        self._store = store
        self._config = config
        self._dtype = dtype
        self._timeout_secs = timeout_secs
        self._delay = delay
        self._process = process
        self._num_processes = num_processes
        self._version: int | None = None
        self._run_epoch = 0
        self._restored = -1  # published by the learner before; up to it, nothing is published again
        self._known = False  # whether its files are here, to compare with

    def resume(
        self, version: int, state: TrainState, status: QueueStatus, resume_point: ResumePoint
    ) -> None:
        """Starts the push of what the servers are to hold when a learner was restored.

        Where a later version was published already, it is given to the servers again, from its files: published
        versions never go back, and the steps up to it are trained again without a push.

        Args:
          version: of the state.
          state: restored.
          status: of the queue.
          resume_point: of the checkpoint, for a queue that knows nothing yet.

        Raises:
          ValueError: the queue's journal ends before the checkpoint.
        """
        if status.v_pub is None:
            self.publish(version, self.snapshot(state), resume_point)
            return
        if status.committed_step < version:
            raise ValueError(
                f"the checkpoint is of step {version}, but the queue's journal ends at step {status.committed_step}: "
                "it was not written to the disk in full. Remove the later checkpoints, or the journal"
            )
        self._run_epoch = status.run_epoch
        if status.v_pub <= version:
            self.publish(version, self.snapshot(state))
            return
        self._restored, self._known = status.v_pub, status.v_pub in self._store.versions()
        if not self._known:
            self._restored -= 1  # It is published when it was trained again.
            log.warning(
                "the weights of version %d, which was published, are no longer in the store: servers wait until it "
                "was trained again",
                status.v_pub,
            )
            return
        log.info(
            "servers are given version %d, which was published; steps %d to %d are trained again",
            status.v_pub,
            version + 1,
            status.committed_step,
        )
        self._push(self._restored, lambda: self._store.path(self._held(self._restored)), None)

    def snapshot(self, state: TrainState) -> Iterable[tuple[str, np.ndarray]]:
        """The tensors that this process writes of a state, which may be donated: to be drawn once, in any thread."""
        part = {"part": self._process, "num_parts": self._num_processes}
        copy = _cast(state.params, self._dtype)
        tensors = hf.to_tensors(copy, self._config, self._dtype, **part)
        # To gather is a program of all processes, which each must dispatch at the same place among its others.
        return tensors if self._num_processes == 1 else list(tensors)

    def publish(
        self,
        version: int,
        snapshot: Iterable[tuple[str, np.ndarray]],
        resume_point: ResumePoint | None = None,
    ) -> None:
        """Starts the push of a version; waits first for the push before it.

        Args:
          version: ≥ 0.
          snapshot: its weights, from `snapshot`.
          resume_point: where a new queue starts from, at the first publication after a restore.
        """
        if version == self._restored and self._known:
            self._compare(version, snapshot)
        if version > self._restored:
            self._push(version, functools.partial(self._write, version, snapshot), resume_point)

    def _push(
        self,
        version: int,
        write: Callable[[], pathlib.Path | None],
        resume_point: ResumePoint | None,
    ) -> None:
        self._publisher.publish(
            version,
            write,
            timeout_secs=self._timeout_secs,
            resume_point=resume_point,
            run_epoch=self._run_epoch,
        )
        self._version = version

    def _compare(self, version: int, snapshot: Iterable[tuple[str, np.ndarray]]) -> None:
        """Writes a version again that was published; where it came out otherwise, a new run epoch begins with it."""
        before = self._store.manifest(version)["digest"]
        path = self._write(version, snapshot)
        if self._process != 0 or (digest := self._store.manifest(version)["digest"]) == before:
            return
        self._run_epoch += 1
        log.warning(
            "fork: version %d, trained again, has digest %s, and was published with %s (another device count, "
            "process count, setting or library?). Run epoch %d begins: the servers are given it again",
            version,
            digest[:12],
            before[:12],
            self._run_epoch,
        )
        self._push(version, lambda: path, None)

    def wait(self, should_stop: Callable[[], bool]) -> None:
        """Waits until the servers hold the newest version, or what a delay makes of it, or `should_stop` says so."""
        if self._version is not None:
            self._publisher.wait(
                self._version, timeout_secs=self._timeout_secs, should_stop=should_stop
            )

    def check(self) -> None:
        """Raises what stopped the publisher, if anything did."""
        self._publisher.check()

    def metrics(self) -> dict[str, float]:
        """weights/version, weights/push_secs and weights/bytes of the last push; with a delay also weights/delay."""
        metrics = self._publisher.metrics()
        if not self._delay.max_steps:
            metrics.pop("weights/delay", None)
        return metrics

    def _write(
        self, version: int, tensors: Iterable[tuple[str, np.ndarray]]
    ) -> pathlib.Path | None:
        """Writes a version with the other processes; process 0 returns the directory of what servers are to hold."""
        if self._process == 0:
            self._store.begin(version)
        processes.barrier(f"version {version} is begun", timeout_secs=self._timeout_secs)
        self._store.write_part(version, self._process, tensors)
        processes.barrier(f"version {version} is written", timeout_secs=self._timeout_secs)
        if self._process != 0:
            return None
        self._store.finish(version, self._num_processes, hf.write_config(self._config))
        return self._store.path(self._held(version))

    def _held(self, version: int) -> int:
        """The version that servers are to hold, or the nearest that is left of it."""
        wanted = self._delay.held(version)
        held = min(kept for kept in self._store.versions() if kept >= wanted)
        if held != wanted:
            # After a restore: the run that was left had gone on, and its store lost older versions.
            log.warning(
                "version %d is published with the weights of version %d: those of version %d, which its delay "
                "asks for, are no longer in the store",
                version,
                held,
                wanted,
            )
        return held


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params: nnx.State, dtype: str) -> nnx.State:
    """A copy, never the same buffers: the learner donates its own to the next update."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)
