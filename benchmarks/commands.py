"""The commands that a user types, as the benchmarks of whole runs run them."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
WARM_STEPS = 5  # of a run, not in its medians


def jaxrl(*words: str) -> int:
    """Runs a verb to its end; returns the peak memory of its largest process, bytes.

    Raises:
      CalledProcessError: it ended with another code than 0.
    """
    command = [sys.executable, "-m", "jaxrl_async", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)  # Of the processes too that it has waited for.
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_maxrss * 1024
