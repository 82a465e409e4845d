"""Clients of the trajectory queue: asyncio for rollout workers, blocking for the learner.

Every call has a deadline and an error that names the queue's address. Calls may safely be sent twice,
so one that finds the queue unavailable is sent again until its deadline. The clients know nothing of
what is in a group.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import grpc

from jaxrl_async import security
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.records import (
    WHOLE,
    Permit,
    QueueStatus,
    ResumePoint,
    ServerRecord,
    Share,
    Wait,
)
from jaxrl_async.queue.trajectory_queue_pb2_grpc import TrajectoryQueueStub
from jaxrl_async.types import Chunk, Group, InvalidTrajectoryError

log = logging.getLogger(__name__)

RETRY_SECS = 0.2
LOOK_SECS = 0.5  # A learner that waits for a step is asked so often whether to go on waiting.
GLANCE_SECS = 1.0  # Longest wait of `glance`.

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

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_secs: float,
        call_timeout_secs: float,
        token: str | None = None,
        tls_ca: str = "",
    ):
        """Connects nowhere yet.

        Args:
          address: "host:port".
          connect_timeout_secs: bound on the first connection, and on a watch's reconnection.
          call_timeout_secs: bound on each call, besides the wait that it asks for.
          token: what the queue asks for; None for nothing.
          tls_ca: PEM file of the authorities to trust; "" for a queue without TLS.

        Raises:
          ValueError: no certificate in tls_ca.
        """
        self._address = address
        self._metadata = _metadata(token)
        self._credentials = _credentials(tls_ca)
        self._connect_timeout_secs = connect_timeout_secs
        self._call_timeout_secs = call_timeout_secs

    async def __aenter__(self) -> "QueueClient":
        """Connects.

        Raises:
          ConnectionError: nobody answers within connect_timeout_secs.
          PermissionError: it asks for another token, or its certificate is of no authority trusted here.
          QueueError: one side speaks TLS, and the other does not.
        """
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(
                self._address, self._credentials, options=_OPTIONS
            )
        self._stub = TrajectoryQueueStub(self._channel)
        try:
            await self._greet()
        except BaseException:
            await self._channel.close()
            raise
        return self

    async def _greet(self) -> None:
        limit = self._connect_timeout_secs
        deadline = time.monotonic() + limit
        log.info("waiting for the queue at %s, at most %g s", self._address, limit)
        while True:
            try:
                left = max(deadline - time.monotonic(), 1e-3)
                await self._stub.Status(pb.StatusRequest(), timeout=left, metadata=self._metadata)
                return
            except grpc.aio.AioRpcError as error:
                doubt = await asyncio.to_thread(
                    _doubt, error, self._address, tls=self._credentials is not None
                )
                if doubt or not _again(error, deadline):
                    raise doubt or _unmet(error, self._address, limit) from None
            await asyncio.sleep(RETRY_SECS)

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

    async def submit(self, group: Group) -> str:
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

    async def report(
        self, role: str, waits: Sequence[Wait], secs: Mapping[str, float] | None = None
    ) -> None:
        """Says what a role waits for, and its `RoleStatus.secs`; also a sign of its life."""
        report = pb.RoleReport(role=role, waits=wire.encode_waits(waits), secs=secs)
        await self._call("Report", report)

    async def status(self) -> QueueStatus:
        """What the queue holds, and who waits for what."""
        return wire.decode_status(await self._call("Status", pb.StatusRequest()))

    async def _call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        limit = self._call_timeout_secs + wait_secs
        deadline = time.monotonic() + limit
        while True:
            try:
                left = deadline - time.monotonic()
                return await getattr(self._stub, name)(
                    request, timeout=left, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                if not _again(error, deadline):
                    raise _explained(error, name, self._address, limit) from error
            await asyncio.sleep(RETRY_SECS)

    async def _watch(self, name: str) -> AsyncIterator[Any]:
        """Replies of a stream that shows signs of life; opened again when it shows none."""
        deadline = time.monotonic() + self._connect_timeout_secs
        while True:
            call = getattr(self._stub, name)(pb.WatchRequest(), metadata=self._metadata)
            try:
                while True:
                    async with asyncio.timeout(self._call_timeout_secs):
                        reply = await call.read()
                    if reply is grpc.aio.EOF:
                        break
                    yield reply
                    deadline = time.monotonic() + self._connect_timeout_secs
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                if _is_refused(error):
                    raise _refused(self._address) from error
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
        token: str | None = None,
        tls_ca: str = "",
    ):
        """Connects nowhere yet; arguments as of `QueueClient`.

        Args:
          share: the groups that this learner process packs.
        """
        self._address = address
        self._metadata = _metadata(token)
        self._credentials = _credentials(tls_ca)
        self._share = share
        self._connect_timeout_secs = connect_timeout_secs
        self._call_timeout_secs = call_timeout_secs

    def __enter__(self) -> "LearnerQueue":
        """Connects; errors as of `QueueClient`."""
        self._channel = _open(self._address, self._credentials)
        self._stub = TrajectoryQueueStub(self._channel)
        try:
            self._greet()
        except BaseException:
            self._channel.close()
            raise
        return self

    def _greet(self) -> None:
        limit = self._connect_timeout_secs
        deadline = time.monotonic() + limit
        log.info("waiting for the queue at %s, at most %g s", self._address, limit)
        while True:
            try:
                left = max(deadline - time.monotonic(), 1e-3)
                self._stub.Status(pb.StatusRequest(), timeout=left, metadata=self._metadata)
                return
            except grpc.RpcError as error:
                doubt = _doubt(error, self._address, tls=self._credentials is not None)
                if doubt or not _again(error, deadline):
                    raise doubt or _unmet(error, self._address, limit) from None
            time.sleep(RETRY_SECS)

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        """The chunks of a step, each asked for when the one before was taken.

        Every chunk has all its groups; those that are not in the share have their true lengths, rewards and
        finish reasons, and no tokens (`wire.decode_outline`).

        Args:
          step: ≥ 1; asked again, the same chunks come again.
          timeout_secs: bound on waiting for one chunk.
          should_stop: called where the first chunk is not there yet, before it is waited for, and again every
            LOOK_SECS. With True the step has no chunk.

        Raises:
          TimeoutError: says which groups are missing.
          QueueError: the step is committed, or an earlier one was not leased.
        """
        chunk = self._first_chunk(step, timeout_secs, should_stop)
        if chunk is None:
            return
        yield chunk
        while not chunk.last:
            chunk = self._chunk(step, chunk.index + 1, timeout_secs)
            yield chunk

    def commit(self, step: int) -> ResumePoint:
        """Says that a step is trained; returns what a checkpoint of it needs of the queue."""
        return wire.decode_resume_point(self._call("Commit", pb.CommitRequest(step=step)))

    def checkpointed(self, step: int) -> None:
        """Says that no learner will be restored before a step."""
        self._call("Checkpointed", pb.CheckpointedRequest(step=step))

    def publish_version(
        self,
        version: int,
        servers: Sequence[ServerRecord],
        resume_point: ResumePoint | None = None,
        run_epoch: int = 0,
    ) -> None:
        """Says what the servers hold.

        Args:
          version: the version of the HEALTHY ones.
          servers: all of them.
          resume_point: of the checkpoint that the run resumes from, at its first publication.
          run_epoch: grows where a resumed run came to other weights under a version that was published.
        """
        encoded = None if resume_point is None else wire.encode_resume_point(resume_point)
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

    def _first_chunk(self, step, timeout_secs, should_stop) -> Chunk | None:
        with contextlib.suppress(TimeoutError):
            return self._chunk(step, 0, 0.0)
        if should_stop():
            return None
        # One call, which says how long it has waited. Where it is given up, it ends with the channel.
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lease")
        call = thread.submit(self._chunk, step, 0, timeout_secs)
        thread.shutdown(wait=False)
        while not concurrent.futures.wait([call], LOOK_SECS).done:
            if should_stop():
                return None
        return call.result()

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
                call = getattr(self._stub, name)
                return take(call(request, timeout=left, metadata=self._metadata))
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


def open_channel(address: str, *, token: str | None = None, tls_ca: str = "") -> grpc.Channel:
    """A channel for `glance`, to a queue that may be away; arguments as of `QueueClient`."""
    channel = _open(address, _credentials(tls_ca))
    return grpc.intercept_channel(channel, _WithToken(token)) if token else channel


def glance(channel: grpc.Channel) -> QueueStatus | None:
    """What the queue says of itself; None when it does not answer within a second."""
    try:
        return wire.decode_status(
            TrajectoryQueueStub(channel).Status(pb.StatusRequest(), timeout=GLANCE_SECS)
        )
    except grpc.RpcError:
        return None


class _WithToken(grpc.UnaryUnaryClientInterceptor):
    """Gives the token with every call of one message and one reply."""

    def __init__(self, token: str):
        self._metadata = _metadata(token)

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(_Details(details.method, details.timeout, self._metadata), request)


@dataclasses.dataclass(frozen=True)
class _Details(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str], ...]
    credentials: None = None
    wait_for_ready: None = None
    compression: None = None


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, credentials, options=_OPTIONS)


def _credentials(tls_ca: str) -> grpc.ChannelCredentials | None:
    if not tls_ca:
        return None
    security.client_context(tls_ca)  # Its errors say what is wrong; gRPC's do not.
    return grpc.ssl_channel_credentials(pathlib.Path(tls_ca).read_bytes())


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


def _is_refused(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED


def _refused(address: str) -> PermissionError:
    return PermissionError(
        f"the queue {address} asks for a token, and this process gave none or another one: its queue.token_env must "
        "name the queue's"
    )


def _doubt(error: grpc.RpcError, address: str, *, tls: bool) -> Exception | None:
    """What no waiting mends when a queue is first called; None where it may be starting."""
    details = error.details() or ""
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        return PermissionError(
            f"the certificate of the queue {address} is not of an authority in queue.tls_ca, or not of that host: "
            f"{details}"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return QueueError(f"the queue {address} speaks no TLS, and queue.tls_ca is set: {details}")
    lost = error.code() is grpc.StatusCode.UNAVAILABLE and "refused" not in details
    if lost and not tls and security.speaks_tls(address):
        return QueueError(f"the queue {address} speaks TLS: set queue.tls_ca")
    return None


def _unmet(error: grpc.RpcError, address: str, seconds: float) -> Exception:
    """The error of a first call that was not answered."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return _nobody(address, seconds)
    return _explained(error, "Status", address, seconds)


def _again(error: grpc.RpcError, deadline: float) -> bool:
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
    return unavailable and time.monotonic() + RETRY_SECS < deadline


def _nobody(address: str, seconds: float) -> ConnectionError:
    return ConnectionError(
        f"no trajectory queue answers at {address} within {seconds:g} s: is its role up?"
    )


def _explained(error: grpc.RpcError, name: str, address: str, seconds: float) -> Exception:
    """The error of a call, in the caller's terms."""
    code, where = error.code(), f"{name} at the queue {address}"
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimeoutError(f"{where}, deadline {seconds:g} s: {error.details()}")
        case grpc.StatusCode.UNAVAILABLE:
            return ConnectionError(f"{where} is unavailable for {seconds:g} s: {error.details()}")
        case grpc.StatusCode.UNAUTHENTICATED:
            return _refused(address)
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ValueError(f"{where}: {error.details()}")
        case _:
            return QueueError(f"{where}: {code.name}: {error.details()}")
