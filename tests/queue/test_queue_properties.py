"""The queue under random schedules with a fake clock, killed at any moment: every answer stays true.

First admission alone, recovered from a ledger of its answers; then the service with a journal in a real file. 300
schedules each; 10,000 with --long.
"""

import asyncio
import collections
import dataclasses
import logging
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
from fixtures.queues import GROUP_SIZE, MAX_TOKENS, VOCAB_SIZE, group
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.admission import Admission, State
from jaxrl_async.queue.journal import Journal, JournalError, JournalReader
from jaxrl_async.queue.leases import FixedChunk, OrderError
from jaxrl_async.queue.service import QueueService
from jaxrl_async.records import (
    BLAMELESS,
    EXHAUSTED,
    OVERTAKEN,
    REISSUE_REASONS,
    RETIRE_REASONS,
    Permit,
    ResumePoint,
)
from jaxrl_async.types import InvalidTrajectoryError

REASONS = sorted(REISSUE_REASONS | RETIRE_REASONS)
WORKERS = ("", "a", "b")
MAX_ATTEMPTS = 3
ADMISSION = dict(push_every_steps=1, max_attempts=MAX_ATTEMPTS, permit_timeout_secs=20.0)
SETTINGS = dict(
    batch_groups=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    max_running_groups=st.integers(1, 9),
    chunk_groups=st.sampled_from([None, 1, 2, 3, 5]),
    max_bytes=st.sampled_from([300, 10**9]),
)
NUMBERS = st.integers(0, 10_000)
STALE_ERRORS = (OrderError, TimeoutError)


@pytest.fixture
def examples(request, caplog) -> int:
    caplog.set_level(logging.ERROR)
    return 10_000 if request.config.getoption("--long") else 300


def schedules(**weights: int):
    """Lists of (event, number); the weight of an event is its frequency."""
    names = [name for name, weight in weights.items() for _ in range(weight)]
    event = st.tuples(st.sampled_from(names), NUMBERS)
    # The length is drawn first: lists of free length have five elements on average.
    return st.integers(0, 100).flatmap(lambda n: st.lists(event, min_size=n, max_size=n))


def pick(items, number: int):
    """One of the items; None where there are none."""
    return items[number % len(items)] if items else None


# Admission alone.


@dataclasses.dataclass
class Entry:
    """One index of the ledger."""

    state: str
    attempt: int  # of reissue: the one to be issued
    worker: str
    num_bytes: int = 0
    reason: str = ""  # of retired
    arrival: int = 0  # of held and leased
    version: int = 0  # published when it was issued


