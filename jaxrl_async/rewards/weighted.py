"""Several rewards as one: task.rewards. Their weighted sum is the reward, and each by itself a component of it.

The sum has a name, by which every process makes it: its parts in JSON.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_async.names import importable
from jaxrl_async.rewards import REWARDS, check_reward, names_seen, reward_function, times_out_as
from jaxrl_async.rewards.process import judged
from jaxrl_async.types import component_problem

# A name, "module:function", or a component → its weight, or (name or "module:function", weight).
Weights = Mapping[str, Any]


def parts_of(rewards: Weights) -> dict[str, tuple[str, float]]:
    """Component → (name of its reward, weight). Raises ValueError: a component twice, or not a name of one."""
    found: dict[str, tuple[str, float]] = {}
    for key, value in rewards.items():
        name, weight = _pair(key, value)
        component = key.rpartition(":")[2]
        if component in found:
            raise ValueError(
                f"task.rewards has two components {component!r}: call one otherwise, {{'NAME': ({key!r}, {weight})}}"
            )
        found[component] = (name, float(weight))
    problem = component_problem({name: 0.0 for name in found})
    if "reward" in found:
        problem = "no component may be called 'reward', as their sum is"
    if problem:
        raise ValueError(
            f"task.rewards: {problem}; {{'NAME': ('module:function', WEIGHT)}} names it otherwise"
        )
    return found


def with_paths(rewards: Weights) -> dict[str, Any]:
    """The rewards as any process finds them: those that a module of the user's registered, by their paths."""
    found = dict(rewards)
    for key, value in rewards.items():
        name, weight = _pair(key, value)
        path = importable(name, REWARDS)
        if path != name and not path.startswith("jaxrl_async."):
            found[key] = (path, weight)
    return found


def name_of(rewards: Weights) -> str:
    """The name of their sum."""
    return json.dumps(parts_of(with_paths(rewards)), sort_keys=True)


def deciding(rewards: Weights) -> tuple[str, ...]:
    """The components that say whether an answer is right: those of the largest weight."""
    parts = parts_of(rewards)
    most = max((weight for _, weight in parts.values()), default=0.0)
    return tuple(component for component, (_, weight) in parts.items() if weight == most)


def _pair(key: str, value: Any) -> tuple[str, float]:
    return tuple(value) if isinstance(value, list | tuple) else (key, value)


class WeightedSum:
    """The reward of such a name; it asks for all that one of its parts asks for."""

    def __init__(self, name: str):
        """Finds the parts; raises ValueError where one is none."""
        self._parts = []
        for component, (path, weight) in parts_of(json.loads(name)).items():
            reward = reward_function(path)
            self._parts.append((component, weight, reward, names_seen(reward)))
        asked = sorted({name for *_, names in self._parts for name in names})
        either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, either) for name in ("completion", "answer")]
        parameters += [inspect.Parameter(name, keyword) for name in asked]
        self.__signature__ = inspect.Signature(parameters)

    @property
    def times_out_as(self) -> float | None:
        """The sum of the parts', where each has one: else a time-out could be a way out of another part's penalty."""
        total = 0.0
        for _, weight, reward, _ in self._parts:
            if (worth := times_out_as(reward)) is None:
                return None
            total += weight * worth
        return total

    def check(self, examples: Iterable) -> None:
        """Each part's own check."""
        examples = list(examples)
        for _, _, reward, _ in self._parts:
            check_reward(reward, examples)

    def __call__(self, completion: str, answer: str, **seen: Any) -> dict[str, float]:
        """The sum, each part, and the components that parts have themselves.

        Raises:
          ValueError: a part that is no finite number, or two components of one name.
        """
        total = {"reward": 0.0}
        for component, weight, reward, asked in self._parts:
            said = judged(reward(completion, answer, **{name: seen[name] for name in asked}))
            own = said if isinstance(said, dict) else {"reward": said, "components": {}}
            if "error" in own:
                raise ValueError(f"{component!r} {own['error']}")
            found = {component: own["reward"], **own["components"]}
            if twice := sorted(total.keys() & found):
                raise ValueError(f"two components are called {twice[0]!r}")
            total |= found
            total["reward"] += weight * own["reward"]
        return total
