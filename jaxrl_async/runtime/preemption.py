"""What a process does that is asked to leave: it goes on to a good end, at most so long, and then says "again".

The first signal sets a flag, which whoever ends steps looks at. The second one, or a deadline, ends the process.
It knows nothing of roles, checkpoints or schedulers.
"""

import logging
import os
import signal
import threading
import time

GRACE_SECS = 60.0  # from the first signal to the end, whatever the process is at
ORDERLY_SECS = 6.0  # for what is interrupted at the deadline to end its children
PREEMPTED = os.EX_TEMPFAIL  # 75: the run is not over, and the same command goes on with it

_log = logging.getLogger(__name__)


class Notice:
    """Whether this process was asked to leave."""

    def __init__(self, *, grace_secs: float = GRACE_SECS):
        """Heeds nothing yet.

        Args:
          grace_secs: from the first signal on.
        """
        self._grace_secs = grace_secs
        self._signal: int | None = None

    def heed(self, *signals: int) -> None:
        """Takes signals as the notice; in the main thread only."""
        for number in signals:
            signal.signal(number, self._take)

    def given(self) -> bool:
        """Whether a signal came."""
        return self._signal is not None

    def _take(self, number, frame) -> None:
        if self.given():
            raise SystemExit(PREEMPTED)
        self._signal = number
        # Logging here could meet itself: a handler runs between any two lines of the main thread.
        threading.Thread(target=self._end_in_time, name="preemption", daemon=True).start()

    def _end_in_time(self) -> None:
        _log.warning(
            "asked to leave by %s: at the end of the step, or in %g s",
            signal.Signals(self._signal).name,
            self._grace_secs,
        )
        time.sleep(self._grace_secs)
        _log.error("still here %g s after %s", self._grace_secs, signal.Signals(self._signal).name)
        os.kill(os.getpid(), self._signal)  # Where the main thread hears it, children end too.
        time.sleep(ORDERLY_SECS)
        logging.shutdown()
        os._exit(PREEMPTED)
