"""The calls of a queue's clients, asynchronous or blocking: two ports, and their implementations over gRPC.

`direct` implements them for a queue in this process.

Over gRPC every call has a deadline, and an error that names the queue's address. Every call is idempotent, so one that
the queue does not answer is tried again, until the attempts have failed for outage_secs. An attempt counts with its own
deadline at most: a process that was stopped for longer has as many attempts after it wakes. Reports are tried once, and
their failure is no error.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, ClassVar, Protocol

import grpc

from jaxrl_async import rpc, security
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.records import SUPERSEDED, QueueStatus, RunFailedError, SupersededError

log = logging.getLogger(__name__)

# Deadlines, unless others are given. The queue needs no device and is up within seconds.
CONNECT_TIMEOUT_SECS = 60.0
CALL_TIMEOUT_SECS = 30.0
RETRY_SECS = 0.2  # backoff between two attempts of a call
WATCH_SECS = 60.0  # after which a watch is begun anew: a queue that hangs closes no connection
GLANCE_SECS = 1.0  # deadline of a `Glance`


class QueueError(RuntimeError):
    """The queue refused a call that contradicts earlier ones, or failed in it."""


class NotReadyError(TimeoutError):
    """The queue's own answer that the wait of a call is over."""


class Calls(Protocol):
    """The asynchronous port; used in the loop that opens it."""

    async def open(self) -> str:
        """Connects; returns the run's id.

        Raises:
          ConnectionError: no answer within connect_timeout_secs.
          PermissionError: the token is wrong, or the certificate is of no trusted authority.
          QueueError: one side speaks TLS, and the other does not.
        """
        ...

    async def close(self) -> None: ...

    async def call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        """The answer to a request that asks the queue to wait for at most wait_secs; of a stream all of them, a list.

        Raises:
          QueueError, RunFailedError, SupersededError, ValueError: the queue refuses it.
          NotReadyError: the wait is over.
          ConnectionError, TimeoutError: no answer within outage_secs.
          PermissionError: the token is wrong.
        """
        ...

    def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.FleetReply]:
        """Yields the table of servers: at once, at every change and as a heartbeat, where none comes from a new call.

        Raises:
          ConnectionError: no answer within outage_secs.
          PermissionError: the token is wrong.
        """
        ...

    async def tell(self, report: pb.RoleReport, timeout_secs: float | None = None) -> None:
        """Sends a report, once. A lost one is no error."""
        ...


class BlockingCalls(Protocol):
    """The blocking port, for any thread; errors as of `Calls`."""

    def open(self) -> None: ...

    def close(self) -> None: ...

    def call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any: ...

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.FleetReply]:
        """As `Calls.watch`, until it is closed and for as long as the queue is away: its caller has the deadline."""
        ...

    def tell(self, report: pb.RoleReport) -> None: ...


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