class Ledger:
    """The state of every index by the answers of admission, as a journal holds it."""

    def __init__(self, batch_groups: int):
        self.batch_groups = batch_groups
        self.entries: dict[int, Entry] = {}
        self.issued: list[Permit] = []
        self.returned = collections.Counter()
        self.chunks: dict[int, list[FixedChunk]] = collections.defaultdict(list)
        self.resume_point = ResumePoint(0, 0, (), {}, {})
        self.arrivals = 0
        self.sampled: dict[int, int] = {}  # the version of each group submitted, by prompt_index
        # Attempts that ended with their worker or server.
        self.lost = collections.Counter()

    def indexes(self, *states: str) -> list[int]:
        return sorted(i for i, e in self.entries.items() if e.state in states)

    def permits(self, state: str) -> list[Permit]:
        return [Permit(i, self.entries[i].attempt) for i in self.indexes(state)]

    def admitted(self, permits: list[Permit], worker: str, version: int) -> None:
        for permit in permits:
            entry = self.entries.get(permit.prompt_index)
            if entry is None:
                assert permit == Permit(len(self.entries), 0)
                assert not self.indexes("reissue")
            else:
                assert (entry.state, entry.attempt) == ("reissue", permit.attempt)
            self.entries[permit.prompt_index] = Entry(
                "running", permit.attempt, worker, version=version
            )
            self.issued.append(permit)

    def standing(self, permit: Permit) -> str:
        entry = self.entries[permit.prompt_index]
        if permit.attempt != entry.attempt:
            return "stale"
        return {"running": "running", "held": "duplicate", "leased": "duplicate"}.get(
            entry.state, "stale"
        )

    def submitted(self, permit: Permit, num_bytes: int) -> None:
        entry, self.arrivals = self.entries[permit.prompt_index], self.arrivals + 1
        entry.state, entry.num_bytes, entry.arrival = "held", num_bytes, self.arrivals

    def gave_back(self, permit: Permit, reason: str) -> str:
        """The expected outcome of a return."""
        self.returned[reason] += 1
        entry = self.entries[permit.prompt_index]
        self.lost[permit.prompt_index] += reason in BLAMELESS
        used = permit.attempt + 1 - self.lost[permit.prompt_index]
        if reason in BLAMELESS or (reason in REISSUE_REASONS and used < MAX_ATTEMPTS):
            entry.state, entry.attempt = "reissue", permit.attempt + 1
            return "reissued"
        del self.lost[permit.prompt_index]
        entry.state = "retired"
        entry.reason = EXHAUSTED if reason in REISSUE_REASONS else reason
        return "retired"

    def leased(self, step: int, chunk: FixedChunk) -> None:
        for index in chunk.indexes:
            assert self.entries[index].state == "held"
            self.entries[index].state = "leased"
        self.chunks[step].append(chunk)
        in_step = [i for fixed in self.chunks[step] for i in fixed.indexes]
        assert chunk.last == (len(in_step) == self.batch_groups)

    def committed(self, step: int) -> list[int]:
        indexes = [i for chunk in self.chunks[step] for i in chunk.indexes]
        for index in indexes:
            assert self.entries[index].state == "leased"
            self.entries[index].state = "committed"
        out = self.indexes("reissue", "running", "held", "leased")
        self.resume_point = ResumePoint(
            step=step,
            frontier=len(self.entries),
            outstanding=tuple(Permit(i, self.entries[i].attempt) for i in out),
            retired=self.retired(),
            returned=dict(self.returned),
        )
        return indexes

    def retired(self) -> dict[str, int]:
        return dict(collections.Counter(e.reason for e in self.entries.values() if e.reason))

    def state(self, v_pub: int) -> State:
        """The state that a journal would give a restarted queue."""

        def sized(state: str):
            permits = sorted(
                self.permits(state), key=lambda p: self.entries[p.prompt_index].arrival
            )
            return tuple((p, self.entries[p.prompt_index].num_bytes) for p in permits)

        return State(
            resume_point=self.resume_point,
            v_pub=v_pub,
            frontier=len(self.entries),
            retired=self.retired(),
            returned=dict(self.returned),
            reissue=tuple(self.permits("reissue")),
            running=tuple(
                (p, e.worker, e.version)
                for p in self.permits("running")
                for e in [self.entries[p.prompt_index]]
            ),
            held=sized("held"),
            leased=sized("leased"),
            chunks={
                s: tuple(c) for s, c in self.chunks.items() if c and s > self.resume_point.step
            },
            lost=dict(self.lost),
        )

    def agrees(self, admission: Admission) -> None:
        """Every index is in exactly one state, the same in the ledger and in admission."""
        count = {
            s: len(self.indexes(s))
            for s in ("reissue", "running", "held", "leased", "committed", "retired")
        }
        assert count["committed"] == admission.leases.committed_step * self.batch_groups
        assert (admission.held, admission.leased) == (count["held"], count["leased"])
        assert (admission.running, admission.reissues) == (count["running"], count["reissue"])
        assert sum(count.values()) == admission.frontier == len(self.entries)
        assert admission.retired == self.retired()
        assert admission.returned == self.returned
        assert admission.resume_point == self.resume_point
        here = self.indexes("held", "leased")
        assert admission.num_bytes == sum(self.entries[i].num_bytes for i in here)
        for worker in WORKERS:
            out = self.permits("running")
            mine = [p for p in out if self.entries[p.prompt_index].worker == worker]
            assert admission.permits_of(worker) == mine
        in_chunks = [i for fixed in self.chunks.values() for c in fixed for i in c.indexes]
        assert len(in_chunks) == len(set(in_chunks))
        for step, fixed in self.chunks.items():
            if step > self.resume_point.step:
                assert [admission.lease(step, i) for i in range(len(fixed))] == fixed


