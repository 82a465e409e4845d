"""The queue as the learner's loop sees it."""

from collections.abc import Callable, Iterator
from typing import Protocol

from jaxrl_async.records import QueueStatus, ResumePoint
from jaxrl_async.types import Chunk


class GroupSource(Protocol):
    """A source of groups, step by step: all that `learner.train` calls on its queue.

    `LearnerQueue` reads the queue service, `FollowerQueue` reads it without committing, `ReplayQueue` reads the journal
    of a finished run. Steps are numbered from 1, and leased and committed in order.
    """

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        """Yields the chunks of a step, in order: B groups together, the last chunk marked as `last`.

        A step that is leased again gives the same chunks.

        Args:
          step: ≥ 1, not above the last step leased + 1.
          timeout_secs: bound on the wait for one chunk.
          should_stop: polled while the first chunk is waited for, and not where it is there. With True the step has
            no chunk.

        Raises:
          TimeoutError: names the groups that are missing.
        """
        ...

    def commit(self, step: int) -> ResumePoint:
        """Commits a trained step, once all its chunks were leased; returns the resume point for its checkpoint."""
        ...

    def status(self) -> QueueStatus:
        """Counts, returns and reports so far, for the metrics of a step; `NO_STATUS` where there are none."""
        ...
