"""The rollout of an environment: turns of the policy and observations, until the episode is done or cut.

The row that is trained on is the row that was sampled: sampled ids are kept as they came, and what an environment says
is encoded once and appended, with mask False. Nothing is encoded again.

An episode ends where the environment says so ("stop"); or it is cut ("length") after max_turns, in a turn that the
token budget ends, which the environment does not see, or before a turn for which no token is left.
"""

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

from jaxrl_async.environments import environment_class
from jaxrl_async.environments.environment import Observation, check_observation
from jaxrl_async.environments.host import EpisodeError, EpisodeTimeoutError, Host
from jaxrl_async.rollout.context import Context, RolloutError, TrajectoryBuilder
from jaxrl_async.rollout.failures import CodeError, code_error
from jaxrl_async.types import MAX_COMPONENTS, Prompt, Trajectory, Turn

TURNS = "turns"  # the component that counts them
_T = TypeVar("_T")
_REWARDED = CodeError("a reward of an environment that does not judge", "")


@dataclasses.dataclass(eq=False, repr=False)
class EnvironmentRollout:
    """A rollout function; `close` ends its processes, and it may be called again afterwards.

    Raises:
      ValueError, TypeError: as of `environment_class`.
    """

    name: str  # in ENVIRONMENTS, or "module:Name"
    args: Mapping[str, Any]  # of each episode, by keyword
    _: dataclasses.KW_ONLY
    max_turns: int  # of the policy, ≥ 1
    max_turn_tokens: int  # sampled, of one turn; 0 for the budget of the whole row alone
    timeout_secs: float  # bound on one reset or step, > 0, without the wait for a free process
    # The others are of an environment that runs in processes of its own, one episode each at a time: as of `Host`.
    num_processes: int
    episode_secs: float
    memory_bytes: int

    def __post_init__(self):
        self._class = environment_class(self.name, self.args)
        one = self._class(**self.args)
        self._takes_tokens = getattr(one, "takes", "text") == "tokens"
        self.judges = getattr(one, "judges", True)
        self._host = None
        if getattr(one, "own_process", False):
            self._host = Host(
                self.name,
                self.args,
                num_processes=self.num_processes,
                timeout_secs=self.timeout_secs,
                episode_secs=self.episode_secs,
                memory_bytes=self.memory_bytes,
            )

    def waits_for(self) -> str:
        """In words: the place of an episode that waits for no server."""
        num = self._host.num_waiting if self._host else 0
        waiting = f", in which {num} episodes wait for a free process" if num else ""
        return f"its environment {self.name!r}{waiting}"

    async def close(self) -> None:
        """Kills the processes."""
        if self._host is not None:
            await self._host.close()

    async def __call__(self, prompt: Prompt, context: Context) -> Trajectory:
        """One episode. Raises RolloutError: "environment_error" or "environment_timeout"; or of `context.generate`."""
        async with self._episode() as episode:
            return await self._play(episode, prompt, context)

    async def _play(self, episode: Any, prompt: Prompt, context: Context) -> Trajectory:
        row, total = TrajectoryBuilder(prompt), _Total(self.judges)
        observation = await self._bounded(_checked(episode.reset(prompt, context.rng)))
        bound = {"max_new_tokens": self.max_turn_tokens} if self.max_turn_tokens else {}
        stop = None  # the stop token of the last turn
        for turn in range(self.max_turns):
            read = self._ids(observation, context, stop, is_first=turn == 0)
            if turn and not context.tokens_left(row.tokens + read):
                break
            row.append(read)
            completion = await context.generate(row.tokens, **bound)
            row.extend(completion)
            total.ends.append(len(row.tokens))
            if completion.finish_reason != "stop":
                break
            stop = int(completion.tokens[-1])
            action = (
                completion.tokens.tolist()
                if self._takes_tokens
                else context.decode(completion.tokens)
            )
            observation = await self._bounded(_checked(episode.step(action)))
            if observation.reward is not None and not self.judges:
                raise self._failure("gave a reward, and its `judges` is False", _REWARDED)
            total.add(observation)
            if observation.done:
                return row.trajectory(**total.fields())
        return row.trajectory(**total.fields(), finish_reason="length")

    def _ids(
        self, observation: Observation, context: Context, stop: int | None, *, is_first: bool
    ) -> list[int]:
        """The tokens of an observation."""
        try:
            if observation.messages:
                if is_first:
                    raise ValueError(
                        "reset returned messages: what is said before the first turn is the prompt"
                    )
                return context.encode_reply(observation.messages, stop)
            return list(observation.tokens) or context.encode(observation.text)
        except ValueError as error:
            raise self._failure(f"cannot be read: {error}", code_error(error)) from error

    @contextlib.asynccontextmanager
    async def _episode(self) -> AsyncIterator[Any]:
        """An environment, here or in a process; closed at the end."""
        if self._host is not None:
            try:
                async with self._host.episode() as episode:
                    yield episode
            except EpisodeTimeoutError as error:
                raise self._late(str(error)) from error
            except EpisodeError as error:
                cause = CodeError(error.place, error.traceback) if error.place else None
                raise self._failure(str(error), cause) from error
            return
        episode = self._class(**self.args)
        try:
            yield episode
        finally:
            if hasattr(episode, "close"):
                await self._bounded(episode.close())

    async def _bounded(self, call: Awaitable[_T]) -> _T:
        """The result of a call of an environment, within its time."""
        # A process is killed at its own bound; this one is of an environment on this event loop.
        bound = asyncio.timeout(None if self._host else self.timeout_secs)
        try:
            async with bound:
                return await call
        except TimeoutError as error:
            if not bound.expired():
                raise self._failure(f"raised TimeoutError: {error}", code_error(error)) from error
            raise self._late(f"took longer than {self.timeout_secs:g} s") from error
        except (RolloutError, EpisodeError):  # `_episode` names those of a process.
            raise
        except Exception as error:
            text = f"raised {type(error).__name__}: {error}"
            raise self._failure(text, code_error(error)) from error

    def _failure(self, text: str, cause: CodeError | None) -> RolloutError:
        return RolloutError("environment_error", f"environment {self.name!r} {text}", cause)

    def _late(self, text: str) -> RolloutError:
        return RolloutError("environment_timeout", f"environment {self.name!r} {text}")