ADMISSION_EVENTS = schedules(
    admit=3,
    ask_again=1,
    submit=4,
    give_back=1,
    stray=1,
    tick=1,
    lease=3,
    commit=2,
    publish=2,
    kill=1,
)


def test_every_index_is_in_one_state_after_any_events(examples):
    @settings(max_examples=examples, deadline=None)
    @given(events=ADMISSION_EVENTS, weight_delay=st.integers(0, 2), **SETTINGS)
    def holds(events, **values):
        run_admission(events, values | ADMISSION)

    holds()


def run_admission(events, values):
    admission, ledger, now = Admission(**values), Ledger(values["batch_groups"]), 0
    bound = values["max_staleness"] + 1
    delay = values["weight_delay"]
    admission.publish(0)

    def give_back(permit, reason):
        expected = ledger.gave_back(permit, reason)
        assert admission.return_permit(permit, reason) == expected

    for event, number in events:
        now += number % 11
        worker, permit = pick(WORKERS, number), pick(ledger.issued, number)
        if event == "admit":
            count = min(number % 6, admission.admissible)
            permits = admission.admit(number % 6, now, worker)
            assert len(permits) == count
            ledger.admitted(permits, worker, admission.v_pub)
        elif event == "ask_again":  # The reply was lost: its permits are given again.
            out = admission.permits_of(worker)
            admission.readmit(out, now)
            assert not set(out) & set(admission.expired(now + 20.0))
        elif event == "submit" and (permit := pick(ledger.permits("running"), number)):
            oldest = ledger.entries[permit.prompt_index].version - delay
            version = oldest + number % 7 - 1 if number % 3 == 0 else oldest
            refusal = admission.check_versions(permit, version, version)
            newest = admission.leases.leased_step
            assert (refusal == "foreign_version") == (version > newest)
            assert (refusal == "over_age") == (version < oldest)
            if refusal:
                give_back(permit, refusal)
            else:
                assert admission.submit(permit, number, version) == "held"
                ledger.submitted(permit, number)
                ledger.sampled[permit.prompt_index] = version
                assert admission.submit(permit, 1) == "duplicate"
        elif event == "give_back" and (permit := pick(ledger.permits("running"), number)):
            give_back(permit, pick(REASONS, number))
        elif event == "stray" and permit and ledger.standing(permit) != "running":
            assert admission.submit(permit, 1) == ledger.standing(permit)
            assert admission.return_permit(permit, pick(REASONS, number)) == "stale"
            with pytest.raises(OrderError):
                admission.submit(Permit(admission.frontier, 0), 1)
        elif event == "tick":
            for permit, reason in admission.expired(now).items():
                give_back(permit, reason)
            assert not admission.expired(now)
        elif event == "lease":
            step = admission.leases.leased_step + 1
            index = len(ledger.chunks[step])
            ready = admission.chunk_is_ready(step, index)
            chunk = admission.lease(step, index)
            assert (chunk is not None) == ready
            if chunk:
                ledger.leased(step, chunk)
                oldest = min(ledger.sampled[i] for i in chunk.indexes)
                assert step - 1 - oldest <= values["max_staleness"] + delay
                for permit in (overtaken := admission.overtaken()):
                    assert admission.take_back(permit) == ledger.gave_back(permit, OVERTAKEN)
                assert not overtaken or (values["chunk_groups"] and values["max_staleness"])
                if values["chunk_groups"] is None:  # In prompt order, no lower index to come.
                    later = ledger.indexes("running", "reissue", "held")
                    assert list(chunk.indexes) == sorted(chunk.indexes)
                    assert chunk.indexes[-1] < min(later, default=admission.frontier)
        elif event == "commit" and admission.leases.leased_step > ledger.resume_point.step:
            step = ledger.resume_point.step + 1
            assert list(admission.commit(step)) == ledger.committed(step)
            assert admission.commit(step) == ()
        elif event == "publish":
            admission.publish(max(admission.v_pub, ledger.resume_point.step))
        elif event == "kill":
            state = ledger.state(admission.v_pub)
            admission = Admission(**values)
            admission.recover(state, now, ledger.sampled)
            assert not admission.expired(now + 20.0)
        ledger.agrees(admission)
        limit = (bound + admission.v_pub) * values["batch_groups"]
        assert admission.accepted + admission.running <= limit
        assert admission.running <= values["max_running_groups"]
        assert 0 <= admission.admissible <= admission.capacity


