"""Sums and differences asked in words: "What is 7 plus 5? Answer with just the number." → "12".

For pretrained models: the texts are of a language, and the answer is read out of what the model says.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from jaxrl_async.tasks.task import Example, check_between, check_split, cycled

TEMPLATE = "What is {question}? Answer with just the number."
MAX_NUMBER = 99
WORDS = {"+": "plus", "-": "minus"}


@dataclasses.dataclass(frozen=True)
class WordSums:
    """Every a plus b, and every a minus b with a ≥ b, of numbers up to max_number; split at random into train and test.

    A sum in test is in train neither as a plus b nor as b plus a.

    Raises:
      ValueError: an argument is outside its bounds.
    """

    max_number: int  # the largest operand, in [1, 99]
    num_test: int  # held-out questions
    seed: int  # of the split
    template: str = TEMPLATE  # of a prompt; "{question}" is replaced
    signs: bool = False  # "7 + 5", not "7 plus 5"
    reward: str = "last_number"  # or "exact": the number and nothing else

    validation_from: ClassVar[str] = "test"  # num_test may be any number.

    def __post_init__(self):
        check_between("max_number", self.max_number, 1, MAX_NUMBER)
        if "{question}" not in self.template:
            raise ValueError(f"template must contain '{{question}}', got {self.template!r}")
        most = len(self._questions) // 2
        check_between("num_test", self.num_test, 1, most, ", half of the questions")

    def examples(self, split: str) -> list[Example]:
        """The questions of a split, in a seeded order."""
        return [self._example(*q) for q in self._splits[check_split(split)]]

    def key(self, text: str) -> str:
        """Equal for a plus b and b plus a."""
        return self._keys[text]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Train questions with the bare number."""
        return [(e.text, e.answer) for e in cycled(self.examples("train"), num)]

    def _example(self, sign: str, a: int, b: int) -> Example:
        question = f"{a} {sign if self.signs else WORDS[sign]} {b}"
        answer = a + b if sign == "+" else a - b
        return Example(self.template.replace("{question}", question), str(answer))

    @functools.cached_property
    def _questions(self) -> list[tuple[str, int, int]]:
        numbers = range(self.max_number + 1)
        sums = [("+", a, b) for a in numbers for b in numbers]
        return sums + [("-", a, b) for a in numbers for b in numbers if a >= b]

    @functools.cached_property
    def _splits(self) -> dict[str, list[tuple[str, int, int]]]:
        """Split → sign and operands."""
        order = np.random.default_rng(self.seed).permutation(len(self._questions)).tolist()
        questions = [self._questions[i] for i in order]
        test, rest = questions[: self.num_test], questions[self.num_test :]
        mirrored = {(sign, b, a) for sign, a, b in test if sign == "+"}
        return {"test": test, "train": [q for q in rest if q not in mirrored]}

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        """Text of a prompt → sign and operands, of a sum in order."""
        return {
            self._example(sign, a, b).text: f"{min(a, b)}+{max(a, b)}"
            if sign == "+"
            else f"{a}-{b}"
            for sign, a, b in self._questions
        }
