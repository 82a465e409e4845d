"""Short functions of Python, asked for by a signature and a sentence: the model goes on after "return".

    def f(x):
        \"\"\"The sum of x and 7.\"\"\"
        return

Answers are tests for the reward "code", which runs what the model wrote in a sandbox.
"""

import dataclasses
import functools
import json
import string
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from jaxrl_async.tasks.task import Example, check_between, check_split, cycled

NUM_TESTS = 6
MAX_CONSTANT = 20
NAMES = ("f", "g", "compute", "solve", "answer", "value")
PREFIX = 'def {name}({arguments}):\n    """{sentence}"""\n    return'

# (arguments, sentence, expression, its function of the constant and the arguments). {k} is a constant from 2 on, n and
# m are numbers, s and t texts, a is a list of numbers.
PROBLEMS = (
    ("n", "The sum of n and {k}.", "n + {k}", lambda k, n: n + k),
    ("n", "The difference of n and {k}.", "n - {k}", lambda k, n: n - k),
    ("n", "The product of n and {k}.", "n * {k}", lambda k, n: n * k),
    ("n", "The remainder of n divided by {k}.", "n % {k}", lambda k, n: n % k),
    ("n", "Whether n is divisible by {k}.", "n % {k} == 0", lambda k, n: n % k == 0),
    ("n", "Whether n is greater than {k}.", "n > {k}", lambda k, n: n > k),
    ("n", "The absolute value of n minus {k}.", "abs(n - {k})", lambda k, n: abs(n - k)),
    ("n", "The square of n, plus {k}.", "n * n + {k}", lambda k, n: n * n + k),
    ("n, m", "The sum of n and m, times {k}.", "(n + m) * {k}", lambda k, n, m: (n + m) * k),
    ("n, m", "The larger of n and m, plus {k}.", "max(n, m) + {k}", lambda k, n, m: max(n, m) + k),
    ("n, m", "The smaller of n and m, plus {k}.", "min(n, m) + {k}", lambda k, n, m: min(n, m) + k),
    ("n, m", "{k} times n, plus m.", "{k} * n + m", lambda k, n, m: k * n + m),
    ("s", "The text s, {k} times.", "s * {k}", lambda k, s: s * k),
    ("s", "The first {k} characters of s.", "s[:{k}]", lambda k, s: s[:k]),
    ("s", "The last {k} characters of s.", "s[-{k}:]", lambda k, s: s[-k:]),
    ("s", "The length of s, plus {k}.", "len(s) + {k}", lambda k, s: len(s) + k),
    ("s", "The reverse of s, {k} times.", "s[::-1] * {k}", lambda k, s: s[::-1] * k),
    ("s", "The upper case of the first {k} characters of s.", "s[:{k}].upper()", lambda k, s: s[:k].upper()),
    ("s, t", "The text s, then t {k} times.", "s + t * {k}", lambda k, s, t: s + t * k),
    ("a", "The sum of the list a, plus {k}.", "sum(a) + {k}", lambda k, a: sum(a) + k),
    ("a", "The largest number of the list a, plus {k}.", "max(a) + {k}", lambda k, a: max(a) + k),
    ("a", "The list a with {k} at its end.", "a + [{k}]", lambda k, a: [*a, k]),
    ("a", "How often {k} is in the list a.", "a.count({k})", lambda k, a: a.count(k)),
    ("a", "Each number of the list a, plus {k}.", "[x + {k} for x in a]", lambda k, a: [x + k for x in a]),
    ("a", "The numbers of the list a above {k}.", "[x for x in a if x > {k}]", lambda k, a: [x for x in a if x > k]),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Code:
    """Every problem with every constant under every name, split at random into train and test.

    A problem and its constant are in one split, under all names.

    Raises:
      ValueError: an argument is outside its bounds.
    """

    num_test: int  # held-out problems with their constants, each under one name
    seed: int  # of the split, and of the inputs of tests
    template: str = "{program}"  # of a prompt; "{program}" is replaced

    reward: ClassVar[str] = "code"
    validation_from: ClassVar[str] = "train"

    def __post_init__(self):
        most = len(PROBLEMS) * (MAX_CONSTANT - 1) // 2
        check_between("num_test", self.num_test, 1, most, ", half of the problems")
        if "{program}" not in self.template:
            raise ValueError(f"template must contain '{{program}}', got {self.template!r}")

    def examples(self, split: str) -> list[Example]:
        """The functions of a split, in a seeded order."""
        return [example for example, _ in self._splits[check_split(split)]]

    def key(self, text: str) -> str:
        """Equal for one problem and constant under all names."""
        return text[text.index('"""') :]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Train functions with their expressions, all of them right."""
        chosen = cycled(self._splits["train"], num)
        return [(example.text, f" {expression}") for example, expression in chosen]

    @functools.cached_property
    def _splits(self) -> dict[str, list[tuple[Example, str]]]:
        """Split → examples and the expressions that solve them."""
        rng = np.random.default_rng(self.seed)
        problems = [(p, k) for p in PROBLEMS for k in range(2, MAX_CONSTANT + 1)]
        order = [problems[i] for i in rng.permutation(len(problems))]
        test, rest = order[: self.num_test], order[self.num_test :]
        test = [self._example(p, k, str(rng.choice(NAMES)), rng) for p, k in test]
        train = [self._example(p, k, name, rng) for p, k in rest for name in NAMES]
        return {"test": test, "train": [train[i] for i in rng.permutation(len(train))]}

    def _example(
        self, problem: tuple[str, str, str, Callable], k: int, name: str, rng: np.random.Generator
    ) -> tuple[Example, str]:
        *texts, solve = problem
        arguments, sentence, expression = (text.replace("{k}", str(k)) for text in texts)
        tests = []
        for _ in range(NUM_TESTS):
            values = [_value(kind, k, rng) for kind in arguments.split(", ")]
            tests.append(f"assert {name}({', '.join(map(repr, values))}) == {solve(k, *values)!r}")
        prefix = PREFIX.format(name=name, arguments=arguments, sentence=sentence)
        text = self.template.replace("{program}", prefix)
        return Example(text, json.dumps(tests), {"prefix": prefix}), expression


def _value(kind: str, k: int, rng: np.random.Generator) -> int | str | list[int]:
    """An input of a test; one in three numbers is near the constant."""
    match kind:
        case "n" | "m":
            low, high = (k - 2, k + 2) if rng.random() < 1 / 3 else (-99, 99)
            return int(rng.integers(low, high, endpoint=True))
        case "s" | "t":
            return "".join(rng.choice(list(string.ascii_lowercase), rng.integers(3, 9)))
        case _:
            return [int(x) for x in rng.integers(0, 2 * k, rng.integers(2, 7))]
