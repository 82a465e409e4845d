"""Answers to held-out prompts, each made and judged as in training: the common half of both evaluators."""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_async import security
from jaxrl_async.rewards.pool import RewardPool
from jaxrl_async.rollout.context import Generate, rng_of
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.servers.port import ServerError
from jaxrl_async.types import Prompt

log = logging.getLogger(__name__)


class EvaluationError(RuntimeError):
    """A version that could not be scored; the message says why."""


async def score(
    prompts: Sequence[Prompt],
    *,
    runner: Runner,
    pool: Callable[[], RewardPool],
    num_samples: int,
    seed: int,
    generate_of: Callable[[int, int], Generate],
) -> tuple[np.ndarray, np.ndarray]:
    """Runs the rollout function num_samples + 1 times per prompt, and judges every sample.

    An answer whose rollout or reward fails is not right; such failures are counted in one warning.

    Args:
      prompts: P of them.
      runner: the run's rollout function.
      pool: makes a pool of rewards, not started.
      num_samples: n ≥ 1, beside the greedy one.
      seed: of the random generators that rollout functions are given.
      generate_of: (position of the prompt, sample) → its `generate`; sample 0 is the greedy one.

    Returns:
      Whether answers are right: greedy bool [P], sampled bool [P, n].

    Raises:
      EvaluationError, ServerError: from `generate`; no answer is judged then.
      RewardError: the pool did not start.
    """
    failures: list[Exception] = []

    async def is_right(number: int, sample: int, pool: RewardPool) -> bool:
        prompt = prompts[number]
        make_rng = functools.partial(rng_of, "evaluation", seed, number, sample, 0)
        try:
            generate = generate_of(number, sample)
            found = await runner.run(prompt, generate, make_rng, is_trained=False)
            runner.check(found)
            return runner.is_right(await runner.judge(found, prompt, pool))
        except (EvaluationError, ServerError):
            raise
        except Exception as error:  # The rollout function's own, an invalid trajectory, a reward.
            failures.append(error)
            return False

    numbers, samples = range(len(prompts)), range(num_samples + 1)
    async with pool() as started:
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
        log.warning(
            "%d of %d rollouts or rewards failed and count as not right; the first: %s",
            *(
                len(failures),
                len(answers),
                security.escaped(f"{type(failures[0]).__name__}: {failures[0]}"),
            ),
        )
    right = np.array([answer.result() for answer in answers]).reshape(len(prompts), -1)
    return right[:, 0], right[:, 1:]


def sampling_of(runner: Runner, *, temperature: float, seed: int, sample: int) -> dict[str, Any]:
    """SGLang's sampling parameters of an answer: greedy for sample 0, at the temperature for the others."""
    return {
        "max_new_tokens": runner.max_new_tokens,
        "stop_token_ids": list(runner.stop_token_ids),
        "temperature": temperature if sample else 0.0,
        "sampling_seed": seed % 2**31,
    } | runner.bias
