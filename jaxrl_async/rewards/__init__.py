"""Rewards: functions of a completion and a gold answer, by name. They know nothing of prompts or tokens."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_async.rewards.math import exact, last_number
from jaxrl_async.rewards.positions import positions

Reward = Callable[[str, str], float]  # (completion, gold answer) → reward

REWARDS: dict[str, Reward] = {
    "exact": exact,
    "last_number": last_number,
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
      table: the known ones.

    Raises:
      ValueError: neither; names the nearest key.
    """
    if name in table:
        return table[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, table, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        known = ", ".join(sorted(table))
        raise ValueError(f"unknown {what} {name!r}{hint} (known: {known}; or 'module:function')")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{what} {name!r} cannot be imported: {error}") from error