# The service with its journal.


class HeldJournal(Journal):
    """A journal that writes on demand, so that a schedule is deterministic."""

    def __init__(self, *args, **kwargs):
        self.waiting = []
        super().__init__(*args, **kwargs)
        self._thread.join()

    def _run(self):
        pass

    def _put(self, event):
        self.check()
        done = asyncio.get_running_loop().create_future()
        self.waiting.append((event, done))
        return done

    def write(self, count: int) -> None:
        """Writes the first `count` waiting events in one transaction, and answers their callers."""
        events, self.waiting = self.waiting[:count], self.waiting[count:]
        if events:
            self._transact(events)

    def close(self) -> None:
        self._connection.close()


@dataclasses.dataclass
class Call:
    task: asyncio.Task
    name: str
    request: Any


class World:
    """A service that is killed repeatedly, its callers, and the answers that they got."""

    def __init__(self, root: pathlib.Path, values: dict, keep: str, start: ResumePoint | None):
        self.root, self.values, self.keep = root, values | ADMISSION, keep
        self.start = start
        self.now, self.lives = 0.0, 0
        self.calls: list[Call] = []
        # The answers.
        self.issued: list[Permit] = []
        self.sent: dict[Permit, set[bytes]] = collections.defaultdict(set)
        self.held: dict[Permit, bytes | None] = {}  # None: a duplicate, of one of `sent`
        self.closed: set[Permit] = set()  # submitted or returned
        self.returned = collections.Counter()
        self.chunks: dict[tuple[int, int], tuple] = {}
        self.positions: dict[int, bytes] = {}
        self.v_pub: int | None = None
        self.forgotten = 0
        self.open()

    @property
    def path(self) -> pathlib.Path:
        return self.root / f"{self.lives}" / "journal"

    @property
    def base(self) -> int:
        """The step that the run started from."""
        return self.start.step if self.start else 0

    def open(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.journal = HeldJournal(
            self.path,
            batch_groups=self.values["batch_groups"],
            keep=self.keep,
            synchronous="off",
        )
        self.admission = Admission(**self.values)
        self.service = QueueService(
            self.admission,
            group_size=GROUP_SIZE,
            vocab_size=VOCAB_SIZE,
            max_tokens=MAX_TOKENS,
            journal=self.journal,
            clock=lambda: self.now,
        )

    # Calls.

    def call(self, name: str, request: Any) -> None:
        method = getattr(self.service, name)

        async def unary():
            if name == "Checkpointed":  # Sent again after a kill, it may name more committed steps.
                committed = self.admission.leases.committed_step
                self.forgotten = max(self.forgotten, min(request.step, committed))
            return await method(request)

        async def stream():
            return [reply async for reply in method(request)]

        run = stream if name == "Lease" else unary
        if name == "Push":
            self.sent[wire.decode_permit(request.permit)].add(request.SerializeToString())
        self.calls.append(Call(asyncio.create_task(run()), name, request))

    async def settle(self) -> None:
        """Runs the service until all calls wait for the journal or for one another; takes its answers."""
        for _ in range(12):
            await asyncio.sleep(0)
        done = [call for call in self.calls if call.task.done()]
        self.calls = [call for call in self.calls if not call.task.done()]
        for call in done:
            if (error := call.task.exception()) is None:
                getattr(self, f"answered_{call.name}")(call.request, call.task.result())
            elif isinstance(error, JournalError):
                assert not self.is_kept(call), error
            elif not isinstance(error, STALE_ERRORS):
                raise error
        self.check()

    def is_kept(self, call: Call) -> bool:
        """Whether the journal must still hold the data of a call."""
        if call.name == "Commit":
            return call.request.step >= self.base
        if call.name == "Lease":
            step, index = call.request.step, call.request.chunk
            forgotten = self.forgotten if self.keep == "checkpointed" else 0
            return (step, index) in self.chunks and step > forgotten
        return True

    # Answers.

    def answered_Admit(self, request, reply):
        for permit in map(wire.decode_permit, reply.permits):
            assert permit not in self.held and permit not in self.closed
            self.issued.append(permit)

    def answered_Push(self, request, reply):
        permit = wire.decode_permit(request.permit)
        if reply.outcome == "held":
            assert permit not in self.closed and permit not in self.held
            self.held[permit] = request.SerializeToString()
        elif reply.outcome == "duplicate":
            self.held.setdefault(permit, None)
        self.closed.add(permit)

    def answered_Return(self, request, reply):
        permit = wire.decode_permit(request.permit)
        if reply.outcome != "stale":
            assert permit not in self.closed
            self.returned[request.reason] += 1
        self.closed.add(permit)

    def answered_Lease(self, request, replies):
        header, groups = replies[0].header, [reply.group for reply in replies[1:]]
        permits = [wire.decode_permit(g.permit) for g in groups]
        messages = [g.SerializeToString() for g in groups]
        assert permits == [wire.decode_permit(g.permit) for g in header.groups]
        found = (header.last, tuple(messages))
        assert self.chunks.setdefault((request.step, request.chunk), found) == found
        for permit, message in zip(permits, messages, strict=True):
            assert message in self.sent[permit]
            assert (self.held.get(permit) or message) == message

    def answered_Commit(self, request, reply):
        found = reply.SerializeToString(deterministic=True)
        assert self.positions.setdefault(request.step, found) == found

    def answered_PublishVersion(self, request, reply):
        self.v_pub = max(request.version, self.v_pub or 0)

    def answered_Checkpointed(self, request, reply):
        pass

    def answered_tick(self, request, reply):
        pass

    # Invariants.

    def check(self) -> None:
        a, batch = self.admission, self.values["batch_groups"]
        if a.v_pub is not None:
            limit = (self.values["max_staleness"] + a.v_pub + 1) * batch
            assert a.accepted + a.running <= limit
        states = [a._reissue, a._running, a._held, a._leased]
        indexes = [getattr(i, "prompt_index", i) for state in states for i in state]
        assert len(indexes) == len(set(indexes))
        retired = sum(a.retired.values())
        assert len(indexes) + a.leases.committed_step * batch + retired == a.frontier
        assert set(self.service._groups) == a._held.keys() | a._leased.keys()
        assert (self.v_pub or 0) <= (a.v_pub or 0)
        assert max(self.positions, default=0) <= a.leases.committed_step
        assert max((p.prompt_index for p in self.issued), default=-1) < a.frontier
        for reason, count in self.returned.items():
            assert count <= a.returned[reason]

    def memory(self) -> dict:
        """The state that a restarted service must recover."""
        a, s = self.admission, self.service
        return {
            "v_pub": a.v_pub,
            "frontier": a.frontier,
            "resume_point": a.resume_point,
            "num_bytes": a.num_bytes,
            "returned": +a.returned,
            "retired": +a.retired,
            "reissue": sorted(a._reissue),
            "running": {i: (r.attempt, r.worker) for i, r in a._running.items()},
            "held": list(a._held.items()),
            "leased": a._leased,
            "chunks": a.leases._chunks,
            "groups": {i: g.SerializeToString() for i, g in s._groups.items()},
            "run_epoch": s._run_epoch,
            "tokens": s._completion_tokens,
        }

    async def kill(self, written: int) -> list[Call]:
        """SIGKILL after the first `written` events are in the file; returns the unanswered calls."""
        whole = written >= len(self.journal.waiting)
        before = self.memory()
        self.journal.write(written)
        self.lives += 1
        old = self.journal._path
        self.path.parent.mkdir()
        for file in old.parent.iterdir():
            shutil.copy(file, self.path.parent / file.name)
        calls, self.calls = self.calls, []
        for call in calls:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
        self.journal.close()
        shutil.rmtree(old.parent)
        self.open()
        if whole and before["v_pub"] is not None:
            assert self.memory() == before
        self.check()
        return [call for call in calls if call.name != "tick"]

    async def flush(self) -> None:
        while self.journal.waiting:
            self.journal.write(10**6)
            await self.settle()


SERVICE_EVENTS = schedules(
    admit=4,
    submit=6,
    submit_again=2,
    give_back=2,
    tick=1,
    lease=5,
    lease_again=1,
    commit=4,
    publish=4,
    checkpointed=1,
    write=8,
    kill=2,
)


def make_request(world: World, event: str, number: int) -> tuple[str, Any] | None:
    """The call of an event."""
    a = world.admission
    running = [Permit(i, r.attempt) for i, r in sorted(a._running.items())]
    known = pick(world.issued, number)
    wait_secs = pick([0.0, 0.0, 1000.0], number)
    step = a.leases.committed_step
    if event == "admit":
        worker, some = pick(WORKERS, number), world.issued[number % 3 :: 2]
        return "Admit", pb.AdmitRequest(
            max_permits=number % 7,
            wait_secs=wait_secs,
            worker=worker,
            working_on=[wire.encode_permit(p) for p in some],
        )
    if event in ("submit", "submit_again"):
        permit = pick(running, number) if event == "submit" else known
        if permit is None:
            return None
        message = wire.encode_group(group(permit, num_tokens=3 + number % 5))
        return "Push", message
    if event == "give_back":
        permit = pick([*running, *world.issued], number)
        if permit is None:
            return None
        reason = pick(REASONS, number)
        return "Return", pb.ReturnRequest(permit=wire.encode_permit(permit), reason=reason)
    if event == "lease":
        step = a.leases.leased_step + 1
        index = len(a.leases._chunks.get(step, []))
        return "Lease", pb.LeaseRequest(step=step, chunk=index, wait_secs=wait_secs)
    if event == "lease_again":
        step, index = pick(sorted(world.chunks), number) or (1, 0)
        return "Lease", pb.LeaseRequest(step=step, chunk=index)
    if event == "commit":
        return "Commit", pb.CommitRequest(step=step + 1 - (number % 4 == 0) * (number % 3))
    if event == "publish":
        if a.v_pub is None and world.start:
            start = wire.encode_resume_point(world.start)
            return "PublishVersion", pb.PublishRequest(version=world.base, position=start)
        epoch = world.service._run_epoch + (number % 9 == 0)
        version = max(
            a.v_pub or 0, pick([step, step, step, step - 1, a.leases.leased_step], number)
        )
        return "PublishVersion", pb.PublishRequest(version=version, run_epoch=epoch)
    if event == "checkpointed":  # Sometimes wrongly, 2 steps ahead.
        named = step + pick([0, -1, 0, -1, 2], number)
        return "Checkpointed", pb.CheckpointedRequest(step=named)
    return "tick", None


async def run_service(root: pathlib.Path, events, values, keep: str, start: ResumePoint | None):
    world = World(root, values, keep, start)
    for event, number in events:
        world.now += number % 11
        if event == "write":
            world.journal.write(1 + number % 4)
        elif event == "kill":
            for i, call in enumerate(await world.kill(number % (len(world.journal.waiting) + 1))):
                if number >> i & 1:  # Sent again, as clients do.
                    world.call(call.name, call.request)
        elif event == "tick":
            world.calls.append(Call(asyncio.create_task(world.service.tick()), "tick", None))
        elif found := make_request(world, event, number):
            world.call(*found)
        await world.settle()
    await world.flush()
    await world.kill(0)
    await assert_answers_are_repeated(world)
    for call in world.calls:
        call.task.cancel()
    await asyncio.gather(*(call.task for call in world.calls), return_exceptions=True)
    world.journal.close()
    reader = JournalReader(world.path)
    assert reader.audit() == {"lost": [], "doubled": [], "gap": [], "stray": []}
    assert reader.steps() == list(range(world.base + 1, world.admission.leases.committed_step + 1))
    reader.close()


async def assert_answers_are_repeated(world: World):
    """Every call that was answered gets the same answer again."""
    for step, index in sorted(world.chunks):
        world.call("Lease", pb.LeaseRequest(step=step, chunk=index))
    for step in sorted(world.positions):
        world.call("Commit", pb.CommitRequest(step=step))
    before = world.memory()
    for permit, message in world.held.items():
        raw = message or sorted(world.sent[permit])[0]
        outcome = await answer(world, "Push", pb.Group.FromString(raw))
        here = permit.prompt_index in before["groups"]
        assert outcome == ("duplicate" if here else "stale")
    await world.settle()
    await world.flush()
    assert not [c for c in world.calls if c.name in ("Lease", "Commit")]
    assert world.memory() == before


async def answer(world: World, name: str, request) -> str:
    world.call(name, request)
    task = world.calls[-1].task
    await asyncio.sleep(0)
    world.journal.write(10**6)
    return (await task).outcome


def starts(batch_groups: int):
    """Starts of a run: a new one, or from step 2 with two indexes outstanding and one retired."""
    frontier = 2 * batch_groups + 3
    resumed = ResumePoint(
        2, frontier, (Permit(1, 1), Permit(frontier - 1, 0)), {"invalid": 1}, {"invalid": 1}
    )
    return st.sampled_from([None, None, ResumePoint(0, 0, (), {}, {}), resumed])


def test_every_answer_is_true_after_a_kill(examples):
    @settings(max_examples=examples, deadline=None)
    @given(data=st.data(), events=SERVICE_EVENTS, **SETTINGS)
    def holds(data, events, **values):
        keep = data.draw(st.sampled_from(["all", "checkpointed"]), "keep")
        start = data.draw(starts(values["batch_groups"]), "start")
        with tempfile.TemporaryDirectory() as root:
            asyncio.run(run_service(pathlib.Path(root), events, values, keep, start))

    holds()


# Changes of a message of 2 rows of 5 tokens, 2 of them the prompt: (field, position, value). Some leave it sound.
SPOILS = st.sampled_from(
    [
        *[("tokens", i, v) for i in (0, 2, 5, 9) for v in (-1, 7, VOCAB_SIZE - 1, VOCAB_SIZE)],
        *[("logprobs", i, v) for i in (1, 3, 9) for v in (0.0, 0.1, -np.inf, np.nan, -5.0)],
        *[("versions", i, v) for i in (1, 3, 9) for v in (-2, -1, 0, 4)],
        *[("mask", i, v) for i in (0, 4, 6, 8) for v in (0, 1, 2)],
        *[("prompt_lengths", i, v) for i in (0, 1) for v in (0, 1, 3, 5, 6)],
        *[("lengths", i, v) for i in (0, 1) for v in (0, 4, 6, 1000)],
        *[("rewards", 1, v) for v in (np.nan, np.inf, 2.0)],
        *[("finish_reasons", 0, v) for v in ("", "length", "bored")],
        ("tokens", slice(9), None),
        ("rewards", slice(1), None),
    ]
)
DTYPES = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "mask": np.uint8}


