"""The queue as a gRPC service: one asyncio loop owns admission and the groups in memory.

A change is applied in memory, written to the journal, and only then answered, so an answered change survives the
process. A journal that cannot be written stops the service.

Messages are parsed here rather than by gRPC, so that every message is answered with a status: malformed bytes and
values outside their bounds with INVALID_ARGUMENT, an event out of order with FAILED_PRECONDITION, a wait beyond its
deadline with DEADLINE_EXCEEDED. A call without the token is UNAUTHENTICATED, and its message is not received.
Independent of rewards, prompts and weights.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import pathlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar, cast

import grpc
from google.protobuf import message as protobuf
from google.protobuf.descriptor import MethodDescriptor

from jaxrl_async import rpc, security
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.journal import Journal, JournalError
from jaxrl_async.queue.leases import FixedChunk, OrderError
from jaxrl_async.records import (
    EXHAUSTED,
    OVERTAKEN,
    REISSUE_REASONS,
    SILENT_SECS,
    SUPERSEDED,
    Identity,
    Permit,
    QueueStatus,
    RoleStatus,
    RunFailedError,
    ServerRecord,
    Share,
    SupersededError,
    new_run_id,
)
from jaxrl_async.types import NO_RECORD, Record

log = logging.getLogger(__name__)

STOPPED_SECS = 2.0  # A longer time between two ticks was a stop of this process.
TICK_SECS = 0.25  # interval of the search for timed-out permits
LOADS_SECS = 2.0  # interval at which the servers' loads are added up and sent
HEARTBEAT_SECS = 5.0  # interval at which a watch repeats an unchanged value
MAX_WAIT_SECS = 3600.0  # longest wait that a caller may ask for
MAX_ROLES = 10_000  # that may report
MAX_DETAIL_CHARS = 1500  # of a refusal: a status travels in headers, which are bounded
# While the loop is busy, the journal's thread waits this long for the interpreter, several times per event. Python's
# 5 ms would be most of its time. In one process a push goes through a dozen changes of threads as well.
SWITCH_SECS = 1e-4
STOP_SECS = 0.5  # grace period of open calls when the service stops

T = TypeVar("T")


async def serve(
    address: str,
    service: "QueueService",
    *,
    max_message_bytes: int,
    on_bound: Callable[[str], None],
    token: str | None = None,
    tls_cert: str = "",
    tls_key: str = "",
) -> None:
    """Serves the queue until cancelled, and then closes its journal.

    Args:
      address: "host:port"; port 0 for a free one.
      service: the queue.
      max_message_bytes: larger messages are refused (RESOURCE_EXHAUSTED).
      on_bound: called with "host:port", with the true port, once calls are answered.
      token: required of every call, as "authorization: Bearer TOKEN"; None for none, on loopback only.
      tls_cert: PEM file of the certificate, "" for no TLS.
      tls_key: PEM file of its key.

    Raises:
      OSError: the address cannot be bound.
      ValueError: no token on an address that is not loopback, or no certificate in the files.
      JournalError: the journal cannot be written.
    """
    security.check_listener("the queue", address, token, "queue.token_env")
    server = grpc.aio.server(
        options=rpc.server_options(max_message_bytes),
        interceptors=[rpc.TokenCheck("queue", token)] if token else [],
    )
    server.add_generic_rpc_handlers((_handlers(service), rpc.health()))
    port = rpc.bind(server, "the queue", address, tls_cert=tls_cert, tls_key=tls_key)
    await server.start()
    switch_secs = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECS)
    try:
        on_bound(f"{address.rpartition(':')[0]}:{port}")
        while True:
            await asyncio.sleep(TICK_SECS)
            await service.tick()
    finally:
        sys.setswitchinterval(switch_secs)
        await server.stop(STOP_SECS)
        service.close()


class Lengths:
    """Mean tokens of prompts and completions by fate; they show whether long ones are lost.

    "admitted" groups were submitted, "trained" ones committed, "dropped" ones returned with a reason.
    """

    def __init__(self):
        self._sums: collections.Counter[str] = collections.Counter()
        self._counts: collections.Counter[str] = collections.Counter()

    def count(self, fate: str, prompt: int, completions: Sequence[int]) -> None:
        """Counts a prompt, unless its length is 0 for unknown, and the finished completions."""
        for name, values in (("prompt", [prompt] if prompt else []), ("completion", completions)):
            self._sums[f"{name}/{fate}"] += sum(values)
            self._counts[f"{name}/{fate}"] += len(values)

    def count_group(self, fate: str, group: pb.Group) -> None:
        """Counts a group from its message."""
        self.count(fate, group.prompt_lengths[0], wire.completion_lengths(group))

    def means(self) -> dict[str, float]:
        return {name: self._sums[name] / count for name, count in self._counts.items() if count}


@dataclasses.dataclass(eq=False, repr=False)
class QueueService:
    """The calls of trajectory_queue.proto. It restores the queue from its journal.

    Raises:
      JournalError: the journal cannot be read.
    """

    admission: Admission  # a new one, without a publication
    _: dataclasses.KW_ONLY
    group_size: int  # G, samples per group
    vocab_size: int  # token ids must lie in [0, vocab_size)
    max_tokens: int  # bound on a trajectory's length
    journal: Journal | None = None  # records the events; None for memory alone
    record: Record = NO_RECORD  # the choices that trajectories have
    archive: Callable[[int, pathlib.Path], None] | None = None  # keeps a copy of the journal
    clock: Callable[[], float] = time.monotonic  # seconds

    def __post_init__(self):
        admission, journal, clock = self.admission, self.journal, self.clock
        self._groups: dict[int, pb.Group] = {}  # by prompt_index: held and leased
        self._servers: tuple[ServerRecord, ...] = ()  # the publisher's table, and then with loads
        self._loads: collections.Counter[str] = collections.Counter()  # address → tokens
        self._table: tuple[ServerRecord, ...] = ()
        self._loads_due = 0.0  # clock, seconds
        self._completion_tokens = 0
        self._last_submission: float | None = None  # clock, seconds
        self._waits: dict[object, Callable[[], str]] = {}  # descriptions of the waiting calls
        self._run_epoch = 0
        self._roles: dict[str, tuple[float, pb.RoleReport]] = {}  # time and text of the last report
        self._failure = ""  # Why the run cannot go on; leases and permits are refused with it.
        self._details: dict[str, str] = {}  # what the last return said, by reason
        self._lengths = Lengths()
        # worker → its process, and the processes that had the name before
        self._instances: dict[str, tuple[str, set[str]]] = {}
        self._changed = asyncio.Event()
        self._archiving = asyncio.Lock()
        self._ticked = clock()
        self.error: MemoryError | None = None  # in the midst of a call
        self._published = asyncio.Event()  # a version, a table of servers, or their loads
        self._identity, self._nonce = Identity(new_run_id(), 0), ""  # and the last learner's nonce
        if journal is not None:
            self._identity, self._nonce = journal.identity()
        self._fleet_reply = self._encode_fleet()  # made once for all who watch
        if journal is not None and (recovered := journal.recover()):
            self._groups = {i: pb.Group.FromString(m) for i, m in recovered.messages.items()}
            oldest = {i: wire.versions_of(group)[0] for i, group in self._groups.items()}
            admission.recover(recovered.state, clock(), oldest)
            self._run_epoch = recovered.run_epoch
            self._completion_tokens = recovered.completion_tokens
            self._set_servers(tuple(ServerRecord(*record) for record in recovered.servers))
            log.info(
                "recovered from the journal: step %d, version %s, %d groups, %d permits out",
                admission.leases.committed_step,
                admission.v_pub,
                len(self._groups),
                admission.running,
            )

    @property
    def run_id(self) -> str:
        """The run of this queue."""
        return self._identity.run_id

    def close(self) -> None:
        """Closes the journal."""
        if self.journal is not None:
            self.journal.close()

    async def tick(self) -> None:
        """Returns the permits of workers that are silent, and adds up the servers' loads.

        After a stop of this process its workers have their whole time again.

        Raises:
          JournalError: the journal cannot be written.
          MemoryError: in a call, whose event may be applied in half. The journal has the truth for the next process.
        """
        if self.error is not None:
            raise self.error
        if self.journal is not None:
            self.journal.check()
        now = self.clock()
        stopped_secs, self._ticked = now - self._ticked - TICK_SECS, now
        if stopped_secs > STOPPED_SECS:
            log.warning("this process was stopped for %.1f s", stopped_secs)
            self.admission.forgive(stopped_secs)
        if now >= self._loads_due:
            self._loads_due, self._loads = now + LOADS_SECS, collections.Counter()
            for since, report in self._roles.values():
                if now - since < SILENT_SECS:  # The requests of a silent worker count no more.
                    self._loads.update(dict(report.loads))
            self._set_servers(self._servers)
        if self.admission.admissible_at(now) > 0:  # A back-off may have ended.
            self._apply(lambda: None)
        expired = self.admission.expired(now)
        for permit, reason in expired.items():
            log.warning("%s is returned by the queue: %s", permit, reason)
        # All at once: while one return waits for the journal, the permits after it could be given again.
        await asyncio.gather(*(self._return(permit, reason) for permit, reason in expired.items()))

    async def Admit(self, request: pb.AdmitRequest) -> pb.AdmitReply:
        """Gives permits: those that the worker has lost, then new ones; a long poll of at most wait_secs."""
        wire.check_admit(request)
        self._check_failure()
        self._check_instance(request)
        count = request.max_permits
        self.admission.seen(request.worker, self.clock())
        permits = self._permits_to_give_again(request)[:count]
        if not permits:

            def ready() -> bool:
                admissible = self.admission.admissible_at(self.clock())
                return bool(self._failure or admissible or self.admission.orphans())

            with contextlib.suppress(TimeoutError):
                await self._until(
                    ready, request.wait_secs, lambda: f"admit of up to {count} permits"
                )
            self._check_failure()
            permits = self.admission.orphans()[:count]
        if permits:
            log.info("%d lost permits are given again to %s", len(permits), request.worker)
            self._apply(self.admission.readmit, permits, self.clock(), request.worker)
        left = count - len(permits)
        permits += self._apply(self.admission.admit, left, self.clock(), request.worker)
        if self.journal is not None and permits:
            await self.journal.admitted(permits, request.worker, self.admission.v_pub)
        given = [wire.encode_permit(p) for p in permits]
        return pb.AdmitReply(permits=given, v_pub=self.admission.v_pub)

    async def Push(self, request: pb.Group, raw: bytes | None = None) -> pb.PushReply:
        """Takes a group, once. `raw` is the received message, for the journal, so that it is not serialized again."""
        wire.check_message(
            request,
            group_size=self.group_size,
            vocab_size=self.vocab_size,
            max_tokens=self.max_tokens,
            record=self.record,
        )
        permit = wire.decode_permit(request.permit)
        message = request.SerializeToString() if raw is None else raw
        oldest, newest = wire.versions_of(request)
        if refusal := self.admission.check_versions(permit, oldest, newest):
            log.warning("%s is refused: %s", permit, refusal)
            await self._return(permit, refusal)
            self._lengths.count_group("dropped", request)
            return pb.PushReply(outcome=refusal)
        outcome = self._apply(self.admission.submit, permit, len(message), oldest)
        if outcome == "held":
            self._groups[permit.prompt_index] = request
            self._lengths.count_group("admitted", request)
            tokens = sum(request.lengths) - sum(request.prompt_lengths)
            self._completion_tokens += tokens
            self._last_submission = self.clock()
            if self.journal is not None:
                await self.journal.submitted(permit, message, tokens)
        elif self.journal is not None:
            await self.journal.flushed()  # The first submission may still be unwritten.
        return pb.PushReply(outcome=outcome)

    async def Return(self, request: pb.ReturnRequest) -> pb.ReturnReply:
        """Takes back a permit."""
        wire.check_return(request)
        permit = wire.decode_permit(request.permit)
        outcome = await self._return(permit, request.reason)
        detail = security.escaped(request.detail)
        if outcome != "stale":
            self._lengths.count("dropped", request.prompt_tokens, request.completion_tokens)
            self._details[request.reason] = f"prompt {permit.prompt_index}: {detail}"
        log.info("%s returned (%s): %s %s", permit, request.reason, outcome, detail)
        return pb.ReturnReply(outcome=outcome)

    async def Begin(self, request: pb.BeginRequest) -> pb.BeginReply:
        """Gives a starting learner the next generation; from now on the calls of earlier ones are refused."""
        wire.check_begin(request)
        if request.nonce != self._nonce:
            run_id, generation = self._identity.run_id, self._identity.generation + 1
            self._nonce = request.nonce
            self._identity = self._apply(Identity, run_id, generation)
            self._failure = ""  # A new start, perhaps of mended code.
            log.info("learner generation %d of run %s begins", generation, run_id)
            if self.journal is not None:
                await self.journal.begun(generation, request.nonce)
        elif self.journal is not None:
            await self.journal.flushed()  # The same call may still be unwritten.
        return pb.BeginReply(**dataclasses.asdict(self._identity))

    async def Lease(self, request: pb.LeaseRequest) -> AsyncIterator[pb.LeaseReply]:
        """Sends one chunk: its header, then its groups. Those outside the caller's share come without tokens."""
        self._check_generation(request)
        step, index = request.step, request.chunk
        share = Share(request.process, request.num_processes or 1, request.num_minibatches or 1)
        if self.journal is not None and 0 < step <= self.admission.leases.committed_step:
            chunk, messages = await self.journal.chunk(step, index)
            groups = [pb.Group.FromString(message) for message in messages]
        else:
            chunk, groups = await self._chunk(request)
        own = set(share.of_chunk(len(groups)))
        headers = [pb.GroupHeader(permit=g.permit, lengths=g.lengths) for g in groups]
        header = pb.ChunkHeader(step=step, index=index, last=chunk.last, groups=headers)
        yield pb.LeaseReply(header=header)
        for position, group in enumerate(groups):
            yield pb.LeaseReply(group=group if position in own else wire.encode_outline(group))

    async def _chunk(self, request: pb.LeaseRequest) -> tuple[FixedChunk, list[pb.Group]]:
        """Waits for a chunk of a step that is not committed; returns it with its groups."""
        step, index = request.step, request.chunk
        # Those of a queue that was killed before it wrote this.
        await asyncio.gather(*self._drop_overtaken())
        await self._until(
            lambda: (
                self._superseded(request)
                or bool(self._failure)
                or self.admission.chunk_is_ready(step, index)
            ),
            request.wait_secs,
            lambda: f"lease of {self.admission.waiting_for(step, self.clock())}",
        )
        self._check_generation(request)  # Another learner may have begun during the wait.
        self._check_failure()
        new = self.admission.leases.fixed(step, index) is None
        chunk = cast(FixedChunk, self._apply(self.admission.lease, step, index))  # It is ready.
        # Before the write: a commit may come in the meantime.
        groups = [self._groups[i] for i in chunk.indexes]
        dropped = self._drop_overtaken()
        if self.journal is not None:
            # A second caller, too, is answered after the write.
            await self.journal.leased(step, index, chunk, new=new)
        await asyncio.gather(*dropped)
        return chunk, groups

    def _drop_overtaken(self) -> list[asyncio.Future]:
        """Drops the groups that are too old for the next step; returns the writes, which have begun."""
        written = []
        for permit in self.admission.overtaken():
            outcome = self._apply(self.admission.take_back, permit)
            group = self._groups.pop(permit.prompt_index)
            self._lengths.count_group("dropped", group)
            log.info("%s is overtaken: %s", permit, outcome)
            if self.journal is not None:
                reasons = OVERTAKEN, outcome, EXHAUSTED
                written.append(self.journal.returned(permit, *reasons, held=True))
        return written

    async def Commit(self, request: pb.CommitRequest) -> pb.Position:
        """Commits a trained step and drops its groups; a repeated call gets the first answer."""
        self._check_generation(request)
        step, journal = request.step, self.journal
        if journal is not None and 0 < step <= self.admission.leases.committed_step:
            return wire.encode_resume_point(await journal.resume_point(step))
        indexes = self._apply(self.admission.commit, step)
        resume_point = self.admission.resume_point
        for index in indexes:
            self._lengths.count_group("trained", self._groups.pop(index))
        if journal is not None and indexes:  # Step 0, the initial weights, has none.
            await journal.committed(resume_point, indexes)
        return wire.encode_resume_point(resume_point)

    async def Checkpointed(self, request: pb.CheckpointedRequest) -> pb.CheckpointedReply:
        """Lets the journal forget the groups that no restored learner will need."""
        self._check_generation(request)
        if self.journal is not None:
            await self.journal.checkpointed(request.step)
        return pb.CheckpointedReply()

    async def Snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotReply:
        """Archives a copy of the journal, from which a queue resumes at the step of a checkpoint."""
        self._check_generation(request)
        if self.journal is not None and self.archive is not None:
            # A caller whose connection is lost leaves it at work, and asks again.
            await asyncio.shield(self._archived(self.journal, self.archive, request.step))
        return pb.SnapshotReply()

    async def _archived(self, journal: Journal, archive: Callable, step: int) -> None:
        async with self._archiving:  # There is one file for copies.
            await asyncio.to_thread(archive, step, await journal.snapshot(step))

    async def PublishVersion(self, request: pb.PublishRequest) -> pb.PublishReply:
        """Publishes a version, the table of servers, and at the first publication a resume point."""
        wire.check_publish(request)
        self._check_generation(request)
        servers = wire.decode_servers(request.servers)
        has_resume_point = request.HasField("position")
        resume_point = wire.decode_resume_point(request.position) if has_resume_point else None
        if request.run_epoch < self._run_epoch:
            late = f"run_epoch {request.run_epoch} is published after run_epoch {self._run_epoch}"
            raise OrderError(late)
        before, before_servers = (self.admission.v_pub, self._run_epoch), self._servers
        self._apply(self.admission.publish, request.version, resume_point)
        self._run_epoch = request.run_epoch
        self._set_servers(servers)
        if self.journal is None:
            return pb.PublishReply()
        changed = servers != before_servers
        table = [dataclasses.astuple(record) for record in servers] if changed else None
        if before != (request.version, self._run_epoch):
            # At once: a permit that waits for this version must not be written before it.
            start = resume_point if before[0] is None else None
            await self.journal.published(request.version, self._run_epoch, start, table)
        elif table is not None:
            await self.journal.fleet(table)
        else:
            await self.journal.flushed()  # The same publication may still be unwritten.
        return pb.PublishReply()

    async def WatchFleet(self, request: pb.WatchRequest) -> AsyncGenerator[pb.FleetReply]:
        """Sends the table of servers and the published version: at once, at every change, every HEARTBEAT_SECS."""
        while True:
            reply, v_pub = self._fleet_reply, self.admission.v_pub
            yield self._encode_fleet(()) if request.without_servers else reply
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECS):
                    while (
                        self.admission.v_pub == v_pub
                        if request.without_servers
                        else self._fleet_reply is reply
                    ):
                        await self._published.wait()

    async def Report(self, request: pb.RoleReport) -> pb.ReportReply:
        """Takes the report of a role."""
        wire.check_report(request)
        if request.role not in self._roles and len(self._roles) >= MAX_ROLES:
            raise ValueError(f"{request.role!r} reports after {MAX_ROLES} roles, the bound")
        if request.leaving:
            self._take_leave(request)
            return pb.ReportReply()
        self._roles[request.role] = (self.clock(), request)
        self.admission.seen(request.role, self.clock())
        if request.failure:
            self._take_failure(request)
        return pb.ReportReply()

    async def Status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """The contents of the queue, its counts, and the waits of every role."""
        a, now = self.admission, self.clock()
        return wire.encode_status(
            QueueStatus(
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
                last_push_age_secs=(
                    None if self._last_submission is None else now - self._last_submission
                ),
                waits=tuple(describe() for describe in self._waits.values()),
                run_epoch=self._run_epoch,
                roles=tuple(
                    RoleStatus(role, now - at, wire.decode_waits(report.waits), dict(report.secs))
                    for role, (at, report) in sorted(self._roles.items())
                ),
                servers=self._table,
                lengths=self._lengths.means(),
                failure=self._failure,
                details=dict(self._details),
                **dataclasses.asdict(self._identity),
            )
        )

    def _check_instance(self, request: pb.AdmitRequest) -> None:
        """Raises SupersededError for a process whose worker's name another one has taken since."""
        if not request.worker or not request.instance:
            return
        newest, former = self._instances.setdefault(request.worker, (request.instance, set()))
        if request.instance in former:
            raise SupersededError(
                f"{SUPERSEDED}: another process works as {request.worker} since; each worker needs an --index of its "
                "own"
            )
        if request.instance != newest:
            self._instances[request.worker] = (request.instance, former | {newest})

    def _superseded(self, request: Any) -> bool:
        return request.generation != self._identity.generation

    def _check_generation(self, request: Any) -> None:
        """Raises SupersededError for a learner's call, unless no learner after it began."""
        if self._superseded(request):
            raise SupersededError(
                f"{SUPERSEDED}: learner generation {request.generation} of run {self._identity.run_id}, whose "
                f"generation {self._identity.generation} has begun"
            )

    async def _return(self, permit: Permit, reason: str) -> str:
        now = self.clock()
        outcome = self._apply(self.admission.return_permit, permit, reason, now)
        if self.journal is not None and outcome == "stale":
            await self.journal.flushed()  # The event that made it stale may still be unwritten.
        elif self.journal is not None:
            retired_as = EXHAUSTED if reason in REISSUE_REASONS else reason
            await self.journal.returned(permit, reason, outcome, retired_as)
        return outcome

    def _set_servers(self, servers: tuple[ServerRecord, ...]) -> None:
        """Takes the publisher's table, adds the loads that workers reported, and wakes those who watch."""
        table = tuple(
            dataclasses.replace(r, load=load) if (load := self._loads[r.address]) else r
            for r in servers
        )
        self._servers = servers
        self._table, last = table, self._fleet_reply
        self._fleet_reply = self._encode_fleet(table)
        if self._fleet_reply == last:
            self._fleet_reply = last  # Those who watch compare by identity.
            return
        self._published.set()
        self._published = asyncio.Event()

    def _encode_fleet(self, servers: Sequence[ServerRecord] = ()) -> pb.FleetReply:
        records, run_id = wire.encode_servers(servers), self.run_id
        return pb.FleetReply(servers=records, v_pub=self.admission.v_pub, run_id=run_id)

    def _take_failure(self, request: pb.RoleReport) -> None:
        """Ends a run without a group. In a later one the worker ends alone: others have shown that the code works."""
        log.error("%s cannot go on: %s", request.role, request.failure)
        if not self._completion_tokens and not self._failure:
            self._failure = request.failure
            self._apply(lambda: None)

    def _take_leave(self, request: pb.RoleReport) -> None:
        """Gives a worker's permits to others, unless another process works under its name since."""
        newest, _ = self._instances.get(request.role, (request.leaving, None))
        if newest != request.leaving:
            return
        count = len(self.admission.permits_of(request.role))
        log.info("%s ends, with %d permits", request.role, count)
        self._roles.pop(request.role, None)
        self._apply(self.admission.leave, request.role)

    def _check_failure(self) -> None:
        if self._failure:
            raise RunFailedError(self._failure)

    def _permits_to_give_again(self, request: pb.AdmitRequest) -> list[Permit]:
        """Permits that are out to the worker without its knowledge, since a reply was lost or it was restarted; then
        those of workers that have left."""
        orphans = self.admission.orphans()
        if not request.worker:
            return orphans
        known = {wire.decode_permit(permit) for permit in request.working_on}
        return [p for p in self.admission.permits_of(request.worker) if p not in known] + orphans

    def _apply(self, event: Callable[..., T], *args: Any) -> T:
        """Applies an event and wakes all waiting calls. Every change of admission passes here."""
        result = event(*args)
        self._changed.set()
        self._changed = asyncio.Event()
        return result

    async def _until(
        self, ready: Callable[[], bool], wait_secs: float, describe: Callable[[], str]
    ) -> None:
        """Waits until ready() holds, checked after every change; raises TimeoutError(describe()) after wait_secs."""
        if not 0 <= wait_secs <= MAX_WAIT_SECS:
            raise ValueError(f"wait_secs must be in [0, {MAX_WAIT_SECS:.0f}], got {wait_secs}")
        since, key = self.clock(), object()
        self._waits[key] = lambda: f"{describe()}, for {self.clock() - since:.1f} s"
        try:
            while not ready():
                try:
                    async with asyncio.timeout(max(0.0, since + wait_secs - self.clock())):
                        await self._changed.wait()
                except TimeoutError:
                    if not ready():
                        message = f"{describe()}; gave up after {wait_secs:g} s"
                        raise TimeoutError(message) from None
        finally:
            del self._waits[key]


