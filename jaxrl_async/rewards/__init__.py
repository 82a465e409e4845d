"""Rewards: functions of the text of a completion and a gold answer, by name.

A reward may ask for more of a sample, by the names of parameters (SEEN), and may return named components beside its
number: a dict, or an instance of a dataclass, that has a "reward".
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
    "code": "jaxrl_async.rewards.code:code",
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


def register(what: str, name: str, table: dict[str, Any], entry: Any) -> Any:
    """Adds "module:attribute" of a class or function to a table, by which any process finds it; returns the entry.

    Raises:
      ValueError: the name is taken, or no other process could import the entry.
    """
    spec = f"{entry.__module__}:{entry.__qualname__}"
    if entry.__module__ == "__main__" or "." in entry.__qualname__:
        raise ValueError(
            f"{what} {name!r} is {spec}, which other processes cannot import: define it at the top of a module (in a "
            "notebook: a cell that begins with %%writefile my_task.py, and then `import my_task`)"
        )
    if table.get(name, spec) != spec:
        raise ValueError(f"there is a {what} {name!r} already: {table[name]}")
    table[name] = spec
    return entry


def importable(name: str, table: Mapping[str, Any]) -> str:
    """The name by which any process finds an entry: "module:attribute" if it was registered, else the name itself."""
    entry = table.get(name)
    return entry if isinstance(entry, str) else name


def reward_function(name: str) -> Reward:
    """A reward by its name in REWARDS, or by "module:function".

    Raises:
      ValueError: neither; names the nearest known reward.
    """
    return find("reward", name, REWARDS)


def check_reward(reward: Reward, examples: Iterable = ()) -> None:
    """Calls a reward's own check, its attribute `check`, where it has one: before a run, and in each of its processes.

    Args:
      reward: the function.
      examples: whose answers it will see; none in a process.

    Raises:
      OSError, ValueError: it cannot work here, or cannot read an answer.
    """
    if check := getattr(reward, "check", None):
        check(examples)


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


def find(what: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry of a table by its name, or the attribute that "module:attribute" names.

    Args:
      what: kind of entry, for the message.
      name: a key of the table, or "module:attribute".
      table: name → entry, or its "module:attribute".

    Raises:
      ValueError: neither (names the nearest key), or it cannot be imported.
    """
    entry = table.get(name, name)
    if not isinstance(entry, str):
        return entry
    module, colon, attribute = entry.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, table, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        known = ", ".join(sorted(table))
        raise ValueError(f"unknown {what} {name!r}{hint} (known: {known}; or 'module:function')")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        # No hint where the module is found, and a module that it imports is not.
        not_found = isinstance(error, ModuleNotFoundError)
        lost = not_found and f"{module}.".startswith(f"{error.name}.")
        hint = "; is its directory on PYTHONPATH?" if lost else ""
        raise ValueError(f"{what} {name!r} cannot be imported: {error}{hint}") from error