def spoiled(spoils) -> pb.Group:
    message = wire.encode_group(group(Permit(0, 0)))
    for name, at, value in spoils:
        values = list(getattr(message, name))
        if name in DTYPES:
            values = np.frombuffer(getattr(message, name), DTYPES[name]).tolist()
        if value is None:
            values = values[at]
        elif at < len(values):
            values[at] = value
        if name in DTYPES:
            setattr(message, name, np.array(values, DTYPES[name]).tobytes())
        else:
            message.ClearField(name)
            getattr(message, name).extend(values)
    return message


def refusal(check, *args) -> str:
    try:
        check(*args, group_size=GROUP_SIZE, vocab_size=VOCAB_SIZE, max_tokens=MAX_TOKENS)
    except InvalidTrajectoryError as error:
        return str(error)
    return ""


def test_a_message_is_refused_where_one_of_its_rows_is(examples):
    @settings(max_examples=examples, deadline=None)
    @given(st.lists(SPOILS, max_size=3))
    def holds(spoils):
        message = spoiled(spoils)

        def row_by_row(message, group_size, max_tokens, **bounds):
            wire.check_outline(message, group_size=group_size, max_tokens=max_tokens)
            decoded = wire.decode_group(message)
            wire.check_group(decoded, group_size=group_size, max_tokens=max_tokens, **bounds)

        assert refusal(wire.check_message, message) == refusal(row_by_row, message)

    holds()
    assert refusal(wire.check_message, spoiled([])) == ""


