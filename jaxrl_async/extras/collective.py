"""Collectives: one broadcast gives a version to all servers that want it at the same time.

The pushes of a version gather for a moment, or until all are there that took the one before. Their servers and rank 0,
a process of its own, make a torch.distributed group. It stays for later versions, and is made anew when other servers
gather, or one of them has restarted. Each push pauses, names and verifies its own server.

A server that fails breaks the round: rank 0 is killed, whose closed connections free the others, and these gather
again while that one is alone in its next round. So every wait ends within the push's deadline. While a group is made
rank 0 outlives the break for LINGER_SECS: closed connections free only those that have connected.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import subprocess
import sys
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from jaxrl_async.extras.rank_zero import NCCL
from jaxrl_async.servers.kinds.sglang import Sglang
from jaxrl_async.servers.port import Push, ServerError, ServerTimeoutError
from jaxrl_async.versions import protocol

log = logging.getLogger(__name__)

Opened = Callable[[], AbstractAsyncContextManager[str]]


class BrokenRoundError(ServerError):
    """A round that another server broke, or the broadcast itself."""


class Collective:
    """The group of rank 0 and the servers. Use within one event loop."""

    def __init__(self):
        """Starts nothing yet."""
        self._rank = _Rank()
        self._gathering: _Round | None = None
        self._last: _Round | None = None
        self._members: set[str] = set()  # addresses that took their last version
        self._alone: set[str] = set()  # addresses that broke their last round
        self._group: tuple[str, dict[str, int]] | None = None  # its name; first rank by address
        self._joined: dict[str, str] = {}  # address → the group that its server was in last
        self._held: dict[str, str] = {}  # address → the name of the weights that it got last
        # The end of a rank 0 whose round was broken.
        self._lingering: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Ends rank 0, and with it every broadcast under way."""
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        self._rank.kill()

    async def deliver(
        self,
        server: Sglang,
        push: Push,
        opened: Opened,
        *,
        host: str,
        num_ranks: int,
        device: str,
        buckets: list[list[str]],
    ) -> None:
        """Gives a server the version, in one broadcast with all that want it now.

        Args:
          server, push: the server as it was just recognised, and the push of a version to it.
          opened: the pause of the server and a session of tensors in it; yields the name to load under.
          host: this machine's address, at which the servers find rank 0.
          num_ranks, device: of the server.
          buckets: names of tensors, in the order in which all servers get them.

        Raises:
          ServerError: as of `Kind.hold`.
          ImportError: there is no PyTorch here.
        """
        address, num_tries = server.address, 0
        has_restarted = server.info.get(protocol.WEIGHT_VERSION) != self._held.get(address)
        if has_restarted and self._group is not None and address in self._group[1]:
            self._group = None
        while True:
            round_ = self._gather(server, push, num_ranks, device, host)
            try:
                async with round_.seat(address, push):
                    await self._take(round_, server, push, opened, host, buckets)
            except BrokenRoundError as error:
                num_tries += 1
                if num_tries >= MAX_SHARED_TRIES:
                    self._alone.add(address)
                push.check_wanted()
                if push.left() < MIN_LEFT_SECS:
                    raise
                log.warning("%s: gathers again: %s", address, error.reason)
                continue
            self._held[address] = push.name
            self._members.add(address)
            self._alone.discard(address)
            return

    async def _take(
        self,
        round_: "_Round",
        server: Sglang,
        push: Push,
        opened: Opened,
        host: str,
        buckets: list[list[str]],
    ) -> None:
        """One server's part of a round."""
        address = server.address
        await round_.wait_until_open(address)
        push.check_wanted()
        group, world_size = round_.group, round_.world_size
        if round_.is_new:
            await self._leave(server, push)
            self._joined[address] = group
            payload = {"master_address": host, "master_port": round_.port}
            payload |= {"rank_offset": round_.ranks[address], "world_size": world_size}
            payload |= {"group_name": group, "backend": round_.backend}
            init = functools.partial(server.update, _JOIN, payload, push.left())
            join = {"host": host, "world_size": world_size, "name": group}
            join |= {"backend": round_.backend}
            round_.is_joining = True
            await round_.together(address, init, functools.partial(self._rank.ask, "join", **join))
            round_.is_joining = False
            self._group = group, round_.ranks
        async with opened() as name:
            for number, bucket in enumerate(buckets, 1):
                push.check_wanted()
                kinds = [push.stored.kind(tensor) for tensor in bucket]
                payload = {
                    "names": bucket,
                    "dtypes": [dtype for dtype, _ in kinds],
                    "shapes": [list(shape) for _, shape in kinds],
                    "group_name": group,
                    "weight_version": name,
                    "flush_cache": push.flush_cache and number == len(buckets),
                    "abort_all_requests": False,
                }
                update = functools.partial(server.update, _RECEIVE, payload, push.left())
                send = {"path": os.fspath(push.stored), "names": bucket}
                await round_.together(
                    address, update, functools.partial(self._rank.ask, "send", **send)
                )

    async def _leave(self, server: Sglang, push: Push) -> None:
        """Lets a server leave the group before, which it does not know where it has restarted."""
        if (group := self._joined.pop(server.address, None)) is not None:
            with contextlib.suppress(ServerError):
                left = min(push.left(), GRACE_SECS)
                await server.update(_LEAVE, {"group_name": group}, left)

    def _gather(
        self, server: Sglang, push: Push, num_ranks: int, device: str, host: str
    ) -> "_Round":
        """The round in which a server takes part."""
        address = server.address
        if address in self._alone:
            alone = _Round(push.name, self._broke)
            alone.add(address, push, num_ranks, device)
            self._close(alone, host)
            return alone
        if self._gathering is not None and self._gathering.version != push.name:
            self._close(self._gathering, host)
        if self._gathering is None:
            self._gathering = _Round(push.name, self._broke)
            self._gathering.timer = asyncio.get_running_loop().call_later(
                GATHER_SECS, self._close, self._gathering, host
            )
        round_ = self._gathering
        round_.add(address, push, num_ranks, device)
        if self._members and self._members <= round_.pushes.keys():
            self._close(round_, host)
        return round_

    def _close(self, round_: "_Round", host: str) -> None:
        """Ends the gathering: the round has all its servers."""
        if self._gathering is round_:
            self._gathering = None
        if round_.timer is not None:
            round_.timer.cancel()
        if not round_.pushes:
            return  # They have left.
        if here := self._members & round_.pushes.keys():  # Else those that join by themselves.
            self._members = here
        before, self._last = self._last, round_
        round_.close(self._open(round_, before, host))

    async def _open(self, round_: "_Round", before: "_Round | None", host: str) -> None:
        """Makes rank 0 ready for a round, after the one before."""
        if before is not None:
            await before.ended.wait()
        if self._lingering is not None:
            self.close()
        round_.has_rank = True
        if await self._rank.start():
            self._group = None
        if self._group is not None and self._group[1] == round_.ranks:
            round_.group = self._group[0]
            return
        self._group = None
        round_.is_new, round_.group = True, f"jaxrl-{uuid.uuid4().hex}"
        if len(devices := sorted(set(round_.devices.values()))) > 1:
            raise _RankError(f"servers on {' and on '.join(devices)} make no group")
        # "gloo" alone makes groups of CUDA too, which a build for CPUs has not.
        is_nccl = devices == ["cuda"] and self._rank.has_nccl
        round_.backend = NCCL if is_nccl else f"{devices[0]}:gloo"
        answer = await self._rank.ask("open", host=host, world_size=round_.world_size)
        round_.port = answer["port"]

    def _broke(self, round_: "_Round", address: str | None) -> None:
        """A round was broken, by this server if any."""
        if round_.has_rank and not round_.ended.is_set():
            self._group = None
            if not round_.is_joining:
                self._rank.kill()
            elif self._lingering is None:
                loop = asyncio.get_running_loop()
                self._lingering = loop.call_later(LINGER_SECS, self.close)
        if address is not None:
            self._members.discard(address)
            self._alone.add(address)


