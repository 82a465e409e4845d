"""What learner processes other than 0 have where process 0 has publisher, commits and metrics.

The loop is the same for all. Process 0 alone talks to servers and changes the queue; the others follow it by the
version that the queue says is published.
"""

import concurrent.futures
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_async.queue.client import LearnerQueue
from jaxrl_async.queue.records import QueueStatus, ResumePoint, Wait
from jaxrl_async.types import Chunk

POLL_SECS = 0.05


class FollowerQueue:
    """The queue, where process 0 commits."""

    def __init__(self, queue: LearnerQueue):
        self._queue = queue

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        return self._queue.lease(step, timeout_secs, should_stop)

    def commit(self, step: int) -> ResumePoint:
        """Commits nothing. Process 0 saves its own resume point, and this one goes nowhere."""
        return ResumePoint(step, 0, (), {}, {})

    def checkpointed(self, step: int) -> None:
        """Process 0 says it."""

    def report(self, role: str, waits: Sequence[Wait]) -> None:
        self._queue.report(role, waits)

    def status(self) -> QueueStatus:
        return self._queue.status()


class FollowerPublisher:
    """Writes this process's part of a version, in a thread; "published" is what the queue calls so."""

    def __init__(self, status: Callable[[], QueueStatus]):
        """Starts nothing yet.

        Args:
          status: of the queue, `LearnerQueue.status`.
        """
        self._status = status
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._writing: concurrent.futures.Future | None = None
        self._version: int | None = None

    def publish(
        self,
        version: int,
        write: Callable[[], Any],
        *,
        timeout_secs: float,
        resume_point: ResumePoint | None = None,
        run_epoch: int = 0,
    ) -> None:
        """Starts `write`; waits first until the version before is published, as `Publisher.publish` does."""
        if self._version is not None:
            self.wait(self._version, timeout_secs=timeout_secs)
        self._version, self._writing = version, self._thread.submit(write)

    def wait(
        self, version: int, *, timeout_secs: float, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits until process 0 has published a version, or `should_stop`, asked again and again, says so.

        Raises:
          TimeoutError: it has not within timeout_secs.
          Exception: what stopped `write`.
        """
        deadline = time.monotonic() + timeout_secs
        while (published := self._status().v_pub) is None or published < version:
            self.check()
            if should_stop():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"version {version} is not published by learner process 0 after {timeout_secs:g} s: "
                    f"the queue has version {published}"
                )
            time.sleep(POLL_SECS)

    def check(self) -> None:
        """Raises what stopped `write`, if anything did."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def waits_for(self) -> str:
        return "learner process 0 to publish"

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._thread.shutdown(wait=False)


class FollowerMetrics:
    """Writes nothing."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