def world_of(root: pathlib.Path, **values) -> World:
    defaults = dict(
        batch_groups=4, max_staleness=1, max_running_groups=8, chunk_groups=None, max_bytes=10**9
    )
    return World(root, defaults | values, "all", None)


async def written(world: World, name: str, request: Any):
    world.call(name, request)
    task = world.calls[-1].task
    await world.settle()
    await world.flush()
    return task.result()


async def test_permits_that_time_out_together_are_returned_before_any_is_given_again(tmp_path):
    world = world_of(tmp_path)
    await written(world, "PublishVersion", pb.PublishRequest(version=0))
    ask = pb.AdmitRequest(max_permits=2, worker="a")
    await written(world, "Admit", ask)
    while world.now < 20.0:  # A longer time between two ticks would be a stop of the queue.
        world.now += 1.0
        await world.service.tick()
    world.now = 21.0
    tick = asyncio.create_task(world.service.tick())
    await world.settle()
    # Both are returned before anything is written, so the worker gets their next attempts.
    again = await written(world, "Admit", ask)
    assert [wire.decode_permit(p) for p in again.permits] == [Permit(0, 1), Permit(1, 1)]
    await tick
    assert (world.admission.running, world.admission.returned) == (2, {"worker_lost": 2})
    world.journal.close()


async def test_a_commit_of_step_0_twice_does_not_stop_the_journal(tmp_path):
    world = world_of(tmp_path)
    start = wire.encode_resume_point(ResumePoint(0, 0, (), {}, {}))
    await written(world, "PublishVersion", pb.PublishRequest(version=0, position=start))
    for _ in range(2):
        assert await written(world, "Commit", pb.CommitRequest(step=0)) == start
    await written(world, "Admit", pb.AdmitRequest(max_permits=1))
    world.journal.close()


async def test_an_error_of_any_kind_stops_the_journal_and_is_named(tmp_path):
    journal = Journal(tmp_path / "j", batch_groups=4)
    with pytest.raises(JournalError, match="j: .*ZeroDivisionError"):
        async with asyncio.timeout(10.0):
            await journal._put(lambda c: 1 / 0)
    with pytest.raises(JournalError, match="ZeroDivisionError"):
        await journal.flushed()
    journal.close()
