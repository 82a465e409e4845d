"""A training run in one process: the parts of `train` without its processes, HTTP and gRPC, for hundreds of small runs.

`learner.train` is the loop here too. Its queue is `_Samples`, which on every lease samples the step's groups on an
embedded `Engine`, rewards them and lets their frictions happen, as a rollout worker would; its publisher is
`_Versions`, which keeps the last weights. Prompts, seeds of requests and all that follows are those of a run in mode
sync, and so are the parameters, bit for bit (tests/benchmarks/test_benchmarks.py). Weights that are
`rollout.delay_steps` old are taken from the versions kept.

It knows nothing of what its runs are compared for.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_async import parts
from jaxrl_async.config.forms import delay_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.inference import engine as engines
from jaxrl_async.inference import requests as engine_requests
from jaxrl_async.inference.sampling import SamplingParams
from jaxrl_async.learner import learner as learners
from jaxrl_async.learner.train_step import TrainState, TrainStep, mesh_of
from jaxrl_async.learner.versions import Delay
from jaxrl_async.metrics import Timers
from jaxrl_async.models import sharding, transformer
from jaxrl_async.records import NO_STATUS, Permit, QueueStatus, ResumePoint
from jaxrl_async.rewards import reward_function
from jaxrl_async.rewards.math import exact
from jaxrl_async.rollout.context import rng_of
from jaxrl_async.rollout.sampler import request_seed
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.servers.port import Completion
from jaxrl_async.tasks.prompts import held_out_prompts, prompt_stream
from jaxrl_async.tasks.tokenizer import Tokenizer
from jaxrl_async.tools.evaluate import completion_of
from jaxrl_async.types import Chunk, Group, Prompt, Trajectory, check_trajectory

TIMEOUT_SECS = 600.0
# Version 0 answers alike in runs that have these, and the learner's head_chunk_tokens, in common.
OF_FIRST_SCORES = ("seed", "task", "tokenizer", "model", "warm_start", "rollout", "server", "evaluate")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    params: nnx.State  # of the last version
    metrics: list[dict[str, float]]  # a row per step, by the names of jaxrl_async.metrics
    evaluations: list[dict[str, float]]  # step, reward, exact: of version 0 and every checkpoint
    seconds: float  # of training and evaluations


class Laboratory:
    """Runs settings one after another. Engines and train steps are made once for all runs of their shapes."""

    def __init__(self, directory: str | os.PathLike):
        """Starts nothing yet.

        Args:
          directory: where version 0 of each seed, model and warm start is kept for the runs that share it.
        """
        self._directory = pathlib.Path(directory)
        self._engines: dict[Any, engines.Engine] = {}
        self._train_steps: dict[Any, TrainStep] = {}
        self._first_scores: dict[str, dict[str, float]] = {}

    def __enter__(self) -> "Laboratory":
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close(timeout_secs=TIMEOUT_SECS)

    def run(self, settings: Settings) -> Outcome:
        """Trains, and evaluates version 0 and every version that `train` would save.

        Raises:
          ValueError: settings that need the real processes.
        """
        _check(settings)
        start = time.monotonic()
        engine, train_step = self._engine(settings), self._train_step(settings)
        versions = _Versions(engine, settings)
        samples = _Samples(engine, versions, settings, self._tokenizer(settings))
        metrics, evaluations = _Metrics(), []
        shared = [getattr(settings, name) for name in OF_FIRST_SCORES]
        first = repr((shared, settings.learner.head_chunk_tokens))

        def evaluate(step: int, state: TrainState, resume_point: ResumePoint | None) -> None:
            known = self._first_scores if step == 0 else {}
            if first not in known:
                versions.hold_for_evaluation(state)
                known[first] = samples.evaluate()
            evaluations.append({"step": step} | known[first])

        state = train_step.init(self.first_params(settings))
        config = parts.model_config_of(settings, self._tokenizer(settings))
        own = functools.partial(_copy, state.params)
        reference = parts.reference_of(settings, config, _mesh(settings), own)
        evaluate(0, state, None)
        versions.publish(0, versions.snapshot(state))
        state = learners.train(
            state,
            first_step=1,
            settings=settings,
            train_step=train_step,
            pack=parts.packer_of(settings),
            queue=samples,
            publisher=versions,
            save=evaluate,
            metrics=metrics,
            timers=Timers(),
            reference=reference,
        )
        return Outcome(state.params, metrics.rows, evaluations, time.monotonic() - start)

    def first_params(self, settings: Settings) -> nnx.State:
        """Version 0: from its file where a run has left one, else made (and warm-started) and left there."""
        key = (settings.seed, settings.task, settings.tokenizer, settings.model)
        key += (settings.warm_start, settings.learner.head_chunk_tokens)
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        path = self._directory / f"version-0-{name}.npz"
        tokenizer, mesh = self._tokenizer(settings), _mesh(settings)
        config = parts.model_config_of(settings, tokenizer)
        if not path.exists():
            _write(
                path,
                jax.tree.leaves(parts.first_params_of(settings, config, mesh, tokenizer)),
            )
        abstract = transformer.abstract_params(config)
        with np.load(path) as leaves:
            params = jax.tree.unflatten(jax.tree.structure(abstract), list(leaves.values()))
        return jax.device_put(params, sharding.param_shardings(mesh, abstract))

    def _engine(self, settings: Settings) -> engines.Engine:
        key = (settings.model, settings.tokenizer, settings.server)
        if key not in self._engines:
            self._engines[key] = parts.engine_of(settings, self._workdir(settings), name="engine")
            self._engines[key].start()
        return self._engines[key]

    def _train_step(self, settings: Settings) -> TrainStep:
        learner = dataclasses.replace(settings.learner, num_steps=1, groups_per_step=1)
        key = (settings.model, settings.tokenizer, settings.loss, settings.rollout.temperature)
        if (key := (*key, learner)) not in self._train_steps:
            config = parts.model_config_of(settings, self._tokenizer(settings))
            self._train_steps[key] = parts.train_step_of(settings, config, _mesh(settings))
        return self._train_steps[key]

    def _tokenizer(self, settings: Settings):
        return parts.tokenizer_of(settings, self._workdir(settings))

    def _workdir(self, settings: Settings) -> pathlib.Path:
        parts = (settings.tokenizer, settings.task)
        return self._directory / hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _Versions:
    """The publisher: keeps the versions that may still sample, and gives the engine the one that is due."""

    def __init__(self, engine: engines.Engine, settings: Settings):
        self._engine = engine
        self._delay = Delay(*delay_of(settings.rollout.delay_steps), seed=settings.seed)
        self._kept: dict[int, nnx.State] = {}
        self._held: int | None = None  # by the engine

    def snapshot(self, state: TrainState) -> nnx.State:
        return _copy(state.params)  # The learner donates its own to the next update.

    def publish(self, version: int, snapshot: nnx.State) -> None:
        self._kept[version] = snapshot
        self._kept.pop(version - self._delay.max_steps - 1, None)

    def hold_for(self, step: int) -> None:
        """Gives the engine the weights that sample a step."""
        version = self._delay.held(step - 1)
        if version != self._held:
            self._engine.update_weights(self._kept[version], str(version)).result(TIMEOUT_SECS)
        self._held = version

    def hold_for_evaluation(self, state: TrainState) -> None:
        self._engine.update_weights(state.params, "0").result(TIMEOUT_SECS)
        self._held = None

    def wait(self, should_stop) -> None: ...
    def check(self) -> None: ...
    def metrics(self) -> dict[str, float]:
        return {}


class _Samples:
    """The queue: a lease is answered with the groups that a worker would have made of the step's permits."""

    def __init__(
        self, engine: engines.Engine, versions: _Versions, settings: Settings, tokenizer: Any
    ):
        self._engine, self._versions, self._settings = engine, versions, settings
        self._tokenizer, task = tokenizer, parts.task_of(settings)
        self._reward = reward_function(task.reward)
        bound = settings.rollout.max_prompt_tokens
        self._prompts = prompt_stream(
            task, tokenizer, split="train", seed=settings.task.seed, max_prompt_tokens=bound
        )
        held_out = held_out_prompts(task, tokenizer, max_prompt_tokens=bound)
        self._held_out = held_out[: settings.evaluate.num_prompts]
        self._frictions = parts.frictions_of(settings, tokenizer)
        self._completion_tokens = 0

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        self._versions.hold_for(step)
        size = self._settings.learner.groups_per_step
        indexes = range((step - 1) * size, step * size)
        samples = range(self._settings.rollout.group_size)
        prompts = {index: self._prompts[index] for index in indexes}
        permits = {index: Permit(index, 0) for index in indexes}
        seeds = {
            (i, j): request_seed(self._settings.seed, permits[i], j)
            for i in indexes
            for j in samples
        }
        temperature = self._settings.rollout.temperature
        completions = self._complete({k: (prompts[k[0]], seeds[k]) for k in seeds}, temperature)
        groups = tuple(
            Group(i, 0, tuple(self._recorded(prompts[i], j, completions[i, j]) for j in samples))
            for i in indexes
        )
        self._completion_tokens += sum(len(c.tokens) for c in completions.values())
        yield Chunk(step=step, index=0, groups=groups, last=True)

    def evaluate(self) -> dict[str, float]:
        """Greedy answers to the held-out prompts by a clean sampler: mean reward, and share of exact answers."""
        asked = {(prompt.index, 0): (prompt, 0) for prompt in self._held_out}
        completions = self._complete(asked, 0.0)
        texts = [text_of(self._tokenizer, completions[p.index, 0].tokens) for p in self._held_out]
        return {
            name: float(
                np.mean([r(t, p.answer) for t, p in zip(texts, self._held_out, strict=True)])
            )
            for name, r in {"reward": self._reward, "exact": exact}.items()
        }

    def commit(self, step: int) -> ResumePoint:
        return ResumePoint(step, step * self._settings.learner.groups_per_step, (), {}, {})

    def status(self) -> QueueStatus:
        return dataclasses.replace(NO_STATUS, completion_tokens=self._completion_tokens)

    def _complete(
        self, asked: dict[tuple[int, int], tuple[Prompt, int]], temperature: float
    ) -> dict[tuple[int, int], Completion]:
        """Completions of (prompt, seed), by the same keys."""
        keys = {f"{index}-{sample}": (index, sample) for index, sample in asked}
        requests = [
            request_of(self._settings, self._tokenizer, rid, prompt, temperature, seed)
            for rid, (prompt, seed) in zip(keys, asked.values(), strict=True)
        ]
        return {keys[done.rid]: completion_of(done) for done in complete(self._engine, requests)}

    def _recorded(self, prompt: Prompt, sample: int, completion: Completion) -> Trajectory:
        """What a worker would push of a sample."""
        rng = (
            rng_of("frictions", self._settings.seed, prompt.index, sample, 0)
            if self._frictions
            else None
        )
        trajectory = _result(single_turn(prompt, functools.partial(_given, completion)))
        if rng:
            (trajectory,) = self._frictions.of_rows([trajectory], rng)
        reward = self._reward(text_of(self._tokenizer, trajectory.completion), prompt.answer)
        if rng:
            reward = self._frictions.of_reward(reward, rng)
        trajectory = dataclasses.replace(trajectory, reward=reward)
        bounds = {"vocab_size": self._tokenizer.vocab_size}
        check_trajectory(trajectory, max_tokens=self._settings.learner.row_tokens, **bounds)
        return trajectory


