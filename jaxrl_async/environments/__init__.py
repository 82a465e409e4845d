"""Environments: what answers a policy over several turns, by name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_async.environments.calculator import Calculator
from jaxrl_async.environments.environment import TAKES, Environment, Observation
from jaxrl_async.environments.locked_door import LockedDoor
from jaxrl_async.environments.tools import ToolUse, register_tool
from jaxrl_async.names import find, register

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "Observation",
    "environment_class",
    "register_environment",
    "register_tool",
]

ENVIRONMENTS: dict[str, type | str] = {
    "calculator": Calculator,
    "locked_door": LockedDoor,
    "tools": ToolUse,
}


def register_environment(name: str) -> Callable[[type], type]:
    """Decorates an environment of a module of yours, so that a config may name it once the module is imported.

        @jaxrl_async.register_environment("maze")
        class Maze: …

    Args:
      name: new in ENVIRONMENTS, or this very class's.

    Raises (when it decorates):
      ValueError: the name is taken, or other processes cannot import the class.
    """
    return functools.partial(register, "environment", name, ENVIRONMENTS)


def environment_class(name: str, args: Mapping[str, Any]) -> type:
    """An environment's class by its name in ENVIRONMENTS, or by "module:Name", checked with an episode's arguments.

    Args:
      args: what each episode is made with, by keyword.

    Raises:
      ValueError: no such environment (names the nearest), it lacks a member, or an argument is outside its bounds.
      TypeError: an unknown or a missing argument; shows the signature.
    """
    cls = find("environment", name, ENVIRONMENTS)
    for member in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(cls, member, None)):
            raise ValueError(f"environment {name!r} must have `async def {member}`")
    if (takes := getattr(cls, "takes", "text")) not in TAKES:
        raise ValueError(f"environment {name!r} takes {takes!r}: must be one of {', '.join(TAKES)}")
    signature = inspect.signature(cls)
    try:
        signature.bind(**args)
    except TypeError as error:
        raise TypeError(
            f"{error}: environment {name!r} takes {signature}, and environment.args is {dict(args)}"
        ) from None
    cls(**args)  # Its own bounds.
    return cls
