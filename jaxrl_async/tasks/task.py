"""What a task is. It knows text only: no tokens, no rewards, no policies."""

import dataclasses
from collections.abc import Sequence


class TaskError(ValueError):
    """A task that cannot be made: an unknown name, a missing file, a broken line."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One question."""

    question: str  # the prompt's text
    answer: str  # gold answer, as the reward compares it


@dataclasses.dataclass(frozen=True)
class Task:
    """Questions with gold answers, and demonstrations for a warm start."""

    train: Sequence[Example]
    test: Sequence[Example]  # held out: no question of `train`
    demonstrations: Sequence[tuple[str, str]]  # (question, completion), of the train split