class _Round:
    """The servers of one broadcast, and the steps that they take together."""

    def __init__(self, version: str, on_break: Callable[["_Round", str | None], None]):
        self.version = version
        self.pushes: dict[str, Push] = {}  # by address
        self.devices: dict[str, str] = {}
        self.ranks: dict[str, int] = {}  # address → its first rank; 0 is this side's
        self.world_size = 1
        self.timer: asyncio.TimerHandle | None = None
        self.has_rank = self.is_new = self.is_joining = False
        self.group, self.port, self.backend = "", 0, ""
        self.ended = asyncio.Event()
        self._on_break = on_break
        self._sizes: dict[str, int] = {}  # address → number of its ranks
        self._seated: set[str] = set()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._opening: asyncio.Task | None = None
        self._aborting: asyncio.Task | None = None
        self._deadline = float("inf")

    def add(self, address: str, push: Push, num_ranks: int, device: str) -> None:
        """Adds a server, before the round is closed."""
        self.pushes[address] = push
        self._sizes[address], self.devices[address] = num_ranks, device

    def close(self, opening: Coroutine[Any, Any, None]) -> None:
        """Ends the gathering; `opening`: the preparation of rank 0 for the round."""
        for address in sorted(self.pushes):
            self.ranks[address] = self.world_size
            self.world_size += self._sizes[address]
        self._seated = set(self.pushes)
        left = min(push.left() for push in self.pushes.values())
        # Servers that another one held up have time for a second round.
        share = SHARED_SHARE if len(self.pushes) > 1 else 1.0
        self._deadline = time.monotonic() + share * left
        self._barrier = asyncio.Barrier(len(self.pushes))
        self._opening = asyncio.create_task(opening, name=f"rank 0 for version {self.version}")
        self._closed.set()

    @contextlib.asynccontextmanager
    async def seat(self, address: str, push: Push) -> AsyncIterator[None]:
        """The context of one server's part; an error in it breaks the round."""
        try:
            await self._closed.wait()  # Its timer closes it.
            yield
        except BrokenRoundError:
            raise
        except BaseException as error:
            if self._closed.is_set():
                # A push that was cancelled or dropped is no fault of its server.
                is_fault = isinstance(error, ServerError) and push.is_wanted()
                self._break(str(error) or type(error).__name__, address if is_fault else None)
            raise
        finally:
            if self._closed.is_set():
                self._seated.discard(address)
            else:
                del self.pushes[address]
            if self._closed.is_set() and not self._seated:
                self._opening.cancel()
                self.ended.set()

    async def wait_until_open(self, address: str) -> None:
        """Waits for rank 0; raises BrokenRoundError when it is late, and ImportError without PyTorch."""
        waits = {self._opening, self._broken}
        await asyncio.wait(waits, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            raise self._error(address)
        if not self._opening.done():
            self._break("rank 0 was not ready in time")
            raise self._error(address)
        try:
            self._opening.result()
        except _RankError as error:
            self._break(str(error))
            raise self._error(address) from error

    async def together(
        self, address: str, call: Callable[[], Awaitable[None]], part: Callable[[], Awaitable[Any]]
    ) -> None:
        """One call to every server at the same time, and rank 0's part of it; returns when all are done.

        Raises:
          BrokenRoundError: another server or rank 0 failed; this one answers.
          ServerError: this server failed.
        """
        place = await self._meet(address)
        running = {asyncio.ensure_future(call())}
        (mine,) = running
        if place == 0:
            running.add(asyncio.create_task(self._run(part), name=f"rank 0 for {address}"))
        try:
            await self._wait(address, mine, running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await self._meet(address)  # What breaks a round would hold up one that still connects.

    async def _meet(self, address: str) -> int:
        """Waits for all servers; returns this one's place among them."""
        try:
            async with asyncio.timeout(self._left()):
                return await self._barrier.wait()
        except (asyncio.BrokenBarrierError, TimeoutError):
            self._break("not all servers were ready in time")
            raise self._error(address) from None

    async def _wait(self, address: str, mine: asyncio.Future, running: set[asyncio.Future]) -> None:
        while not self._broken.done() and not all(task.done() for task in running):
            if mine.done() and mine.exception() is not None:
                raise mine.exception()
            waits = {self._broken} | {task for task in running if not task.done()}
            await asyncio.wait(waits, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if not self._left():
                self._break("a broadcast was not over in time")
        if not self._broken.done():
            return mine.result()
        await asyncio.wait({mine}, timeout=GRACE_SECS)
        if not mine.done():
            reason = (
                f"no answer {GRACE_SECS:g} s after the round was broken: {self._broken.result()}"
            )
            raise ServerTimeoutError(address, "", reason, retryable=True)
        if (error := mine.exception()) is not None and getattr(error, "status", None) is None:
            raise error  # Its connection is lost, while those that were held up answer.
        raise self._error(address)

    async def _run(self, part: Callable[[], Awaitable[Any]]) -> None:
        try:
            await part()
        except _RankError as error:
            self._break(str(error))

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _break(self, reason: str, address: str | None = None) -> None:
        if not self._broken.done():
            self._broken.set_result(reason)
            self._aborting = asyncio.create_task(self._barrier.abort())
        self._on_break(self, address)

    def _error(self, address: str) -> ServerError:
        kind = BrokenRoundError if len(self.pushes) > 1 else ServerError
        reason = f"the broadcast to {len(self.pushes)} servers ended: {self._broken.result()}"
        return kind(address, "", reason, retryable=True)


class _RankError(Exception):
    """Rank 0 failed, or was killed."""


class _Rank:
    """The process of rank 0, one for many groups, until something goes wrong."""

    def __init__(self):
        self.has_nccl = False
        self._process: subprocess.Popen | None = None
        self._closing: Callable[[], None] = lambda: None

    async def start(self) -> bool:
        """Starts it where it does not run; returns whether it did not. Raises ImportError without PyTorch."""
        if self._process is not None and self._process.poll() is None:
            return False
        self.kill()
        command = [sys.executable, "-m", "jaxrl_async.extras.rank_zero"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = await asyncio.to_thread(subprocess.Popen, command, **pipes)
        self._closing = weakref.finalize(self, _end, self._process)
        answer = await self._exchange(None)
        if "missing" in answer:
            self.kill()
            raise ImportError(
                "weights.transport 'distributed' needs PyTorch in the learner's environment: "
                + answer["missing"]
            )
        self.has_nccl = answer["nccl"]
        return True

    async def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """The answer to a command of rank_zero.RankZero, without a deadline: `kill` ends it. Raises _RankError."""
        answer = await self._exchange(json.dumps({"do": do} | values))
        if "error" in answer:
            raise _RankError(f"rank 0 failed to {do}: {answer['error']}")
        return answer

    async def _exchange(self, line: str | None) -> dict[str, Any]:
        if self._process is None:
            raise _RankError("rank 0 was ended")
        try:
            answer = await asyncio.to_thread(_exchange, self._process, line)
            return json.loads(answer)
        except (OSError, ValueError) as error:
            raise _RankError("rank 0 was ended, or died") from error

    def kill(self) -> None:
        """Ends the process, and with it every broadcast under way."""
        self._closing()
        self._process = None


def _exchange(process: subprocess.Popen, line: str | None) -> bytes:
    if line is not None:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
    return process.stdout.readline()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()


# Routes of SGLang. The server joins once all ranks have come, for which it waits for half an hour, and does not sample
# meanwhile; it receives until a connection closes.
_JOIN, _LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
_RECEIVE = "/update_weights_from_distributed"
GATHER_SECS = 1.0  # in which a server that comes alone, as one that joins, waits for others
SHARED_SHARE = 0.5  # of a push's time, for a round of several servers
MAX_SHARED_TRIES = 2
MIN_LEFT_SECS = 1.0
GRACE_SECS = 5.0  # A server that was held up answers within this.
LINGER_SECS = 2.0  # in which servers that still connect do; one that finds nobody listening tries for half an hour
