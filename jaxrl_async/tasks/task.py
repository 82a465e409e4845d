"""The interface of a task: texts alone. Tokens, order and epochs are made of them in tasks/prompts.py."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class Example:
    """One question."""

    text: str  # the prompt, as the policy reads it, before any chat template
    answer: str  # gold answer, as the task's reward expects it


class Task(Protocol):
    """A source of questions. Equal arguments give equal tasks in every process.

    Two members are optional (tasks/validation.py): `validation_from`, the split, "train" (the default) or "test", that
    gives questions to a validation split; and `key(text)`, equal for questions that one split must hold together.
    """

    reward: str  # name of the reward that its answers are made for

    def examples(self, split: str) -> Sequence[Example]:
        """The questions of a split, "train" or "test", in a fixed order; the two share none."""

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Prompts and completions to imitate in a warm start.

        Args:
          num: how many, in cycles over the train split; None for one per train example.
        """


def check_split(split: str) -> str:
    """Returns the name of a split.

    Raises:
      ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    return split
