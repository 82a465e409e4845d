"""The pauses of a push over the fleet: at most max_paused servers at once, and the sum of their seconds.

It knows no server and no version.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable

log = logging.getLogger(__name__)


class Pauses:
    """Gives servers their turns to pause. Use within one event loop."""

    def __init__(self, *, max_paused: int, turn_secs: float, max_turn_secs: float = math.inf):
        """No server is paused yet.

        Args:
          max_paused: servers that are paused at once; 0: no bound.
          turn_secs: after which the next server's turn begins although this one has not continued: one that hangs holds
            up no roll. Twice the longest pause that ended well, where that is longer: a slow server does not hang.
          max_turn_secs: bound on that.
        """
        self._turn_secs, self._max_turn_secs = turn_secs, max_turn_secs
        self._free = asyncio.Semaphore(max_paused) if max_paused else None
        self._secs = 0.0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A context for the pause of one server; waits for its turn."""
        async with contextlib.AsyncExitStack() as stack:
            if self._free is not None:
                await self._free.acquire()
                stack.callback(self._lend(self._free))
            start = time.monotonic()
            try:
                yield
                longest = min(2 * (time.monotonic() - start), self._max_turn_secs)
                self._turn_secs = max(self._turn_secs, longest)
            finally:
                self._secs += time.monotonic() - start

    def pop(self) -> float:
        """Server-seconds of the pauses that ended since the last call."""
        secs, self._secs = self._secs, 0.0
        return secs

    def _lend(self, free: asyncio.Semaphore) -> Callable[[], None]:
        """Returns the end of a turn, which comes by itself after turn_secs."""

        def end() -> None:
            if not timer.cancelled():
                timer.cancel()
                free.release()

        secs = self._turn_secs

        def expire() -> None:
            log.warning(
                "a server is paused for more than %g s: the next one's turn begins beside it. Where servers are slow, "
                "raise weights.push_timeout_secs",
                secs,
            )
            end()

        timer = asyncio.get_running_loop().call_later(secs, expire)
        return end
