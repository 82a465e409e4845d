"""The health of the inference servers: the version each one holds, and whether it gets requests.

    HEALTHY  answers, and holds the current version
    STALE    answers, and does not
    DEAD     does not answer

A record belongs to the publisher's task that keeps its server. The queue gets one record for each address that takes
requests, which may be a router.
"""

import asyncio
import collections
import dataclasses
from collections.abc import Sequence

from jaxrl_async.records import ServerRecord
from jaxrl_async.servers.descriptors import is_out_of_files
from jaxrl_async.servers.fleet import DEAD, HEALTHY, MAX_DESCRIBED, STALE
from jaxrl_async.servers.port import Kind, ServerError, Servers
from jaxrl_async.versions.version import Version

PROBE_TIMEOUT_SECS = 5.0  # A server that loads and samples at once still answers within this.


@dataclasses.dataclass(frozen=True)
class Target:
    """The version that every server should hold."""

    name: str  # of the weights, as the servers report it
    files: Version

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.files.version


@dataclasses.dataclass(eq=False)
class Server:
    """One server, as its task last saw it; a push that a server missed also writes its state."""

    address: str  # takes control calls
    serves: str  # takes requests: the same, or a router's
    state: str = STALE
    reason: str = "has not answered yet"
    version: int | None = None  # of the weights; None before the first push
    # Of the weights of its last push, and of those after it that failed.
    names: set[str] = dataclasses.field(default_factory=set)
    tried: Target | None = None  # the last target whose push ended, well or not
    reserved: bool = False  # for an evaluation
    speed: float = 1.0  # relative
    has_left: bool = False  # the run: it is no longer listed
    num_failures: int = 0  # attempts in a row
    kind: Kind | None = None  # as it was recognised last
    # Set to end the poll interval early.
    due: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def holds(self, target: Target) -> bool:
        return self.state == HEALTHY and self.version == target.version

    def __str__(self) -> str:
        return f"{self.address} is {self.state} ({self.reason})"


def weight_name(version: int, run_epoch: int, run_id: str = "") -> str:
    """The name of a version's weights on the servers: "RUN.epoch.version".

    Without a run, as of a tool, "12", and "1.12" in run epoch 1.
    """
    if run_id:
        return f"{run_id}.{run_epoch}.{version}"
    return f"{run_epoch}.{version}" if run_epoch else str(version)


class Table:
    """One record for each address that takes requests, renewed for one server at a time.

    A router leaves out servers that are gone, not those of another version: its address is STALE while one behind
    it is, HEALTHY when one of the others is, else DEAD. Its version is the smallest of the HEALTHY ones.
    """

    def __init__(self):
        self._behind: dict[str, list[Server]] = {}
        self._records: dict[str, ServerRecord] = {}
        # Whether a state, or the set of addresses, has changed since `take`.
        self.is_changed = False

    def add(self, server: Server) -> None:
        """Adds a server."""
        self._behind.setdefault(server.serves, []).append(server)
        self.update(server)

    def remove(self, server: Server) -> None:
        """Removes a server, and with the last one behind it its address."""
        self._behind[server.serves].remove(server)
        if not self._behind[server.serves]:
            del self._behind[server.serves], self._records[server.serves]
            self.is_changed = True
        else:
            self.update(server)

    def update(self, server: Server) -> None:
        """Renews the record of a server's address; its owner calls it after every change of the server."""
        address = server.serves
        if address not in self._behind:
            return  # It has left.
        known, record = self._records.get(address), _record(address, self._behind[address])
        self._records[address] = record
        if known is None or known.state != record.state:
            self.is_changed = True

    def any_healthy(self) -> bool:
        """Whether an address gets requests."""
        return any(record.state == HEALTHY for record in self._records.values())

    def take(self) -> list[ServerRecord]:
        """The records; from now on they are known."""
        self.is_changed = False
        return list(self._records.values())


def _record(address: str, servers: list[Server]) -> ServerRecord:
    states = {server.state for server in servers}
    state = next(state for state in (STALE, HEALTHY, DEAD) if state in states)
    known = [(s.version, s.state) for s in servers if s.version is not None]
    versions = [v for v, state in known if state == HEALTHY] or [v for v, _ in known]
    return ServerRecord(address, state, min(versions, default=None), servers[0].speed)


def describe(servers: Sequence[Server]) -> str:
    """The state of every server in words; of many, the counts and the first that are not HEALTHY."""
    if len(servers) <= MAX_DESCRIBED:
        return "; ".join(map(str, servers)) or "no server is known"
    counts = collections.Counter(server.state for server in servers)
    ill = [str(server) for server in servers if server.state != HEALTHY]
    words = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    more = [f"{len(ill) - MAX_DESCRIBED} more"] if len(ill) > MAX_DESCRIBED else []
    return "; ".join([f"{len(servers)} servers: {words}", *ill[:MAX_DESCRIBED], *more])


async def answers(client: Servers, server: Server) -> bool:
    """Whether a server answers, as far as this process can tell."""
    try:
        await client.recognise(server.address, timeout_secs=PROBE_TIMEOUT_SECS)
    except ServerError as error:
        return is_out_of_files(error)  # Without a connection nothing is known of it.
    return True
