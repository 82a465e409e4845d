"""Stand-ins for the publisher, queue and metrics in learner processes other than 0.

All processes run the same loop. Only process 0 talks to servers and changes the queue; the others follow the version
that the queue reports as published.
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
    """The queue without commits, which are process 0's."""

    def __init__(self, queue: LearnerQueue):
        self._queue = queue

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        return self._queue.lease(step, timeout_secs, should_stop)

    def commit(self, step: int) -> ResumePoint:
        """Commits nothing. The result is a placeholder: only process 0 saves its resume point."""
        return ResumePoint(step, 0, (), {}, {})

    def checkpointed(self, step: int) -> None:
        """Reports nothing; process 0 does."""

    def report(self, role: str, waits: Sequence[Wait]) -> None:
        self._queue.report(role, waits)

    def status(self) -> QueueStatus:
        return self._queue.status()


class FollowerPublisher:
    """Writes this process's part of a version in a thread; the queue tells when a version is published."""

    def __init__(self, status: Callable[[], QueueStatus]):
        """Starts nothing yet.

        Args:
          status: status of the queue, `LearnerQueue.status`.
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
        """Starts `write` once the version before is published, as `Publisher.publish` does."""
        if self._version is not None:
            self.wait(self._version, timeout_secs=timeout_secs)
        self._version, self._writing = version, self._thread.submit(write)

    def wait(
        self, version: int, *, timeout_secs: float, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits until process 0 has published a version, or until `should_stop`, called every POLL_SECS.

        Raises:
          TimeoutError: it is not published within timeout_secs.
          Exception: the failure of `write`.
        """
        deadline = time.monotonic() + timeout_secs
        while (published := self._status().v_pub) is None or published < version:
            self.check()
            if should_stop():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"learner process 0 has not published version {version} after {timeout_secs:g} s: "
                    f"the queue has version {published}"
                )
            time.sleep(POLL_SECS)

    def check(self) -> None:
        """Raises the failure of `write`, if it failed."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def waits_for(self) -> str:
        return "learner process 0 to publish"

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._thread.shutdown(wait=False)


class FollowerMetrics:
    """Discards metrics; process 0 writes them."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
