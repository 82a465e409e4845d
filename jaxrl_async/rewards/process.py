"""One reward process: reads calls from stdin, writes their outcomes to stdout, as lines of JSON.

    in     [[completion, answer, {…}], …]  a batch of calls, with what the reward asks for of rewards.SEEN
    out    0.5                           one line per call, as soon as it is known: the reward,
           {"reward": 0.5, "components": {"length": 3.0}}
                                         the reward with named components,
           {"error": "ValueError: …", "place": "ValueError at rewards.py:12", "traceback": "…"}
                                         what went wrong in it,
           null                          or out of memory

The first line out is {"seen": what the reward asks for, "times_out_as": its attribute}, or else a string that says why
not. The process ends with its stdin. It imports nothing but rewards, so that starting another one is cheap.

The limit on memory is on address space (RLIMIT_AS), on top of what the process has at its start, after the reward's
imports: the interpreter and its libraries do not count, what a reward imports while it is called does. A reward that
catches its MemoryError stays within the limit. A process that the reward starts has the same limit of its own.
"""

import dataclasses
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

from jaxrl_async.rewards import Reward, check_reward, names_seen, reward_function, times_out_as

MAX_MESSAGE_CHARS = 1000
MAX_TRACEBACK_CHARS = 3000  # its end
MAX_FRAMES = 10  # the innermost ones


def main(name: str, max_secs: str, memory_bytes: str) -> None:
    """Serves one reward until stdin ends.

    Args:
      max_secs: a call that takes longer ends the process, even where the pool is gone.
      memory_bytes: bound on the address space it takes from here on; 0 for none.
    """
    calls, outcomes = private_streams()
    try:
        reward = reward_function(name)
        greeting = {"seen": names_seen(reward), "times_out_as": times_out_as(reward)}
        limit_memory(int(memory_bytes))
        check_reward(reward)
    except (ValueError, OSError) as error:
        return write(outcomes, str(error))
    write(outcomes, greeting)
    for line in calls:
        for completion, answer, seen in json.loads(line):
            signal.setitimer(signal.ITIMER_REAL, float(max_secs))
            write(outcomes, _outcome(reward, completion, answer, seen))
        signal.setitimer(signal.ITIMER_REAL, 0)


def private_streams() -> tuple[BinaryIO, int]:
    """stdin and stdout under other numbers, so that a reward that prints or reads does no harm.

    A timer ends the process from then on, even where a call never returns to the interpreter.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    calls, outcomes = os.fdopen(os.dup(0), "rb"), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return calls, outcomes


def limit_memory(more_bytes: int) -> None:
    """Bounds the address space at its present size + more_bytes; 0 for no bound."""
    if not more_bytes:
        return
    with open("/proc/self/statm", "rb") as statm:  # in pages; Linux has it
        limit = int(statm.read().split()[0]) * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _outcome(
    reward: Reward, completion: str, answer: str, seen: dict[str, Any]
) -> float | dict[str, Any] | None:
    try:
        return judged(reward(completion, answer, **seen))
    except MemoryError:
        return None
    except BaseException as error:  # SystemExit too: an outcome of this call, not of the process.
        return failure(error)


def failure(error: BaseException) -> dict[str, str]:
    """What an exception of the user's code was, and where, without the frame that caught it."""
    frames = error.__traceback__ and error.__traceback__.tb_next
    last = traceback.extract_tb(frames)[-1:]
    where = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    lines = traceback.format_exception(type(error), error, frames, limit=-MAX_FRAMES)
    return {
        "error": f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS],
        "place": (type(error).__name__ + where)[:MAX_MESSAGE_CHARS],
        "traceback": "".join(lines).strip()[-MAX_TRACEBACK_CHARS:],
    }


def judged(value: Any) -> float | dict[str, Any]:
    """A reward as a float, or with its components, or the reason why it is none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value) if hasattr(value, "__dict__") else dataclasses.asdict(value)
    if not isinstance(value, Mapping):
        return _checked(value)
    if "reward" not in value:
        error = f"returned {value!r}"[:MAX_MESSAGE_CHARS] + ", without a 'reward'"
        return {"error": error, "place": "a reward without a 'reward'", "traceback": ""}
    reward = _checked(value["reward"])
    if isinstance(reward, dict):
        return reward
    components = {str(name): _checked(part) for name, part in value.items() if name != "reward"}
    for name, part in components.items():
        if isinstance(part, dict):
            return part | {"error": f"component {name!r} {part['error']}"[:MAX_MESSAGE_CHARS]}
    return {"reward": reward, "components": components}


def _checked(value: Any) -> float | dict[str, str]:
    """A reward as a float, or the reason why it is none."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    error = f"returned {value!r}"[:MAX_MESSAGE_CHARS] + ", not a finite number"
    return {"error": error, "place": "a reward that is no finite number", "traceback": ""}


def write(outcomes: int, outcome: float | str | dict[str, Any] | None) -> None:
    """Writes one line of JSON."""
    # Unbuffered: when the next call hangs or crashes, the pool must know which one did.
    if isinstance(outcome, str):
        outcome = outcome[:MAX_MESSAGE_CHARS]
    os.write(outcomes, json.dumps(outcome).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
