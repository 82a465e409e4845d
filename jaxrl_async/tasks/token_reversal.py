"""Synthetic reversal of a sequence of symbols: "0111>" → "1110".

The task of Delightful Distributed Policy Gradient (Osband, arXiv 2603.20521), there with 10 tokens of 2 symbols. Its
reward is the share of right positions, so that a policy without a warm start can learn.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from jaxrl_async.tasks.task import Example, check_between, check_split, cycled

MAX_PROMPTS = 100_000  # drawn at random where there are more
MAX_SYMBOLS = 10  # A symbol is a digit.
SEPARATOR = ">"  # ends a prompt, and marks where the answer begins


@dataclasses.dataclass(frozen=True)
class TokenReversal:
    """Sequences of num_tokens symbols to be written backwards, split at random into train and test.

    Raises:
      ValueError: an argument is outside its bounds.
    """

    num_tokens: int  # H ≥ 1, symbols in a sequence; M^H < 2^63
    num_symbols: int  # M in [2, 10]; symbols are the digits from "0"
    num_test: int  # held-out sequences
    seed: int  # of the split

    reward: ClassVar[str] = "positions"
    validation_from: ClassVar[str] = "test"  # num_test may be any number.

    def __post_init__(self):
        check_between("num_symbols", self.num_symbols, 2, MAX_SYMBOLS)
        # Their numbers must fit in 64 bits.
        if self.num_tokens < 1 or self._num_sequences >= 2**63:
            raise ValueError(
                f"num_tokens must be ≥ 1, and num_symbols^num_tokens < 2^63, got {self.num_tokens} of "
                f"{self.num_symbols} symbols"
            )
        most = min(self._num_sequences, MAX_PROMPTS) // 2
        check_between("num_test", self.num_test, 1, most, ", half of the prompts")

    def examples(self, split: str) -> list[Example]:
        """The sequences of a split, in a seeded order."""
        return [Example(s + SEPARATOR, s[::-1]) for s in self._sequences[check_split(split)]]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Train sequences with their reversals, all of them right."""
        return [(e.text, e.answer) for e in cycled(self.examples("train"), num)]

    @property
    def _num_sequences(self) -> int:
        return self.num_symbols**self.num_tokens

    @functools.cached_property
    def _sequences(self) -> dict[str, list[str]]:
        """Split → sequences, which are numbers in base num_symbols."""
        count, rng = self._num_sequences, np.random.default_rng(self.seed)
        numbers = rng.choice(count, min(count, MAX_PROMPTS), replace=False).tolist()
        sequences = [np.base_repr(n, self.num_symbols).zfill(self.num_tokens) for n in numbers]
        return {"test": sequences[: self.num_test], "train": sequences[self.num_test :]}
