"""Evaluation while a run trains: a version is scored on validation prompts, on a server that holds it meanwhile.

The publisher lends a server and leaves it at its version until the evaluation is over. A completion with a token of
another version is an error, not a score. Imports nothing of the learner.
"""

import asyncio
import dataclasses
import itertools
import logging
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxrl_async import sealed
from jaxrl_async.config.settings import Evaluate
from jaxrl_async.evaluation.score import EvaluationError, EvaluationSet, sampling_of, score
from jaxrl_async.rewards.pool import RewardError
from jaxrl_async.rollout.context import Generate
from jaxrl_async.servers.port import Completion, ServerError, Servers

BEST_FILE = "best.json"

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class Evaluator:
    """Scores every `every_steps`-th version, one at a time, and knows the best of them."""

    workdir: pathlib.Path  # its best.json names the best version, over restarts of the run
    # The first one chooses the best version: the validation split, or the test split where evaluate.num_validation is
    # −1.
    sets: Sequence[EvaluationSet]
    _: dataclasses.KW_ONLY
    # The block; every_steps ≥ 1. At timeout_secs the server is given back; max_running_requests leaves training most of
    # a server that it shares; `seed` gives every version the same random numbers.
    settings: Evaluate
    temperature: float  # > 0, of the num_samples completions per prompt; one more is greedy

    def __post_init__(self):
        self._best_path = self.workdir / BEST_FILE
        say_lost_best(self.workdir)
        self._lock = threading.Lock()  # The learner pops what the publisher's thread adds.
        self._new: dict[str, float] = {}

    def wants(self, version: int) -> bool:
        """Whether this version is to be scored."""
        return version % self.settings.every_steps == 0

    async def run(self, client: Servers, address: str, version: int) -> None:
        """Scores the version that a server holds until this returns; a failure is logged, and leaves no score."""
        start = time.monotonic()
        row: dict[str, float] = {"version": version}
        try:
            async with asyncio.timeout(self.settings.timeout_secs):
                row |= await self._score(client, address, version)
        except (EvaluationError, RewardError, ServerError) as error:
            log.warning("version %d is not evaluated: %s", version, error)
        except TimeoutError:
            log.warning(
                "version %d is not evaluated: not done within evaluate.timeout_secs = %g",
                *(version, self.settings.timeout_secs),
            )
        except Exception:  # As of a process that the machine cannot start: training goes on.
            log.exception("version %d is not evaluated", version)
        else:
            row["secs"] = time.monotonic() - start
            row["validation"] = float(self.settings.num_validation > 0)
            log.info("version %d: %s", version, {k: round(v, 4) for k, v in row.items()})
            try:
                self._keep_best(version, row["greedy"])
            except Exception:  # As of a full disk: training goes on.
                log.exception("version %d is not kept as the best", version)
        with self._lock:
            self._new = {f"eval/{name}": value for name, value in row.items()}

    def pop(self) -> dict[str, float]:
        """The metrics of an evaluation that ended since the last call: eval/version alone where it failed."""
        with self._lock:
            new, self._new = self._new, {}
        return new

    async def _score(self, client: Servers, address: str, version: int) -> dict[str, float]:
        """As `score`."""
        wanted = self.settings
        places = asyncio.Semaphore(wanted.max_running_requests)

        def generate_of(asked: EvaluationSet, number: int, sample: int) -> Generate:
            seed = wanted.seed * 1_000_003 + number * (wanted.num_samples + 1) + sample
            sampling = sampling_of(
                asked.runner, temperature=self.temperature, seed=seed, sample=sample
            )
            calls = itertools.count()

            async def generate(tokens: Sequence[int], **overrides: Any) -> Completion:
                async with places:
                    completion = await client.generate(
                        address,
                        rid=f"eval-{version:08d}-{number:06d}-{sample:04d}-{next(calls):04d}",
                        input_ids=tokens,
                        sampling_params=sampling | overrides,
                        timeout_secs=wanted.timeout_secs,
                    )
                self._check(completion, address, version)
                return completion

            return generate

        return await score(
            self.sets, num_samples=wanted.num_samples, seed=wanted.seed, generate_of=generate_of
        )

    def _check(self, completion: Completion, address: str, version: int) -> None:
        if completion.finish_reason == "abort":
            raise EvaluationError(f"{address} aborted a request")
        others = set(completion.versions.tolist()) - {version}
        if others:
            raise EvaluationError(f"{address} sampled tokens with version {min(others)}")

    def _keep_best(self, version: int, greedy: float) -> None:
        best = _read_best(self._best_path)
        if best is None or greedy > best["greedy"]:
            sealed.write(self._best_path, {"version": version, "greedy": greedy})


def best_version(workdir: pathlib.Path) -> int | None:
    """The version with the highest greedy accuracy of a run so far, the first of equal ones; None before any.

    Raises:
      DamagedError: best.json is not as it was written.
    """
    best = _read_best(workdir / BEST_FILE)
    return None if best is None else best["version"]


def say_lost_best(workdir: pathlib.Path) -> None:
    """Warns where best.json is missing, though versions were evaluated; raises DamagedError where it is damaged."""
    rows = workdir / "metrics.jsonl"
    lost = _read_best(workdir / BEST_FILE) is None and rows.exists()
    if lost and b'"eval/greedy"' in rows.read_bytes():
        log.warning("%s is missing: the next evaluation chooses the best anew", workdir / BEST_FILE)


def _read_best(path: pathlib.Path) -> dict | None:
    if not path.exists():
        return None
    remedy = "delete it: the next evaluation chooses the best version anew"
    return sealed.read(path, remedy=remedy, keys=("version", "greedy"))
