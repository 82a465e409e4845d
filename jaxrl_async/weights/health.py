"""The health of the inference servers: the version each one holds, and whether it gets requests.

    HEALTHY  answers, and holds the current version
    STALE    answers, and does not
    DEAD     does not answer

A record belongs to the publisher's task that keeps its server. The queue gets one record for each address that takes
requests, which may be a router.
"""

import asyncio
import dataclasses
import errno
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_async.queue.records import ServerRecord
from jaxrl_async.servers.client import InferenceClient, ServerError
from jaxrl_async.servers.fleet import DEAD, HEALTHY, STALE
from jaxrl_async.weights.store import StoredVersion

PROBE_TIMEOUT_SECS = 5.0  # A server that loads and samples at once still answers within this.


@dataclasses.dataclass(frozen=True)
class Target:
    """The version that every server should hold."""

    name: str  # of the weights, as the servers report it
    files: StoredVersion

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.files.version

    @property
    def digest(self) -> str:
        """The digest of the manifest."""
        return self.files.digest


@dataclasses.dataclass(eq=False)
class Server:
    """One server, as its task last saw it; a push that a server missed also writes its state."""

    address: str  # takes control calls
    serves: str  # takes requests: the same, or a router's
    state: str = STALE
    reason: str = "has not answered yet"
    version: int | None = None  # of the weights; None before the first push
    tried: Target | None = None  # the last target whose push ended, well or not
    reserved: bool = False  # for an evaluation
    # Set to end the poll interval early.
    due: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def holds(self, target: Target) -> bool:
        return self.state == HEALTHY and self.version == target.version

    def __str__(self) -> str:
        return f"{self.address} is {self.state} ({self.reason})"


def weight_name(version: int, run_epoch: int) -> str:
    """The name of a version's weights on the servers: "12", and "1.12" in run epoch 1."""
    return f"{run_epoch}.{version}" if run_epoch else str(version)


def server_records(servers: Sequence[Server]) -> list[ServerRecord]:
    """One record for each address that takes requests.

    A router leaves out servers that are gone, not those of another version: its address is STALE while one behind
    it is, HEALTHY when one of the others is, else DEAD. Its version is the smallest of the HEALTHY ones.
    """
    behind: dict[str, list[Server]] = {}
    for server in servers:
        behind.setdefault(server.serves, []).append(server)
    return [_record(address, group) for address, group in behind.items()]


def _record(address: str, servers: list[Server]) -> ServerRecord:
    states = {server.state for server in servers}
    state = next(state for state in (STALE, HEALTHY, DEAD) if state in states)
    known = [s for s in servers if s.version is not None]
    versions = [s.version for s in known if s.state == HEALTHY] or [s.version for s in known]
    return ServerRecord(address, state, min(versions, default=None))


def difference(info: Mapping[str, Any], target: Target) -> str | None:
    """The difference between a server's report and the target, in words; None where there is none."""
    held, digest = info.get("weight_version"), info.get("weight_digest", target.digest)
    if held != target.name:
        return f"version {held!r} instead of {target.name}"
    if digest != target.digest:
        return f"weights with digest {digest} as version {held}, its manifest says {target.digest}"
    return None


def is_local(error: BaseException | None) -> bool:
    """Whether a call failed for want of file descriptors here, which is no server's illness."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


async def answers(client: InferenceClient, server: Server) -> bool:
    try:
        await client.model_info(server.address, timeout_secs=PROBE_TIMEOUT_SECS)
    except ServerError:
        return False
    return True