@dataclasses.dataclass(eq=False, repr=False)
class _Grpc:
    """The address of a queue, the access to it, and the calls' bounds and errors; a wrong tls_ca raises ValueError."""

    _library: ClassVar[Any]  # grpc or grpc.aio

    address: str  # "host:port"
    _: dataclasses.KW_ONLY
    outage_secs: float  # bound on the failed attempts at a call, or at a watch, together
    connect_timeout_secs: float = CONNECT_TIMEOUT_SECS  # bound on the first connection
    # Bound on each attempt at a call, in addition to the wait that the call asks for.
    call_timeout_secs: float = CALL_TIMEOUT_SECS
    token: str | None = None  # bearer token of the queue; None where it has none
    tls_ca: str = ""  # PEM file of the trusted authorities; "" for a queue without TLS

    def __post_init__(self):
        self._metadata = rpc.metadata(self.token)
        self._credentials = rpc.channel_credentials(self.tls_ca)

    def _begin(self) -> float:
        """Makes the channel; returns the clock's time by which the queue has to answer."""
        self._channel = rpc.channel(self._library, self.address, self._credentials)
        self._stub = _stub(self._channel)
        limit = self.connect_timeout_secs
        log.info("waiting for the queue at %s, at most %g s", self.address, limit)
        return time.monotonic() + limit

    def _send(self, name: str, request: Any, timeout_secs: float) -> Any:
        return getattr(self._stub, name)(request, timeout=timeout_secs, metadata=self._metadata)

    def _check_first(self, error: grpc.RpcError, deadline: float) -> None:
        """Raises the error of a first call, unless the queue may still be starting. Blocks."""
        permanent, code = self._permanent_error(error), error.code()
        lost = code is grpc.StatusCode.UNAVAILABLE
        if not permanent and lost and time.monotonic() + RETRY_SECS < deadline:
            return
        if lost or code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise permanent or self._no_answer(self.connect_timeout_secs) from None
        raise permanent or self._error(error, "Status", self.connect_timeout_secs) from None

    def _check(self, error: grpc.RpcError, name: str, outage: _Outage, limit: float) -> None:
        """Raises the error of a call, unless it is tried again."""
        # gRPC raises the call itself: its own frames would hold it, and groups with it, in a cycle.
        error.with_traceback(None)
        if not outage.goes_on(error, limit):
            raise self._error(error, name, self.outage_secs) from error

    def _permanent_error(self, error: grpc.RpcError) -> Exception | None:
        """The error of a first call that no retry mends."""
        address, details = self.address, error.details() or ""
        if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
            return PermissionError(
                f"the certificate of the queue {address} is not of an authority in queue.tls_ca, or not of that host: "
                f"{details}"
            )
        if "WRONG_VERSION_NUMBER" in details:
            where = f"the queue {address} speaks no TLS"
            return QueueError(f"{where}, and queue.tls_ca is set: {details}")
        lost = error.code() is grpc.StatusCode.UNAVAILABLE and "refused" not in details
        if lost and self._credentials is None and security.speaks_tls(address):
            return QueueError(f"the queue {address} speaks TLS: set queue.tls_ca")
        return None

    def _error(self, error: grpc.RpcError, name: str, limit_secs: float) -> Exception:
        """The error of a call, as an exception of Python."""
        code, details = error.code(), error.details() or ""
        where = f"{name} at the queue {self.address}"
        match code:
            case grpc.StatusCode.DEADLINE_EXCEEDED if not _is_unanswered(error):
                return NotReadyError(f"{where}: {details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return TimeoutError(f"{where} is not answered for {limit_secs:g} s: {details}")
            case grpc.StatusCode.UNAVAILABLE:
                return ConnectionError(f"{where} is unavailable for {limit_secs:g} s: {details}")
            case grpc.StatusCode.ABORTED:
                return RunFailedError(details)
            case grpc.StatusCode.UNAUTHENTICATED:
                return self._token_error()
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED:
                return ValueError(f"{where}: {details}")
            case grpc.StatusCode.FAILED_PRECONDITION if details.startswith(SUPERSEDED):
                return SupersededError(f"{where}: {details}")
            case _:
                return QueueError(f"{where}: {code.name}: {details}")

    def _token_error(self) -> PermissionError:
        return PermissionError(
            f"the queue {self.address} asks for a token; this process sent none or a wrong one: queue.token_env must "
            "name the variable that holds it. A run that made its own has it in WORKDIR/keys, for its user alone"
        )

    def _no_answer(self, secs: float) -> ConnectionError:
        where = f"no trajectory queue answers at {self.address}"
        return ConnectionError(f"{where} within {secs:g} s: is its role up?")

    def _log_lost(self, error: grpc.RpcError) -> None:
        log.debug("a report to the queue %s is lost: %s", self.address, error.details())


class GrpcCalls(_Grpc):
    """`Calls` over gRPC."""

    _library = grpc.aio

    async def open(self) -> str:
        deadline = self._begin()
        try:
            while True:
                left = max(deadline - time.monotonic(), 1e-3)
                try:
                    return (await self._send("Status", pb.StatusRequest(), left)).run_id
                except grpc.RpcError as error:
                    await asyncio.to_thread(self._check_first, error, deadline)
                await asyncio.sleep(RETRY_SECS)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._channel.close()

    async def call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        limit, outage = self.call_timeout_secs + wait_secs, _Outage(self.outage_secs)
        while True:
            try:
                return await self._send(name, request, limit)
            except grpc.RpcError as error:
                self._check(error, name, outage, limit)
            await asyncio.sleep(RETRY_SECS)
            outage.start()

    async def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.FleetReply]:
        outage = _Outage(self.outage_secs)
        while True:
            call = self._stub.WatchFleet(request, metadata=self._metadata)
            try:
                while True:
                    async with asyncio.timeout(self.call_timeout_secs):
                        reply = await call.read()
                    if reply is grpc.aio.EOF:  # pyright: ignore  # The stubs lack it.
                        break
                    yield reply
                    outage = _Outage(self.outage_secs)
            except (TimeoutError, grpc.RpcError) as error:
                if _is_unauthenticated(error):
                    raise self._token_error() from error
                if not outage.goes_on(error, self.call_timeout_secs):
                    raise self._no_answer(self.outage_secs) from error
            finally:
                call.cancel()
            await asyncio.sleep(RETRY_SECS)
            outage.start()

    async def tell(self, report: pb.RoleReport, timeout_secs: float | None = None) -> None:
        try:
            await self._send("Report", report, timeout_secs or self.call_timeout_secs)
        except grpc.RpcError as error:
            self._log_lost(error)


