"""Probes of many servers: a GET of an information route to each, over an open connection, spread over the interval.

A probe costs a fraction of a call of the client, which stays the judge: a probe reports what a server said, or that it
said nothing that could be read, and its owner then calls. The client's small calls may use the open connection of a
probe, at the same cost. It knows no states and no versions.
"""

import asyncio
import contextlib
import dataclasses
import re
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, cast

from jaxrl_async.servers.answers import decode
from jaxrl_async.versions.protocol import MODEL_INFO

TICK_SECS = 0.05  # between two groups of probes
MAX_ANSWER_BYTES = 1 << 16
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[ \r]")
_CLOSE = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)


class LostAnswerError(ConnectionError):
    """A call on an open connection whose answer did not come, or could not be read."""


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Probes:
    """Probes each of its servers every interval_secs, while `run` runs. Use within one event loop."""

    interval_secs: float  # between two probes of a server
    timeout_secs: float  # bound on an answer; it is checked at the next probe
    is_wanted: Callable[[Any], bool]  # server → whether to probe it now
    # Called with a server and its answer, or None where there was no answer or no plain one.
    on_answer: Callable[[Any, dict[str, Any] | None], None]
    # Address → the information route of its server, asked at every probe.
    route_of: Callable[[str], str] = lambda address: MODEL_INFO
    api_key: str | None = None  # of the information routes
    # Context for https:// addresses; True for the system's authorities.
    tls: ssl.SSLContext | bool = True

    def __post_init__(self):
        self._slots: list[list[_Peer]] = [
            [] for _ in range(max(1, round(self.interval_secs / TICK_SECS)))
        ]
        self._pause_secs = self.interval_secs / len(self._slots)
        self._peers: dict[str, _Peer] = {}

    def add(self, server: Any, address: str) -> None:
        """Adds a server, its owner's object, at "http://host:port" or "https://host:port"."""
        peer = _Peer(self, server, address)
        min(self._slots, key=len).append(peer)
        self._peers[address] = peer

    def remove(self, server: Any) -> None:
        """Removes a server and closes its connection."""
        for slot in self._slots:
            for peer in [peer for peer in slot if peer.server is server]:
                slot.remove(peer)
                self._peers.pop(peer.address, None)
                peer.close()

    def open_line(self, address: str) -> "_Peer | None":
        """The connection to a server, for one call: None where it is not open, in use, or gave no plain answer."""
        peer = self._peers.get(address)
        return peer if peer is not None and peer.is_free else None

    async def run(self) -> None:
        """Probes until it is cancelled, and then closes all connections."""
        try:
            while True:
                for slot in self._slots:
                    for peer in tuple(slot):
                        if self.is_wanted(peer.server):
                            peer.probe()
                    await asyncio.sleep(self._pause_secs)
        finally:
            for slot in self._slots:
                for peer in slot:
                    peer.close()


class _Peer(asyncio.Protocol):
    """The connection to one server; one probe or call at a time."""

    def __init__(self, owner: Probes, server: Any, address: str):
        self._owner, self.server, self.address = owner, server, address
        url = urllib.parse.urlsplit(address)
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = (owner.tls if url.scheme == "https" else None) or None
        self._key = f"Authorization: Bearer {owner.api_key}\r\n" if owner.api_key else ""
        self._host_line = f" HTTP/1.1\r\nHost: {url.netloc}\r\n"
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task | None = None
        self._asked_at: float | None = None  # of the probe under way
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None  # of the call under way
        self._is_plain = True  # whether every call had an answer that could be read
        self._buffer = b""

    @property
    def is_free(self) -> bool:
        """Whether `call` may be used."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self._asked_at is None and self._answer is None and self._is_plain

    async def call(
        self, method: str, route: str, body: bytes, headers: Mapping[str, str], timeout_secs: float
    ) -> tuple[int, bytes]:
        """A call on the open connection, which `is_free`.

        Returns:
          The HTTP status and the body.

        Raises:
          TimeoutError: no answer within timeout_secs.
          LostAnswerError: the connection ended, or the answer had no length; the request may have been executed.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {route}{self._host_line}{lines}Content-Length: {len(body)}\r\n\r\n"
        self._buffer = b""
        answer = self._answer = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(head.encode() + body)
        try:
            async with asyncio.timeout(timeout_secs):
                return await answer
        finally:
            self._answer = None
            if not answer.done() or answer.cancelled():  # Its answer may still come.
                self._abort()

    def probe(self) -> None:
        if self._answer is not None:
            return
        now = time.monotonic()
        if self._asked_at is not None:
            if now - self._asked_at > self._owner.timeout_secs:
                self._end(None)
            return
        self._asked_at, self._buffer = now, b""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._request())
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def close(self) -> None:
        self._asked_at = None
        if self._connecting is not None:
            self._connecting.cancel()
        self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _request(self) -> bytes:
        route = self._owner.route_of(self.address)
        return f"GET {route}{self._host_line}{self._key}\r\n".encode()

    async def _connect(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self, self._host, self._port, ssl=self._tls)
        except OSError:  # ssl.SSLError among them
            self._end(None)
        finally:
            self._connecting = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request())

    def data_received(self, data: bytes) -> None:
        if self._asked_at is None and self._answer is None:  # nothing was asked
            self._abort()
            return
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n") if end else None
        status = _STATUS.match(head) if end else None
        is_unread = end and (length is None or status is None)
        if len(self._buffer) > MAX_ANSWER_BYTES or is_unread:
            self._is_plain = self._is_plain and self._answer is None
            self._end_unread("an answer without a length, or too long")
        elif length is not None and status is not None and len(body) >= int(length[1]):
            if _CLOSE.search(head + b"\r\n"):
                self._abort()
            self._end_read(int(status[1]), body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end_unread(str(exc or "closed by the server"))

    def _end_read(self, status: int, body: bytes) -> None:
        if self._answer is not None:
            if not self._answer.done():
                self._answer.set_result((status, body))
            return
        info = None
        if status == 200:
            with contextlib.suppress(ValueError):
                info = decode(body)
        self._end(info if isinstance(info, dict) else None)

    def _end_unread(self, reason: str) -> None:
        if self._answer is not None:
            if not self._answer.done():
                self._answer.set_exception(LostAnswerError(reason))
            self._abort()
        elif self._asked_at is not None:
            self._end(None)

    def _end(self, info: dict[str, Any] | None) -> None:
        """Ends a probe; a connection that gave no plain answer is not used again."""
        self._asked_at = None
        if info is None:
            self.close()
        self._owner.on_answer(self.server, info)
