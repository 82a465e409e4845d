"""Synthetic addition of two numbers: "47+38=" → "85".

A share of its demonstrations forgets to carry, on purpose: 47+38 → 75. A policy that imitates them is right
sometimes, so RL has something to select.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from jaxrl_async.tasks.task import Example, check_between, check_split, cycled

MAX_PAIRS = 100_000  # drawn at random where there are more pairs of operands
MAX_DIGITS = 9  # numbers of pairs of operands fit in 64 bits


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Sums of two operands of num_digits digits each, split at random into train and test.

    A pair in test is in train neither as a+b nor as b+a.

    Raises:
      ValueError: an argument is outside its bounds.
    """

    num_digits: int  # in [1, 9]; operands of two or more digits do not start with 0
    num_test: int  # held-out pairs
    forget_carry: float  # share of demonstrations that forget to carry, in [0, 1]
    seed: int  # of the split, and of the demonstrations that forget

    reward: ClassVar[str] = "exact"
    validation_from: ClassVar[str] = "test"  # num_test may be any number.

    def __post_init__(self):
        check_between("num_digits", self.num_digits, 1, MAX_DIGITS)
        check_between("forget_carry", self.forget_carry, 0, 1)
        check_between("num_test", self.num_test, 1, self._num_pairs // 2, ", half of the pairs")

    def examples(self, split: str) -> list[Example]:
        """The sums of a split, in a seeded order."""
        return [Example(f"{a}+{b}=", str(a + b)) for a, b in self._pairs[check_split(split)]]

    def key(self, text: str) -> str:
        """Equal for a+b and b+a."""
        return "+".join(sorted(text.removesuffix("=").split("+")))

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Sums with an answer, a share forget_carry of them wrong; each cycle over train forgets others."""
        chosen = cycled(self._pairs["train"], num)
        forgets = np.random.default_rng([self.seed, 1]).random(len(chosen)) < self.forget_carry
        return [
            (f"{a}+{b}=", str(add_without_carry(a, b) if bad else a + b))
            for (a, b), bad in zip(chosen, forgets, strict=True)
        ]

    @property
    def _operands(self) -> range:
        return range(10 ** (self.num_digits - 1) if self.num_digits > 1 else 0, 10**self.num_digits)

    @property
    def _num_pairs(self) -> int:
        return min(len(self._operands) ** 2, MAX_PAIRS)

    @functools.cached_property
    def _pairs(self) -> dict[str, list[tuple[int, int]]]:
        """Split → pairs of operands."""
        operands, rng = self._operands, np.random.default_rng([self.seed, 0])
        numbers = rng.choice(len(operands) ** 2, self._num_pairs, replace=False).tolist()
        pairs = [(operands[i], operands[j]) for i, j in (divmod(n, len(operands)) for n in numbers)]
        test, rest = pairs[: self.num_test], pairs[self.num_test :]
        mirrored = {(b, a) for a, b in test}
        return {"test": test, "train": [pair for pair in rest if pair not in mirrored]}


def add_without_carry(a: int, b: int) -> int:
    """a + b column by column, every carry dropped: 47+38 → 75, 58+73 → 21."""
    total, place = 0, 1
    while a or b:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total
