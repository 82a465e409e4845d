"""Processes in which environments run that ask for one: an episode has a process for itself, and dies with it.

A call beyond its bound in time or memory, or a crash, costs that episode: its process is killed, and another one is
started for the next. After a whole episode a process takes the next one, in a new instance of the environment.
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from jaxrl_async.environments.environment import Observation
from jaxrl_async.rewards import child
from jaxrl_async.types import Prompt

MAX_REPLY_BYTES = 1 << 22


class EpisodeError(child.CallError):
    """An episode failed; the message says what its environment did."""


class EpisodeTimeoutError(EpisodeError):
    """A call, or the wait for a free process, took longer than its bound."""


@dataclasses.dataclass(eq=False, repr=False)
class Host:
    """Up to num_processes processes of one environment, each started when it is first needed."""

    name: str  # of the environment
    args: Mapping[str, Any]  # of each episode: values of JSON
    _: dataclasses.KW_ONLY
    num_processes: int  # ≥ 1, episodes at once; more wait
    timeout_secs: float  # bound on one call
    # The longest that an episode takes, > 0; a wait for a free process has it once for each of the episodes that one
    # process has before it.
    episode_secs: float
    memory_bytes: int  # bound on a process's address space beyond its imports; 0 for none

    def __post_init__(self):
        # In order of arrival; of one event loop, up to `close`.
        self._places = asyncio.Semaphore(self.num_processes)
        self.num_waiting = 0  # episodes without a process
        self._idle: list[child.Process] = []
        self._alive: set[child.Process] = set()

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator["_Episode"]:
        """An episode in a process of its own, as soon as one is free.

        Raises:
          EpisodeTimeoutError: none came free.
          EpisodeError: its process did not start; or of its calls.
        """
        places = self._places
        await self._take_place()
        try:
            process = await self._process()
            episode = _Episode(process, self.timeout_secs, self.memory_bytes)
            try:
                yield episode
            finally:
                if episode.is_whole:
                    self._idle.append(process)
                else:
                    await self._end(process)
        finally:
            places.release()

    async def close(self) -> None:
        """Kills all processes; the next episodes may be of another event loop."""
        self._places = asyncio.Semaphore(self.num_processes)
        self._idle.clear()
        await asyncio.gather(*(self._end(process) for process in list(self._alive)))

    async def _take_place(self) -> None:
        num_before = self.num_waiting // self.num_processes + 1  # episodes of one process
        secs = num_before * self.episode_secs
        self.num_waiting += 1
        try:
            async with asyncio.timeout(secs):
                await self._places.acquire()
        except TimeoutError:
            raise EpisodeTimeoutError(
                f"had none of its {self.num_processes} processes free for {secs:g} s"
            ) from None
        finally:
            self.num_waiting -= 1

    async def _process(self) -> child.Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            await self._end(process)
        process = await child.start(
            "jaxrl_async.environments.process",
            *(self.name, json.dumps(dict(self.args))),
            *(str(self.timeout_secs + child.ORPHAN_SECS), str(self.memory_bytes)),
            max_line_bytes=MAX_REPLY_BYTES,
        )
        self._alive.add(process)
        try:
            reason = await child.greeting(process)
        except BaseException:  # Cancelled.
            await self._end(process)
            raise
        if reason is not None:
            await self._end(process)
            raise EpisodeError(f"process did not start: {reason}")
        return process

    async def _end(self, process: child.Process) -> None:
        await child.end(process)
        self._alive.discard(process)


class _Episode:
    """The calls of one episode. Its process may take another one where none is under way and all were answered."""

    def __init__(self, process: child.Process, timeout_secs: float, memory_bytes: int):
        self._process, self._timeout_secs = process, timeout_secs
        self._memory_bytes = memory_bytes
        self.is_whole = True

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        fields = vars(prompt) | {
            "tokens": prompt.tokens.tolist(),
            "metadata": dict(prompt.metadata),
        }
        return await self._call({"reset": [fields, rng.bit_generator.state]})

    async def step(self, action: str | list[int]) -> Observation:
        return await self._call({"step": action})

    async def _call(self, call: dict[str, Any]) -> Observation:
        self.is_whole = False
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        line = await self._read()
        if not line.endswith(b"\n"):
            raise EpisodeError(await child.ending(self._process, self._memory_bytes))
        outcome = json.loads(line)
        if outcome is None:
            raise EpisodeError(child.out_of_memory(self._memory_bytes))
        if "error" in outcome:
            raise EpisodeError(
                f"raised {outcome['error']}",
                place=outcome["place"],
                traceback=outcome["traceback"],
            )
        self.is_whole = True
        return Observation(**outcome)

    async def _read(self) -> bytes:
        """The reply to the call under way; without its newline, where the process ended."""
        for secs in (self._timeout_secs, child.LATE_SECS):
            try:
                async with asyncio.timeout(secs):
                    return await self._process.stdout.readline()
            except TimeoutError:
                continue
            except ValueError as error:
                raise EpisodeError(f"returned more than {MAX_REPLY_BYTES} bytes") from error
        raise EpisodeTimeoutError(f"took longer than {self._timeout_secs:g} s")
