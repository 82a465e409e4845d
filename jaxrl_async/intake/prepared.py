"""The prepared version: read, verified and on the device, beside the one that a server samples with.

A push has two halves, and this is what lies between them. It is there from the end of a preparation until the update
that takes it, another preparation, or the end of its lease; there is never more than one. An update without it loads
the version itself, so nothing depends on it.

It knows no engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from jaxrl_async.intake.pause_lease import Lease

log = logging.getLogger(__name__)


class Weights(Protocol):
    """Weights of the engine's own type."""

    @property
    def digest(self) -> str:
        """Of the tensors as they were read: `layout.version_digest`."""
        ...


class SupersededPreparationError(ValueError):
    """A preparation that a newer one, or an update, made useless while it was loading."""


class Prepared:
    """The one prepared version of a server. Use within one event loop."""

    def __init__(self):
        self._loading = asyncio.Lock()  # Two loads at once would be a third copy.
        self._wanted: tuple[str, str] | None = None  # (version, digest) asked for last
        self._held: tuple[str, str] | None = None
        self._weights: Weights | None = None
        self._lease = Lease(self._expire)

    @property
    def version(self) -> str | None:
        """Name of the version that is prepared."""
        return self._held[0] if self._held else None

    async def prepare(
        self,
        version: str,
        digest: str,
        load: Callable[[], Awaitable[Weights]],
        lease_secs: float | None,
    ) -> None:
        """Loads a version in place of the one prepared before; returns at once where it is there already.

        Args:
          version, digest: its name, and the digest of its manifest.
          load: reads, verifies and places it.
          lease_secs: after which it is dropped if nobody took it; None: never.

        Raises:
          SupersededPreparationError: another one was begun, or an update, before this one was done.
          ValueError: the weights that were loaded have another digest.
        """
        self._wanted = key = (version, digest)
        if self._held != key:
            self.drop()
        async with self._loading:
            if self._held != key:
                self._check_wanted(key)
                weights = await load()
                self._check_wanted(key)
                if weights.digest != digest:
                    found = f"version {version} has digest {weights.digest}"
                    raise ValueError(f"{found}, the push is of {digest}")
                self._held, self._weights = key, weights
            self._lease.begin(lease_secs)

    def take(self, version: str, digest: str | None) -> Any:
        """The prepared weights if they are these, else None; either way none are prepared afterwards."""
        weights = self._weights if self._held == (version, digest) else None
        self._wanted = None
        self.drop()
        return weights

    def drop(self) -> None:
        """Frees the prepared weights."""
        self._lease.end()
        self._held = self._weights = None

    def _check_wanted(self, key: tuple[str, str]) -> None:
        if self._wanted != key:
            by = f"version {self._wanted[0]}" if self._wanted else "an update"
            raise SupersededPreparationError(f"version {key[0]} is superseded by {by}")

    def _expire(self, secs: float) -> None:
        log.warning("version %s was prepared %g s ago and not taken: dropped", self.version, secs)
        self.drop()
