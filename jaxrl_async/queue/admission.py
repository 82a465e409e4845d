"""Admission: permits to generate, capacity, and the state of every prompt index. Pure, driven by events.

Time is an argument of the events that need it, so that the service, the tests and the simulator use the same object.
Independent of the contents of groups, of sockets and of clocks.

An index is in exactly one state. It goes   fresh → running → held → leased → committed,   or from running back to
`reissue` or out to `retired`.
"""

import collections
import dataclasses
import heapq
import logging
import math
from collections.abc import Collection, Mapping

from jaxrl_async.queue.leases import FixedChunk, Leases, OrderError
from jaxrl_async.records import (
    BLAMELESS,
    EXHAUSTED,
    FAULTS,
    OVERTAKEN,
    REISSUE_REASONS,
    RETIRE_REASONS,
    WORKER_LOST,
    Permit,
    ResumePoint,
)

BACKOFF_SECS = 0.5  # before the second attempt of an index; doubles with each
MAX_BACKOFF_SECS = 30.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class State:
    """The state that a restarted queue recovers; see `Admission.recover`."""

    resume_point: ResumePoint  # as of the last commit
    v_pub: int | None
    frontier: int
    retired: dict[str, int]  # indexes by reason
    returned: dict[str, int]  # returns by reason
    reissue: tuple[Permit, ...]
    # each with its worker, and the version published when it was issued; None where it was not recorded
    running: tuple[tuple[Permit, str, int | None], ...]
    held: tuple[tuple[Permit, int], ...]  # each with its bytes, in completion order
    leased: tuple[tuple[Permit, int], ...]  # each with its bytes
    chunks: dict[int, tuple[FixedChunk, ...]]  # of the uncommitted steps, by step
    lost: dict[int, int]  # open index → its attempts that ended for one of BLAMELESS


@dataclasses.dataclass(frozen=True)
class _Running:
    attempt: int
    since: float  # clock, seconds
    worker: str
    version: int | None  # published when the permit was issued


