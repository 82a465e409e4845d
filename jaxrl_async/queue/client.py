"""Clients of the trajectory queue: asyncio for rollout workers, blocking for the learner.

Every call has a deadline, and an error that names the queue's address. Every call is idempotent, so one that the queue
does not answer is tried again, until the attempts have failed for outage_secs. An attempt counts with its own deadline
at most: a process that was stopped for longer has as many attempts after it wakes. Reports are tried once, and their
failure is no error. The clients do not read what a group is for.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import grpc

from jaxrl_async import rpc, security
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.trajectory_queue_pb2_grpc import TrajectoryQueueStub
from jaxrl_async.records import (
    SUPERSEDED,
    WHOLE,
    Identity,
    Permit,
    QueueStatus,
    ResumePoint,
    RunFailedError,
    ServerRecord,
    Share,
    SupersededError,
    Wait,
)
from jaxrl_async.types import Chunk, Group, InvalidTrajectoryError

log = logging.getLogger(__name__)

RETRY_SECS = 0.2  # backoff between two attempts of a call
# Longest wait of one attempt at a lease: a stop of either process costs no more.
LEASE_WAIT_SECS = 10.0
POLL_SECS = 0.5  # interval between two calls of `should_stop`
WATCH_SECS = 60.0  # after which a watch is begun anew: a queue that hangs closes no connection
LEAVE_SECS = 3.0  # deadline of `leave`: a process that ends has little time
GLANCE_SECS = 1.0  # deadline of `glance`
MAX_DETAIL_CHARS = 1000  # of a return; the rest is cut off


class QueueError(RuntimeError):
    """The queue refused a call that contradicts earlier ones, or failed in it."""


class NotReadyError(TimeoutError):
    """The queue's own answer that the wait of a call is over."""


class _Outage:
    """How long the attempts at a call have failed because the queue did not answer."""

    def __init__(self, limit_secs: float, clock: Callable[[], float] = time.monotonic):
        """`limit_secs`: seconds of failed attempts; 0 for one attempt."""
        self._limit_secs, self._clock = limit_secs, clock
        self._secs = 0.0
        self.start()

    def start(self) -> None:
        """An attempt begins."""
        self._since = self._clock()

    def goes_on(self, error: Exception, deadline_secs: float) -> bool:
        """Whether to try again after an attempt failed whose deadline was deadline_secs."""
        self._secs += min(self._clock() - self._since, deadline_secs) + RETRY_SECS
        return _is_unanswered(error) and self._secs < self._limit_secs


