"""Clients of the trajectory queue: asyncio for rollout workers, blocking for the learner.

`calls` says how a call is tried again, and which errors it raises. The clients do not read what a group is for.
"""

import concurrent.futures
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_async import security
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.calls import BlockingCalls, Calls, NotReadyError, QueueError
from jaxrl_async.records import (
    SUPERSEDED,
    WHOLE,
    Identity,
    Permit,
    QueueStatus,
    ResumePoint,
    ServerRecord,
    Share,
    SupersededError,
    Wait,
)
from jaxrl_async.types import Chunk, Group, InvalidTrajectoryError

# Longest wait of one attempt at a lease: a stop of either process costs no more.
LEASE_WAIT_SECS = 10.0
SNAPSHOT_SECS = 3600.0  # bound on the upload of a copy of the journal
POLL_SECS = 0.5  # interval between two calls of `should_stop`
LEAVE_SECS = 3.0  # deadline of `leave`: a process that ends has little time
MAX_DETAIL_CHARS = 1000  # of a return; the rest is cut off


class QueueClient:
    """The rollout side: an async context manager, used in the loop that enters it."""

    def __init__(self, calls: Calls):
        """`calls`: not opened yet."""
        self._calls = calls
        self._instance = uuid.uuid4().hex  # of this process, where it works under a name
        self.run_id = ""  # the run of the queue that answered last; "" before it connects
        # The version published when permits were given last, and that of the last table; None before the first.
        self.v_pub: int | None = None
        self.table_v_pub: int | None = None

    async def __aenter__(self) -> "QueueClient":
        """Connects; errors as of `Calls.open`."""
        self.run_id = await self._calls.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._calls.close()

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
        reply = await self._calls.call("Admit", request, wait_secs)
        self.v_pub = reply.v_pub if reply.HasField("v_pub") else None
        return [wire.decode_permit(p) for p in reply.permits]

    async def submit(self, group: Group) -> str:
        """Submits a group.

        Returns:
          "held", "duplicate" or "stale" (`Admission.submit`), or why it is refused (`Admission.check_versions`). After
          each of them the worker is done with the permit.

        Raises:
          InvalidTrajectoryError: the group is malformed or too large; its permit is still out.
        """
        try:
            return (await self._calls.call("Push", wire.encode_group(group))).outcome
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
            detail=security.escaped(detail)[:MAX_DETAIL_CHARS],
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        return (await self._calls.call("Return", request)).outcome

    async def watch_fleet(self) -> AsyncIterator[tuple[ServerRecord, ...]]:
        """Yields the table of servers, at once and at every change; errors as of `Calls.watch`.

        `table_v_pub` is the version that was published when the table was sent.
        """
        last = None
        async with contextlib.aclosing(self._calls.watch(pb.WatchRequest())) as replies:
            async for reply in replies:
                servers = wire.decode_servers(reply.servers)
                v_pub = reply.v_pub if reply.HasField("v_pub") else None
                if (servers, v_pub) != (last, self.table_v_pub) or reply.run_id != self.run_id:
                    self.table_v_pub = v_pub
                    self.run_id = reply.run_id  # Another one where a new queue began a new run.
                    last = servers
                    yield servers

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
        await self._calls.tell(report)

    async def leave(self, worker: str) -> None:
        """Reports that this process ends, so that others take its permits at once. Tried once, for LEAVE_SECS.

        Never raises. Where the report is lost the permits expire by silence.
        """
        await self._calls.tell(pb.RoleReport(role=worker, leaving=self._instance), LEAVE_SECS)

    async def fail(self, role: str, message: str) -> None:
        """Reports that the run cannot go on. A queue without a group then refuses leases and permits with it."""
        report = pb.RoleReport(role=role, failure=message[: wire.MAX_TEXT_CHARS])
        await self._calls.call("Report", report)


