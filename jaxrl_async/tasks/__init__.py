"""Tasks: prompts, gold answers and demonstrations, by name. A task knows nothing of tokens, models or queues."""

from collections.abc import Callable

from jaxrl_async.rewards import find
from jaxrl_async.tasks.arithmetic import Arithmetic
from jaxrl_async.tasks.gsm8k import Gsm8k
from jaxrl_async.tasks.task import Example, Task
from jaxrl_async.tasks.token_reversal import TokenReversal

__all__ = ["TASKS", "Example", "Task", "make_task"]

TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": Arithmetic,
    "gsm8k": Gsm8k,
    "token_reversal": TokenReversal,
}


def make_task(name: str, **kwargs) -> Task:
    """A task by its name in TASKS, or from "module:factory".

    Args:
      name: of the task.
      **kwargs: what its factory takes.

    Raises:
      ValueError: no such task (names the nearest), or an argument outside its bounds.
      TypeError: an unknown or a missing argument.
    """
    return find("task", name, TASKS)(**kwargs)
