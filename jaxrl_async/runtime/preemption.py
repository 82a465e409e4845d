"""Graceful preemption: finish the step, checkpoint, exit 75.

The first signal, or an output that nobody reads any more, sets a flag, which the learner's loop or the supervisor
reads. A second signal, or the end of the grace period, ends the process. Independent of roles, checkpoints and
schedulers.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

CLEANUP_SECS = 6.0  # for the children of a process that is interrupted after its grace period
ASSUMED_BYTES_PER_SEC = 1e9  # write rate before one is measured
PREEMPTED = os.EX_TEMPFAIL  # 75: the run is not done, and the same command resumes it

log = logging.getLogger(__name__)


class StopRequest:
    """Whether a signal requested that this process stop, or its terminal or pipe is gone."""

    def __init__(self, *, grace_secs: float):
        """Listens to no signal yet.

        Args:
          grace_secs: grace period, from the first signal to the forced exit.
        """
        self._grace_secs = grace_secs
        self._signals: tuple[int, ...] = ()
        self._cause = ""

    def listen(self, *signals: int) -> None:
        """Installs the handlers of signals; in the main thread only. With SIGHUP, stdout and stderr are watched too.

        A process that ignores SIGHUP, as under nohup, goes on.
        """
        self._signals += signals
        for number in signals:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def received(self) -> bool:
        """Whether it is to stop."""
        if not self._cause and signal.SIGHUP in self._signals:
            for name in ("stdout", "stderr"):
                if _is_closed(getattr(sys, name)):
                    self._begin(f"{name} is closed")
        return bool(self._cause)

    def _handle(self, number, frame) -> None:
        # A terminal that closes sends several: the shell's and the system's.
        if self._cause and number == signal.SIGHUP:
            return
        if self._cause:
            # What the main thread waits for on its way out, a checkpoint's last bytes, is bounded too.
            threading.Thread(target=_exit_soon, name="exit", daemon=True).start()
            raise SystemExit(PREEMPTED)
        self._begin(signal.Signals(number).name)

    def _begin(self, cause: str) -> None:
        self._cause = cause
        # A handler runs between any two lines of the main thread: logging here could interrupt logging.
        threading.Thread(target=self._enforce, name="preemption", daemon=True).start()

    def _enforce(self) -> None:
        log.warning("%s: stopping after this step, or in %g s", self._cause, self._grace_secs)
        time.sleep(self._grace_secs)
        log.error("still running %g s after %s: exiting", self._grace_secs, self._cause)
        os.kill(os.getpid(), self._signals[0])  # The main thread exits, and ends its children.
        _exit_soon()  # It may be in a call that no signal interrupts.


class _Output:
    """A text stream that may be closed at its other end: text that cannot be written is dropped."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def outputs_may_close() -> Iterator[None]:
    """Lets stdout and stderr lose their terminal, or the reader of their pipe, without an error."""
    null = open(os.devnull, "w")  # where a process is started without them
    out, err = (_Output(stream or null) for stream in (sys.stdout, sys.stderr))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):  # type: ignore[type-var]
            yield
    finally:
        # The exit writes what is left in their buffers.
        for stream in filter(_is_closed, (out, err)):
            os.dup2(null.fileno(), stream.fileno())
        null.close()


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


def _is_closed(stream: TextIO | _Output) -> bool:
    """Whether nobody can read what is written to a stream: its pipe has no reader, or its terminal is gone."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # It is no file.
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
