"""The keeper of a server: the one task that talks to it, and keeps it at the version that all should hold.

It pushes a new version, polls the server every poll_secs, and pushes again to one that was late, failed or restarted.
A server that is reserved for an evaluation is not touched. Announcements are the publisher's.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.publishing import health
from jaxrl_async.publishing.health import Target
from jaxrl_async.publishing.pauses import Pauses
from jaxrl_async.publishing.scored import ScoredPrompts
from jaxrl_async.servers.descriptors import is_out_of_files
from jaxrl_async.servers.fleet import DEAD, HEALTHY, STALE
from jaxrl_async.servers.port import (
    Kind,
    ObsoleteVersionError,
    ServerError,
    Servers,
    ServerTimeoutError,
    UnfitServerError,
)
from jaxrl_async.versions import protocol
from jaxrl_async.versions.store import StoredVersion

log = logging.getLogger(__name__)


class PublisherError(RuntimeError):
    """A version did not reach the servers; the message names each server and why."""


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Course:
    """The part that all keepers share: how versions are pushed, and the one that every server should hold."""

    # Gives one server a version; as `transports.Transport`.
    transport: Callable[..., Awaitable[None]]
    pin: Callable[[int], AbstractContextManager[None]]  # `WeightStore.pin`
    # Deadline of a server for a version; one that misses it is STALE. Without a HEALTHY server for this time the
    # publisher fails, unless a server is DEAD, or has just restarted or woken.
    push_timeout_secs: float
    poll_secs: float  # poll interval of each server
    max_paused: int = 0  # servers that a push pauses at once; the others go on, HEALTHY. 0: all
    # Refuses a server before its first push, and before the first after a restart; see preflight.server. Before any
    # version is published a refusal ends the publisher.
    preflight: Callable[[Servers, str], Awaitable[None]] | None = None
    # Compares what a server samples after its first push with scores, and the first such after a restart; a refusal is
    # as the preflight's.
    scored: ScoredPrompts | None = None
    scores_every_push: bool = False  # not after the first alone

    def __post_init__(self):
        self.pauses = Pauses(
            max_paused=self.max_paused,
            turn_secs=TURN_SHARE * self.push_timeout_secs,
            max_turn_secs=self.push_timeout_secs / 2,
        )
        self.active = ActiveClock()
        self.target: Target | None = None  # that every server should hold
        self.before: int | None = None  # the version before it, current while its push is under way
        self.announced: tuple[int, int] | None = None  # (version, run epoch) that the queue knows
        self.wants_scores = False  # a server of the run verifies nothing itself

    async def changed(self, server: health.Server) -> None:
        """A server was found to be no longer HEALTHY."""
        raise NotImplementedError

    async def tried(self, server: health.Server, *, is_back: bool) -> None:
        """An attempt at a server ended; `is_back`: it answers again."""
        raise NotImplementedError


class Keeper:
    """Keeps one server, whose record it owns."""

    def __init__(self, server: health.Server, client: Servers, course: Course):
        """Talks to nobody yet."""
        self.server, self._client, self._course = server, client, course
        self._is_compared = False  # what it samples, since it started

    async def run(self) -> None:
        """Keeps the server until it is cancelled."""
        server = self.server
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rest_secs()):
                    await server.due.wait()
            server.due.clear()
            if self._course.target is not None and not server.reserved:
                await self._try(self._course.target)

    def is_settled(self) -> bool:
        """Whether the server holds the target, so that a probe is enough."""
        target, server = self._course.target, self.server
        return target is not None and not server.reserved and server.holds(target)

    def probed(self, info: Mapping[str, Any] | None) -> None:
        """Makes the server due where a probe differs from the target, or has no answer."""
        if self.is_settled() and (info is None or self._difference(info) is not None):
            self.server.due.set()

    def _difference(self, info: Mapping[str, Any]) -> str | None:
        kind, target = self.server.kind, self._course.target
        assert kind is not None and target is not None
        return kind.difference(info, target.name, target.files.digest)

    def _rest_secs(self) -> float | None:
        """Seconds to the next attempt: backoff, with jitter; None where probes say when it is due."""
        if self.is_settled():
            return None
        # One that is DEAD costs a refused connection, and restarts while the others wait.
        failures = self.server.num_failures if self.server.state != DEAD else 0
        backoff = min(2.0 ** (failures - 1), MAX_BACKOFF) if failures else 1.0
        return self._course.poll_secs * backoff * random.uniform(0.8, 1.2)

    async def _try(self, target: Target) -> None:
        """One attempt to bring the server to the target."""
        course, server = self._course, self.server
        course.active.now()
        num_stops, is_back, woke = course.active.num_stops, False, False
        try:
            with course.pin(target.version):
                await self._push(target)
            self._held()
        except ObsoleteVersionError:
            server.due.set()
            return
        except (ImportError, PublisherError):
            raise  # of this process or of the queue, on any server
        except UnfitServerError as error:
            if course.announced is None:
                raise PublisherError(str(error)) from None
            server.state, server.reason = STALE, str(error)
        except Exception as error:
            course.active.now()
            if course.active.num_stops != num_stops:
                server.due.set()  # Its deadline passed while this process was stopped.
                return
            if self._failed(error, target):
                return
            was_dead = server.state == DEAD
            server.state = STALE if await health.answers(self._client, server) else DEAD
            is_back = was_dead and server.state == STALE
            # One that woke in the attempt has not had its try.
            is_late = isinstance(error, ServerTimeoutError)
            woke = server.state == STALE and (was_dead or is_late)
        server.tried = None if woke else target
        await course.tried(server, is_back=is_back)

    def _held(self) -> None:
        """Notes that a push ended well: during a push the version before it is still current."""
        course, server = self._course, self.server
        assert course.target is not None
        if not server.reserved:  # meanwhile
            is_current = server.version in (course.target.version, course.before)
            server.state = HEALTHY if is_current else STALE
            server.reason = f"holds version {server.version}"
        server.num_failures = 0

    def _failed(self, error: Exception, target: Target) -> bool:
        """Notes a failure; returns whether it is this process's: the server keeps its state, and is tried again."""
        server = self.server
        server.num_failures += 1
        if not isinstance(error, ServerError):
            log.error(
                "a push of version %s to %s failed", target.name, server.address, exc_info=error
            )
        server.reason = str(error) or type(error).__name__
        if is_ours := is_out_of_files(error):
            log.error("%s: out of file descriptors (ulimit -n): %s", server.address, error)
        return is_ours

    async def _push(self, target: Target) -> None:
        """Pushes the target to the server, unless it holds it."""
        course, server, client = self._course, self.server, self._client
        call = {"timeout_secs": health.PROBE_TIMEOUT_SECS}
        server.kind = kind = await client.recognise(server.address, **call)
        # Before the first push, an equal number would be another run's.
        if server.version == target.version:
            difference = kind.difference(kind.info, target.name, target.files.digest)
            if difference is None:
                return
            await self._restarted(difference)
        elif server.version is not None and self._is_of_no_push(kind.info):
            await self._restarted(f"version {kind.info.get(protocol.WEIGHT_VERSION)!r}")
        is_first = server.version is None
        if is_first and course.preflight is not None:
            await course.preflight(client, server.address)
        if is_first and not kind.ends_pauses:
            # A learner that was killed in a push left it paused. Its weights are verified, or have a name that no
            # client accepts.
            with contextlib.suppress(ServerError):
                await kind.continue_(**call)
        server.names.add(target.name)  # Also where the push fails.
        await course.transport(
            client,
            server.address,
            files=target.files,
            version=target.name,
            timeout_secs=course.push_timeout_secs,
            is_wanted=lambda: course.target is target and not server.has_left,
            pausing=course.pauses.turn,
            is_first=is_first,
        )
        if is_first or course.scores_every_push:
            self._is_compared = False
        if not self._is_compared:
            self._is_compared = await self._compare(kind, target)
        server.version, server.names = target.version, {target.name}

    def _is_of_no_push(self, info: Mapping[str, Any]) -> bool:
        """Whether a server that has got versions reports other weights than it may hold since its last push."""
        reported = str(info.get(protocol.WEIGHT_VERSION))
        return reported.removesuffix(protocol.UNVERIFIED) not in self.server.names

    async def _restarted(self, reports: str) -> None:
        """Notes a restart: the next push is the first again."""
        server = self.server
        server.state, server.version = STALE, None
        server.reason = f"restarted: reports {reports}"
        await self._course.changed(server)

    async def _compare(self, kind: Kind, target: Target) -> bool:
        """Compares what a server samples with the learner's log-probs, unless it verifies its weights itself.

        Returns:
          False where a version with scores must follow.
        """
        course, files = self._course, target.files
        if course.scored is None or kind.verifies_itself or not isinstance(files, StoredVersion):
            return True
        course.wants_scores = True  # of the next versions, where this one has none
        call = {"timeout_secs": course.push_timeout_secs}
        return await course.scored.check(kind, self.server.address, files, target.name, **call)


# Of push_timeout_secs: a server that hangs in its turn holds up the others no longer.
TURN_SHARE = 0.125
MAX_BACKOFF = 8.0  # poll intervals between two attempts at a server that fails
