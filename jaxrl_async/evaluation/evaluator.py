"""Evaluation while a run trains: a version is scored on held-out prompts, on a server that holds it meanwhile.

The publisher lends a server and leaves it at its version until the evaluation is over. A completion of which any token
was sampled by another version is an error, not a score. Knows nothing of the learner.
"""

import asyncio
import json
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_async.evaluation import scores
from jaxrl_async.rewards.pool import RewardError, RewardPool
from jaxrl_async.servers.client import Completion, InferenceClient, ServerError
from jaxrl_async.tasks.tokenizer import completion_text
from jaxrl_async.types import Prompt

BEST_FILE = "best.json"

log = logging.getLogger(__name__)


class EvaluationError(RuntimeError):
    """A version that could not be scored; the message says why."""


class Evaluator:
    """Scores every `every_steps`-th version, one at a time, and knows the best of them."""

    def __init__(
        self,
        workdir: pathlib.Path,
        prompts: Sequence[Prompt],
        *,
        every_steps: int,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int,
        max_running_requests: int,
        timeout_secs: float,
        decode: Callable[[Sequence[int]], str],
        pool: Callable[[], RewardPool],
    ):
        """Starts nothing.

        Args:
          workdir: its best.json names the best version, over restarts of the run.
          prompts: held out.
          every_steps: ≥ 1.
          num_samples: per prompt, at `temperature`; one more is greedy.
          max_new_tokens: of a completion.
          temperature: > 0.
          stop_token_ids: that end a completion.
          seed: of the sampled completions; equal ones for every version.
          max_running_requests: at a time, so that training keeps most of a server that it shares.
          timeout_secs: bound on one evaluation; the server is given back then.
          decode: token ids → text.
          pool: makes the pool of rewards, once for each evaluation.
        """
        self._best_path, self._prompts = workdir / BEST_FILE, prompts
        self._every_steps, self._num_samples = every_steps, num_samples
        self._sampling = {"max_new_tokens": max_new_tokens, "stop_token_ids": list(stop_token_ids)}
        self._temperature, self._stops, self._seed = temperature, set(stop_token_ids), seed
        self._max_running_requests, self._timeout_secs = max_running_requests, timeout_secs
        self._decode, self._pool = decode, pool
        self._lock = threading.Lock()  # The learner pops what the publisher's thread adds.
        self._new: dict[str, float] = {}

    def wants(self, version: int) -> bool:
        """Whether this version is to be scored."""
        return version % self._every_steps == 0

    async def run(self, client: InferenceClient, address: str, version: int) -> None:
        """Scores the version that a server holds until this returns; what goes wrong is logged and counted."""
        start, row = time.monotonic(), {"version": version}
        try:
            async with asyncio.timeout(self._timeout_secs):
                greedy, sampled = await self._score(client, address, version)
        except (EvaluationError, RewardError, ServerError) as error:
            log.warning("version %d is not evaluated: %s", version, error)
        except TimeoutError:
            log.warning(
                "version %d is not evaluated: not done within evaluate.timeout_secs = %g",
                *(version, self._timeout_secs),
            )
        else:
            row |= scores.row(greedy, sampled) | {"secs": time.monotonic() - start}
            log.info("version %d: %s", version, {k: round(v, 4) for k, v in row.items()})
            self._keep_best(version, row["greedy"])
        with self._lock:
            self._new = {f"eval/{name}": value for name, value in row.items()}

    def pop(self) -> dict[str, float]:
        """The metrics of an evaluation that ended since the last call: eval/version alone where it failed."""
        with self._lock:
            new, self._new = self._new, {}
        return new

    async def _score(
        self, client: InferenceClient, address: str, version: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whether completions are right: greedy bool [P], sampled bool [P, n]."""
        places = asyncio.Semaphore(self._max_running_requests)
        counts = self._num_samples + 1  # Sample 0 is greedy.

        async def right(number: int, sample: int, pool: RewardPool) -> bool:
            prompt, seed = self._prompts[number], self._seed * 1_000_003 + number * counts + sample
            async with places:
                completion = await client.generate(
                    address,
                    rid=f"eval-{version:08d}-{number:06d}-{sample:04d}",
                    input_ids=prompt.tokens.tolist(),
                    sampling_params=self._sampling
                    | {
                        "temperature": self._temperature if sample else 0.0,
                        "sampling_seed": seed % 2**31,
                    },
                    timeout_secs=self._timeout_secs,
                )
            self._check(completion, address, version)
            text = completion_text(
                completion.tokens.tolist(), decode=self._decode, stop_token_ids=self._stops
            )
            try:
                return await pool.score(text, prompt.answer) >= 1.0
            except RewardError:
                return False

        async with self._pool() as pool:
            calls = [right(p, s, pool) for p in range(len(self._prompts)) for s in range(counts)]
            try:
                async with asyncio.TaskGroup() as tasks:
                    results = [tasks.create_task(call) for call in calls]
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
        found = np.array([task.result() for task in results]).reshape(-1, counts)
        return found[:, 0], found[:, 1:]

    def _check(self, completion: Completion, address: str, version: int) -> None:
        if completion.finish_reason == "abort":
            raise EvaluationError(f"{address} aborted a request")
        others = set(completion.versions.tolist()) - {version}
        if others:
            raise EvaluationError(f"{address} sampled tokens with version {min(others)}")

    def _keep_best(self, version: int, greedy: float) -> None:
        best = _read_best(self._best_path)
        if best is None or greedy > best["greedy"]:
            aside = self._best_path.with_suffix(".tmp")
            aside.write_text(json.dumps({"version": version, "greedy": greedy}) + "\n", "utf-8")
            aside.replace(self._best_path)


def best_version(workdir: pathlib.Path) -> int | None:
    """The version with the highest greedy accuracy of a run so far, the first of equal ones; None before any."""
    best = _read_best(workdir / BEST_FILE)
    return None if best is None else best["version"]


def _read_best(path: pathlib.Path) -> dict | None:
    return json.loads(path.read_text("utf-8")) if path.exists() else None
