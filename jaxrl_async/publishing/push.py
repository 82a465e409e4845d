"""The push of a version to one server: the part that all kinds and ways have in common."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from jaxrl_async.publishing import fanout
from jaxrl_async.servers.port import (
    ObsoleteVersionError,
    Pausable,
    ServerError,
    ServerTimeoutError,
    Sources,
)
from jaxrl_async.versions import difference, protocol
from jaxrl_async.versions.store import StoredVersion, WeightStoreError, read_manifest
from jaxrl_async.versions.version import Version

if TYPE_CHECKING:
    from jaxrl_async.publishing.transports import Transport

log = logging.getLogger(__name__)

Pausing = Callable[[], AbstractAsyncContextManager[None]]  # `pauses.Pauses.turn`


@dataclasses.dataclass(frozen=True, eq=False)
class Push:
    """A `port.Push`: a deadline, checked files, the pause around a change, and the name meanwhile."""

    options: "Transport"
    address: str
    files: Version
    name: str  # of the weights
    deadline: float  # on the monotonic clock
    _: dataclasses.KW_ONLY
    # Whether the version is still the newest, asked before a load begins and between the parts of one.
    is_wanted: Callable[[], bool] = lambda: True
    pausing: Pausing = contextlib.nullcontext  # that the pause lies in; it may make the push wait
    is_first: bool = True  # to this server, since it started

    async def check(self) -> None:
        """Compares the files with their manifest, once for all servers: a truncated one kills an SGLang server."""
        if isinstance(self.files, StoredVersion) and not self.files.is_checked:
            try:
                await asyncio.to_thread(self.files.check)
            except WeightStoreError as error:
                raise self.error(f"was not asked: {error}") from error

    @property
    def stored(self) -> StoredVersion:
        """The version's files; raises ServerError for a version in memory."""
        if not isinstance(self.files, StoredVersion):
            raise self.error("takes versions in files, and this one is in memory")
        return self.files

    @property
    def compares_all(self) -> bool:
        """Whether the digests of all tensors are compared; else those of a part."""
        return self.is_first or self.options.verify == "all"

    @property
    def flush_cache(self) -> bool:
        """Whether the load empties the prefix cache: SGLang refuses to under stale KV."""
        return self.options.mode != "in_place"

    @property
    def collective(self) -> Any:
        """The broadcasts of the run."""
        return self.options.collective

    def left(self) -> float:
        """Seconds until the push is late."""
        return max(self.deadline - time.monotonic(), 1e-3)

    def error(self, reason: str) -> ServerError:
        """An error of this push that a retry does not mend."""
        return ServerError(self.address, "", reason, retryable=False)

    def check_wanted(self) -> None:
        """Raises ObsoleteVersionError where a newer version has taken this one's place."""
        if not self.is_wanted():
            reason = f"version {self.name} was dropped for a newer one"
            raise ObsoleteVersionError(self.address, "", reason, retryable=True)

    @contextlib.asynccontextmanager
    async def paused(
        self, kind: Pausable, verify: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[str]:
        """Pauses the server in a turn of the roll; yields the name to load under; verifies and continues.

        A server that verifies itself does so before it changes anything, so the name is the version's. Another one
        gets a name that no client accepts as a version, before its first byte changes and until `verify` has compared
        the weights: a load that fails halfway leaves no mixture under the name of the version before.
        """
        async with self.turn():
            self.check_wanted()
            may_differ = False
            try:
                await _to_its_end(
                    kind.pause(
                        mode=self.options.mode,
                        timeout_secs=self.left(),
                        lease_secs=self.options.pause_lease_secs,
                    )
                )
                if kind.verifies_itself:
                    yield self.name
                else:
                    may_differ, unverified = True, self.name + protocol.UNVERIFIED
                    await kind.rename(unverified, timeout_secs=self.left())
                    yield unverified
                await verify()
                may_differ = False
                await kind.continue_(timeout_secs=self.left())
            except BaseException:
                await _abandon(kind, may_differ)
                raise

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(self.left()):
                    await turn.enter_async_context(self.pausing())
            except TimeoutError:
                reason = "no turn to pause came in time"
                raise ServerTimeoutError(self.address, "", reason, retryable=True) from None
            yield

    async def difference(self, base: str | None) -> pathlib.Path | None:
        """The file that leads from the version which the server has kept; None: it needs the full one."""
        if not self.options.delta or base is None:
            return None
        try:
            async with asyncio.timeout(self.left()):
                return await self.stored.once(write_difference, base)
        except TimeoutError:
            return None

    def sources(self, files: Sequence[pathlib.Path]) -> Sources:
        """The tree in which these files travel."""
        return fanout.shared(self.stored, files, self.options.fanout)


def write_difference(stored: StoredVersion, base: str) -> pathlib.Path | None:
    """Writes the difference of a version from one beside it in its store, whose digest `base` is.

    Returns:
      its file; None where the store has no such base, or the full version is the better way.
    """
    version = pathlib.Path(stored)
    for other in sorted(version.parent.iterdir(), reverse=True):
        try:
            if not (other.name.isdecimal() and read_manifest(other)["digest"] == base):
                continue
            file = difference.write(other, version)
        except WeightStoreError:
            continue  # It is being removed.
        except (OSError, ValueError) as error:  # of DifferenceError's kind too
            log.info("%s goes to the servers in full: %s", version, error)
            return None
        num_bytes = sum(os.path.getsize(f) for f in version.glob("*.safetensors"))
        size = os.path.getsize(file)
        log.info("%s: %d bytes, %.3g of the version", file, size, size / num_bytes)
        return file
    return None


async def _to_its_end(pause: Coroutine[Any, Any, None]) -> None:
    """Awaits a pause; a cancellation waits for it: a server could otherwise take it after the call to continue."""
    task = asyncio.create_task(pause)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(ServerError, TimeoutError):
            await asyncio.wait_for(task, CONTINUE_TIMEOUT_SECS)
        raise


async def _abandon(kind: Pausable, may_differ: bool) -> None:
    """Lets the server continue, without its requests where its weights may be unverified.

    The requests of a server that was only paused stay: their weights are those they began with.
    """
    with contextlib.suppress(ServerError):
        if may_differ:
            await kind.abort(None, timeout_secs=CONTINUE_TIMEOUT_SECS)
    with contextlib.suppress(ServerError):
        await kind.continue_(timeout_secs=CONTINUE_TIMEOUT_SECS)


CONTINUE_TIMEOUT_SECS = 5.0