async def _checked(call: Awaitable[Any]) -> Observation:
    return check_observation(await call)


class _Total:
    """Turns, rewards and components so far."""

    def __init__(self, judges: bool):
        self._judges = judges
        self.ends: list[int] = []  # of the policy's turns in the row, the last one perhaps cut
        self._rewards: dict[int, float] = {}  # number of a turn, from 1 → its reward
        self._components: dict[str, float] = collections.defaultdict(float)

    def add(self, observation: Observation) -> None:
        """Adds what the last turn was worth."""
        if observation.reward is not None:
            self._rewards[len(self.ends)] = float(observation.reward)
        for name, value in observation.components.items():
            self._components[name] += float(value)

    def fields(self) -> dict[str, Any]:
        """Of the trajectory: its reward is the sum over the turns, 0 where an episode was cut before any.

        Without a judging environment the reward is None, and no turn has one of its own.
        """
        components = self._components_by_name()
        if not self._judges:
            return {"components": components}
        turns = [Turn(end, self._rewards.get(i, 0.0)) for i, end in enumerate(self.ends, 1)]
        reward = float(sum(self._rewards.values()))
        return {"reward": reward, "components": components, "turns": turns}

    def _components_by_name(self) -> dict[str, float]:
        """The environment's; the number of turns; and where several turns have rewards, each of the first ones'."""
        found = {TURNS: float(len(self.ends))} | self._components
        several = self._rewards.items() if len(self._rewards) > 1 else ()
        for turn, reward in several:
            if len(found) < MAX_COMPONENTS:
                found.setdefault(f"turn_{turn}", reward)
        return found
