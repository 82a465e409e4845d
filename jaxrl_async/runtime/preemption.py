"""Graceful preemption: finish the step, checkpoint, exit 75.

The first signal sets a flag, which the learner's loop or the supervisor reads. A second signal, or the end of the grace
period, ends the process. Independent of roles, checkpoints and schedulers.
"""

import logging
import os
import signal
import threading
import time

GRACE_SECS = 60.0  # grace period: from the first signal to the forced exit
CLEANUP_SECS = 6.0  # for the children of a process that is interrupted after its grace period
PREEMPTED = os.EX_TEMPFAIL  # 75: the run is not done, and the same command resumes it

log = logging.getLogger(__name__)


class StopRequest:
    """Whether a signal requested that this process stop."""

    def __init__(self, *, grace_secs: float = GRACE_SECS):
        """Listens to no signal yet.

        Args:
          grace_secs: grace period, from the first signal.
        """
        self._grace_secs = grace_secs
        self._signal: int | None = None

    def listen(self, *signals: int) -> None:
        """Installs the handlers of signals; in the main thread only."""
        for number in signals:
            signal.signal(number, self._handle)

    def received(self) -> bool:
        """Whether a signal came."""
        return self._signal is not None

    def _handle(self, number, frame) -> None:
        if self.received():
            raise SystemExit(PREEMPTED)
        self._signal = number
        # A handler runs between any two lines of the main thread: logging here could interrupt logging.
        threading.Thread(target=self._enforce, name="preemption", daemon=True).start()

    def _enforce(self) -> None:
        name = signal.Signals(self._signal).name
        log.warning("%s: stopping after this step, or in %g s", name, self._grace_secs)
        time.sleep(self._grace_secs)
        log.error("still running %g s after %s: exiting", self._grace_secs, name)
        os.kill(os.getpid(), self._signal)  # The main thread exits, and ends its children.
        time.sleep(CLEANUP_SECS)
        logging.shutdown()
        os._exit(PREEMPTED)