class _Metrics:
    """The metrics writer."""

    def __init__(self):
        self.rows: list[dict[str, float]] = []

    def write(self, step: int, row: dict[str, float]) -> None:
        self.rows.append({"step": step} | row)


def _check(settings: Settings) -> None:
    rollout = settings.rollout
    for name, value, wanted in (
        ("mode", settings.mode, "sync"),
        ("rollout.function", rollout.function, "single_turn"),
        ("rollout.drop_equal_rewards", rollout.drop_equal_rewards, False),
        ("rollout.overlong_buffer_tokens", rollout.overlong_buffer_tokens, 0),
        ("weights.dtype", settings.weights.dtype, "float32"),
        ("the servers in loss.teacher", settings.loss.teachers, {}),
    ):
        if value != wanted:
            raise ValueError(f"{name} must be {wanted!r} in one process, got {value!r}")


def complete(
    engine: engines.Engine, requests: Sequence[engine_requests.Request]
) -> list[engine_requests.Completion]:
    """Runs requests to their ends, in any order.

    Raises:
      UnavailableError: the engine died.
    """
    ended: queue.SimpleQueue = queue.SimpleQueue()
    completions: list[engine_requests.Completion] = []
    sent = min(len(requests), engine.max_queued_requests)
    for request in requests[:sent]:
        engine.submit(request, ended.put)
    while len(completions) < len(requests):
        for _, outcome in ended.get(timeout=TIMEOUT_SECS):
            if isinstance(outcome, Exception):
                raise outcome
            completions.append(outcome)
            if sent < len(requests):
                engine.submit(requests[sent], ended.put)
                sent += 1
    return completions