def _handlers(service: QueueService) -> grpc.GenericRpcHandler:
    """The service's methods, which take bytes and parse them inside `_refusals`."""

    def behavior_of(method: MethodDescriptor) -> Callable:
        call, parse = getattr(service, method.name), rpc.parser(method.input_type)

        async def unary(raw: bytes, context: grpc.aio.ServicerContext):
            async with _refusals(service, context):
                return await (call(parse(raw), raw) if method.name == "Push" else call(parse(raw)))

        async def streaming(raw: bytes, context: grpc.aio.ServicerContext):
            async with _refusals(service, context):
                async for reply in call(parse(raw)):
                    yield reply

        return streaming if method.server_streaming else unary

    return rpc.handlers(pb.DESCRIPTOR.services_by_name["TrajectoryQueue"], behavior_of)


_STATUSES = {
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    protobuf.DecodeError: grpc.StatusCode.INVALID_ARGUMENT,
    JournalError: grpc.StatusCode.INTERNAL,
    RunFailedError: grpc.StatusCode.ABORTED,
    OrderError: grpc.StatusCode.FAILED_PRECONDITION,
    SupersededError: grpc.StatusCode.FAILED_PRECONDITION,
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@contextlib.asynccontextmanager
async def _refusals(
    service: QueueService, context: grpc.aio.ServicerContext
) -> AsyncIterator[None]:
    """Answers a refused call with the status that fits its error."""
    try:
        yield
    except tuple(_STATUSES) as error:
        text = str(error)
        status = next(_STATUSES[of] for of in type(error).__mro__ if of in _STATUSES)
        short = text[:MAX_DETAIL_CHARS] + "…" * (len(text) > MAX_DETAIL_CHARS)
        await context.abort(status, short)
    except MemoryError as error:
        service.error = error
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the queue is out of memory")
