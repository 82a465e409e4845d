"""A rollout function that takes its time, so that a fault finds a run at work; see attacked.py."""

import asyncio
import os
import pathlib
import time

from jaxrl_async.rollout.single_turn import single_turn

GROUP_SECS = 0.4  # between the starts of two groups of a worker
FAST = "CHAOS_FAST"  # variable: the file that ends the pace when it exists
LOOK_SECS = 0.5  # interval of the looks for that file

_starts: dict[int, float] = {}  # of groups, by prompt_index


async def paced(prompt, context):
    """`single_turn`, started when it is the turn of the sample's group."""
    now, last = time.monotonic(), next(reversed(_starts.values()), 0.0)
    start = _starts.setdefault(prompt.index, max(now, last + GROUP_SECS))
    fast = pathlib.Path(os.environ[FAST])
    while time.monotonic() < start and not fast.exists():
        await asyncio.sleep(min(LOOK_SECS, max(0.0, start - time.monotonic())))
    return await single_turn(prompt, context)