def request_of(
    settings: Settings,
    tokenizer: Tokenizer,
    rid: str,
    prompt: Prompt,
    temperature: float,
    seed: int,
) -> engine_requests.Request:
    """A run's request for one sample, at another temperature."""
    sampling = SamplingParams(
        max_new_tokens=settings.rollout.max_new_tokens,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=tuple(tokenizer.stop_token_ids),
        seed=seed,
    )
    return engine_requests.Request(rid, prompt.tokens, sampling)


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Of an answer [T], without the token that ended it."""
    ids = ids.tolist()
    if ids and ids[-1] in tokenizer.stop_token_ids:
        del ids[-1]
    return tokenizer.decode(ids)


async def _given(completion: Completion, tokens: Sequence[int] | np.ndarray) -> Completion:
    return completion


def _result(coroutine: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError(f"{coroutine} waits for something")


@jax.jit
def _copy(params: nnx.State) -> nnx.State:
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)


def _mesh(settings: Settings) -> jax.sharding.Mesh:
    return mesh_of(settings.learner, jax.devices()[: settings.learner.num_devices])


def _write(path: pathlib.Path, leaves: Sequence[jax.Array]) -> None:
    """Whole or not at all: other processes look for the file too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
        np.savez(file, *map(np.asarray, leaves))
    pathlib.Path(file.name).rename(path)
