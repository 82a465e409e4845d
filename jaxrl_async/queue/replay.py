"""A queue that plays the journal of a run that is over: the same chunks, in the same steps.

The learner's loop runs on it as on a live one. There is nothing to wait for, and nothing is changed.
"""

from collections.abc import Callable, Iterator

from jaxrl_async.queue.admission import ResumePoint
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.queue.wire import NO_STATUS, QueueStatus
from jaxrl_async.types import Chunk


class ReplayQueue:
    """What the learner's loop needs of a `LearnerQueue`, out of a journal."""

    def __init__(self, reader: JournalReader):
        self._reader = reader

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        """The chunks of a step, as they were.

        Raises:
          JournalError: its groups are forgotten or damaged.
        """
        for index in range(self._reader.num_chunks(step)):
            groups, last = self._reader.chunk(step, index)
            yield Chunk(step, index, groups, last)

    def commit(self, step: int) -> ResumePoint:
        return ResumePoint(step, 0, (), {}, {})

    def status(self) -> QueueStatus:
        return NO_STATUS
