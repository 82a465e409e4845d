"""The interface of an environment: what answers the policy between its turns, in text, tokens or messages.

Independent of tokenizers, servers and the queue: the rollout of rollout/environment.py makes tokens of what an
environment says.
"""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from jaxrl_async.types import Prompt, component_problem

TAKES = ("text", "tokens")


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the policy reads next, and what its last turn was worth. At most one of text, tokens and messages."""

    text: str = ""  # encoded as it is, nothing added
    tokens: Sequence[int] = ()  # ids [T]
    # each with its `role` and `content`, written as the tokenizer's chat template writes them after an answer
    messages: Sequence[Mapping[str, Any]] = ()
    # of the turn that it answers; None: none. A trajectory's reward is the sum over its turns
    reward: float | None = None
    done: bool = False  # no turn follows, and the policy does not read this observation
    # name → value, added over the turns: components of the reward
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Environment(Protocol):
    """One episode. Made anew for each sample, by keyword from `environment.args`; its class holds no state.

    `takes` says what `step` is given: "text", without special tokens, or "tokens". With `own_process` the episode runs
    in a process that is killed where it takes too long or too much memory; all that it is given and returns is JSON.
    Where `judges` is False, no turn has a reward, and the task's reward judges the sampled text of all turns.
    An optional `async def close(self)` ends an episode that began, also one that failed. In a process of its own it is
    called before the next episode there; where the process is killed, it is not.
    """

    takes: ClassVar[str] = "text"
    own_process: ClassVar[bool] = False
    judges: bool = True

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        """Begins the episode.

        Args:
          prompt: its question, gold answer and metadata; the policy has read its text.
          rng: of this sample, and of nothing else: equal in every run of a seed.

        Returns:
          What the policy reads after the prompt; `Observation()` for nothing.
        """
        ...

    async def step(self, action: str | list[int]) -> Observation:
        """Answers one turn of the policy, a whole one: a stop token ended it."""
        ...


def check_observation(observation: Any) -> Observation:
    """Returns an observation that can be used. Raises TypeError, ValueError: names the field and the value."""
    o = observation
    if not isinstance(o, Observation):
        raise TypeError(f"an environment must return an Observation, got {o!r:.200}")
    said = [name for name in ("text", "tokens", "messages") if len(getattr(o, name))]
    if len(said) > 1:
        raise ValueError(f"an observation has one of text, tokens and messages, got {said}")
    if not isinstance(o.text, str):
        raise TypeError(f"an observation's text must be a string, got {o.text!r:.200}")
    if o.reward is not None and (
        isinstance(o.reward, bool) or not isinstance(o.reward, numbers.Real)
    ):
        raise TypeError(f"an observation's reward must be a number or None, got {o.reward!r:.80}")
    for message in o.messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"a message must have role and content, got {message!r:.200}")
    if problem := component_problem(o.components):
        raise ValueError(problem)
    return o