class QueueClient:
    """The rollout side: an async context manager, used in the loop that enters it."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_secs: float,
        call_timeout_secs: float,
        outage_secs: float,
        token: str | None = None,
        tls_ca: str = "",
    ):
        """Opens no connection yet.

        Args:
          address: "host:port".
          connect_timeout_secs: bound on the first connection.
          call_timeout_secs: bound on each attempt at a call, in addition to the wait that the call asks for.
          outage_secs: bound on the failed attempts at a call, or at a watch, together.
          token: bearer token of the queue; None where it has none.
          tls_ca: PEM file of the trusted authorities; "" for a queue without TLS.

        Raises:
          ValueError: tls_ca holds no certificate.
        """
        self._address = address
        self._metadata = rpc.metadata(token)
        self._credentials = rpc.channel_credentials(tls_ca)
        self._connect_timeout_secs = connect_timeout_secs
        self._call_timeout_secs = call_timeout_secs
        self._outage_secs = outage_secs
        self._instance = uuid.uuid4().hex  # of this process, where it works under a name
        self.run_id = ""  # the run of the queue that answered last; "" before it connects
        # The version published when permits were given last, and that of the last table; None before the first.
        self.v_pub: int | None = None
        self.table_v_pub: int | None = None

    async def __aenter__(self) -> "QueueClient":
        """Connects.

        Raises:
          ConnectionError: no answer within connect_timeout_secs.
          PermissionError: the token is wrong, or the certificate is of no trusted authority.
          QueueError: one side speaks TLS, and the other does not.
        """
        self._channel = rpc.channel(self._address, self._credentials)
        self._stub = TrajectoryQueueStub(self._channel)
        try:
            await self._connect()
        except BaseException:
            await self._channel.close()
            raise
        return self

    async def _connect(self) -> None:
        limit = self._connect_timeout_secs
        deadline = time.monotonic() + limit
        log.info("waiting for the queue at %s, at most %g s", self._address, limit)
        while True:
            try:
                left = max(deadline - time.monotonic(), 1e-3)
                status = await self._stub.Status(
                    pb.StatusRequest(), timeout=left, metadata=self._metadata
                )
                self.run_id = status.run_id
                return
            except grpc.aio.AioRpcError as error:
                permanent = await asyncio.to_thread(
                    _permanent_error, error, self._address, tls=self._credentials is not None
                )
                if permanent or not _should_retry(error, deadline):
                    raise permanent or _connect_error(error, self._address, limit) from None
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
          max_permits: bound on their number.
          wait_secs: of the long poll; the queue answers with none after it.
          worker: unique name of the caller; "" for none. Of two callers with one name, the elder is refused.
          working_on: the permits that the worker has. Others that are out to it are given again.

        Raises:
          SupersededError: another process works under this name since.
        """
        request = pb.AdmitRequest(
            max_permits=max_permits,
            wait_secs=wait_secs,
            worker=worker,
            instance=self._instance,
            working_on=[wire.encode_permit(p) for p in working_on],
        )
        reply = await self._call("Admit", request, wait_secs)
        self.v_pub = reply.v_pub if reply.HasField("v_pub") else None
        return [wire.decode_permit(p) for p in reply.permits]

    async def submit(self, group: Group) -> str:
        """Submits a group.

        "over_age" and "foreign_version" are outcomes, too (`Admission.submit`).

        Returns:
          "held", "duplicate" or "stale" (`Admission.submit`). After each of them the worker is done with the permit.

        Raises:
          InvalidTrajectoryError: the group is malformed or too large; its permit is still out.
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
        """Returns a permit without a group.

        Args:
          permit: the permit.
          reason: one of REISSUE_REASONS or RETIRE_REASONS.
          detail: for the log of the queue.
          prompt_tokens: length of the dropped prompt.
          completion_tokens: lengths of its finished completions.

        Returns:
          "reissued", "retired" or "stale" (`Admission.return_permit`).
        """
        request = pb.ReturnRequest(
            permit=wire.encode_permit(permit),
            reason=reason,
            detail=detail[:MAX_DETAIL_CHARS],
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        return (await self._call("Return", request)).outcome

    async def watch_fleet(self) -> AsyncIterator[tuple[ServerRecord, ...]]:
        """Yields the table of servers, at once and at every change. Reconnects where no heartbeat comes.

        `table_v_pub` is the version that was published when the table was sent.

        Raises:
          ConnectionError: no answer within outage_secs.
          PermissionError: the token is wrong.
        """
        last = None
        outage = _Outage(self._outage_secs)
        while True:
            call = self._stub.WatchFleet(pb.WatchRequest(), metadata=self._metadata)
            try:
                while True:
                    async with asyncio.timeout(self._call_timeout_secs):
                        reply = await call.read()
                    if reply is grpc.aio.EOF:
                        break
                    servers = wire.decode_servers(reply.servers)
                    v_pub = reply.v_pub if reply.HasField("v_pub") else None
                    if (servers, v_pub) != (last, self.table_v_pub) or reply.run_id != self.run_id:
                        self.table_v_pub = v_pub
                        self.run_id = reply.run_id  # Another one where a new queue began a new run.
                        last = servers
                        yield servers
                    outage = _Outage(self._outage_secs)
            except (TimeoutError, grpc.aio.AioRpcError) as error:
                if _is_unauthenticated(error):
                    raise _token_error(self._address) from error
                if not outage.goes_on(error, self._call_timeout_secs):
                    raise _no_answer(self._address, self._outage_secs) from error
            finally:
                call.cancel()
            await asyncio.sleep(RETRY_SECS)
            outage.start()

    async def report(
        self,
        role: str,
        waits: Sequence[Wait],
        secs: Mapping[str, float] | None = None,
        loads: Mapping[str, int] | None = None,
    ) -> None:
        """Reports a role's waits, its `RoleStatus.secs` and its outstanding tokens by server; also its heartbeat.

        Never raises.
        """
        report = pb.RoleReport(role=role, waits=wire.encode_waits(waits), secs=secs, loads=loads)
        try:
            await self._stub.Report(
                report, timeout=self._call_timeout_secs, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            _log_lost_report(error, self._address)

    async def leave(self, worker: str) -> None:
        """Reports that this process ends, so that others take its permits at once. Tried once, for LEAVE_SECS.

        Never raises. Where the report is lost the permits expire by silence.
        """
        report = pb.RoleReport(role=worker, leaving=self._instance)
        try:
            await self._stub.Report(report, timeout=LEAVE_SECS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            _log_lost_report(error, self._address)

    async def fail(self, role: str, message: str) -> None:
        """Reports that the run cannot go on. A queue without a group then refuses leases and permits with it."""
        await self._call("Report", pb.RoleReport(role=role, failure=message))

    async def _call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        limit, outage = self._call_timeout_secs + wait_secs, _Outage(self._outage_secs)
        while True:
            try:
                return await getattr(self._stub, name)(
                    request, timeout=limit, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                if not outage.goes_on(error, limit):
                    raise _call_error(error, name, self._address, self._outage_secs) from error
            await asyncio.sleep(RETRY_SECS)
            outage.start()


class LearnerQueue:
    """The learner's side, a `GroupSource`: a context manager of blocking calls."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_secs: float,
        call_timeout_secs: float,
        outage_secs: float,
        share: Share = WHOLE,
        token: str | None = None,
        tls_ca: str = "",
    ):
        """Opens no connection yet. Arguments as of `QueueClient`, and:

        Args:
          share: the groups of this learner process; only these come with their tokens.
        """
        self._address = address
        self._metadata = rpc.metadata(token)
        self._credentials = rpc.channel_credentials(tls_ca)
        self._share = share
        self._generation = 0  # of this learner, by `begin`
        self._connect_timeout_secs = connect_timeout_secs
        self._call_timeout_secs = call_timeout_secs
        self._outage_secs = outage_secs

    def __enter__(self) -> "LearnerQueue":
        """Connects; errors as of `QueueClient`."""
        self._channel = _open(self._address, self._credentials)
        self._stub = TrajectoryQueueStub(self._channel)
        try:
            self._connect()
        except BaseException:
            self._channel.close()
            raise
        return self

    def _connect(self) -> None:
        limit = self._connect_timeout_secs
        deadline = time.monotonic() + limit
        log.info("waiting for the queue at %s, at most %g s", self._address, limit)
        while True:
            try:
                left = max(deadline - time.monotonic(), 1e-3)
                self._stub.Status(pb.StatusRequest(), timeout=left, metadata=self._metadata)
                return
            except grpc.RpcError as error:
                permanent = _permanent_error(
                    error, self._address, tls=self._credentials is not None
                )
                if permanent or not _should_retry(error, deadline):
                    raise permanent or _connect_error(error, self._address, limit) from None
            time.sleep(RETRY_SECS)

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def begin(self) -> Identity:
        """Starts this learner: from now on the queue refuses the calls of the run's earlier ones."""
        reply = self._call("Begin", pb.BeginRequest(nonce=uuid.uuid4().hex))
        self._generation = reply.generation
        return Identity(reply.run_id, reply.generation)

    def join(self, generation: int) -> None:
        """Calls as the learner that `begin` gave this generation in another process."""
        self._generation = generation

    def confirm(self) -> None:
        """Checks that no learner began after this one.

        Raises:
          SupersededError: names both generations.
        """
        newest = self.status().generation
        if newest != self._generation:
            raise SupersededError(
                f"{SUPERSEDED}: learner generation {self._generation}, after which generation {newest} has begun"
            )

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        """Yields the chunks of a step, each requested when the one before was taken.

        Every chunk has all its groups. Groups outside the share have their true lengths, rewards and finish reasons,
        and no tokens (`wire.decode_outline`).

        Args:
          step: ≥ 1. A step that is leased again gives the same chunks.
          timeout_secs: bound on the wait for one chunk.
          should_stop: called before the first chunk is waited for, and every POLL_SECS during that wait. With True the
            step has no chunk.

        Raises:
          TimeoutError: names the groups that are missing.
          QueueError: the step is committed, or an earlier one was not leased.
          SupersededError: another learner began; so every call that changes the queue.
        """
        chunk = self._first_chunk(step, timeout_secs, should_stop)
        if chunk is None:
            return
        yield chunk
        while not chunk.last:
            chunk = self._chunk(step, chunk.index + 1, timeout_secs)
            yield chunk

    def commit(self, step: int) -> ResumePoint:
        """Commits a trained step; returns the resume point for its checkpoint."""
        return wire.decode_resume_point(
            self._call("Commit", self._own(pb.CommitRequest(step=step)))
        )

    def checkpointed(self, step: int) -> None:
        """Reports the step of the oldest checkpoint: no learner will be restored before it."""
        self._call("Checkpointed", self._own(pb.CheckpointedRequest(step=step)))

    def publish_version(
        self,
        version: int,
        servers: Sequence[ServerRecord],
        resume_point: ResumePoint | None = None,
        run_epoch: int = 0,
    ) -> None:
        """Publishes the version that the servers hold.

        Args:
          version: of the HEALTHY servers.
          servers: all of them.
          resume_point: of the restored checkpoint, at the first publication of a resumed run.
          run_epoch: grows where a resumed run came to other weights under a published version.
        """
        encoded = None if resume_point is None else wire.encode_resume_point(resume_point)
        records = wire.encode_servers(servers)
        request = pb.PublishRequest(
            version=version, servers=records, position=encoded, run_epoch=run_epoch
        )
        self._call("PublishVersion", self._own(request))

    def watch_version(self) -> Iterator[int]:
        """Yields the published version, at once and at every change, until the client is closed.

        Reconnects for as long as the queue is unavailable: its caller has the deadline.

        Raises:
          PermissionError: the token is wrong.
        """
        last = None
        request = pb.WatchRequest(without_servers=True)
        while True:
            try:
                call = self._stub.WatchFleet(request, timeout=WATCH_SECS, metadata=self._metadata)
                for reply in call:
                    if reply.HasField("v_pub") and reply.v_pub != last:
                        last = reply.v_pub
                        yield last
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.CANCELLED:
                    return
                if _is_unauthenticated(error):
                    raise _token_error(self._address) from error
            except ValueError:  # The channel was closed between two calls.
                return
            time.sleep(RETRY_SECS)

    def report(self, role: str, waits: Sequence[Wait]) -> None:
        """Reports the waits of a role; also its heartbeat. Never raises."""
        report = pb.RoleReport(role=role, waits=wire.encode_waits(waits))
        try:
            self._stub.Report(report, timeout=self._call_timeout_secs, metadata=self._metadata)
        except grpc.RpcError as error:
            _log_lost_report(error, self._address)
        except ValueError:
            pass  # The client was closed in the meantime.

    def status(self) -> QueueStatus:
        """The contents of the queue, its counts, and the waits of every role."""
        return wire.decode_status(self._call("Status", pb.StatusRequest()))

    def _first_chunk(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Chunk | None:
        with contextlib.suppress(NotReadyError):
            return self._attempt_lease(step, 0, 0.0)
        if should_stop():
            return None
        # After a stop the call ends with the channel.
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lease")
        call = thread.submit(self._chunk, step, 0, timeout_secs)
        thread.shutdown(wait=False)
        while not concurrent.futures.wait([call], POLL_SECS).done:
            if should_stop():
                return None
        return call.result()

    def _chunk(self, step: int, index: int, timeout_secs: float) -> Chunk:
        left = timeout_secs
        while True:
            wait_secs = min(left, LEASE_WAIT_SECS)
            try:
                return self._attempt_lease(step, index, wait_secs)
            except NotReadyError as error:
                left -= wait_secs
                if left <= 0:
                    raise TimeoutError(f"no groups within {timeout_secs:g} s: {error}") from None

    def _attempt_lease(self, step: int, index: int, wait_secs: float) -> Chunk:
        share = dataclasses.asdict(self._share)
        request = pb.LeaseRequest(step=step, chunk=index, wait_secs=wait_secs, **share)
        return self._call("Lease", self._own(request), wait_secs, read=self._read_chunk)

    def _own(self, request: Any) -> Any:
        """Signs a request with this learner's generation."""
        request.generation = self._generation
        return request

    def _call(
        self,
        name: str,
        request: Any,
        wait_secs: float = 0.0,
        read: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        limit, outage = self._call_timeout_secs + wait_secs, _Outage(self._outage_secs)
        while True:
            try:
                call = getattr(self._stub, name)
                return read(call(request, timeout=limit, metadata=self._metadata))
            except grpc.RpcError as error:
                if not outage.goes_on(error, limit):
                    raise _call_error(error, name, self._address, self._outage_secs) from error
            time.sleep(RETRY_SECS)
            outage.start()

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
    """Opens a channel for `glance`, to a queue that need not be up; arguments as of `QueueClient`."""
    channel = _open(address, rpc.channel_credentials(tls_ca))
    return grpc.intercept_channel(channel, _TokenSender(token)) if token else channel


def glance(channel: grpc.Channel) -> QueueStatus | None:
    """The status of the queue; None where it does not answer within GLANCE_SECS."""
    try:
        return wire.decode_status(
            TrajectoryQueueStub(channel).Status(pb.StatusRequest(), timeout=GLANCE_SECS)
        )
    except grpc.RpcError:
        return None


class _TokenSender(grpc.UnaryUnaryClientInterceptor):
    """Adds the token to every unary call."""

    def __init__(self, token: str):
        self._metadata = rpc.metadata(token)

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
        return grpc.insecure_channel(address, options=rpc.CLIENT_OPTIONS)
    return grpc.secure_channel(address, credentials, options=rpc.CLIENT_OPTIONS)


def _should_retry(error: grpc.RpcError, deadline: float) -> bool:
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
    return unavailable and time.monotonic() + RETRY_SECS < deadline


def _permanent_error(error: grpc.RpcError, address: str, *, tls: bool) -> Exception | None:
    """The error of a first call that no retry mends; None where the queue may still be starting."""
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


def _connect_error(error: grpc.RpcError, address: str, limit_secs: float) -> Exception:
    """The error of a first call, after its deadline."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return _no_answer(address, limit_secs)
    return _call_error(error, "Status", address, limit_secs)


def _call_error(error: grpc.RpcError, name: str, address: str, limit_secs: float) -> Exception:
    """The error of a call, as an exception of Python."""
    code, where = error.code(), f"{name} at the queue {address}"
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED if not _is_unanswered(error):
            return NotReadyError(f"{where}: {error.details()}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimeoutError(f"{where} is not answered for {limit_secs:g} s: {error.details()}")
        case grpc.StatusCode.UNAVAILABLE:
            return ConnectionError(
                f"{where} is unavailable for {limit_secs:g} s: {error.details()}"
            )
        case grpc.StatusCode.ABORTED:
            return RunFailedError(error.details())
        case grpc.StatusCode.UNAUTHENTICATED:
            return _token_error(address)
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ValueError(f"{where}: {error.details()}")
        case grpc.StatusCode.FAILED_PRECONDITION if error.details().startswith(SUPERSEDED):
            return SupersededError(f"{where}: {error.details()}")
        case _:
            return QueueError(f"{where}: {code.name}: {error.details()}")


def _is_unanswered(error: Exception) -> bool:
    """Whether an attempt ended without an answer of the queue; the queue's own DEADLINE_EXCEEDED has other details."""
    if not isinstance(error, grpc.RpcError):
        return True  # no heartbeat
    code = error.code()
    expired = code is grpc.StatusCode.DEADLINE_EXCEEDED and error.details() == "Deadline Exceeded"
    return expired or code is grpc.StatusCode.UNAVAILABLE


def _log_lost_report(error: grpc.RpcError, address: str) -> None:
    log.debug("a report to the queue %s is lost: %s", address, error.details())


def _no_answer(address: str, limit_secs: float) -> ConnectionError:
    return ConnectionError(
        f"no trajectory queue answers at {address} within {limit_secs:g} s: is its role up?"
    )


def _is_unauthenticated(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED


def _token_error(address: str) -> PermissionError:
    return PermissionError(
        f"the queue {address} asks for a token; this process sent none or a wrong one: queue.token_env must name the "
        "variable that holds it"
    )
