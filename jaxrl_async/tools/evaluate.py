"""Held-out evaluation of checkpoints: greedy accuracy and pass@k, on the embedded engine in this process.

Rewards run in the pool, within the run's bounds. A completion whose reward fails is not right, and is counted.
"""

import asyncio
import logging
import math
import pathlib
import queue
from collections.abc import Sequence

import numpy as np

from jaxrl_async.config.settings import Settings
from jaxrl_async.evaluation import scores
from jaxrl_async.inference.engine import Completion, Engine, Request
from jaxrl_async.inference.sampling import SamplingParams
from jaxrl_async.rewards.pool import RewardError
from jaxrl_async.roles import parts
from jaxrl_async.tasks.prompts import test_prompts
from jaxrl_async.tasks.tokenizer import completion_text
from jaxrl_async.types import Prompt

ENGINE_TIMEOUT_SECS = 600.0

_log = logging.getLogger(__name__)


def evaluate(settings: Settings, workdir: pathlib.Path, steps: Sequence[int | None]) -> list[dict]:
    """Scores checkpoints of a run on the task's held-out prompts.

    Args:
      settings: the run's settings.
      workdir: its directory.
      steps: checkpoints; None is the last one.

    Returns:
      One row per checkpoint: step, greedy (accuracy at temperature 0), and pass@1 and pass@n at the run's
      temperature, n = evaluate.num_samples, with their intervals (see `scores.row`).

    Raises:
      CheckpointError: no such checkpoint, or one of another shape.
    """
    tokenizer = parts.tokenizer_of(settings, workdir)
    task = parts.task_of(settings)
    max_prompt_tokens = settings.rollout.max_prompt_tokens
    prompts = test_prompts(task, tokenizer, max_prompt_tokens=max_prompt_tokens)
    prompts = prompts[: settings.evaluate.num_prompts]
    engine = parts.engine_of(settings, workdir, name="evaluate")
    engine.start()
    try:
        rows = []
        for step in steps:
            step, params = parts.checkpoint_params(settings, workdir, step)
            engine.update_weights(params, str(step)).result(ENGINE_TIMEOUT_SECS)
            rows.append({"step": step} | _score(engine, settings, tokenizer, prompts, task.reward))
        return rows
    finally:
        engine.close(timeout_secs=ENGINE_TIMEOUT_SECS)


def _score(
    engine: Engine, settings: Settings, tokenizer, prompts: Sequence[Prompt], reward: str
) -> dict:
    rollout, n = settings.rollout, settings.evaluate.num_samples

    def text(completion: Completion) -> str:
        return completion_text(
            completion.output_ids.tolist(),
            decode=tokenizer.decode,
            stop_token_ids=tokenizer.stop_token_ids,
        )

    def sampled(temperature: float, count: int) -> np.ndarray:
        """bool [prompts, count]"""
        requests = [
            Request(
                rid=f"{i:06d}-{sample:04d}",
                input_ids=prompt.tokens,
                sampling=SamplingParams(
                    max_new_tokens=rollout.max_new_tokens,
                    temperature=temperature,
                    top_p=1.0,
                    top_k=-1,
                    stop_token_ids=tuple(tokenizer.stop_token_ids),
                    seed=(settings.evaluate.seed * 1_000_003 + i * n + sample) % 2**31,
                ),
            )
            for i, prompt in enumerate(prompts)
            for sample in range(count)
        ]
        completions = sorted(complete(engine, requests), key=lambda c: c.rid)
        calls = [(text(c), prompts[int(c.rid[:6])].answer) for c in completions]
        # Partial credit is not right.
        return np.array(_rewards(calls, settings, reward)).reshape(len(prompts), count) >= 1.0

    return scores.row(sampled(0.0, 1)[:, 0], sampled(rollout.temperature, n))


def _rewards(calls: Sequence[tuple[str, str]], settings: Settings, reward: str) -> list[float]:
    """Of (completion, answer) pairs; −inf where the reward failed."""

    async def score() -> list[float | BaseException]:
        async with parts.reward_pool_of(settings, reward) as pool:
            return await asyncio.gather(*(pool.score(*c) for c in calls), return_exceptions=True)

    outcomes = asyncio.run(score())
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if other := [failure for failure in failures if not isinstance(failure, RewardError)]:
        raise other[0]
    if failures:
        _log.warning(
            "%d of %d rewards failed and count as not right: %s",
            len(failures),
            len(calls),
            failures[0],
        )
    return [-math.inf if isinstance(o, BaseException) else o for o in outcomes]


def complete(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Runs requests to their ends, in any order.

    Raises:
      UnavailableError: the engine died.
    """
    ended: queue.SimpleQueue = queue.SimpleQueue()
    completions: list[Completion] = []
    sent = min(len(requests), engine.max_queued_requests)
    for request in requests[:sent]:
        engine.submit(request, ended.put)
    while len(completions) < len(requests):
        for _, outcome in ended.get(timeout=ENGINE_TIMEOUT_SECS):
            if isinstance(outcome, Exception):
                raise outcome
            completions.append(outcome)
            if sent < len(requests):
                engine.submit(requests[sent], ended.put)
                sent += 1
    return completions
