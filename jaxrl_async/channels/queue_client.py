"""Clients of the trajectory queue: asyncio for rollout workers, blocking for the learner.

Every call has a deadline and an error that names the queue's address. Calls may safely be sent twice,
so one that finds the queue unavailable is sent again until its deadline. The clients know nothing of
what is in a group.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import Any

import grpc

from jaxrl_async.channels import trajectory_queue_pb2 as pb
from jaxrl_async.channels import wire
from jaxrl_async.channels.admission import Permit, Position
from jaxrl_async.channels.lease import WHOLE, Share
from jaxrl_async.channels.trajectory_queue_pb2_grpc import TrajectoryQueueStub
from jaxrl_async.channels.wire import QueueStatus, ServerRecord, Wait
from jaxrl_async.types import Chunk, Group, InvalidTrajectoryError

RETRY_SECS = 0.2
GLANCE_SECS = 1.0  # Longest wait of `who_waits`.

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # The queue bounds what it takes.
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # The default would wait for two minutes.
    ("grpc.enable_http_proxy", 0),
]


class QueueError(RuntimeError):
    """The queue refused a call: it contradicts what happened before, or failed there."""


class QueueClient:
    """The rollout side. An async context manager; belongs to the loop that it is entered in."""

    def __init__(self, address: str, *, connect_timeout_secs: float, call_timeout_secs: float):
        """Connects nowhere yet.

        Args:
          address: "host:port".
          connect_timeout_secs: bound on the first connection, and on a watch's reconnection.
          call_timeout_secs: bound on each call, besides the wait that it asks for.
        """
        self._address = address
        self._connect_timeout_secs = connect_timeout_secs
        self._call_timeout_secs = call_timeout_secs

    async def __aenter__(self) -> "QueueClient":
        """Connects.

        Raises:
          ConnectionError: nobody answers within connect_timeout_secs.
        """
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        self._stub = TrajectoryQueueStub(self._channel)
        try:
            async with asyncio.timeout(self._connect_timeout_secs):
                await self._channel.channel_ready()
        except TimeoutError:
            await self._channel.close()
            raise _nobody(self._address, self._connect_timeout_secs) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def admit(
        self,
        max_permits: int,
        wait_secs: float,
        *,
        worker: str = "",
        working_on: Collection[Permit] = (),
    ) -> list[Permit]:
        """Asks for permits.

        Args:
          max_permits: at most so many are given.
          wait_secs: the queue waits at most so long before it answers with none.
          worker: who asks; no other process has this name. "" for nobody in particular.
          working_on: the permits that it has; others that are out to it are given again.
        """
        request = pb.AdmitRequest(
            max_permits=max_permits,
            wait_secs=wait_secs,
            worker=worker,
            working_on=[wire.encode_permit(p) for p in working_on],
        )
        reply = await self._call("Admit", request, wait_secs)
        return [wire.decode_permit(p) for p in reply.permits]

    async def push(self, group: Group) -> str:
        """Hands over a group.

        Returns:
          "held", "duplicate" or "stale" (`Admission.push`): in each case the worker is done with it.

        Raises:
          InvalidTrajectoryError: the queue found it malformed or too large; its permit is still out.
        """
        try:
            return (await self._call("Push", wire.encode_group(group))).outcome
        except ValueError as error:
            raise InvalidTrajectoryError(str(error)) from error

    async def return_permit(
        self,
        permit: Permit,
        reason: str,
        detail: str = "",
        *,
        prompt_tokens: int = 0,
        completion_tokens: Sequence[int] = (),
    ) -> str:
        """Gives a permit back.

        Args:
          permit: the permit.
          reason: one of admission's.
          detail: for the log.
          prompt_tokens: of the prompt that is dropped.
          completion_tokens: of each of its completions that came to an end.

        Returns:
          "reissued", "retired" or "stale" (`Admission.return_permit`).
        """
        request = pb.ReturnRequest(
            permit=wire.encode_permit(permit),
            reason=reason,
            detail=detail[:1000],
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        return (await self._call("Return", request)).outcome

    async def watch_version(self) -> AsyncIterator[int]:
        """The published version, now and whenever it changes; versions may be skipped."""
        last = None
        async for reply in self._watch("WatchVersion"):
            if reply.HasField("version") and reply.version != last:
                last = reply.version
                yield last

    async def watch_fleet(self) -> AsyncIterator[tuple[ServerRecord, ...]]:
        """The table of servers, now and whenever it changes."""
        last = None
        async for reply in self._watch("WatchFleet"):
            servers = wire.decode_servers(reply.servers)
            if servers != last:
                last = servers
                yield last

    async def report(self, role: str, waits: Sequence[Wait]) -> None:
        """Says what a role waits for; also a sign of its life."""
        await self._call("Report", pb.RoleReport(role=role, waits=wire.encode_waits(waits)))

    async def status(self) -> QueueStatus:
        """What the queue holds, and who waits for what."""
        return wire.decode_status(await self._call("Status", pb.StatusRequest()))

    async def _call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        limit = self._call_timeout_secs + wait_secs
        deadline = time.monotonic() + limit
        while True:
            try:
                left = deadline - time.monotonic()
                return await getattr(self._stub, name)(request, timeout=left)
            except grpc.aio.AioRpcError as error:
                if not _again(error, deadline):
                    raise _explained(error, name, self._address, limit) from error
            await asyncio.sleep(RETRY_SECS)

    async def _watch(self, name: str) -> AsyncIterator[Any]:
        """Replies of a stream that shows signs of life; opened again when it shows none."""
        deadline = time.monotonic() + self._connect_timeout_secs
        while True:
            call = getattr(self._stub, name)(pb.WatchRequest())
            try:
                while True:
                    async with asyncio.timeout(self._call_timeout_secs):
                        reply = await call.read()
                    if reply is grpc.aio.EOF:
                        break
                    yield reply
                    deadline = time.monotonic() + self._connect_timeout_secs
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                if time.monotonic() > deadline:
                    raise _nobody(self._address, self._connect_timeout_secs) from error
            finally:
                call.cancel()
            await asyncio.sleep(RETRY_SECS)


class LearnerQueue:
    """The learner's side. A context manager."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_secs: float,
        call_timeout_secs: float,
        share: Share = WHOLE,
    ):
        """Connects nowhere yet; arguments as of `QueueClient`.

        Args:
          share: the groups that this learner process packs.
        """
        self._address = address
        self._share = share
        self._connect_timeout_secs = connect_timeout_secs
        self._call_timeout_secs = call_timeout_secs

    def __enter__(self) -> "LearnerQueue":
        """Connects.

        Raises:
          ConnectionError: nobody answers within connect_timeout_secs.
        """
        self._channel = grpc.insecure_channel(self._address, options=_OPTIONS)
        self._stub = TrajectoryQueueStub(self._channel)
        try:
            grpc.channel_ready_future(self._channel).result(self._connect_timeout_secs)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise _nobody(self._address, self._connect_timeout_secs) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def lease(
        self, step: int, timeout_secs: float, before_waiting: Callable[[], None]
    ) -> Iterator[Chunk]:
        """The chunks of a step, each asked for when the one before was taken.

        Every chunk has all its groups; those that are not in the share have their true lengths, rewards and
        finish reasons, and no tokens (`wire.decode_outline`).

        Args:
          step: ≥ 1; asked again, the same chunks come again.
          timeout_secs: bound on waiting for one chunk.
          before_waiting: called where the first chunk is not there yet, before it is waited for.

        Raises:
          TimeoutError: says which groups are missing.
          QueueError: the step is committed, or an earlier one was not leased.
        """
        try:
            chunk = self._chunk(step, 0, 0.0)
        except TimeoutError:
            before_waiting()
            chunk = self._chunk(step, 0, timeout_secs)
        yield chunk
        while not chunk.last:
            chunk = self._chunk(step, chunk.index + 1, timeout_secs)
            yield chunk

    def commit(self, step: int) -> Position:
        """Says that a step is trained; returns what a checkpoint of it needs of the queue."""
        return wire.decode_position(self._call("Commit", pb.CommitRequest(step=step)))

    def checkpointed(self, step: int) -> None:
        """Says that no learner will be restored before a step."""
        self._call("Checkpointed", pb.CheckpointedRequest(step=step))

    def publish_version(
        self,
        version: int,
        servers: Sequence[ServerRecord],
        position: Position | None = None,
        run_epoch: int = 0,
    ) -> None:
        """Says what the servers hold.

        Args:
          version: the version of the HEALTHY ones.
          servers: all of them.
          position: of the checkpoint that the run resumes from, at its first publication.
          run_epoch: grows where a resumed run came to other weights under a version that was published.
        """
        encoded = None if position is None else wire.encode_position(position)
        records = wire.encode_servers(servers)
        request = pb.PublishRequest(
            version=version, servers=records, position=encoded, run_epoch=run_epoch
        )
        self._call("PublishVersion", request)

    def report(self, role: str, waits: Sequence[Wait]) -> None:
        """Says what a role waits for; also a sign of its life."""
        self._call("Report", pb.RoleReport(role=role, waits=wire.encode_waits(waits)))

    def status(self) -> QueueStatus:
        """What the queue holds, and who waits for what."""
        return wire.decode_status(self._call("Status", pb.StatusRequest()))

    def _chunk(self, step: int, index: int, wait_secs: float) -> Chunk:
        share = dataclasses.asdict(self._share)
        request = pb.LeaseRequest(step=step, chunk=index, wait_secs=wait_secs, **share)
        return self._call("Lease", request, wait_secs, take=self._read_chunk)

    def _call(
        self,
        name: str,
        request: Any,
        wait_secs: float = 0.0,
        take: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        limit = self._call_timeout_secs + wait_secs
        deadline = time.monotonic() + limit
        while True:
            try:
                left = deadline - time.monotonic()
                return take(getattr(self._stub, name)(request, timeout=left))
            except grpc.RpcError as error:
                if not _again(error, deadline):
                    raise _explained(error, name, self._address, limit) from error
            time.sleep(RETRY_SECS)

    def _read_chunk(self, replies: Iterator[pb.LeaseReply]) -> Chunk:
        header = next(replies).header
        own = set(self._share.of_chunk(len(header.groups)))
        groups = tuple(
            wire.decode_group(reply.group) if i in own else wire.decode_outline(reply.group)
            for i, reply in enumerate(replies)
        )
        expected = [wire.decode_permit(group.permit) for group in header.groups]
        found = [Permit(group.prompt_index, group.attempt) for group in groups]
        if found != expected:
            raise QueueError(
                f"chunk {header.index} of step {header.step} is {found}, not {expected}"
            )
        return Chunk(header.step, header.index, groups, header.last)


def who_waits(channel: grpc.Channel) -> str:
    """In words: who waits for what at the queue; "" when it does not answer within a second."""
    try:
        reply = TrajectoryQueueStub(channel).Status(pb.StatusRequest(), timeout=GLANCE_SECS)
    except grpc.RpcError:
        return ""
    return "; ".join(reply.waits)


def _again(error: grpc.RpcError, deadline: float) -> bool:
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
    return unavailable and time.monotonic() + RETRY_SECS < deadline


def _nobody(address: str, seconds: float) -> ConnectionError:
    return ConnectionError(f"no trajectory queue answers at {address} within {seconds:g} s")


def _explained(error: grpc.RpcError, name: str, address: str, seconds: float) -> Exception:
    """The error of a call, in the caller's terms."""
    code, where = error.code(), f"{name} at the queue {address}"
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimeoutError(f"{where}, deadline {seconds:g} s: {error.details()}")
        case grpc.StatusCode.UNAVAILABLE:
            return ConnectionError(f"{where} is unavailable for {seconds:g} s: {error.details()}")
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ValueError(f"{where}: {error.details()}")
        case _:
            return QueueError(f"{where}: {code.name}: {error.details()}")
