"""Answers to held-out prompts, each made and judged as in training: the common half of both evaluators."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from jaxrl_async import security
from jaxrl_async.evaluation import scores
from jaxrl_async.rewards.pool import PoolError, RewardPool
from jaxrl_async.rollout.context import Generate, rng_of
from jaxrl_async.rollout.failures import flattened
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.servers.port import ServerError
from jaxrl_async.types import Prompt

# At once. Agents share a thread, and the time in which one waits for the others is its own: thousands would be late.
MAX_SAMPLES = 512

log = logging.getLogger(__name__)


class EvaluationError(RuntimeError):
    """A version that could not be scored; the message says why."""


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Held-out prompts of one task, and what answers and judges them."""

    prompts: Sequence[Prompt]  # that are scored
    _: dataclasses.KW_ONLY
    num_fit: int  # prompts of the split that fit; evaluate.num_prompts of them are scored
    num_questions: int  # of the split
    runner: Runner  # of the run's rollout function
    pool: Callable[[], RewardPool]  # makes a pool of the task's reward, not started
    name: str = ""  # in evaluate.sets; "" of the run's own task

    @property
    def prefix(self) -> str:
        """Before the names of its scores."""
        return f"{self.name}/" if self.name else ""

    @property
    def coverage(self) -> dict[str, int]:
        """The prompts that its scores are of, by their names beside the scores."""
        counts = {"num_prompts": len(self.prompts), "num_fit": self.num_fit}
        return counts | {"num_questions": self.num_questions}


async def score(
    sets: Sequence[EvaluationSet],
    *,
    num_samples: int,
    seed: int,
    generate_of: Callable[[EvaluationSet, int, int], Generate],
) -> dict[str, float]:
    """Runs the rollout function num_samples + 1 times per prompt, and judges every sample; one set after another.

    MAX_SAMPLES of a set run at once. An answer whose rollout or reward fails is not right; a warning of each set has
    the first of them.

    Args:
      num_samples: n ≥ 1, beside the greedy one.
      seed: of the random generators that rollout functions are given.
      generate_of: (set, position of the prompt, sample) → its `generate`; sample 0 is the greedy one.

    Returns:
      Of each set `scores.row`, its coverage and num_failed, the answers that failed; of a named one as NAME/SCORE.

    Raises:
      EvaluationError, ServerError: from `generate`; no answer is judged then.
      RewardError: the pool did not start, or lost its processes.
    """
    row: dict[str, float] = {}
    for found in sets:
        generate = functools.partial(generate_of, found)
        right, num_failed = await _answers(found, num_samples, seed, generate)
        of_set = scores.row(right[:, 0], right[:, 1:]) | found.coverage | {"num_failed": num_failed}
        row |= {f"{found.prefix}{name}": value for name, value in of_set.items()}
    return row


async def _answers(
    wanted: EvaluationSet, num_samples: int, seed: int, generate_of: Callable[[int, int], Generate]
) -> tuple[np.ndarray, int]:
    """Whether answers are right, bool [P, 1 + n], the greedy ones first; and the number that failed."""
    failures: list[Exception] = []
    faults = (EvaluationError, PoolError, ServerError)
    runner, places = wanted.runner, asyncio.Semaphore(MAX_SAMPLES)

    async def is_right(number: int, sample: int, pool: RewardPool) -> bool:
        prompt = wanted.prompts[number]
        make_rng = functools.partial(rng_of, "evaluation", seed, number, sample, 0)
        try:
            async with places:
                generate = generate_of(number, sample)
                found = await runner.run(prompt, generate, make_rng, is_trained=False)
                runner.check(found, is_trained=False)
                return runner.is_right(await runner.judge(found, prompt, pool))
        except faults:
            raise
        except Exception as error:
            flat = flattened(error)  # Calls that a rollout function makes at once fail as a group.
            if fault := next((one for one in flat if isinstance(one, faults)), None):
                raise fault from error
            # The rollout function's own, an invalid trajectory, a reward.
            failures.append(cast(Exception, flat[0]))
            return False

    numbers, samples = range(len(wanted.prompts)), range(num_samples + 1)
    async with wanted.pool() as started:
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = [
                    tasks.create_task(is_right(number, sample, started))
                    for number in numbers
                    for sample in samples
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await runner.close()
    if failures:
        first = security.escaped(f"{type(failures[0]).__name__}: {failures[0]}")
        text = "%d of %d rollouts or rewards failed and count as not right; the first: %s"
        log.warning(text, len(failures), len(answers), first)
    right = np.array([answer.result() for answer in answers])
    return right.reshape(len(wanted.prompts), -1), len(failures)


def sampling_of(runner: Runner, *, temperature: float, seed: int, sample: int) -> dict[str, Any]:
    """SGLang's sampling parameters of an answer: greedy for sample 0, at the temperature for the others."""
    return {
        "max_new_tokens": runner.max_new_tokens,
        "stop_token_ids": list(runner.stop_token_ids),
        "temperature": temperature if sample else 0.0,
        "sampling_seed": seed % 2**31,
    } | runner.bias
