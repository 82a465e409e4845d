"""The rollout of an agent: any code that speaks to an OpenAI endpoint, one session for each sample.

Agents run on an event loop and a thread of their own: one that blocks delays the others, and neither the worker nor the
calls that it waits for itself. The tokens of a sample are `sessions`' part; an agent sees messages alone.
"""

import asyncio
import concurrent.futures
import dataclasses
import importlib
import inspect
import math
import numbers
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl_async.rollout.context import Context, RolloutError
from jaxrl_async.rollout.failures import CodeError, code_error
from jaxrl_async.rollout.sessions import Session, Sessions
from jaxrl_async.types import Prompt, Sample

MAX_THREADS = 512  # of agents that wait in `asyncio.to_thread`
CLOSE_SECS = 5.0  # for the thread of the agents to end
_MIN_WAIT_SECS = 0.05  # for an agent, before its time is compared with its bound

# agent(base_url, prompt) → reward; see `AgentRollout`.
Agent = Callable[[str, Prompt], Awaitable[float | None]]


def agent_of(name: str) -> Agent:
    """An agent by "module:function".

    Raises:
      ImportError: of its module.
      ValueError: no such function, or not `async def agent(base_url, prompt)`.
    """
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} must be 'module:function'")
    found = getattr(importlib.import_module(module), function, None)
    call = found if inspect.isroutine(found) else getattr(found, "__call__", None)  # noqa: B004
    if found is None or not inspect.iscoroutinefunction(call):
        raise ValueError(
            f"{name!r} must be `async def {function}(base_url, prompt)`, got {found!r}"
        )
    try:
        inspect.signature(found).bind("", None)
    except TypeError as error:
        raise ValueError(f"{name!r} must take (base_url, prompt): {error}") from None
    return found


@dataclasses.dataclass(eq=False, repr=False)
class AgentRollout:
    """A rollout function; `close` ends the endpoint and the agents, and it may be called again afterwards.

    Raises:
      ImportError, ValueError: as of `agent_of`.
    """

    own_prompts = True  # A row begins with the messages of the agent.

    # "module:function" of `async def agent(base_url, prompt) -> reward`. `base_url` is for its client of OpenAI's API;
    # any key will do. `prompt` is the task's `Prompt`: text, answer and metadata. A reward of None leaves it to the
    # task's, of the text of the last call's row.
    name: str
    _: dataclasses.KW_ONLY
    agent_timeout_secs: (
        float  # bound on the agent's own time in a session, > 0; its calls' does not count
    )
    # As of `Session`.
    agent_calls: int
    agent_rows: str

    def __post_init__(self):
        self._agent = agent_of(self.name)
        self._started: asyncio.Task[tuple[Sessions, _Thread]] | None = None

    def waits_for(self) -> str:
        """In words: the place of a session that waits for no server."""
        return f"its agent {self.name!r}"

    async def close(self) -> None:
        """Ends the sessions, the endpoint and the agents."""
        started, self._started = self._started, None
        if started is None:
            return
        await asyncio.wait({started})
        if not started.cancelled() and started.exception() is None:
            sessions, thread = started.result()
            await thread.close()
            await sessions.close()

    async def __call__(self, prompt: Prompt, context: Context) -> Sample:
        """One session.

        Raises:
          RolloutError: "agent_error", "agent_timeout" or "agent_rows"; "overlong" where the agent raised after a call
            for which no token was left; or of `context.generate`.
        """
        # A start that failed, as without a file descriptor, is tried again.
        if self._started is None or (self._started.done() and self._started.exception()):
            self._started = asyncio.create_task(self._start())
        sessions, thread = await asyncio.shield(self._started)
        with sessions.session(prompt, context) as (base_url, session):
            running = thread.run(self._agent(base_url, prompt))
            try:
                reward = await self._reward(session, running)
            finally:
                running.cancel()
            return session.sample(reward)

    async def _start(self) -> tuple[Sessions, "_Thread"]:
        """The endpoint, and the thread of the agents."""
        sessions = Sessions(agent_calls=self.agent_calls, agent_rows=self.agent_rows)
        await sessions.start()
        return sessions, _Thread()

    async def _reward(self, session: Session, running: asyncio.Future) -> float | None:
        """The reward that the agent of a session returns; None leaves it to the task."""
        done: set[asyncio.Future] = set()
        while not done:
            left = self.agent_timeout_secs - session.own_secs()
            if left <= 0:
                text = f"took longer than rollout.agent_timeout_secs = {self.agent_timeout_secs:g}"
                raise RolloutError("agent_timeout", f"agent {self.name!r} {text}")
            done, _ = await asyncio.wait(
                {running, session.failure},
                timeout=max(left, _MIN_WAIT_SECS),
                return_when=asyncio.FIRST_COMPLETED,
            )
        if session.failure.done():
            raise session.failure.result()
        reward, error = (
            (None, asyncio.CancelledError()) if running.cancelled() else running.result()
        )
        if error is not None and session.is_cut:
            raise RolloutError("overlong", f"agent {self.name!r} raised {error!r:.300}")
        if error is not None:
            raise self._failure(f"raised {type(error).__name__}: {error}", code_error(error))
        if session.num_running:
            text = f"returned while {session.num_running} of its calls were being answered"
            raise self._failure(text, CodeError("an agent that leaves calls", text))
        if reward is None or (isinstance(reward, numbers.Real) and math.isfinite(reward)):
            return None if reward is None else float(reward)
        text = f"must return a finite number or None, got {reward!r:.80}"
        raise self._failure(text, CodeError("an agent that returns no reward", text))

    def _failure(self, text: str, cause: CodeError) -> RolloutError:
        return RolloutError("agent_error", f"agent {self.name!r} {text}", cause)


class _Thread:
    """An event loop on a thread of its own."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._pool = concurrent.futures.ThreadPoolExecutor(MAX_THREADS, "agents")
        self._loop.set_default_executor(self._pool)
        self._thread = threading.Thread(target=self._work, name="agents", daemon=True)
        self._thread.start()

    def run(self, agent: Awaitable[Any]) -> asyncio.Future:
        """Runs a coroutine there; the future's result is (value returned, error raised), one of them None."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_caught(agent), self._loop))

    async def close(self) -> None:
        """Cancels all that runs there, and waits for the thread for CLOSE_SECS: an agent that blocks is left behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._end)
        await asyncio.to_thread(self._thread.join, CLOSE_SECS)

    def _work(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _end(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())


async def _caught(agent: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """No agent ends the thread of all: not by SystemExit either."""
    try:
        return await agent, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error
