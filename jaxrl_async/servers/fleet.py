"""The routing table: each server's state, version, speed and outstanding tokens.

A pure table, without I/O or a clock of its own. It adds one state: a server that failed a request of this process is
SUSPECT for a while. All other states come from the publisher, through the queue.
"""

import collections
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from jaxrl_async.queue.records import ServerRecord

HEALTHY = "HEALTHY"  # holds the current version
SUSPECT = "SUSPECT"  # failed a request of this process within suspect_secs
STALE = "STALE"  # answers, but does not hold the current version
DEAD = "DEAD"  # does not answer


class Fleet:
    """Routes a request to the HEALTHY server with the fewest outstanding tokens for its speed."""

    def __init__(
        self, *, suspect_secs: float, clock: Callable[[], float], speeds: Mapping[str, float]
    ):
        """Starts with no server.

        Args:
          suspect_secs: time without requests for a server that failed one.
          clock: monotonic seconds.
          speeds: address → relative speed, > 0; 1 for an address that is not in it.
        """
        self._suspect_secs = suspect_secs
        self._clock = clock
        self._speeds = dict(speeds)
        self._records: dict[str, ServerRecord] = {}
        self._suspect_until: dict[str, float] = {}
        self._outstanding: collections.Counter[str] = collections.Counter()

    def update(self, records: Iterable[ServerRecord]) -> None:
        """Replaces the table by the publisher's; suspicion and outstanding tokens stay."""
        self._records = {record.address: record for record in records}

    def route(self, excluding: Collection[str] = ()) -> str | None:
        """The HEALTHY server with the fewest outstanding tokens / speed, the first in the table among equals.

        An excluded server is taken only when no other is HEALTHY.

        Returns:
          The address, or None when no server is HEALTHY.
        """
        healthy = [address for address in self._records if self.state(address) == HEALTHY]
        preferred = [address for address in healthy if address not in excluding] or healthy
        return min(preferred, key=self._load, default=None)

    def state(self, address: str) -> str:
        """The publisher's state of a server, or SUSPECT after a failed request of this process."""
        record = self._records.get(address)
        if record is None:
            return DEAD
        if record.state == HEALTHY and self._clock() < self._suspect_until.get(address, 0.0):
            return SUSPECT
        return record.state

    @contextlib.contextmanager
    def serving(self, address: str, num_tokens: int) -> Iterator[None]:
        """Counts a request's tokens as outstanding while it runs."""
        self._outstanding[address] += num_tokens
        try:
            yield
        finally:
            self._outstanding[address] -= num_tokens

    def outstanding(self, address: str) -> int:
        """Tokens of this process's requests running on a server."""
        return self._outstanding[address]

    def suspect(self, address: str) -> None:
        """Notes that a request failed on a server."""
        self._suspect_until[address] = self._clock() + self._suspect_secs

    def _load(self, address: str) -> float:
        speed = self._speeds.get(address, self._records[address].speed)
        return self._outstanding[address] / speed

    def describe(self) -> str:
        """One phrase per server, for messages."""
        if not self._records:
            return "no server is known yet"
        rows = self._records.values()
        return "; ".join(f"{r.address} {self.state(r.address)} version {r.version}" for r in rows)