@dataclasses.dataclass(frozen=True)
class _Held:
    attempt: int
    num_bytes: int
    oldest: int | None = None  # version of its tokens; None where it was not told


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Admission:
    """Permits, capacity and leases; at first without a permit and without a publication.

        capacity = min((η + v_pub + 1)·B − (accepted + running), max_running_groups − running)

    accepted = held + leased + committed groups, B = batch_groups, η = max_staleness, v_pub = the version published
    last, which the servers hold. Before the first publication the capacity is 0. So after every event

        accepted + running ≤ (η + v_pub + 1)·B

    AReaL (Fu et al., arXiv 2505.24298), Eq. 3.

    Raises:
      ValueError: a value is outside its bound, or η < N − 1, which would deadlock.
    """

    batch_groups: int  # B ≥ 1, groups per step
    max_staleness: int  # η ≥ 0, steps
    push_every_steps: int  # N ≥ 1, steps between two publications
    max_running_groups: int  # permits out at once, ≥ 1
    max_attempts: int  # issues of one index before it is retired as exhausted, ≥ 1
    # Silence of a worker after which its permits are returned, > 0; of a caller without a name, the age of a permit.
    permit_timeout_secs: float
    max_bytes: int  # of groups in memory, ≥ 1; at this bound only groups that the next lease needs are admitted
    chunk_groups: int | None = None  # ≥ 1; see `Leases`
    # Versions that the servers may be behind the published one (rollout.delay_steps); None: the versions of groups are
    # not checked, and none is overtaken.
    weight_delay: int | None = None

    def __post_init__(self):
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be ≥ 1, got {value}")
        check_staleness(self.max_staleness, self.push_every_steps)
        if 0 < self.max_staleness < self.push_every_steps + 1:
            found = (
                f"max_staleness {self.max_staleness} < push_every_steps {self.push_every_steps} + 1"
            )
            log.warning("%s: generation will wait for pushes", found)
        if self.permit_timeout_secs <= 0:
            raise ValueError(f"permit_timeout_secs must be > 0, got {self.permit_timeout_secs}")

        self.v_pub: int | None = None
        self.frontier = 0
        self.leases = Leases(batch_groups=self.batch_groups, chunk_groups=self.chunk_groups)
        self.resume_point = ResumePoint(0, 0, (), {}, {})  # as of the last commit
        self.num_bytes = 0  # of the groups held and leased
        self.stale_events = 0  # submissions and returns whose permit was no longer valid
        self.returned: collections.Counter[str] = collections.Counter()
        self.retired: collections.Counter[str] = collections.Counter()
        self._reissue: list[Permit] = []  # heap: the lowest index first
        self._not_before: dict[int, float] = {}  # index in `_reissue` → end of its back-off, clock
        self._running: dict[int, _Running] = {}
        self._seen: dict[str, float] = {}  # worker → clock, seconds, of its last sign of life
        self._left: set[str] = set()  # workers that have ended
        # attempts that ended for one of BLAMELESS
        self._lost: collections.Counter[int] = collections.Counter()
        self._held: dict[int, _Held] = {}  # in completion order
        self._leased: dict[int, _Held] = {}

    # State.

    @property
    def running(self) -> int:
        """Permits that are out."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Groups submitted and not leased."""
        return len(self._held)

    @property
    def leased(self) -> int:
        """Groups leased and not committed."""
        return len(self._leased)

    @property
    def reissues(self) -> int:
        """Indexes to be issued again."""
        return len(self._reissue)

    @property
    def accepted(self) -> int:
        """Groups held, leased and committed."""
        return self.held + self.leased + self.leases.committed_step * self.batch_groups

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now, ≥ 0, without regard to `max_bytes`."""
        if self.v_pub is None:
            return 0
        bound = (self.max_staleness + self.v_pub + 1) * self.batch_groups
        by_staleness = bound - (self.accepted + self.running)
        return max(0, min(by_staleness, self.max_running_groups - self.running))

    @property
    def admissible(self) -> int:
        """Permits that `admit` would give now.

        At max_bytes, only those that the next lease needs. To refuse these, too, would deadlock: nothing is freed
        before that lease.
        """
        if self.num_bytes < self.max_bytes:
            return self.capacity
        lacking = self.leases.missing_groups - self.held - self.running - self.reissues
        return min(self.capacity, self.reissues + max(0, lacking))

    def admissible_at(self, now: float) -> int:
        """Permits that `admit` would give at a time: an index that backs off keeps its place, and is not given."""
        total, ready = self.admissible, self.reissues - self._num_backing_off(now)
        return min(total, ready) + max(0, total - self.reissues)

    def chunk_is_ready(self, step: int, index: int) -> bool:
        """Whether `lease` would give this chunk. Raises OrderError: as `lease`."""
        return self.leases.fixed(step, index) is not None or self._choose() is not None

    # Events.

    def recover(self, state: State, now: float, oldest: Mapping[int, int]) -> None:
        """Takes over the state of a former queue with the same settings. Only for a new object.

        `oldest` has the oldest version of the tokens of each held group, by prompt_index. Permits that run stay out:
        their age starts again, and their workers may still submit.

        Raises:
          OrderError: the state contradicts itself or batch_groups.
        """
        self._restore(state.resume_point)
        self.resume_point = state.resume_point
        self.v_pub, self.frontier = state.v_pub, state.frontier
        self.retired = collections.Counter(state.retired)
        self.returned = collections.Counter(state.returned)
        self._lost = collections.Counter(state.lost)
        self._reissue = sorted(state.reissue)
        self._running = {
            p.prompt_index: _Running(p.attempt, now, worker, version)
            for p, worker, version in state.running
        }
        self._held = {
            p.prompt_index: _Held(p.attempt, size, oldest[p.prompt_index]) for p, size in state.held
        }
        self._leased = {p.prompt_index: _Held(p.attempt, size) for p, size in state.leased}
        self.num_bytes = sum(size for _, size in (*state.held, *state.leased))
        self.leases.recover(state.chunks)

    def publish(self, version: int, resume_point: ResumePoint | None = None) -> None:
        """The servers hold `version`. The first publication may give the point that the queue starts from.

        A repeated publication changes nothing. A resume point of the last committed step is ignored by a queue at
        work, whose state is newer.

        Raises:
          OrderError: the version goes back or was not leased here, or the resume point contradicts the version,
            itself, or the queue.
        """
        if version < 0:
            raise OrderError(f"version {version} is published; versions start at 0")
        if resume_point is not None and resume_point.step != version:
            other = f"the resume point of step {resume_point.step}"
            raise OrderError(f"version {version} is published with {other}")
        if resume_point is not None and self.v_pub is None:
            self._restore(resume_point)
        elif resume_point is not None and resume_point.step != self.leases.committed_step:
            raise OrderError(
                f"resume point of step {resume_point.step} is given to a queue at work, whose last committed "
                f"step is {self.leases.committed_step}; start a new queue"
            )
        if self.v_pub is not None and version < self.v_pub:
            raise OrderError(f"version {version} is published after version {self.v_pub}")
        if version > self.leases.leased_step:
            raise OrderError(
                f"version {version} is published, but the last step leased in full is "
                f"{self.leases.leased_step}; a resumed run gives its resume point"
            )
        self.v_pub = version

    def admit(self, max_permits: int, now: float, worker: str = "") -> list[Permit]:
        """Issues at most `max_permits`: returned indexes in ascending order, then fresh ones."""
        count = min(max_permits, self.admissible_at(now))
        permits = [self._next_permit(now) for _ in range(count)]
        for permit in permits:
            self._running[permit.prompt_index] = _Running(permit.attempt, now, worker, self.v_pub)
        return permits

    def readmit(self, permits: Collection[Permit], now: float, worker: str | None = None) -> None:
        """Issues running permits again, to another worker or, with None, to their own: their age starts again."""
        for permit in permits:
            running = self._running[permit.prompt_index]
            taker = running.worker if worker is None else worker
            taken = dataclasses.replace(running, since=now, worker=taker)
            self._running[permit.prompt_index] = taken

    def permits_of(self, worker: str) -> list[Permit]:
        """The running permits of a worker, ascending."""
        return self._out_to({worker})

    def orphans(self) -> list[Permit]:
        """The running permits of workers that have left, ascending. Their attempt is the same for who takes them."""
        return self._out_to(self._left) if self._left else []

    def _out_to(self, workers: Collection[str]) -> list[Permit]:
        running = self._running.items()
        return sorted(Permit(i, r.attempt) for i, r in running if r.worker in workers)

    def check_versions(self, permit: Permit, oldest: int, newest: int) -> str | None:
        """The reason to refuse a submitted group for the versions that sampled it; None to take it.

        A permit issued under version v belongs to a step ≤ η + v + 1, so tokens of v and later are within η there;
        servers hold at most weight_delay less. No version above the last step leased in full exists.

        Returns:
          "over_age", "foreign_version", "overtaken" as of `overtaken`, or None.
        """
        running = self._running.get(permit.prompt_index)
        if self.weight_delay is None or running is None or running.attempt != permit.attempt:
            return None
        if newest > self.leases.leased_step:
            return "foreign_version"
        if running.version is not None and oldest < running.version - self.weight_delay:
            return "over_age"
        return OVERTAKEN if self._is_overtaken(oldest) else None

    def submit(self, permit: Permit, num_bytes: int, oldest: int | None = None) -> str:
        """A group was submitted, whose oldest token is of the version `oldest`.

        Returns:
          "held"; "duplicate" where this attempt is here already; "stale" where the permit was returned in the meantime
          or its index is committed or retired. Only a "held" group is stored.

        Raises:
          OrderError: the permit was never issued.
        """
        standing = self._standing(permit)
        if standing == "running":
            del self._running[permit.prompt_index]
            self._held[permit.prompt_index] = _Held(permit.attempt, num_bytes, oldest)
            self.num_bytes += num_bytes
            return "held"
        self.stale_events += standing == "stale"
        return standing

    def return_permit(self, permit: Permit, reason: str, now: float | None = None) -> str:
        """A permit was returned without a group; its capacity is free again.

        After one of FAULTS the index is issued again BACKOFF_SECS later, doubled for each attempt before, and at most
        MAX_BACKOFF_SECS later; at once where `now` is None.

        Returns:
          "reissued", "retired", or "stale" where the permit was no longer out.

        Raises:
          ValueError: the reason is not one of REISSUE_REASONS and RETIRE_REASONS.
          OrderError: the permit was never issued.
        """
        if reason not in REISSUE_REASONS | RETIRE_REASONS:
            known = sorted(REISSUE_REASONS | RETIRE_REASONS)
            raise ValueError(f"return reason {reason!r:.80} is none of {', '.join(known)}")
        if self._standing(permit) != "running":
            self.stale_events += 1
            return "stale"
        del self._running[permit.prompt_index]
        self.returned[reason] += 1
        self._lost[permit.prompt_index] += reason in BLAMELESS
        used = permit.attempt + 1 - self._lost[permit.prompt_index]
        is_left = reason in BLAMELESS or used < self.max_attempts
        if reason in REISSUE_REASONS and is_left:
            heapq.heappush(self._reissue, Permit(permit.prompt_index, permit.attempt + 1))
            if reason in FAULTS and now is not None:
                backoff = min(BACKOFF_SECS * 2**permit.attempt, MAX_BACKOFF_SECS)
                self._not_before[permit.prompt_index] = now + backoff
            return "reissued"
        self._lost.pop(permit.prompt_index, None)
        self.retired[EXHAUSTED if reason in REISSUE_REASONS else reason] += 1
        return "retired"

    def overtaken(self) -> list[Permit]:
        """The held groups with a token that would be older than η in the next step to be leased.

        In prompt order, and in periodic mode, there is none: no group waits for more steps than its permit allows.
        """
        held = self._held.items()
        return [Permit(i, group.attempt) for i, group in held if self._is_overtaken(group.oldest)]

    def take_back(self, permit: Permit) -> str:
        """Drops a group of `overtaken`; the outcome is as of `return_permit`."""
        group = self._held.pop(permit.prompt_index)
        self.num_bytes -= group.num_bytes
        self._running[permit.prompt_index] = _Running(permit.attempt, 0.0, "", None)
        return self.return_permit(permit, OVERTAKEN)

    def _is_overtaken(self, oldest: int | None) -> bool:
        if self.chunk_groups is None or self.weight_delay is None or oldest is None:
            return False
        return oldest < self.leases.leased_step - self.max_staleness - self.weight_delay

    def seen(self, worker: str, now: float) -> None:
        """A worker gave a sign of life."""
        self._seen[worker] = now
        self._left.discard(worker)

    def leave(self, worker: str) -> None:
        """A worker said that it ends: its permits are orphans."""
        self._left.add(worker)

    def forgive(self, secs: float) -> None:
        """This process was stopped for `secs`: nobody was late in that time."""
        self._seen = {worker: then + secs for worker, then in self._seen.items()}
        self._running = {
            index: dataclasses.replace(running, since=running.since + secs)
            for index, running in self._running.items()
        }

    def expired(self, now: float) -> dict[Permit, str]:
        """Permits to be returned, with the reason.

        "worker_lost": its worker gave no sign of life for permit_timeout_secs. "timeout": it is older than that, and
        its caller has no name.
        """
        return {
            Permit(index, running.attempt): WORKER_LOST if running.worker else "timeout"
            for index, running in self._running.items()
            if now - max(running.since, self._last_sign(running.worker)) > self.permit_timeout_secs
        }

    def _last_sign(self, worker: str) -> float:
        return self._seen.get(worker, -math.inf) if worker else -math.inf

    def lease(self, step: int, index: int) -> FixedChunk | None:
        """The chunk at position `index` of a step, fixed now if its groups are there; None if they are not.

        Raises:
          OrderError: the step is committed, or an earlier step or chunk was not leased.
        """
        chunk = self.leases.fixed(step, index)
        if chunk is None and (indexes := self._choose()) is not None:
            chunk = self.leases.fix(indexes)
            for i in indexes:
                self._leased[i] = dataclasses.replace(self._held.pop(i), oldest=None)
                self._lost.pop(i, None)
        return chunk

    def commit(self, step: int) -> tuple[int, ...]:
        """A step was trained; sets `resume_point`. A repeated commit of the last step changes nothing.

        Returns:
          The indexes whose groups may be dropped.

        Raises:
          OrderError: not the step after the last committed one, or not leased in full.
        """
        if step == self.leases.committed_step:
            return ()
        indexes = self.leases.commit(step)
        self.num_bytes -= sum(self._leased.pop(i).num_bytes for i in indexes)
        self.resume_point = ResumePoint(
            step, self.frontier, self._outstanding(), dict(self.retired), dict(self.returned)
        )
        return indexes

    def waiting_for(self, step: int, now: float) -> str:
        """Describes the groups that the lease of a step waits for."""
        missing, batch = self.leases.missing_groups, self.batch_groups
        issued = {p.prompt_index: f"attempt {p.attempt}, to be issued again" for p in self._reissue}
        for index, running in self._running.items():
            issued[index] = f"attempt {running.attempt}, running {now - running.since:.0f} s"
        nearest = sorted(issued.keys() | self._held.keys())[:missing]
        late = [f"{i} ({issued[i]})" for i in nearest if i in issued]
        there = batch - missing + len(nearest) - len(late)
        parts = []
        if late:
            more = f" and {len(late) - 5} more" if len(late) > 5 else ""
            parts.append(f"prompt_index {', '.join(late[:5])}{more}")
        if len(nearest) < missing:
            parts.append(f"{missing - len(nearest)} not issued ({self._why_no_more()})")
        waiting = f"step {step}: {there} of {batch} groups; waiting for {' and '.join(parts)}"
        retired = ", ".join(f"{count} as {reason}" for reason, count in self.retired.items())
        return f"{waiting}; prompts retired so far: {retired}" if retired else waiting

    def _num_backing_off(self, now: float) -> int:
        for index in [i for i, end in self._not_before.items() if end <= now]:
            del self._not_before[index]
        return len(self._not_before)

    def _next_permit(self, now: float) -> Permit:
        if len(self._reissue) > self._num_backing_off(now):
            if not self._not_before:
                return heapq.heappop(self._reissue)
            permit = min(p for p in self._reissue if p.prompt_index not in self._not_before)
            self._reissue.remove(permit)
            heapq.heapify(self._reissue)
            return permit
        self.frontier += 1
        return Permit(self.frontier - 1, 0)

    def _choose(self) -> tuple[int, ...] | None:
        open_indexes = self._running.keys() | {p.prompt_index for p in self._reissue}
        return self.leases.choose(list(self._held), open_indexes)

    def _standing(self, permit: Permit) -> str:
        """The state of a permit: "running", "duplicate" where its group is here, or "stale"."""
        index = permit.prompt_index
        group = self._running.get(index) or self._held.get(index) or self._leased.get(index)
        last = group.attempt if group else self._last_attempt(index)
        if not 0 <= index < self.frontier or not 0 <= permit.attempt <= last:
            raise OrderError(
                f"prompt_index {index}, attempt {permit.attempt} was never issued "
                f"(next fresh index {self.frontier})"
            )
        if group is None or permit.attempt < group.attempt:
            return "stale"
        return "running" if index in self._running else "duplicate"

    def _last_attempt(self, index: int) -> float:
        """The last attempt of an index that is not out; no bound where it is committed or retired.

        max_attempts is none: those that ended with their worker are not counted.
        """
        waiting = (p.attempt - 1 for p in self._reissue if p.prompt_index == index)
        return next(waiting, math.inf)

    def _outstanding(self) -> tuple[Permit, ...]:
        out = {**self._running, **self._held, **self._leased}
        return tuple(sorted([*self._reissue, *(Permit(i, g.attempt) for i, g in out.items())]))

    def _restore(self, point: ResumePoint) -> None:
        committed = point.step * self.batch_groups
        indexes = {p.prompt_index for p in point.outstanding}
        done = committed + sum(point.retired.values())
        if len(indexes) + done != point.frontier or len(indexes) != len(point.outstanding):
            raise OrderError(
                f"resume point of step {point.step}: {committed} groups trained, "
                f"{sum(point.retired.values())} retired and {len(point.outstanding)} outstanding "
                f"do not make its frontier {point.frontier} (other batch_groups?)"
            )
        if any(not 0 <= i < point.frontier for i in indexes):
            raise OrderError(f"resume point: an outstanding index is outside [0, {point.frontier})")
        self.resume_point = point
        self.frontier = point.frontier
        self.leases.committed_step = point.step
        self.retired.update(point.retired)
        self.returned.update(point.returned)
        self._reissue = sorted(point.outstanding)

    def _why_no_more(self) -> str:
        if self.v_pub is None:
            return "no version was published yet"
        if self.capacity:
            return f"capacity {self.capacity}: no worker asks for permits"
        return (
            f"capacity 0 = min((η {self.max_staleness} + v_pub {self.v_pub} + 1)·{self.batch_groups}"
            f" − ({self.accepted} accepted + {self.running} running), "
            f"{self.max_running_groups} − {self.running})"
        )


def check_staleness(max_staleness: int, push_every_steps: int) -> None:
    """Refuses η < N − 1, with which no group could be admitted before the next push.

    Raises:
      ValueError: the bound, with both values.
    """
    if max_staleness < max(0, push_every_steps - 1):
        raise ValueError(
            f"max_staleness {max_staleness} < push_every_steps {push_every_steps} − 1: "
            "no group could be admitted before the next push of weights"
        )


_POSITIVE = (
    *("batch_groups", "push_every_steps", "max_running_groups", "max_attempts"),
    *("max_bytes", "chunk_groups"),
)
