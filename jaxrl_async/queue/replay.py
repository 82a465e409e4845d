"""A queue that replays the journal of a finished run: the same chunks, in the same steps."""

from collections.abc import Callable, Iterator

from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.records import NO_STATUS, QueueStatus, ResumePoint
from jaxrl_async.types import Chunk


class ReplayQueue:
    """A `GroupSource` that reads a journal, up to a step. It never waits, and changes nothing."""

    def __init__(self, reader: JournalReader, last: int):
        self._reader, self._last = reader, last

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        """Yields the chunks of a step as they were. Raises JournalError: its groups are forgotten or damaged."""
        for index in range(self._reader.num_chunks(step) if step <= self._last else 0):
            groups, last = self._reader.chunk(step, index)
            yield Chunk(step, index, groups, last)

    def commit(self, step: int) -> ResumePoint:
        return ResumePoint(step, 0, (), {}, {})

    def status(self) -> QueueStatus:
        return NO_STATUS
