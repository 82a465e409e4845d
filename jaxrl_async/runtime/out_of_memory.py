"""The end of a process whose memory is used up.

gRPC, asyncio and the ends of threads log a MemoryError and go on: their callers would wait for ever. So the process
ends at the first one, as one that the kernel ends: its supervisor starts it again. So does one without the address
space of a thread, which gRPC's core goes on without, and answers nothing.
"""

import contextlib
import logging
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

ROOM_BYTES = 16 << 20  # a thread's stack, and its heap
POLL_SECS = 1.0  # poll interval
MAX_FAILURES = 3  # in a row, without such room


@contextlib.contextmanager
def ends(role: str) -> Iterator[None]:
    """Meanwhile want of memory ends this process by name.

    That is a MemoryError that is logged or that a thread or a callback ends with, or ROOM_BYTES that cannot be had.
    """
    handler = _Handler(role)
    of_threads, of_callbacks = threading.excepthook, sys.unraisablehook
    logging.getLogger().addHandler(handler)
    threading.excepthook = handler.after(of_threads)
    sys.unraisablehook = handler.after(of_callbacks)
    done = threading.Event()
    watch = threading.Thread(target=handler.watch, args=(done,), name="memory", daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()
        threading.excepthook, sys.unraisablehook = of_threads, of_callbacks
        logging.getLogger().removeHandler(handler)


def end() -> NoReturn:
    """Ends this process: as killed under a supervisor, which starts it again, else with exit code 1."""
    if "JAXRL_PARENT" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


class _Handler(logging.Handler):
    def __init__(self, role: str):
        super().__init__(logging.ERROR)
        self._last_words = f"role {role} is out of memory\n".encode()  # made while there is some

    def emit(self, record: logging.LogRecord) -> None:
        self._look(record.exc_info and record.exc_info[1])

    def after(self, hook: Callable[[Any], Any]) -> Callable[[Any], None]:
        def look(args: Any) -> None:
            try:
                hook(args)
            finally:
                self._look(args.exc_value)

        return look

    def watch(self, done: threading.Event) -> None:
        failures = 0
        while not done.wait(POLL_SECS):
            try:
                mmap.mmap(-1, ROOM_BYTES).close()
                failures = 0
            except (OSError, MemoryError) as error:
                failures += 1
                if failures == MAX_FAILURES:
                    self._look(MemoryError(error))

    def _look(self, error: object) -> None:
        if isinstance(error, MemoryError):
            os.write(2, self._last_words)
            end()
