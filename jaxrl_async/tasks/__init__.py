"""Tasks: prompts, gold answers and demonstrations as texts, by name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_async.names import find, register
from jaxrl_async.tasks.arithmetic import Arithmetic
from jaxrl_async.tasks.code import Code
from jaxrl_async.tasks.gsm8k import Gsm8k
from jaxrl_async.tasks.locked_door import LockedDoors
from jaxrl_async.tasks.table import Jsonl, Parquet
from jaxrl_async.tasks.task import Example, Task
from jaxrl_async.tasks.token_reversal import TokenReversal
from jaxrl_async.tasks.word_problems import WordProblems
from jaxrl_async.tasks.word_sums import WordSums

__all__ = ["TASKS", "Example", "Task", "make_task", "register_task"]

TASKS: dict[str, Callable[..., Any] | str] = {
    "arithmetic": Arithmetic,
    "code": Code,
    "gsm8k": Gsm8k,
    "jsonl": Jsonl,
    "locked_door": LockedDoors,
    "parquet": Parquet,
    "token_reversal": TokenReversal,
    "word_problems": WordProblems,
    "word_sums": WordSums,
}

# A library → the task that an environment or a data set of it is, "LIBRARY:NAME"; imported on use.
LIBRARIES: dict[str, str] = {
    "datasets": "jaxrl_async.tasks.table:Dataset",
    "openenv": "jaxrl_async.extras.openenv:OpenEnv",
    "reasoning_gym": "jaxrl_async.extras.reasoning_gym:ReasoningGym",
    "verifiers": "jaxrl_async.extras.verifiers:Verifiers",
}


def register_task(name: str) -> Callable[[Callable[..., Task]], Callable[..., Task]]:
    """Decorates a task of a module of yours, so that a config may name it once the module is imported.

        @jaxrl_async.register_task("coins")
        class Coins: …

    Args:
      name: new in TASKS, or this very factory's.

    Raises (when it decorates):
      ValueError: the name is taken, or other processes cannot import the factory.
    """
    return functools.partial(register, "task", name, TASKS)


def make_task(name: str, /, **kwargs: Any) -> Task:
    """A task by its name in TASKS, from "module:factory", or of a library, "LIBRARY:NAME".

    Args:
      name: of the task.
      **kwargs: arguments of its factory.

    Raises:
      ValueError: no such task (names the nearest), or an argument outside its bounds.
      TypeError: an unknown or a missing argument; shows the factory's signature.
    """
    library, _, environment = name.partition(":")
    if library in LIBRARIES:
        factory = functools.partial(find("task", library, LIBRARIES), environment)
    else:
        factory = find("task", name, TASKS)
    signature = inspect.signature(factory)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise TypeError(
            f"{error}: it takes {signature}, and task.args is {kwargs}; on a command line, "
            "--config.task.args=\"{'NAME': VALUE}\" replaces all of them"
        ) from None
    return factory(**kwargs)
