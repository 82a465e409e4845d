"""The lock of a device that a learner and engines share: one side at a time, in the order in which they ask."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class DeviceLock:
    """A fair lock that counts the seconds of each side's waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._condition = threading.Condition()
        self._asked: collections.deque[object] = collections.deque()  # the first has its turn
        self._secs: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def held_by(self, side: str) -> Iterator[None]:
        """Held by a side. It ends with the context, so nobody waits for longer than those before hold it."""
        turn, since = object(), self._clock()
        with self._condition:
            self._asked.append(turn)
        try:
            with self._condition:
                self._condition.wait_for(lambda: self._asked[0] is turn)
                self._secs[side] += self._clock() - since
            yield
        finally:  # Also where an interrupt ends the wait: nobody waits behind a side that has gone.
            with self._condition:
                self._asked.remove(turn)
                self._condition.notify_all()

    def pop_waits(self) -> dict[str, float]:
        """Side → seconds of its waits that ended since the last call."""
        with self._condition:
            secs, self._secs = self._secs, collections.Counter()
        return dict(secs)
