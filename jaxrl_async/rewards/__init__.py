"""Rewards: functions of the text of a completion and a gold answer, by name.

A reward may ask for more of a sample, by the names of parameters (SEEN), and may return named components beside its
number: a dict, or an instance of a dataclass, that has a "reward".
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

from jaxrl_async.names import find, register
from jaxrl_async.rewards.ends import ends
from jaxrl_async.rewards.math import exact, last_number
from jaxrl_async.rewards.positions import positions

# (completion, gold answer, and of SEEN what it names) → reward, or {"reward": reward, component: value, …}
Reward = Callable[..., Any]

# What a reward may ask for, besides the completion and the gold answer.
SEEN = {
    "prompt": "the example's text",
    "finish_reason": '"stop" or "length"',
    "metadata": "the example's",
    "raw_completion": "the text of all sampled tokens, with the names of special ones",
}

# "module:function" where the module needs an extra, or more than this package: it is imported on use.
REWARDS: dict[str, Reward | str] = {
    "code": "jaxrl_async.extras.programs.code:code",
    "ends": ends,
    "exact": exact,
    "last_number": last_number,
    "math_verify": "jaxrl_async.rewards.math_verifier:math_verify",
    "positions": positions,
}


def register_reward(name: str) -> Callable[[Reward], Reward]:
    """Decorates a reward of a module of yours, so that a task may name it.

        @jaxrl_async.register_reward("within_one")
        def within_one(completion: str, answer: str) -> float: …

    Args:
      name: new in REWARDS, or this very function's.

    Raises (when it decorates):
      ValueError: the name is taken, or other processes cannot import the function.
    """
    return functools.partial(register, "reward", name, REWARDS)


def reward_function(name: str) -> Reward:
    """A reward by its name in REWARDS, by "module:function", or the sum that `weighted.name_of` names.

    Raises:
      ValueError: none of them; names the nearest known reward.
    """
    if name.startswith("{"):
        from jaxrl_async.rewards.weighted import WeightedSum

        return WeightedSum(name)
    return find("reward", name, REWARDS)


def check_reward(reward: Reward, examples: Iterable = ()) -> None:
    """Calls a reward's own check, its attribute `check`, where it has one: before a run, and in each of its processes.

    Args:
      examples: whose answers it will see; none in a process.

    Raises:
      OSError, ValueError: it cannot work here, or cannot read an answer.
    """
    if check := getattr(reward, "check", None):
        check(examples)


def times_out_as(reward: Reward) -> float | None:
    """The reward of an answer that is not judged in time, a reward's own attribute `times_out_as`; None without one.

    Raises:
      ValueError: it is no finite number.
    """
    value = getattr(reward, "times_out_as", None)
    if value is None or (isinstance(value, int | float) and isfinite(value)):
        return value
    raise ValueError(f"its attribute times_out_as must be a finite number, got {value!r:.80}")


def names_seen(reward: Reward) -> list[str]:
    """The names of SEEN that a reward asks for: its parameters after the first two.

    Raises:
      ValueError: it does not take two arguments, or has another parameter without a default.
    """
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a function of C without one
        return []
    parameters = list(signature.parameters.values())
    ordinary = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    seen = [p.name for p in parameters[2:] if p.kind in ordinary and p.name in SEEN]
    try:
        signature.bind("", "", **dict.fromkeys(seen))
    except TypeError as error:
        raise ValueError(
            f"it takes {signature}, and is called with a completion, an answer and of {', '.join(SEEN)} what it "
            f"names: {error}"
        ) from None
    return seen
