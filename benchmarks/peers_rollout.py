"""The rollout function of peers.py: nothing but its length ends a completion, so every step is the same work."""

import functools

from jaxrl_async.rollout.context import Context
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.types import Prompt, Trajectory


async def to_the_end(prompt: Prompt, context: Context) -> Trajectory:
    """`single_turn` without stop tokens."""
    return await single_turn(prompt, functools.partial(context, stop_token_ids=[]))
