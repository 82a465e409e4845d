"""Environments of the library `verifiers` (0.4): task.name = "verifiers:ENVIRONMENT", and the agent that plays them.

The environment runs its own episode: its tasks, tools, stops and rewards, and its program or `verifiers_chat`. Its
model is the session's endpoint, so the endpoint's rows are trained; the library's own tokens are not used. A prompt's
metadata names the environment and the task, and the agent needs nothing else.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxrl_async.tasks.table import library_of
from jaxrl_async.tasks.task import Example, check_split
from jaxrl_async.types import Prompt

AGENT = f"{__name__}:agent"  # in rollout.agent
_KEY = "verifiers"  # of a prompt's metadata


@dataclasses.dataclass(frozen=True)
class Verifiers:
    """The tasks of an environment's taskset, split at random into train and test.

    Tasks of one prompt are in one split.

    Raises:
      ValueError: the library or the environment cannot be loaded, a seat of the environment is not the policy's, or an
        argument is outside its bounds.
    """

    environment: str  # id of its taskset: an installed module, or one of the library's own
    num_test: int  # held-out tasks, at least; as many more as have their prompts
    num_tasks: int | None = None  # the first ones alone, of an endless taskset or a large one
    seed: int = 0  # of the split
    # the block `env` of the library's own configs: {"taskset": {…}, "agent": {"max_turns": …}}
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    reward: ClassVar[str] = "exact"  # The environment judges.

    def __post_init__(self):
        if self.num_tasks is not None and self.num_tasks < 2:
            raise ValueError(f"num_tasks must be ≥ 2, got {self.num_tasks}")
        num = len(self._loaded.tasks)
        if not 1 <= self.num_test <= num // 2:
            raise ValueError(
                f"num_test must be in [1, {num // 2}], half of the {num} tasks of 'verifiers:{self.environment}', got "
                f"{self.num_test}"
            )
        if not self.examples("train"):
            raise ValueError(f"all tasks of 'verifiers:{self.environment}' have one prompt")

    def examples(self, split: str) -> list[Example]:
        """The tasks of a split, in a seeded order."""
        return self._splits[check_split(split)]

    @property
    def _arguments(self) -> str:
        return json.dumps(
            [self.environment, self.num_tasks, dict(self.config)], sort_keys=True, default=dict
        )

    @property
    def _loaded(self) -> "_Loaded":
        return _load(self._arguments)

    @functools.cached_property
    def _splits(self) -> dict[str, list[Example]]:
        tasks = self._loaded.tasks
        order = np.random.default_rng(self.seed).permutation(len(tasks))
        examples = [self._example(int(i)) for i in order]
        held_out = {example.text for example in examples[: self.num_test]}
        return {
            "test": [e for e in examples if e.text in held_out],
            "train": [e for e in examples if e.text not in held_out],
        }

    def _example(self, index: int) -> Example:
        data = self._loaded.tasks[index].data
        # A task without a prompt is opened by its environment; a prompt is never empty here.
        text = data.prompt_text or data.name or f"{self.environment} {index}"
        where = {"arguments": self._arguments, "index": index}
        return Example(text, str(getattr(data, "answer", "")), {_KEY: where})


async def agent(base_url: str, prompt: Prompt) -> float:
    """Plays one task; returns the sum of the weighted rewards of the policy's seat.

    Raises:
      ValueError: the prompt is of another task.
      RuntimeError: the episode failed, or gave no reward.
    """
    where = prompt.metadata.get(_KEY)
    if where is None:
        raise ValueError(f"rollout.agent = {AGENT!r} needs task.name = 'verifiers:ENVIRONMENT'")
    loaded, vf = _load(where["arguments"]), library_of("verifiers.v1", _KEY)
    # An environment for each episode: the servers that `serving` starts are of one base URL, and end with it.
    environment = vf.load_environment(loaded.config)
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="JAXRL_ASYNC_NO_KEY")
    async with environment.serving():
        episode = await environment.run_episode(
            loaded.tasks[where["index"]], vf.ModelContext(model="policy", client=client)
        )
    return _reward(episode, loaded.seat)


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """What of an environment all episodes share."""

    config: Any  # verifiers.v1.EnvConfig
    tasks: list[Any]  # verifiers.v1.Task
    seat: str  # the policy's


@functools.cache
def _load(arguments: str) -> _Loaded:
    """An environment by `Verifiers._arguments`; raises ValueError where it cannot be loaded."""
    name, num_tasks, given = json.loads(arguments)
    vf = library_of("verifiers.v1", _KEY)
    try:
        config, seat = _config_of(vf, name, given)
        taskset = vf.load_environment(config).taskset
        if num_tasks is not None:
            taskset = taskset.take(num_tasks)
        elif not taskset.bounded:
            raise ValueError("its taskset is endless: give num_tasks")
        return _Loaded(config, list(taskset), seat)
    except Exception as error:  # Of its code.
        raise ValueError(
            f"task.name = 'verifiers:{name}' cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _config_of(vf, name: str, given: Mapping[str, Any]) -> tuple[Any, str]:
    """The library's config of an environment, and the name of the policy's seat.

    A seat without a program or a machine of its own has `verifiers_chat` on this one.
    """
    from jaxrl_async.extras import verifiers_chat

    vf.import_taskset(name)  # Its error says what was tried.
    config = {**given, "taskset": {**given.get("taskset", {}), "id": name}}
    fields = vf.env_config_type(name, config.get("id", "")).model_fields
    seats = {key: f.default for key, f in fields.items() if isinstance(f.default, vf.AgentConfig)}
    policy = []
    for seat, default in seats.items():
        chosen = config[seat] = dict(given.get(seat, {}))
        if "runtime" not in default.model_fields_set:
            chosen.setdefault("runtime", {"type": "subprocess"})
        if default.harness is None and vf.default_harness_id(name) == "bash":
            chosen.setdefault("harness", {"id": verifiers_chat.ID})
        if "client" not in chosen and default.client is None:
            policy.append(seat)
    if len(policy) != 1:
        raise ValueError(
            f"one of its seats {sorted(seats)} is the policy's, and every other needs a client of its own in "
            f"task.args' config; without one are {policy}"
        )
    return vf.resolve_env_config(config), policy[0]


def _reward(episode, seat: str) -> float:
    errors = [e for e in (episode.last_error, *(t.last_error for t in episode.traces)) if e]
    if not episode.ok:
        said = f"{errors[0].type}: {errors[0].message}" if errors else "it is not ok"
        raise RuntimeError(f"the episode failed: {said}")
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    if len(traces) != 1:
        raise RuntimeError(f"the seat {seat!r} must be played once, got {len(traces)} times")
    rewards = traces[0].rewards
    if missing := sorted(name for name, reward in rewards.items() if reward is None):
        raise RuntimeError(f"no reward of {missing}: {traces[0].stop_condition}")
    return float(traces[0].reward)