class LearnerQueue:
    """The learner's side, a `GroupSource`: a context manager of blocking calls."""

    def __init__(self, calls: BlockingCalls, share: Share = WHOLE):
        """Of one process of the learner.

        Args:
          calls: not opened yet.
          share: the groups of this process; only these come with their tokens.
        """
        self._calls, self._share = calls, share
        self._generation = 0  # of this learner, by `begin`

    def __enter__(self) -> "LearnerQueue":
        """Connects; errors as of `Calls.open`."""
        self._calls.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()

    def begin(self) -> Identity:
        """Starts this learner: from now on the queue refuses the calls of the run's earlier ones."""
        reply = self._calls.call("Begin", pb.BeginRequest(nonce=uuid.uuid4().hex))
        self._generation = reply.generation
        return Identity(reply.run_id, reply.generation)

    def join(self, generation: int) -> None:
        """Calls as the learner that `begin` gave this generation in another process."""
        self._generation = generation

    def confirm(self) -> None:
        """Checks that no learner began after this one. Raises SupersededError: names both generations."""
        if (newest := self.status().generation) != self._generation:
            raise SupersededError(
                f"{SUPERSEDED}: learner generation {self._generation}, after which generation {newest} has begun"
            )

    def lease(
        self, step: int, timeout_secs: float, should_stop: Callable[[], bool]
    ) -> Iterator[Chunk]:
        """Yields the chunks of a step, each requested when the one before was taken; as of `GroupSource.lease`.

        Every chunk has all its groups. Groups outside the share have their true lengths, rewards and finish reasons,
        and no tokens (`wire.decode_outline`). `should_stop` is polled every POLL_SECS.

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
        request = self._own(pb.CommitRequest(step=step))
        return wire.decode_resume_point(self._calls.call("Commit", request))

    def checkpointed(self, step: int) -> None:
        """Reports the step of the oldest checkpoint: no learner will be restored before it."""
        self._calls.call("Checkpointed", self._own(pb.CheckpointedRequest(step=step)))

    def snapshot(self, step: int) -> None:
        """Puts a copy of the journal beside a checkpoint in a bucket; returns when it is there."""
        request = self._own(pb.SnapshotRequest(step=step))
        self._calls.call("Snapshot", request, SNAPSHOT_SECS)

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
        self._calls.call("PublishVersion", self._own(request))

    def watch_version(self) -> Iterator[int]:
        """Yields the published version, at once and at every change, until the client is closed.

        Reconnects for as long as the queue is unavailable: its caller has the deadline.

        Raises:
          PermissionError: the token is wrong.
        """
        last = None
        for reply in self._calls.watch(pb.WatchRequest(without_servers=True)):
            if reply.HasField("v_pub") and reply.v_pub != last:
                last = reply.v_pub
                yield last

    def report(self, role: str, waits: Sequence[Wait]) -> None:
        """Reports the waits of a role; also its heartbeat. Never raises."""
        self._calls.tell(pb.RoleReport(role=role, waits=wire.encode_waits(waits)))

    def status(self) -> QueueStatus:
        """The contents of the queue, its counts, and the waits of every role."""
        return wire.decode_status(self._calls.call("Status", pb.StatusRequest()))

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
        first, *replies = self._calls.call("Lease", self._own(request), wait_secs)
        header = first.header
        own = set(self._share.of_chunk(len(header.groups)))
        groups = tuple(
            wire.decode_group(reply.group) if i in own else wire.decode_outline(reply.group)
            for i, reply in enumerate(replies)
        )
        expected = [wire.decode_permit(group.permit) for group in header.groups]
        found = [Permit(group.prompt_index, group.attempt) for group in groups]
        if found != expected:
            which = f"chunk {header.index} of step {header.step}"
            raise QueueError(f"{which} is {found}, not {expected}")
        return Chunk(header.step, header.index, groups, header.last)

    def _own(self, request: Any) -> Any:
        """Signs a request with this learner's generation."""
        request.generation = self._generation
        return request
