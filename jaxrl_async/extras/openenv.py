"""Environments of the library OpenEnv (0.10): task.name = "openenv:URL" of a server, and the agent that plays them.

An episode is a session of the server, by the library's client: `reset` with a seed, and `step` with each answer. What
the server says is a user's message. Prompts are seeds, so that a group plays one episode; a prompt's metadata holds the
server and the fields, and the agent needs nothing else.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxrl_async.tasks.table import library_of
from jaxrl_async.tasks.task import CUT, Example, check_split
from jaxrl_async.types import Prompt

AGENT = f"{__name__}:agent"  # in rollout.agent
_KEY = "openenv"  # of a prompt's metadata


@dataclasses.dataclass(frozen=True)
class OpenEnv:
    """The episodes of a server: those of the seeds 0 to num_test − 1 are the test split, the next num_train train.

    Raises:
      ValueError: the library is not installed, or an argument is outside its bounds.
    """

    url: str  # of the server, http:// or https://
    num_train: int
    num_test: int
    # the field of an action that an answer's text is; "": an answer is an action, in JSON
    action: str = ""
    observation: str = ""  # the field of an observation that is read; "": all of it, in JSON
    system_prompt: str = ""
    # to `reset`, beside the seed
    reset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_turns: int = 32  # of the policy; an episode that goes on is judged as it is

    reward: ClassVar[str] = "exact"  # The environment judges.
    validation_from: ClassVar[str] = "test"  # num_test may be any number.

    def __post_init__(self):
        _library()
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"task.name = 'openenv:URL' needs http:// or https://, got {self.url!r}"
            )
        for name in ("num_train", "num_test", "max_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be ≥ 1, got {getattr(self, name)}")

    def examples(self, split: str) -> list[Example]:
        """The episodes of a split, in the order of their seeds."""
        if check_split(split) == "test":
            seeds = range(self.num_test)
        else:
            seeds = range(self.num_test, self.num_test + self.num_train)
        episode = dataclasses.asdict(self) | {"reset": dict(self.reset)}
        return [Example(f"seed {seed}", "", {_KEY: episode | {"seed": seed}}) for seed in seeds]


async def agent(base_url: str, prompt: Prompt) -> float:
    """Plays one episode; returns the sum of its steps' rewards.

    Raises:
      ValueError: the prompt is of another task.
      RuntimeError: the episode ended without a reward.
      Exception: of the server, or of the way to it.
    """
    episode = prompt.metadata.get(_KEY)
    if episode is None:
        raise ValueError(f"rollout.agent = {AGENT!r} needs task.name = 'openenv:URL'")
    client_class, openai = _library()
    asked = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=None)
    rewards = []
    async with asked, client_class(base_url=episode["url"], mode="simulation") as server:
        messages = []
        if episode["system_prompt"]:
            messages.append({"role": "system", "content": episode["system_prompt"]})
        result = await server.reset(seed=episode["seed"], **episode["reset"])
        for _ in range(episode["max_turns"]):
            messages.append({"role": "user", "content": _read(result.observation, episode)})
            try:
                answer = await asked.chat.completions.create(model="policy", messages=messages)
            except openai.BadRequestError as error:
                if error.code == CUT:
                    break
                raise
            choice = answer.choices[0]
            if choice.finish_reason == "length":  # The environment does not see half an answer.
                break
            messages.append({"role": "assistant", "content": choice.message.content})
            result = await server.step(_action(choice.message.content, episode))
            if result.reward is not None:
                rewards.append(float(result.reward))
            if result.done:
                if not rewards:
                    raise RuntimeError(f"the episode of seed {episode['seed']} gave no reward")
                break
    return sum(rewards, 0.0)


def _library():
    return library_of("openenv.core", _KEY).GenericEnvClient, library_of("openai", _KEY)


def _read(observation: Mapping[str, Any], episode: Mapping[str, Any]) -> str:
    """What the policy reads of an observation."""
    name = episode["observation"]
    if not name:
        return json.dumps(observation, ensure_ascii=False)
    if name not in observation:
        raise RuntimeError(f"an observation has no field {name!r}, of {sorted(observation)}")
    found = observation[name]
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _action(text: str, episode: Mapping[str, Any]) -> dict[str, Any]:
    """An answer as an action; one that is no JSON object is an action without fields, which the server refuses."""
    if name := episode["action"]:
        return {name: text}
    try:
        action = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return action if isinstance(action, dict) else {}
