"""A clock of the time in which this process ran: a deadline in it does not pass while the process is stopped.

A signal, a debugger, a suspended machine or a scheduler stops a process; when it wakes, every deadline of a monotonic
clock has passed. The clock is read often, and a long time between two readings was a stop.
"""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

STOP_SECS = 2.0  # A longer time between two readings was a stop.


class ActiveClock:
    """Monotonic seconds without the stops. Its owner calls `now` more often than every STOP_SECS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._last = clock()
        self._stopped_secs = 0.0
        self.num_stops = 0  # as of the last `now`

    def now(self) -> float:
        """Seconds; the difference of two is the active time between them."""
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap > STOP_SECS:
            self._stopped_secs += gap
            self.num_stops += 1
            log.warning("this process was stopped, or its thread kept from running, %.1f s", gap)
        return now - self._stopped_secs
