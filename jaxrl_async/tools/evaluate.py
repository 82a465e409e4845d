"""Held-out evaluation of checkpoints: greedy accuracy and pass@k, on the embedded engine in this process.

The run's rollout function makes the answers, and rewards run in the pool, within the run's bounds.
"""

import asyncio
import contextlib
import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async import parts
from jaxrl_async.config.settings import Evaluate, Settings
from jaxrl_async.evaluation.score import EvaluationError, EvaluationSet, sampling_of, score
from jaxrl_async.inference import engine as engines
from jaxrl_async.inference import requests as engine_requests
from jaxrl_async.inference.fields import parse_sampling
from jaxrl_async.rollout.context import Generate
from jaxrl_async.servers.port import Completion

ENGINE_TIMEOUT_SECS = 600.0


def evaluate(
    settings: Settings,
    workdir: pathlib.Path,
    steps: Sequence[int | None],
    sets: Sequence[EvaluationSet],
) -> list[dict[str, float]]:
    """Scores checkpoints of a run on held-out prompts.

    Args:
      steps: checkpoints; None is the last one.
      sets: as of `parts.evaluation_sets`.

    Returns:
      One row per checkpoint: step, greedy (accuracy at temperature 0), and pass@1 and pass@n at the run's
      temperature, n = evaluate.num_samples, with their intervals and coverage, of each set (see `score`).

    Raises:
      CheckpointError: no such checkpoint, or one of another shape.
      EvaluationError: the engine died, or is stuck.
    """
    engine = parts.engine_of(settings, workdir, name="evaluate")
    engine.start()
    try:
        rows = []
        for step in steps:
            step, params = parts.checkpoint_params(settings, workdir, step)
            engine.update_weights(params, str(step)).result(ENGINE_TIMEOUT_SECS)
            temperature = settings.rollout.temperature
            row = score_engine(engine, sets, settings=settings.evaluate, temperature=temperature)
            rows.append({"step": step} | row)
        return rows
    finally:
        engine.close(timeout_secs=ENGINE_TIMEOUT_SECS)


def score_engine(
    engine: engines.Engine,
    sets: Sequence[EvaluationSet],
    *,
    settings: Evaluate,
    temperature: float,
) -> dict[str, float]:
    """Scores the weights of a started engine; arguments as of `Evaluator`, the row as of `score`.

    Raises:
      EvaluationError: the engine died, or is stuck.
      RewardError: the pool did not start.
    """

    async def run() -> dict[str, float]:
        engine_client = EngineClient(engine)

        def generate_of(asked: EvaluationSet, number: int, sample: int) -> Generate:
            seed = settings.seed * 1_000_003 + number * settings.num_samples + max(sample - 1, 0)
            sampling = sampling_of(asked.runner, temperature=temperature, seed=seed, sample=sample)
            return functools.partial(engine_client.generate, sampling)

        return await score(
            sets, num_samples=settings.num_samples, seed=settings.seed, generate_of=generate_of
        )

    return asyncio.run(run())


class EngineClient:
    """`generate` of an engine in this process, for one event loop."""

    def __init__(self, engine: engines.Engine):
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(engine.max_queued_requests)
        self._rids = map(str, itertools.count())
        self._running: dict[str, asyncio.Future] = {}  # rid → completion or error
        self._num_ended = 0

    async def generate(
        self, sampling: Mapping[str, Any], tokens: Sequence[int], **overrides: Any
    ) -> Completion:
        """Continues token ids [T]; `overrides` replace sampling parameters, by SGLang's names.

        Raises:
          InvalidRequestError: the engine does not take these tokens or parameters.
          EvaluationError: the engine died, or ended no request for ENGINE_TIMEOUT_SECS.
        """
        rid, ids = next(self._rids), np.array(tokens, np.int32)
        request = engine_requests.Request(rid, ids, parse_sampling({**sampling, **overrides}))
        async with self._places:
            try:
                self._engine.submit(request, self._on_done)
                self._running[rid] = self._loop.create_future()
                return completion_of(await self._ended(self._running[rid]))
            except engine_requests.UnavailableError as error:
                raise EvaluationError(str(error)) from error
            except asyncio.CancelledError:  # Its rollout function gave it up.
                self._engine.abort({rid}.__contains__)
                raise
            finally:
                self._running.pop(rid, None)

    async def _ended(self, future: asyncio.Future) -> engine_requests.Completion:
        while not future.done():
            before = self._num_ended
            await asyncio.wait({future}, timeout=ENGINE_TIMEOUT_SECS)
            if not future.done() and self._num_ended == before:
                raise EvaluationError(
                    f"engine {self._engine.name!r} ended no request within {ENGINE_TIMEOUT_SECS:g} s"
                )
        outcome = future.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _on_done(self, ended: list) -> None:
        """On the engine's thread: one wake-up of the event loop for all that ended together."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._resolve, ended)

    def _resolve(self, ended: list) -> None:
        self._num_ended += len(ended)
        for rid, outcome in ended:
            future = self._running.get(rid)
            if future is not None and not future.done():
                future.set_result(outcome)


def completion_of(done: engine_requests.Completion) -> Completion:
    """An engine's answer as the HTTP client would have read it."""
    versions = np.empty(len(done.output_ids), np.int32)
    for span in done.spans:
        versions[span.start : span.end] = int(span.version)
    logprobs = np.minimum(done.logprobs, 0)  # float32 rounds log 1 to a little above.
    assert done.finish_reason is not None
    reason = done.finish_reason["type"]
    return Completion(done.output_ids, logprobs, versions, reason, routes=done.routes)
