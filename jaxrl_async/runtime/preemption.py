"""Graceful preemption: finish the step, checkpoint, exit 75.

The first signal sets a flag, which the learner's loop or the supervisor reads. A second signal, or the end of the grace
period, ends the process. Independent of roles, checkpoints and schedulers.
"""

import logging
import os
import signal
import threading
import time

CLEANUP_SECS = 6.0  # for the children of a process that is interrupted after its grace period
ASSUMED_BYTES_PER_SEC = 1e9  # write rate before one is measured
PREEMPTED = os.EX_TEMPFAIL  # 75: the run is not done, and the same command resumes it

log = logging.getLogger(__name__)


class StopRequest:
    """Whether a signal requested that this process stop."""

    def __init__(self, *, grace_secs: float):
        """Listens to no signal yet.

        Args:
          grace_secs: grace period, from the first signal to the forced exit.
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
            # What the main thread waits for on its way out, a checkpoint's last bytes, is bounded too.
            threading.Thread(target=_exit_soon, name="exit", daemon=True).start()
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
        _exit_soon()  # It may be in a call that no signal interrupts.


def plan(num_bytes: int, bytes_per_sec: float | None, grace_secs: float) -> tuple[str, bool]:
    """The time that a graceful stop needs of its grace period, in words, and whether that fits.

    Args:
      num_bytes: of a checkpoint.
      bytes_per_sec: measured rate of writing it; None: ASSUMED_BYTES_PER_SEC.
      grace_secs: checkpoint.grace_secs.
    """
    rate = bytes_per_sec or ASSUMED_BYTES_PER_SEC
    secs = num_bytes / rate
    how = "measured" if bytes_per_sec else "assumed until one is written"
    text = (
        f"at SIGTERM: the step under way, then a checkpoint of {num_bytes / 1e9:.3g} GB at "
        f"{rate / 1e9:.3g} GB/s ({how}): {secs:.3g} s of checkpoint.grace_secs = {grace_secs:g}"
    )
    if secs < grace_secs:
        return text, True
    advice = "raise it, and the grace period of the scheduler with it"
    return f"{text}: does not fit, a preempted run would resume from an older one; {advice}", False


def _exit_soon() -> None:
    time.sleep(CLEANUP_SECS)
    logging.shutdown()
    os._exit(PREEMPTED)
