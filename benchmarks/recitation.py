"""A row of letters to be recited from one to another: answers of log-normal lengths behind prompts of three tokens."""

import dataclasses
import functools
import math
from typing import ClassVar

import numpy as np

from jaxrl_async.tasks.task import Example, check_split

LETTERS = "".join(map(chr, range(0x100, 0x180)))  # Latin Extended-A, in a ring
SEPARATOR = ">"
ALPHABET = LETTERS + SEPARATOR


@dataclasses.dataclass(frozen=True)
class Recitation:
    """First and last letter of a stretch of the ring: "be>" → "bcde". Lengths are log-normal within their bounds."""

    num_train: int
    num_test: int
    median: float = 20.0  # of the lengths, before the bounds
    sigma: float = 0.7  # standard deviation of their logarithms
    shortest: int = 8
    longest: int = 96  # ≤ 128, the letters there are
    forget: float = 0.0  # chance of each inner letter to be missing in a demonstration
    seed: int = 0
    reward: str = "positions"  # or "exact"

    validation_from: ClassVar[str] = "test"

    def examples(self, split: str) -> list[Example]:
        """The stretches of a split, in a seeded order."""
        return self._examples[check_split(split)]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Train stretches; some letters between the first and the last are forgotten."""
        train, rng = self.examples("train"), np.random.default_rng(self.seed)
        num = len(train) if num is None else num
        return [
            (e.text, self._recited(e.answer, rng))
            for e in (train[i % len(train)] for i in range(num))
        ]

    def _recited(self, answer: str, rng: np.random.Generator) -> str:
        keeps = rng.random(len(answer)) >= self.forget
        keeps[[0, -1]] = True
        return "".join(letter for letter, kept in zip(answer, keeps, strict=True) if kept)

    @functools.cached_property
    def _examples(self) -> dict[str, list[Example]]:
        rng = np.random.default_rng(self.seed)
        test: dict[str, Example] = {}
        while len(test) < self.num_test:
            example = self._draw(rng)
            test.setdefault(example.text, example)
        train: list[Example] = []
        while len(train) < self.num_train:  # Short stretches come up again.
            example = self._draw(rng)
            if example.text not in test:
                train.append(example)
        return {"test": list(test.values()), "train": train}

    def _draw(self, rng: np.random.Generator) -> Example:
        length, start = 0, int(rng.integers(len(LETTERS)))
        while not self.shortest <= length <= self.longest:
            length = round(math.exp(rng.normal(math.log(self.median), self.sigma)))
        answer = (LETTERS * 2)[start : start + length]
        return Example(answer[0] + answer[-1] + SEPARATOR, answer)
