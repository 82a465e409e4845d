"""Rewards in processes that can be killed, each call bounded in time and memory.

A reward judges text that a model wrote: it may hang, crash, leak or corrupt its interpreter. That costs one call: the
process is replaced, and the other calls of its batch go to the next process. A process is also replaced, between
calls, after `calls_per_process` of them. Independent of groups and prompts.

Where a reward says by `times_out_as` what an answer is worth that it cannot judge in time, such a call is made once
more, in another process. A second one that takes too long has that reward, and the component TIMED_OUT counts it.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from jaxrl_async.rewards import child
from jaxrl_async.types import MAX_REWARD, component_problem

READ_BYTES = 1 << 16
# Calls in a message, where there are several processes: the rest of a batch waits behind a call that hangs.
MAX_BATCH_CALLS = 16
TIMED_OUT = "timed_out"  # Component of a reward with `times_out_as`: 1.0 or 0.0, so that its mean is a share.
AGAIN_SECS = (1.0, 5.0, 25.0)  # before each further start of a successor that did not start
MIN_MEMORY_BYTES = 1 << 20  # the size in which Python takes memory from the system

log = logging.getLogger(__name__)


class RewardError(child.CallError):
    """A reward failed, or returned no finite number; the message names the reward and what it did."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a reward said of one completion."""

    reward: float  # finite
    # name → value, each finite
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)


class RewardTimeoutError(RewardError):
    """A reward took longer than its bound."""


class PoolError(RewardError):
    """The pool itself cannot judge: it is not started, closed, or lost its processes. The reward is not the cause."""


