"""Leases: a server whose learner died in mid-push continues by itself, and drops the version prepared for it.

Shared by the servers of this project; imports the standard library alone. It knows no engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

RETRY_SECS = 1.0  # between two attempts to end a pause

log = logging.getLogger(__name__)


class Lease:
    """A time that ends by itself unless it is ended before. Use within one event loop."""

    def __init__(self, expire: Callable[[float], object]):
        """`expire`: called with the seconds of a lease that came to its end."""
        self._on_end = expire
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, secs: float | None) -> None:
        """Begins a lease of `secs`, or none for None. The one before it ends."""
        self.end()
        if secs is not None:
            self._timer = asyncio.get_running_loop().call_later(secs, self._on_end, secs)

    def end(self) -> None:
        """Ends the lease."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class PauseLease(Lease):
    """The end of the pause under way."""

    def __init__(self, resume: Callable[[], Awaitable[object]]):
        """`resume`: ends a pause, as /continue_generation does. It is called again where it raises."""
        super().__init__(self._expire)
        self._resume = resume
        self._resuming: asyncio.Task | None = None
        self.num_expired = 0  # pauses that were ended here

    def end(self) -> None:
        """Ends the lease; the pause is no longer ended here."""
        super().end()
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None

    def _expire(self, secs: float) -> None:
        self.num_expired += 1
        log.warning("no word from the learner for %g s of a pause: the server continues", secs)
        self._resuming = asyncio.create_task(self._resume_at_last())

    async def _resume_at_last(self) -> None:
        said = ""
        while True:
            try:
                await self._resume()
                return
            except Exception as error:
                reason = str(error) or type(error).__name__
            if reason != said:
                log.error("the pause does not end, and is tried every %g s: %s", RETRY_SECS, reason)
            said = reason
            await asyncio.sleep(RETRY_SECS)