class BlockingGrpcCalls(_Grpc):
    """`BlockingCalls` over gRPC."""

    _library = grpc

    def open(self) -> None:
        deadline = self._begin()
        try:
            while True:
                left = max(deadline - time.monotonic(), 1e-3)
                try:
                    self._send("Status", pb.StatusRequest(), left)
                    return
                except grpc.RpcError as error:
                    self._check_first(error, deadline)
                time.sleep(RETRY_SECS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._channel.close()

    def call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        limit, outage = self.call_timeout_secs + wait_secs, _Outage(self.outage_secs)
        while True:
            try:
                reply = self._send(name, request, limit)
                return list(reply) if isinstance(reply, Iterator) else reply
            except grpc.RpcError as error:
                self._check(error, name, outage, limit)
            time.sleep(RETRY_SECS)
            outage.start()

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.FleetReply]:
        while True:
            try:
                yield from self._send("WatchFleet", request, WATCH_SECS)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.CANCELLED:
                    return
                if _is_unauthenticated(error):
                    raise self._token_error() from error
            except ValueError:  # The channel was closed between two calls.
                return
            time.sleep(RETRY_SECS)

    def tell(self, report: pb.RoleReport) -> None:
        try:
            self._send("Report", report, self.call_timeout_secs)
        except grpc.RpcError as error:
            self._log_lost(error)
        except ValueError:
            pass  # The client was closed in the meantime.


class Glance:
    """Looks at a queue that need not be up."""

    def __init__(self, address: str, *, token: str | None = None, tls_ca: str = ""):
        """Arguments as of `GrpcCalls`."""
        self._channel = rpc.channel(grpc, address, rpc.channel_credentials(tls_ca))
        self._stub, self._metadata = _stub(self._channel), rpc.metadata(token)

    def __call__(self) -> QueueStatus | None:
        """The status of the queue; None where it does not answer within GLANCE_SECS."""
        how = {"timeout": GLANCE_SECS, "metadata": self._metadata}
        try:
            return wire.decode_status(self._stub.Status(pb.StatusRequest(), **how))
        except grpc.RpcError:
            return None

    def close(self) -> None:
        self._channel.close()


def _stub(channel: Any) -> rpc.Stub:
    return rpc.Stub(channel, pb.DESCRIPTOR.services_by_name["TrajectoryQueue"])


def _is_unanswered(error: Exception) -> bool:
    """Whether an attempt ended without an answer of the queue; the queue's own DEADLINE_EXCEEDED has other details."""
    if not isinstance(error, grpc.RpcError):
        return True  # no heartbeat
    code = error.code()
    expired = code is grpc.StatusCode.DEADLINE_EXCEEDED and error.details() == "Deadline Exceeded"
    return expired or code is grpc.StatusCode.UNAVAILABLE


def _is_unauthenticated(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