@dataclasses.dataclass(eq=False, repr=False)
class RewardPool:
    """`num_processes` processes that score completions; use as `async with RewardPool(…) as pool`.

    Raises:
      ValueError: a bound is broken.
    """

    reward: str  # a name in rewards.REWARDS, or "module:function"
    _: dataclasses.KW_ONLY
    num_processes: int  # ≥ 1
    timeout_secs: float  # bound on one call, > 0, without the wait for a free process
    # Bound on the address space that a process takes after the reward's import, ≥ 1 MiB; 0 for none. Each process that
    # the reward starts has the same bound.
    memory_bytes: int
    calls_per_process: int  # after which a process is replaced, ≥ 0; 0 for never
    # names of the variables of this process that a reward process gets, beside child.ENVIRONMENT
    environment: Sequence[str] = ()

    def __post_init__(self):
        if self.num_processes < 1:
            raise ValueError(f"num_processes must be ≥ 1, got {self.num_processes}")
        if not self.timeout_secs > 0:
            raise ValueError(f"timeout_secs must be > 0, got {self.timeout_secs}")
        if self.memory_bytes != 0 and self.memory_bytes < MIN_MEMORY_BYTES:
            raise ValueError(
                f"memory_bytes must be 0 or ≥ {MIN_MEMORY_BYTES}, got {self.memory_bytes}"
            )
        if self.calls_per_process < 0:
            raise ValueError(f"calls_per_process must be ≥ 0, got {self.calls_per_process}")
        self._waiting: collections.deque[_Call] = collections.deque()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task] = []
        self._processes: set[child.Process] = set()  # alive
        self._asks_for: list[str] = []  # of rewards.SEEN
        self._times_out_as: float | None = None  # the reward's
        # Why the pool takes no calls; None when it does.
        self._refusal: str | None = "is not started"

    async def start(self) -> None:
        """Starts the processes, within child.START_TIMEOUT_SECS.

        Raises:
          RewardError: the reward cannot be imported, or a process did not start.
        """
        try:
            starts = (self._start_process() for _ in range(self.num_processes))
            started = []
            for process in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(process, BaseException):
                    raise process
                started.append(process)
        except BaseException:
            await self._end_all()
            raise
        self._refusal = None
        self._tasks = [
            asyncio.create_task(
                # Staggered, so that processes are not all replaced at once.
                self._serve(process, i * self.calls_per_process // self.num_processes),
                name=f"reward process {i}",
            )
            for i, process in enumerate(started)
        ]

    async def close(self) -> None:
        """Kills the processes within CLOSE_TIMEOUT_SECS; waiting calls fail with RewardError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._refuse("is closed")
        await self._end_all()

    async def __aenter__(self) -> "RewardPool":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def lost(self) -> NoReturn:
        """Waits until the pool, which is started, takes no calls any more. Raises PoolError: says why."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        raise self._refused()

    def waits_for(self) -> str:
        """The wait of a call, in words."""
        return "its reward, in the pool"

    async def judge(
        self, completion: str, answer: str, seen: Mapping[str, Any] = MappingProxyType({})
    ) -> Judgement:
        """The reward of one completion, with its components. Calls that wait at the same time share messages.

        Args:
          completion: the text of the sampled tokens, without stop tokens.
          seen: a value of JSON for each name of rewards.SEEN; the reward gets those that it asks for.

        Raises:
          RewardTimeoutError: the call ran for more than timeout_secs, and the reward has no `times_out_as`.
          RewardError: the reward raised, crashed, took more than memory_bytes or returned no finite number, or asks for
            a name that is not there; or the pool is not started, or closed, or lost its processes.
        """
        if self._refusal is not None:
            raise self._refused()
        asked = {name: seen[name] for name in self._asks_for if name in seen}
        call = _Call(completion, answer, asked, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._arrived.set()
        return await call.outcome

    async def _serve(self, process: child.Process, num_answered: int) -> None:
        """Gives calls to a process, and to its successor when it is lost or has answered calls_per_process."""
        try:
            while True:
                calls = await self._next_calls(self.calls_per_process - num_answered)
                num_answered += len(calls)
                kept = await self._answer(process, calls)
                if not kept or num_answered == self.calls_per_process:
                    await self._end(process)
                    process, num_answered = await self._successor(), 0
        except Exception as error:
            self._refuse(f"lost a process and cannot replace it: {error}")

    async def _next_calls(self, num_left: int) -> "collections.deque[_Call]":
        """One process's share of the waiting calls: at least one, at most num_left where processes are replaced."""
        calls: collections.deque[_Call] = collections.deque()
        while not calls:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            share = len(self._waiting)
            if self.num_processes > 1:
                share = min(-(-share // self.num_processes), MAX_BATCH_CALLS)
            if self.calls_per_process:
                share = min(share, num_left)
            taken = [self._waiting.popleft() for _ in range(share)]
            # The callers of the others gave up; a client of a service does at its deadline, and asks again.
            calls.extend(call for call in taken if not call.outcome.done())
        return calls

    async def _answer(self, process: child.Process, calls: "collections.deque[_Call]") -> bool:
        """Has a process answer the calls; False when it is lost."""
        try:
            # It ended between calls, and none of these is the cause.
            if process.returncode is not None:
                return False
            lines = [[call.completion, call.answer, call.seen] for call in calls]
            process.stdin.write(json.dumps(lines).encode() + b"\n")
            received = bytearray()
            while calls:
                for line in await self._read(process, received):
                    outcome = self._outcome(json.loads(line))
                    calls.popleft().end(outcome)
        except _LostError as lost:
            self._lose(calls, lost.outcome)
            return False
        finally:
            self._waiting.extendleft(reversed(calls))
            if calls:  # Others may be idle, while this one's successor starts.
                self._arrived.set()
        return True

    def _lose(self, calls: "collections.deque[_Call]", outcome: RewardError) -> None:
        """Ends the first call, which cost its process; or leaves it there, to be made once more."""
        worth = self._times_out_as
        if not isinstance(outcome, RewardTimeoutError) or worth is None:
            calls.popleft().end(outcome)
        elif calls[0].timed_out:
            calls.popleft().end(Judgement(worth, {TIMED_OUT: 1.0}))
        else:
            calls[0].timed_out = True

    async def _read(self, process: child.Process, received: bytearray) -> list[bytearray]:
        """The lines that the process has written, at least that of the call which it runs; keeps the rest in received.

        Processes write them one by one. Where many are there they are read at once.
        """
        for secs in (self.timeout_secs, child.LATE_SECS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(secs):
                    while b"\n" not in received:
                        data = await process.stdout.read(READ_BYTES)
                        if not data:
                            break
                        received += data
                break
        else:
            message = f"reward {self.reward!r} took longer than {self.timeout_secs:g} s"
            raise _LostError(RewardTimeoutError(message))
        *lines, rest = received.split(b"\n")
        if not lines:
            message = await child.ending(process, self.memory_bytes)
            raise _LostError(RewardError(f"reward {self.reward!r} {message}"))
        received[:] = rest
        return lines

    def _outcome(self, outcome: Any) -> Judgement | RewardError:
        """What a line says of its call."""
        if outcome is None:  # Memory that it leaked would fail the next calls too.
            message = child.out_of_memory(self.memory_bytes)
            raise _LostError(RewardError(f"reward {self.reward!r} {message}"))
        counted = {} if self._times_out_as is None else {TIMED_OUT: 0.0}
        if isinstance(outcome, float | int):
            outcome = {"reward": outcome, "components": {}}
        if "error" in outcome:
            return RewardError(
                f"reward {self.reward!r}: {outcome['error']}",
                place=outcome["place"],
                traceback=outcome["traceback"],
            )
        if abs(outcome["reward"]) > MAX_REWARD:
            return RewardError(
                f"reward {self.reward!r}: returned {outcome['reward']}, outside ±{MAX_REWARD:g}: scale it down",
                place="a reward that is too large",
            )
        if problem := component_problem(outcome["components"]):
            return RewardError(
                f"reward {self.reward!r}: {problem}", place="the components of a reward"
            )
        return Judgement(outcome["reward"], counted | outcome["components"])

    async def _start_process(self) -> child.Process:
        process = await child.start(
            "jaxrl_async.rewards.process",
            *(self.reward, str(self.timeout_secs + child.ORPHAN_SECS), str(self.memory_bytes)),
            environment=self.environment,
        )
        self._processes.add(process)
        said = await child.greeting(process)
        if isinstance(said, str):
            await self._end(process)
            raise RewardError(f"reward process did not start: {said}")
        self._asks_for, self._times_out_as = said["seen"], said["times_out_as"]
        return process

    async def _successor(self) -> child.Process:
        """A process in the place of another one; the machine may lack memory for it for a while."""
        for secs in AGAIN_SECS:
            try:
                return await self._start_process()
            except (RewardError, OSError) as error:
                log.warning("%s; it is started again in %g s", error, secs)
            await asyncio.sleep(secs)
        return await self._start_process()

    async def _end_all(self) -> None:
        await asyncio.gather(*(self._end(process) for process in self._processes))

    async def _end(self, process: child.Process) -> None:
        """Kills a process and all that it started."""
        await child.end(process)
        self._processes.discard(process)

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        while self._waiting:
            self._waiting.popleft().end(self._refused())

    def _refused(self) -> PoolError:
        return PoolError(f"the pool of reward {self.reward!r} {self._refusal}")


@dataclasses.dataclass(eq=False)
class _Call:
    completion: str
    answer: str
    seen: dict[str, Any]
    outcome: asyncio.Future
    timed_out: bool = False  # once

    def end(self, outcome: Judgement | RewardError) -> None:
        if self.outcome.done():  # Its caller was cancelled.
            return
        if isinstance(outcome, RewardError):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class _LostError(Exception):
    """The process cannot be used any more; carries the outcome of the call that it ran."""

    def __init__(self, outcome: RewardError):
        super().__init__(outcome)
        self.outcome = outcome
