"""One reward process: reads calls from stdin, writes their outcomes to stdout, as lines of JSON.

    in     [[completion, answer], …]                    a batch of calls
    out    0.5   or   "what went wrong"   or   null     one line per call, as soon as it is known; null is out of memory

The first line out is "" when the reward was found, or else says why not. The process ends with its stdin. It imports
nothing but rewards, so that starting another one is cheap.

The limit on memory is on address space (RLIMIT_AS), on top of what the process has at its start, after the reward's
imports: the interpreter and its libraries do not count, what a reward imports while it is called does. A reward that
catches its MemoryError stays within the limit. A process that the reward starts has the same limit of its own.
"""

import json
import math
import os
import resource
import signal
import sys

from jaxrl_async.rewards import Reward, reward_function

MAX_MESSAGE_CHARS = 1000


def main(name: str, max_secs: str, memory_bytes: str) -> None:
    """Serves one reward until stdin ends.

    Args:
      name: of the reward.
      max_secs: a call that takes longer ends the process, even where the pool is gone.
      memory_bytes: bound on the address space it takes from here on; 0 for none.
    """
    calls, outcomes = _private_streams()
    # The default action ends the process even where a call never returns to the interpreter.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        reward = reward_function(name)
        if int(memory_bytes):
            _limit_memory(int(memory_bytes))
    except (ValueError, OSError) as error:
        return _write(outcomes, str(error))
    _write(outcomes, "")
    for line in calls:
        for completion, answer in json.loads(line):
            signal.setitimer(signal.ITIMER_REAL, float(max_secs))
            _write(outcomes, _outcome(reward, completion, answer))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _private_streams():
    """stdin and stdout under other numbers, so that a reward that prints or reads does no harm."""
    calls, outcomes = os.fdopen(os.dup(0), "rb"), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return calls, outcomes


def _limit_memory(more_bytes: int) -> None:
    """Bounds the address space at its present size + more_bytes."""
    with open("/proc/self/statm", "rb") as statm:  # in pages; Linux has it
        limit = int(statm.read().split()[0]) * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _outcome(reward: Reward, completion: str, answer: str) -> float | str | None:
    try:
        return _checked(reward(completion, answer))
    except MemoryError:
        return None
    except (
        BaseException
    ) as error:  # SystemExit too: it is an outcome of this call, not the end of the process.
        return f"{type(error).__name__}: {error}"


def _checked(value) -> float | str:
    """A reward as a float, or the reason why it is none."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    return number if math.isfinite(number) else f"returned {value!r}, not a finite number"


def _write(outcomes: int, outcome: float | str | None) -> None:
    # Unbuffered: when the next call hangs or crashes, the pool must know which one did.
    if isinstance(outcome, str):
        outcome = outcome[:MAX_MESSAGE_CHARS]
    os.write(outcomes, json.dumps(outcome).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
