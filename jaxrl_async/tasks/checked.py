"""A task as the roles use it: each split is read once, from whatever iterable the task gives, and checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_async.tasks.task import Example, Task, Turns, check_text


class CheckedTask:
    """A task whose splits are lists of Examples. Other members are the task's own."""

    def __init__(self, task: Task):
        self._task, self.reward = task, task.reward
        self._splits: dict[str, list[Example]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def examples(self, split: str) -> Sequence[Example]:
        """The questions of a split, the same in every call.

        Raises:
          TypeError: the task gives something else than Examples, or texts that are none.
          ValueError: the split is empty, or a text has no UTF-8.
        """
        if split not in self._splits:
            self._splits[split] = _checked(self._task.examples(split), split)
        return self._splits[split]

    def demonstrations(self, num: int | None = None) -> Sequence[tuple[str, Turns]]:
        """Those of the task; none where it has no such method."""
        found = getattr(self._task, "demonstrations", None)
        return list(found(num)) if found else []


def _checked(examples: Iterable[Example], split: str) -> list[Example]:
    if not isinstance(examples, Iterable):
        raise TypeError(f"examples({split!r}) must give Examples, got {examples!r:.200}")
    found = list(examples)
    if not found:
        raise ValueError(f"split {split!r} is empty: it must have one example at least")
    members = (("text", str), ("answer", str), ("metadata", Mapping))
    for place, example in enumerate(found):
        if not all(isinstance(getattr(example, name, None), kind) for name, kind in members):
            raise TypeError(
                f"example {place} of split {split!r} must be an Example with a text and an answer of type str, and "
                f"metadata that is a mapping; got {example!r:.200}"
            )
        for name in ("text", "answer"):
            check_text(f"the {name} of example {place} of split {split!r}", getattr(example, name))
    return found
