"""The routing table: each server's state, version, speed and load.

A pure table, without I/O or a clock of its own. It adds one state: a server that failed a request of this process is
SUSPECT for a while. All other states come from the publisher, through the queue, and so does the load that the other
workers put on each server.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from jaxrl_async.records import ServerRecord

HEALTHY = "HEALTHY"  # holds the current version
SUSPECT = "SUSPECT"  # failed a request of this process within suspect_secs
STALE = "STALE"  # answers, but does not hold the current version
DEAD = "DEAD"  # does not answer

# A request leaves the server that has its prefix for one with less than this share of its load. A group so stays on
# one server while there is work for all, and spreads over servers that would be idle otherwise.
SPILL_SHARE = 0.25
MAX_DESCRIBED = 16  # servers in a message
DISTRUST_PROBES = 5  # times suspect_secs
_DRAWS = 4  # of two servers, before the whole table is looked at


@dataclasses.dataclass(eq=False)
class _Fault:
    """A server that answered nonsense or with other weights, and has given no good answer since."""

    record: ServerRecord | None  # in the table then
    prompts: set[int]  # that it failed
    on_trial: bool = False

    def is_of(self, record: ServerRecord) -> bool:
        then = self.record
        return then is not None and (then.state, then.version) == (record.state, record.version)


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Fleet:
    """Routes a request to the less loaded of two HEALTHY servers drawn at random.

    Many workers share the servers, and each knows the load of the others as it was some seconds ago. If all took the
    least loaded server they would take the same one. Two random choices keep the loads within a small difference
    without that (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    """

    suspect_secs: float  # time without requests for a server that failed one
    clock: Callable[[], float]  # monotonic seconds
    # Address → relative speed, > 0; the table's for an address that is not in it.
    speeds: Mapping[str, float]
    # Draws servers; the default is one that no other worker has. Samples do not depend on it.
    rng: random.Random = dataclasses.field(default_factory=random.Random)

    def __post_init__(self):
        self._records: dict[str, ServerRecord] = {}
        self._healthy: list[str] = []  # of the table; some may be SUSPECT
        self._cumulative_speeds: list[float] = []  # of the HEALTHY ones; [] where all are equal
        self._suspect_until: dict[str, float] = {}
        self._outstanding: collections.Counter[str] = collections.Counter()
        self._faults: dict[str, _Fault] = {}
        self._answers: collections.Counter[str] = collections.Counter()  # good ones
        self._num_answers = 0  # of all servers together
        self._v_pub: int | None = None  # published when the table was sent
        self._newest_v_pub: int | None = None  # as the queue said last
        self._reported: dict[str, int] = {}  # the outstanding tokens that the queue knows
        self._changed = asyncio.Event()

    def update(self, records: Iterable[ServerRecord], v_pub: int | None = None) -> None:
        """Replaces the table by the queue's; suspicion and outstanding tokens stay.

        Args:
          records: the table.
          v_pub: the version that was published when it was sent; None where that is unknown.
        """
        self._records = {record.address: record for record in records}
        self._v_pub = v_pub
        for address, fault in tuple(self._faults.items()):
            if (record := self._records.get(address)) is None:
                del self._faults[address]
            if not record or not fault.is_of(record):
                fault.record = record
                self._suspect_until.pop(address, None)
        self._healthy = [a for a, record in self._records.items() if record.state == HEALTHY]
        speeds = [self._speed(address) for address in self._healthy]
        self._cumulative_speeds = list(itertools.accumulate(speeds)) if len(set(speeds)) > 1 else []
        now = self.clock()
        self._suspect_until = {a: t for a, t in self._suspect_until.items() if t > now}
        self._wake()

    def expect(self, v_pub: int | None) -> None:
        """A table of before this version was published routes nothing: a server in it may have missed the push."""
        self._newest_v_pub = v_pub

    @property
    def is_out_of_date(self) -> bool:
        """Whether the table is of before the version that was published last."""
        known, newest = self._v_pub, self._newest_v_pub
        return known is not None and newest is not None and known < newest

    def route(self, excluding: Collection[str] = (), *, prefers: str | None = None) -> str | None:
        """A HEALTHY server for a request: the less loaded of two, or the preferred one.

        An excluded server is taken only when no other is HEALTHY.

        Args:
          excluding: servers that failed this request.
          prefers: the server that has the request's prefix in its cache. It is taken while it is HEALTHY, unless the
            other has less than SPILL_SHARE of its load.

        Returns:
          The address, or None when no server is HEALTHY or the table is out of date.
        """
        if self.is_out_of_date:
            return None
        best = min(self._candidates(excluding), key=self.load, default=None)
        if best is None or prefers in (None, best) or not self._takes(prefers, excluding):
            return best
        return best if self.load(best) < SPILL_SHARE * self.load(prefers) else prefers

    async def wait_for_change(self, timeout_secs: float) -> None:
        """Waits for a new table, the end of a suspicion or the timeout."""
        now = self.clock()
        ends = [until - now for until in self._suspect_until.values() if until > now]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min([timeout_secs, *ends]))):
                await self._changed.wait()

    def state(self, address: str) -> str:
        """The publisher's state of a server, or SUSPECT after a failed request of this process."""
        record, fault = self._records.get(address), self._faults.get(address)
        if record is None:
            return DEAD
        is_suspect = self.clock() < self._suspect_until.get(address, 0.0)
        if record.state == HEALTHY and (is_suspect or (fault is not None and fault.on_trial)):
            return SUSPECT
        return record.state

    def has_left(self, address: str) -> bool:
        """Whether the table has servers, and this one is no longer among them."""
        return bool(self._records) and address not in self._records

    @contextlib.contextmanager
    def serving(self, address: str, num_tokens: int) -> Iterator[_Fault | None]:
        """Counts a request's tokens as outstanding while it runs.

        Yields the server's fault, for `answered` or `failed`: the request is its trial, and the only one meanwhile.
        """
        self._outstanding[address] += num_tokens
        if (fault := self._faults.get(address)) is not None:
            fault.on_trial = True
        try:
            yield fault
        finally:
            if fault is not None:
                fault.on_trial = False
                self._wake()
            self._outstanding[address] -= num_tokens
            if not self._outstanding[address]:
                del self._outstanding[address]

    def outstanding(self, address: str) -> int:
        """Tokens of this process's requests running on a server."""
        return self._outstanding[address]

    def take_report(self) -> dict[str, int]:
        """Address → outstanding tokens of this process, for the queue, which adds up those of all workers."""
        self._reported = dict(self._outstanding)
        return dict(self._outstanding)

    def load(self, address: str) -> float:
        """Outstanding tokens / speed: this process's now, and the other workers' at their last report."""
        record = self._records.get(address)
        others = max(0, record.load - self._reported.get(address, 0)) if record else 0
        return (others + self._outstanding[address]) / self._speed(address)

    def suspect(self, address: str) -> None:
        """Notes that a request failed on a server."""
        until = self.clock() + self.suspect_secs
        self._suspect_until[address] = max(until, self._suspect_until.get(address, until))

    def answered(self, address: str, fault: _Fault | None) -> None:
        """Notes a good answer. It ends a fault that was known when its request began."""
        self._answers[address] += 1
        self._num_answers += 1
        if fault is not None and self._faults.get(address) is fault:
            del self._faults[address]

    def silence(self, address: str) -> Callable[[], bool]:
        """A function: whether other servers have answered since this call, and this one has not.

        Its connections to this process are lost, perhaps, while it answers the publisher's probes.
        """
        own, num = self._answers[address], self._num_answers
        return lambda: self._answers[address] == own and self._num_answers > num

    def failed(self, address: str, prompt: int, fault: _Fault | None) -> None:
        """Notes an answer that is nonsense or of other weights, or a silence; its request began with `fault`.

        The answers to all requests that ran together are one fault: the server is left for suspect_secs at first, so
        that one odd prompt costs little, and as `distrust` says when it fails its trial.
        """
        known = self._faults.get(address)
        if known is fault:
            self._leave(address, prompt, 1 if fault is None else DISTRUST_PROBES)
        elif known is not None:
            known.prompts.add(prompt)

    def fails_several(self, address: str) -> bool:
        """Whether a server failed several prompts since its last good answer, so that none of them is to blame."""
        return address in self._faults and len(self._faults[address].prompts) > 1

    def distrust(self, address: str, prompt: int) -> None:
        """Notes that a server failed a prompt by nonsense, or by other weights than the table says.

        It gets no request until the table says otherwise: until its state or version changes there. The publisher
        looks at it within suspect_secs; a change that goes by unseen ends the wait after DISTRUST_PROBES of them. Then
        it is on trial: it gets one request at a time until one has a good answer.
        """
        self._leave(address, prompt, DISTRUST_PROBES)

    def _leave(self, address: str, prompt: int, num_probes: int) -> None:
        known = self._faults.get(address)
        prompts = {prompt} | (known.prompts if known else set())
        self._faults[address] = _Fault(self._records.get(address), prompts)
        self._suspect_until[address] = self.clock() + num_probes * self.suspect_secs

    def describe(self) -> str:
        """One phrase per server, for messages; of many, the counts by state and the first that are not HEALTHY."""
        if not self._records:
            return "no server is known yet"
        rows, counts = list(self._records.values()), ""
        if len(rows) > MAX_DESCRIBED:
            states = collections.Counter(self.state(r.address) for r in rows)
            by_state = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            counts = f"{len(rows)} servers: {by_state}; first "
            rows = sorted(rows, key=lambda r: self.state(r.address) == HEALTHY)[:MAX_DESCRIBED]
        text = counts + "; ".join(
            f"{r.address} {self.state(r.address)} version {r.version}" for r in rows
        )
        if not self.is_out_of_date:
            return text
        return f"a table of version {self._v_pub}, while {self._newest_v_pub} is published: {text}"

    def _candidates(self, excluding: Collection[str]) -> Sequence[str]:
        """Two HEALTHY servers drawn at random, or those of them that take the request; () where none is HEALTHY."""
        for _ in range(_DRAWS):
            if found := [a for a in self._draw(self._healthy) if self._takes(a, excluding)]:
                return found
        healthy = [address for address in self._healthy if self.state(address) == HEALTHY]
        others = [address for address in healthy if address not in excluding]
        return self.rng.sample(others or healthy, min(2, len(others or healthy)))

    def _draw(self, addresses: Sequence[str]) -> Sequence[str]:
        if len(addresses) == 1:
            return addresses
        if self._cumulative_speeds and len(addresses) > 2:
            return self.rng.choices(addresses, cum_weights=self._cumulative_speeds, k=2)
        return self.rng.sample(addresses, min(2, len(addresses)))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _takes(self, address: str, excluding: Collection[str]) -> bool:
        return address not in excluding and self.state(address) == HEALTHY

    def _speed(self, address: str) -> float:
        record = self._records.get(address)
        return self.speeds.get(address, record.speed if record else 1.0)
