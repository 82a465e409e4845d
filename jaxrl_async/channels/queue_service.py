"""The queue as a gRPC service: one asyncio loop owns admission and the groups in memory.

Messages are parsed here rather than by gRPC, so that whatever arrives is answered with a status: bad
bytes and bad values are INVALID_ARGUMENT, an event out of order FAILED_PRECONDITION, a wait that ran
out DEADLINE_EXCEEDED. The service knows nothing of rewards, prompts or weights.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf import message as protobuf
from google.protobuf import message_factory

from jaxrl_async.channels import trajectory_queue_pb2 as pb
from jaxrl_async.channels import wire
from jaxrl_async.channels.admission import Admission
from jaxrl_async.channels.lease import FixedChunk, OrderError, Share

log = logging.getLogger(__name__)

TICK_SECS = 0.25  # Permits are looked through for timeouts this often.
BEAT_SECS = (
    5.0  # A watch repeats itself this often, so that its reader can tell silence from death.
)
MAX_WAIT_SECS = 3600.0  # Longest wait that a caller may ask for.
STOP_SECS = 0.5  # Calls that are open when the service stops get this long.

T = TypeVar("T")


async def serve(
    address: str,
    *,
    admission: Admission,
    group_size: int,
    vocab_size: int,
    max_tokens: int,
    max_message_bytes: int,
    on_bound: Callable[[str], None],
) -> None:
    """Serves the queue until cancelled.

    Args:
      address: "host:port"; port 0 for a free one.
      admission: the state to serve, nothing published yet.
      group_size: G, trajectories per group.
      vocab_size: token ids must lie in [0, vocab_size).
      max_tokens: bound on a trajectory's length.
      max_message_bytes: larger messages are refused (RESOURCE_EXHAUSTED).
      on_bound: gets "host:port", with the true port, once calls are answered.

    Raises:
      OSError: the address cannot be bound.
    """
    service = QueueService(
        admission, group_size=group_size, vocab_size=vocab_size, max_tokens=max_tokens
    )
    server = grpc.aio.server(options=_options(max_message_bytes))
    server.add_generic_rpc_handlers((_handlers(service),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"the queue cannot listen on {address}: is the port taken?") from error
    await server.start()
    try:
        on_bound(f"{address.rpartition(':')[0]}:{port}")
        while True:
            await asyncio.sleep(TICK_SECS)
            service.tick()
    finally:
        await server.stop(STOP_SECS)


class QueueService:
    """The calls of trajectory_queue.proto."""

    def __init__(
        self,
        admission: Admission,
        *,
        group_size: int,
        vocab_size: int,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        """See `serve`."""
        self._admission = admission
        self._check_group = functools.partial(
            wire.check_group, group_size=group_size, vocab_size=vocab_size, max_tokens=max_tokens
        )
        self._clock = clock
        self._groups: dict[int, pb.Group] = {}  # by prompt_index: held and leased
        self._servers: tuple[wire.ServerRecord, ...] = ()
        self._completion_tokens = 0
        self._last_push: float | None = None
        self._waits: dict[object, Callable[[], str]] = {}
        self._changed = asyncio.Event()

    def tick(self) -> None:
        """Takes back the permits that have been out for too long."""
        for permit in self._admission.expired(self._clock()):
            log.warning("permit %s timed out", permit)
            self._apply(self._admission.return_permit, permit, "timeout")

    async def Admit(self, request: pb.AdmitRequest) -> pb.AdmitReply:
        """Waits until there is something to give, at most wait_secs; then gives what there is."""
        count = request.max_permits
        waits_for = f"admit of up to {count} permits"
        with contextlib.suppress(TimeoutError):
            await self._until(
                lambda: self._admission.admissible > 0, request.wait_secs, lambda: waits_for
            )
        permits = self._apply(self._admission.admit, count, self._clock())
        return pb.AdmitReply(permits=[wire.encode_permit(p) for p in permits])

    async def Push(self, request: pb.Group) -> pb.PushReply:
        """Takes a group, once."""
        group = wire.decode_group(request)
        self._check_group(group)
        permit = wire.decode_permit(request.permit)
        outcome = self._apply(self._admission.push, permit, request.ByteSize())
        if outcome == "held":
            self._groups[permit.prompt_index] = request
            self._completion_tokens += sum(len(t.completion) for t in group.trajectories)
            self._last_push = self._clock()
        return pb.PushReply(outcome=outcome)

    async def Return(self, request: pb.ReturnRequest) -> pb.ReturnReply:
        """Takes back a permit."""
        permit = wire.decode_permit(request.permit)
        outcome = self._apply(self._admission.return_permit, permit, request.reason)
        log.info("%s returned (%s): %s %s", permit, request.reason, outcome, request.detail)
        return pb.ReturnReply(outcome=outcome)

    async def Lease(self, request: pb.LeaseRequest) -> AsyncIterator[pb.LeaseReply]:
        """Sends one chunk: its header, then its groups, with tokens those of the process that asks."""
        step, index = request.step, request.chunk
        share = Share(request.process, request.num_processes or 1, request.num_minibatches or 1)
        await self._until(
            lambda: self._admission.chunk_is_ready(step, index),
            request.wait_secs,
            lambda: f"lease of {self._admission.waiting_for(step, self._clock())}",
        )
        chunk = self._apply(self._admission.lease, step, index)
        groups = [self._groups[i] for i in chunk.indexes]
        own = set(share.of_chunk(len(groups)))
        yield pb.LeaseReply(header=_chunk_header(step, index, chunk, groups))
        for position, group in enumerate(groups):
            yield pb.LeaseReply(group=group if position in own else wire.encode_outline(group))

    async def Commit(self, request: pb.CommitRequest) -> pb.Position:
        """Forgets the groups of a trained step."""
        for index in self._apply(self._admission.commit, request.step):
            del self._groups[index]
        return wire.encode_position(self._admission.position)

    async def PublishVersion(self, request: pb.PublishRequest) -> pb.PublishReply:
        """Learns what the servers hold."""
        servers = wire.decode_servers(request.servers)
        with_position = request.HasField("position")
        position = wire.decode_position(request.position) if with_position else None
        self._apply(self._admission.publish, request.version, position)
        self._servers = servers
        return pb.PublishReply()

    async def WatchVersion(self, request: pb.WatchRequest) -> AsyncIterator[pb.VersionReply]:
        """Sends the published version."""
        async for version in self._watch(lambda: self._admission.v_pub):
            yield pb.VersionReply(version=version)

    async def WatchFleet(self, request: pb.WatchRequest) -> AsyncIterator[pb.FleetReply]:
        """Sends the table of servers."""
        async for servers in self._watch(lambda: self._servers):
            yield pb.FleetReply(servers=wire.encode_servers(servers))

    async def Status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Says what is held, and who waits for what."""
        a, now = self._admission, self._clock()
        return wire.encode_status(
            wire.QueueStatus(
                depth_groups=a.held,
                depth_bytes=a.num_bytes,
                leased_groups=a.leased,
                running_groups=a.running,
                reissue_groups=a.reissues,
                capacity=a.capacity,
                v_pub=a.v_pub,
                committed_step=a.leases.committed_step,
                leased_step=a.leases.leased_step,
                frontier=a.frontier,
                returned=dict(a.returned),
                retired=dict(a.retired),
                stale_events=a.stale_events,
                completion_tokens=self._completion_tokens,
                last_push_age_secs=None if self._last_push is None else now - self._last_push,
                waits=tuple(describe() for describe in self._waits.values()),
            )
        )

    def _apply(self, event: Callable[..., T], *args: Any) -> T:
        """Every change of state passes here, one after another; then all who wait look again."""
        result = event(*args)
        self._changed.set()
        self._changed = asyncio.Event()
        return result

    async def _until(
        self, ready: Callable[[], bool], wait_secs: float, describe: Callable[[], str]
    ) -> None:
        """Waits until ready() holds; looks after every change."""
        if not 0 <= wait_secs <= MAX_WAIT_SECS:
            raise ValueError(f"wait_secs must be in [0, {MAX_WAIT_SECS:.0f}], got {wait_secs}")
        deadline = self._clock() + wait_secs
        with self._waiting(describe):
            while not ready():
                try:
                    async with asyncio.timeout(max(0.0, deadline - self._clock())):
                        await self._changed.wait()
                except TimeoutError:
                    if not ready():
                        message = f"{describe()}; gave up after {wait_secs:g} s"
                        raise TimeoutError(message) from None

    @contextlib.contextmanager
    def _waiting(self, describe: Callable[[], str]) -> Iterator[None]:
        since, key = self._clock(), object()
        self._waits[key] = lambda: f"{describe()}, for {self._clock() - since:.1f} s"
        try:
            yield
        finally:
            del self._waits[key]

    async def _watch(self, read: Callable[[], T]) -> AsyncIterator[T]:
        """A value: now, at every change, and every BEAT_SECS."""
        while True:
            value = read()
            yield value
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECS):
                    while read() == value:
                        await self._changed.wait()


