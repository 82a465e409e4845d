"""Rewards: functions of a completion and a gold answer, by name. They know nothing of prompts or tokens."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_async.rewards.math import exact, last_number
from jaxrl_async.rewards.positions import positions

Reward = Callable[[str, str], float]  # (completion, gold answer) → reward

# "module:function" where the module needs an extra, and is imported when it is asked for.
REWARDS: dict[str, Reward | str] = {
    "exact": exact,
    "last_number": last_number,
    "math_verify": "jaxrl_async.rewards.math_verifier:math_verify",
    "positions": positions,
}


def reward_function(name: str) -> Reward:
    """A reward by its name in REWARDS, or by "module:function".

    Raises:
      ValueError: neither; names the nearest known reward.
    """
    return find("reward", name, REWARDS)


def find(what: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry of a table by its name, or what "module:attribute" imports.

    Args:
      what: kind of thing, for the message.
      name: a key of the table, or "module:attribute".
      table: the known ones, or "module:attribute" of them.

    Raises:
      ValueError: neither, which names the nearest key; or it cannot be imported.
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
        raise ValueError(f"{what} {name!r} cannot be imported: {error}") from error
