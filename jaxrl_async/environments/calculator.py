"""A calculator: a turn that is an expression is answered with its value; the first that is none is the answer.

prompt       tom has 482 and gets 715.
turn 1       482+715
observation  =1197:
turn 2       1197
"""

import operator
import re

import numpy as np

from jaxrl_async.environments.environment import Observation
from jaxrl_async.types import Prompt

EXPRESSION = re.compile(r"(\d{1,12})([-+*])(\d{1,12})")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator:
    """Reward 1 for the gold answer, else 0. Component `calls`: expressions that were computed."""

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        """Remembers the gold answer."""
        self._answer = prompt.answer
        return Observation()

    async def step(self, action: str) -> Observation:
        """Computes an expression, or judges the answer."""
        result = computed(action)
        if result is None:
            return Observation(reward=float(action == self._answer), done=True)
        return Observation(text=shown(result), components={"calls": 1.0})


def computed(text: str) -> str | None:
    """The value of one expression of two numbers; None where the text is none."""
    match = EXPRESSION.fullmatch(text)
    return match and str(_OPERATORS[match[2]](int(match[1]), int(match[3])))


def shown(result: str) -> str:
    """A result as the policy reads it."""
    return f"={result}:"
