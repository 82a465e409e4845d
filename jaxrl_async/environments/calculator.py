"""A calculator: a turn that is an expression is answered with its value; the first that is none is the answer.

prompt       tom has 482 and gets 715.
turn 1       482+715
observation  =1197:
turn 2       1197
"""

import asyncio
import math
import operator
import re

import numpy as np

from jaxrl_async.environments.environment import Observation
from jaxrl_async.types import Prompt

EXPRESSION = re.compile(r"(\d{1,12})([-+*])(\d{1,12})")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator:
    """Reward 1 for the gold answer, else 0. Component `calls`: expressions that were computed."""

    def __init__(self, median_secs: float = 0.0, sigma: float = 1.0):
        """A computation takes log-normal seconds, as the tools of real agents do; 0: none.

        Raises:
          ValueError: median_secs or sigma, of the logarithm, is not ≥ 0 and finite.
        """
        for name, value in (("median_secs", median_secs), ("sigma", sigma)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of the calculator must be ≥ 0 and finite, got {value!r}")
        self._median_secs, self._sigma = median_secs, sigma

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        """Remembers the gold answer."""
        self._answer, self._rng = prompt.answer, rng
        return Observation()

    async def step(self, action: str) -> Observation:
        """Computes an expression, or judges the answer."""
        result = computed(action)
        if result is None:
            return Observation(reward=float(action == self._answer), done=True)
        if self._median_secs:
            spread = math.exp(self._sigma * self._rng.standard_normal())
            await asyncio.sleep(self._median_secs * spread)
        return Observation(text=shown(result), components={"calls": 1.0})


def computed(text: str) -> str | None:
    """The value of one expression of two numbers; None where the text is none."""
    match = EXPRESSION.fullmatch(text)
    return match and str(_OPERATORS[match[2]](int(match[1]), int(match[3])))


def shown(result: str) -> str:
    """A result as the policy reads it."""
    return f"={result}:"
