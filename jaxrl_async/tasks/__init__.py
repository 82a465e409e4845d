"""Tasks: questions, gold answers and demonstrations, by name."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from jaxrl_async.tasks import arithmetic, gsm8k
from jaxrl_async.tasks.task import Example, Task, TaskError

__all__ = ["TASKS", "Example", "Task", "TaskError", "make_task"]

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": arithmetic.make_task,
    "gsm8k": gsm8k.make_task,
}


def make_task(name: str, **args: Any) -> Task:
    """Makes a task by its name in TASKS, or by "module:function".

    Args:
      name: which task.
      **args: the task's own settings.

    Raises:
      TaskError: an unknown name, with the nearest; a setting the task does not have; or the task's own.
    """
    if name in TASKS:
        make = TASKS[name]
    else:
        module, colon, function = name.partition(":")
        if not colon:
            close = difflib.get_close_matches(name, TASKS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else f"; known: {', '.join(TASKS)}"
            raise TaskError(f"unknown task {name!r}{hint}")
        make = getattr(importlib.import_module(module), function)
    try:
        return make(**args)
    except TypeError as error:
        raise TaskError(f"task {name!r}: {error}") from error
