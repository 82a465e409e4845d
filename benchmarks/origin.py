"""Where a result comes from: the date, the commit and the processor, which stand beside its numbers."""

import os
import pathlib
import platform
import subprocess
import time

ROOT = pathlib.Path(__file__).parent.parent


def origin() -> dict[str, str]:
    """The keys for a result's JSON. The commit of a changed tree ends in "+"; JAXRL_COMMIT names that of a copy."""
    return {"date": time.strftime("%Y-%m-%d"), "commit": _commit(), "processor": _processor()}


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return found or os.environ.get("JAXRL_COMMIT", "")


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {named[0] if named else platform.processor() or platform.machine()}"
