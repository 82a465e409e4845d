"""Python processes that can be killed, of this package's modules: what runs in them may hang, crash or leak.

A process has the variables ENVIRONMENT and those that it is given, so that no key reaches it by its environment. It
talks over stdin and stdout, in lines. Independent of what it does.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Collection
from typing import Any, Protocol, cast

START_TIMEOUT_SECS = 600.0  # A user's module may import slowly.
SLOW_SECS = 15.0  # after which a start is named
LATE_SECS = 0.1  # to read a reply that arrived in time while this event loop was late
# Beyond the bound on a call, after which a process without its parent ends itself.
ORPHAN_SECS = 5.0
CLOSE_TIMEOUT_SECS = 5.0
ENVIRONMENT = re.compile(
    "HOME|LANG|LANGUAGE|LC_[A-Z]+|LD_LIBRARY_PATH|LOGNAME|PATH|PYTHON[A-Z]+|SHELL|TERM|TMPDIR|TZ|USER"
    "|VIRTUAL_ENV|(OMP|OPENBLAS|MKL|NUMEXPR)_NUM_THREADS"
)

log = logging.getLogger(__name__)


class CallError(Exception):
    """A call of a process failed; the message says what its code did.

    Where the user's own code is the cause, `place` has the type and line of its exception, and `traceback` its text.
    """

    def __init__(self, message: str, *, place: str = "", traceback: str = ""):
        super().__init__(message)
        self.place = place
        self.traceback = traceback


class Process(Protocol):
    """A process of asyncio, with both pipes."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    pid: int

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


async def start(
    module: str, *arguments: str, environment: Collection[str] = (), max_line_bytes: int = 1 << 16
) -> Process:
    """Starts `python -m module arguments`, which finds the same modules as this process.

    Args:
      environment: names of the variables of this process that it gets, beside ENVIRONMENT.
      max_line_bytes: of a line that is read of it.
    """
    given = (name for name in os.environ if ENVIRONMENT.fullmatch(name) or name in environment)
    # -P and this path: the process finds the same modules as this one, in the same order.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={name: os.environ[name] for name in given} | {"PYTHONPATH": path},
        process_group=0,  # killed as one, without Ctrl-C from the terminal
        limit=max_line_bytes,
    )
    return cast(Process, process)


async def greeting(process: Process) -> Any:
    """The first line of a process, JSON, within START_TIMEOUT_SECS; a text says why the process cannot serve."""
    said = "process %d has not started for %g s: what it imports takes its time"
    loop = asyncio.get_running_loop()
    warning = loop.call_later(SLOW_SECS, log.warning, said, process.pid, SLOW_SECS)
    try:
        async with asyncio.timeout(START_TIMEOUT_SECS):
            line = await process.stdout.readline()
    except TimeoutError:
        return f"no answer for {START_TIMEOUT_SECS:g} s"
    finally:
        warning.cancel()
    return json.loads(line) if line else f"it ended ({await exit_of(process)})"


async def end(process: Process) -> None:
    """Kills a process and all that it started, within CLOSE_TIMEOUT_SECS."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_SECS):
            await process.stdout.read()
            await process.wait()


async def ending(process: Process, memory_bytes: int) -> str:
    """In words: how a process with this bound on its memory ended in a call."""
    bound = f", memory limited to {memory_bytes} bytes" if memory_bytes else ""
    return f"ended its process ({await exit_of(process)}{bound})"


def out_of_memory(memory_bytes: int) -> str:
    """In words: what a call did that had no memory left."""
    return f"took more than {memory_bytes} bytes of memory" if memory_bytes else "ran out of memory"


async def exit_of(process: Process) -> str:
    """In words: how a process ended that closed its stdout."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_SECS):
            code = await process.wait()
    except TimeoutError:
        return "still running"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
