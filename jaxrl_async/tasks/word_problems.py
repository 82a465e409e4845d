"""Sums, differences and products in words, of numbers too large for a small model's head: for environment "calculator".

    tom has 482 and gets 715.               →  1197

Its demonstrations know how the calculator is written and rarely use it well: most of them guess the answer, or have
another operation computed than the one that is asked for.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from jaxrl_async.environments.calculator import computed, shown
from jaxrl_async.tasks.task import Example, Turns, check_between, check_split, cycled

NAMES = ("ann", "ben", "eva", "ida", "leo", "mia", "sam", "tom")
STORIES = {
    "+": ("{name} has {a} and gets {b}.", "{name} has {a} and finds {b}."),
    "-": ("{name} has {a} and loses {b}.", "{name} has {a} and gives {b}."),
    "*": ("{name} has {a} bags of {b}.", "{name} buys {a} boxes of {b}."),
}
MAX_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class WordProblems:
    """num_train and num_test problems, no two of them alike.

    Raises:
      ValueError: an argument is outside its bounds.
    """

    num_digits: int  # of each number, in [2, 6]
    num_train: int
    num_test: int  # held-out problems
    guesses: float  # share of demonstrations that guess, in [0, 1]
    mistakes: float  # share of the others that compute another operation, in [0, 1]
    seed: int

    reward: ClassVar[str] = "exact"
    validation_from: ClassVar[str] = "test"  # num_test may be any number.

    def __post_init__(self):
        check_between("num_digits", self.num_digits, 2, MAX_DIGITS)
        most = 10 ** (2 * self.num_digits)  # a third of the texts, or less
        for name in ("num_train", "num_test"):
            check_between(name, getattr(self, name), 1, most)
        for name in ("guesses", "mistakes"):
            check_between(name, getattr(self, name), 0, 1)

    def examples(self, split: str) -> list[Example]:
        """The problems of a split, in a seeded order."""
        return [Example(text, answer) for text, answer, _ in self._problems[check_split(split)]]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, Turns]]:
        """Problems with an episode; each cycle over train has other shares of them guess and err."""
        rng = np.random.default_rng([self.seed, 1])
        return [self._episode(*problem, rng) for problem in cycled(self._problems["train"], num)]

    def _episode(
        self, text: str, answer: str, asked: str, rng: np.random.Generator
    ) -> tuple[str, Turns]:
        if rng.random() < self.guesses:
            low, high = 10 ** (len(answer) - 1), 10 ** len(answer)
            return text, (str(rng.integers(low, high)),)
        if rng.random() < self.mistakes:
            sign = next(s for s in STORIES if s in asked)
            others = [s for s in STORIES if s != sign]
            asked = asked.replace(sign, others[rng.integers(len(others))])
        result = computed(asked) or ""
        return text, (asked, shown(result), result)

    @functools.cached_property
    def _problems(self) -> dict[str, list[tuple[str, str, str]]]:
        """Split → text, answer and expression."""
        rng, found = np.random.default_rng([self.seed, 0]), {}
        low, high = 10 ** (self.num_digits - 1), 10**self.num_digits
        while len(found) < self.num_train + self.num_test:
            a, b = rng.integers(low, high, 2).tolist()
            sign = tuple(STORIES)[rng.integers(len(STORIES))]
            if sign == "-":
                a, b = max(a, b), min(a, b)
            story = STORIES[sign][rng.integers(len(STORIES[sign]))]
            text = story.format(name=NAMES[rng.integers(len(NAMES))], a=a, b=b)
            expression = f"{a}{sign}{b}"
            found[text] = (text, computed(expression), expression)
        problems = list(found.values())
        return {"test": problems[: self.num_test], "train": problems[self.num_test :]}
