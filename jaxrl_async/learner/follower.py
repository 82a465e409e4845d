"""Stand-ins for the publisher, queue and metrics in learner processes other than 0.

All processes run the same loop. Only process 0 talks to servers and changes the queue; the others follow the version
that the queue reports as published.
"""

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.queue.client import LearnerQueue
from jaxrl_async.records import ResumePoint

log = logging.getLogger(__name__)

POLL_SECS = 0.5  # between two calls of should_stop during a wait


class FollowerQueue(LearnerQueue):
    """The queue without commits, which are process 0's."""

    def commit(self, step: int) -> ResumePoint:
        """Commits nothing. The result is a placeholder: only process 0 saves its resume point."""
        return ResumePoint(step, 0, (), {}, {})

    def confirm(self) -> None:
        """Checks nothing; process 0 does."""

    def checkpointed(self, step: int) -> None:
        """Reports nothing; process 0 does."""

    def snapshot(self, step: int) -> None:
        """Asks for nothing; process 0 does."""


class FollowerPublisher:
    """Writes this process's part of a version in a thread; the queue says when a version is published."""

    def __init__(self, watch: Callable[[], Iterator[int]]):
        """Starts the watch of the published version, in a thread.

        Args:
          watch: yields it at every change, `LearnerQueue.watch_version`.
        """
        self._watch = watch
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._writing: concurrent.futures.Future | None = None
        self._version: int | None = None
        self._condition = threading.Condition()  # of the next two
        self._published: int | None = None
        self._error: Exception | None = None  # of the watch
        threading.Thread(target=self._follow, name="versions", daemon=True).start()

    def _follow(self) -> None:
        try:
            for version in self._watch():
                with self._condition:
                    self._published = version
                    self._condition.notify_all()
        except Exception as error:
            log.error("the watch of the published version failed: %s", error)
            with self._condition:
                self._error = error
                self._condition.notify_all()

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
          Exception: the failure of `write` or of the watch.
        """
        active = ActiveClock()
        deadline = active.now() + timeout_secs

        def over() -> bool:
            return self._error is not None or (
                self._published is not None and self._published >= version
            )

        with self._condition:
            while not self._condition.wait_for(over, min(POLL_SECS, deadline - active.now())):
                self.check()
                if should_stop():
                    return
                if active.now() > deadline:
                    raise TimeoutError(
                        f"learner process 0 has not published version {version} after {timeout_secs:g} s: "
                        f"the queue has version {self._published}"
                    )
        self.check()

    def check(self) -> None:
        """Raises the failure of `write` or of the watch, if one failed."""
        if self._error is not None:
            raise self._error
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

    def show(self, step: int, name: str, text: str) -> None:
        pass

    def close(self) -> None:
        pass
