"""The interface of a task: texts alone. Tokens, order and epochs are made of them in tasks/prompts.py."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

SPLITS = ("train", "test")
RIGHT = 1.0  # the least reward of a right answer; partial credit is not right
CUT = "context_length_exceeded"  # OpenAI's code of an agent's call for which no token is left

_T = TypeVar("_T")
# An answer, or an episode: a turn of the policy, an observation, a turn, … The last one is a turn.
Turns = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Example:
    """One question."""

    text: str  # the prompt, as the policy reads it, before any chat template
    answer: str  # gold answer, as the task's reward expects it
    # more for a reward that asks for it: values of JSON
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    # a prompt of several messages, each a role and a content; `text` is then their contents
    messages: tuple[Mapping[str, Any], ...] = dataclasses.field(default=(), hash=False)


class Task(Protocol):
    """A source of questions. Equal arguments give equal tasks in every process.

    Five members are optional. Of tasks/validation.py: `validation_from`, the split, "train" (the default) or "test",
    that gives questions to a validation split; and `key(text)`, equal for questions that one split must hold together.
    `right`, the least reward of a right answer in evaluations: RIGHT where a task does not say. `demonstrations`, which
    a warm start needs. And `files`, the paths of the files that it was read from, whose digests a run keeps.
    """

    reward: str  # name of the reward that its answers are made for

    def examples(self, split: str) -> Sequence[Example]:
        """The questions of a split, "train" or "test", in a fixed order; the two share none."""
        ...

    def demonstrations(self, num: int | None = None) -> Sequence[tuple[str, Turns]]:
        """Prompts and completions to imitate in a warm start; of an episode, the policy's turns are.

        Args:
          num: how many, in cycles over the train split; None for one per train example.
        """
        ...


def metadata_of(example: Example) -> dict[str, Any]:
    """A copy of an example's metadata. Raises ValueError: it is no JSON, in which rewards get it."""
    try:
        return json.loads(json.dumps(dict(example.metadata))) if example.metadata else {}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata of the example {example.text!r:.80} is no JSON: {error}"
        ) from None


def messages_of(example: Example) -> tuple[Mapping[str, Any], ...]:
    """The messages of a prompt that has several; an example of a user's own class may have no such field."""
    return getattr(example, "messages", ())


def texts_of(completion: Turns) -> tuple[str, ...]:
    """The texts of a completion, turns of the policy at even places.

    Raises:
      ValueError: the last one is an observation.
    """
    texts = (completion,) if isinstance(completion, str) else tuple(completion)
    if len(texts) % 2 == 0:
        raise ValueError(f"a demonstration must end with a turn of the policy, got {texts!r:.200}")
    return texts


def cycled(train: Sequence[_T], num: int | None) -> list[_T]:
    """`num` of a train split, in cycles; each once for None."""
    return [train[i % len(train)] for i in range(len(train) if num is None else num)]


def check_between(name: str, value: float, low: float, high: float, which: str = "") -> None:
    """Checks an argument of a task. Raises ValueError: it is outside [low, high]; `which` says what `high` is."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}]{which}, got {value}")


def check_text(what: str, text: str) -> None:
    """Raises ValueError: a text of the data holds half a pair of surrogates, which has no tokens and no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(error.start - 20, 0) : error.start + 20]
        raise ValueError(
            f"{what} holds half a pair of surrogates, which UTF-8 has not: {near!r}"
        ) from None


def check_split(split: str) -> str:
    """Returns the name of a split. Raises ValueError: there is no such split."""
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    return split
