"""Looks at many servers: a GET of /model_info to each, over one open connection each, spread over the interval.

A look costs a fraction of a call of the client, which stays the judge: a look reports what a server said, or that it
said nothing that could be read, and its owner then calls. It knows no states and no versions.
"""

import asyncio
import contextlib
import json
import re
import ssl
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

TICK_SECS = 0.05  # between two groups of looks
MAX_ANSWER_BYTES = 1 << 16
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)


class Looks:
    """Looks at each of its servers every interval_secs, while `run` runs. Use within one event loop."""

    def __init__(
        self,
        *,
        interval_secs: float,
        timeout_secs: float,
        is_wanted: Callable[[Any], bool],
        on_answer: Callable[[Any, dict[str, Any] | None], None],
        api_key: str | None = None,
        tls: ssl.SSLContext | bool = True,
    ):
        """Opens nothing yet.

        Args:
          interval_secs: between two looks at a server.
          timeout_secs: bound on an answer; it is looked for at the next look.
          is_wanted: server → whether to look at it now.
          on_answer: called with a server and its /model_info, or None where there was no answer or no plain one.
          api_key: of the information routes.
          tls: context for https:// addresses; True for the system's authorities.
        """
        self._timeout_secs = timeout_secs
        self._is_wanted = is_wanted
        self._on_answer = on_answer
        self._api_key = api_key
        self._tls = tls
        self._slots: list[list[_Peer]] = [
            [] for _ in range(max(1, round(interval_secs / TICK_SECS)))
        ]
        self._pause_secs = interval_secs / len(self._slots)

    def add(self, server: Any, address: str) -> None:
        """Adds a server, its owner's object, at "http://host:port" or "https://host:port"."""
        peer = _Peer(server, address, self._api_key, self._tls, self._timeout_secs, self._on_answer)
        min(self._slots, key=len).append(peer)

    def remove(self, server: Any) -> None:
        """Removes a server and closes its connection."""
        for slot in self._slots:
            for peer in [peer for peer in slot if peer.server is server]:
                slot.remove(peer)
                peer.close()

    async def run(self) -> None:
        """Looks until it is cancelled, and then closes all connections."""
        try:
            while True:
                for slot in self._slots:
                    for peer in tuple(slot):
                        if self._is_wanted(peer.server):
                            peer.look()
                    await asyncio.sleep(self._pause_secs)
        finally:
            for slot in self._slots:
                for peer in slot:
                    peer.close()


class _Peer(asyncio.Protocol):
    """The connection to one server; one look at a time."""

    def __init__(self, server, address, api_key, tls, timeout_secs, on_answer):
        self.server = server
        url = urllib.parse.urlsplit(address)
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = (tls if url.scheme == "https" else None) or None
        self._timeout_secs = timeout_secs
        self._on_answer = on_answer
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._request = f"GET /model_info HTTP/1.1\r\nHost: {url.netloc}\r\n{key}\r\n".encode()
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task | None = None
        self._asked_at: float | None = None  # of the look under way
        self._buffer = b""

    def look(self) -> None:
        now = time.monotonic()
        if self._asked_at is not None:
            if now - self._asked_at > self._timeout_secs:
                self._end(None)
            return
        self._asked_at, self._buffer = now, b""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._request)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def close(self) -> None:
        self._asked_at = None
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _connect(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self, self._host, self._port, ssl=self._tls)
        except OSError:  # ssl.SSLError among them
            self._end(None)
        finally:
            self._connecting = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._asked_at is None:  # nothing was asked
            self._transport.abort()
            return
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n") if end else None
        if len(self._buffer) > MAX_ANSWER_BYTES or (end and length is None):
            self._end(None)
        elif end and len(body) >= int(length[1]):
            info = None
            if head.startswith(b"HTTP/1.1 200"):
                with contextlib.suppress(ValueError):
                    info = json.loads(body)
            self._end(info if isinstance(info, dict) else None)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._asked_at is not None:
            self._end(None)

    def _end(self, info: dict[str, Any] | None) -> None:
        """Ends a look; a connection that gave no plain answer is not used again."""
        self._asked_at = None
        if info is None:
            self.close()
        self._on_answer(self.server, info)