def _chunk_header(
    step: int, index: int, chunk: FixedChunk, groups: list[pb.Group]
) -> pb.ChunkHeader:
    headers = [pb.GroupHeader(permit=g.permit, lengths=g.lengths) for g in groups]
    return pb.ChunkHeader(step=step, index=index, last=chunk.last, groups=headers)


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # Else two queues would share a port, and calls fall to either.
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Clients ping every ten seconds, also while a call waits.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _handlers(service: QueueService) -> grpc.GenericRpcHandler:
    """The service's table of methods, which take bytes and parse them inside `_refusals`."""
    described = pb.DESCRIPTOR.services_by_name["TrajectoryQueue"]
    handlers = {}
    for method in described.methods:
        call = getattr(service, method.name)
        parse = message_factory.GetMessageClass(method.input_type).FromString
        if method.server_streaming:
            make, behavior = grpc.unary_stream_rpc_method_handler, _streaming(call, parse)
        else:
            make, behavior = grpc.unary_unary_rpc_method_handler, _unary(call, parse)
        reply = message_factory.GetMessageClass(method.output_type)
        handlers[method.name] = make(behavior, response_serializer=reply.SerializeToString)
    return grpc.method_handlers_generic_handler(described.full_name, handlers)


def _unary(call: Callable, parse: Callable[[bytes], Any]) -> Callable:
    async def behavior(raw: bytes, context: grpc.aio.ServicerContext):
        async with _refusals(context):
            return await call(parse(raw))

    return behavior


def _streaming(call: Callable, parse: Callable[[bytes], Any]) -> Callable:
    async def behavior(raw: bytes, context: grpc.aio.ServicerContext):
        async with _refusals(context):
            async for reply in call(parse(raw)):
                yield reply

    return behavior


@contextlib.asynccontextmanager
async def _refusals(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Answers a refused call with the status of its error; the service goes on."""
    try:
        yield
    except (ValueError, protobuf.DecodeError) as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except OrderError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except TimeoutError as error:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
