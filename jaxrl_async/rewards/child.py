"""Python processes that can be killed, of this package's modules: what runs in them may hang, crash or leak.

A process has the variables ENVIRONMENT and those that it is given, so that no key reaches it by its environment. It
talks over stdin and stdout, in lines. Independent of what it does.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Collection
from typing import Any

START_TIMEOUT_SECS = 30.0
LATE_SECS = 0.1  # to read a reply that arrived in time while this event loop was late
# Beyond the bound on a call, after which a process without its parent ends itself.
ORPHAN_SECS = 5.0
CLOSE_TIMEOUT_SECS = 5.0
ENVIRONMENT = re.compile(
    "HOME|LANG|LANGUAGE|LC_[A-Z]+|LD_LIBRARY_PATH|LOGNAME|PATH|PYTHON[A-Z]+|SHELL|TERM|TMPDIR|TZ|USER"
    "|VIRTUAL_ENV|(OMP|OPENBLAS|MKL|NUMEXPR)_NUM_THREADS"
)


async def start(
    module: str, *arguments: str, environment: Collection[str] = (), max_line_bytes: int = 1 << 16
) -> asyncio.subprocess.Process:
    """Starts `python -m module arguments`, which finds the same modules as this process.

    Args:
      module: of this package.
      *arguments: its words.
      environment: names of the variables of this process that it gets, beside ENVIRONMENT.
      max_line_bytes: of a line that is read of it.
    """
    # -P and this path: the process finds the same modules as this one, in the same order.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={
            name: value
            for name, value in os.environ.items()
            if ENVIRONMENT.fullmatch(name) or name in environment
        }
        | {"PYTHONPATH": path},
        start_new_session=True,  # A process group of its own, killed as one, without Ctrl-C from the terminal.
        limit=max_line_bytes,
    )


async def greeting(process: asyncio.subprocess.Process) -> Any:
    """The first line of a process, JSON, within START_TIMEOUT_SECS; a text says why the process cannot serve."""
    try:
        async with asyncio.timeout(START_TIMEOUT_SECS):
            line = await process.stdout.readline()
    except TimeoutError:
        return f"no answer for {START_TIMEOUT_SECS:g} s"
    return json.loads(line) if line else f"it ended ({await exit_of(process)})"


async def end(process: asyncio.subprocess.Process) -> None:
    """Kills a process and all that it started, within CLOSE_TIMEOUT_SECS."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_SECS):
            await process.stdout.read()
            await process.wait()


async def exit_of(process: asyncio.subprocess.Process) -> str:
    """In words: how a process ended that closed its stdout."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_SECS):
            code = await process.wait()
    except TimeoutError:
        return "still running"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
