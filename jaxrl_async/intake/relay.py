"""The files of a version that arrive at a server, and are handed on to other servers while they still arrive.

    PUT  /weights/{version}/{file}    a file comes from the learner
    POST /weights/fetch               the files come from another server, piece by piece as that one gets them
    GET  /weights/{version}/{file}    a file goes to another server

A piece is a file; it counts when it has its digest. There is one version at a time: the first file of another one
removes it. Shared by the servers of this project; it knows no engine and no plan of who fetches from whom.
"""

import asyncio
import dataclasses
import functools
import hashlib
import itertools
import pathlib
import shutil
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, BinaryIO

import aiohttp

from jaxrl_async.versions import protocol
from jaxrl_async.versions.protocol import Piece

CHUNK_BYTES = 1 << 18
STALL_SECS = 5.0  # without a byte, after which a piece is asked of another server
SENDER_SECS = 120.0  # without a byte of a piece, after which its sender is taken for lost


class PieceError(ValueError):
    """A piece that cannot be had: altered, too large, or not there."""


class SourceError(PieceError):
    """A server that does not hand a piece on; another one may."""


@dataclasses.dataclass(eq=False, repr=False)
class Relay:
    """The pieces at one server. Use within one event loop."""

    root: pathlib.Path  # an empty directory of the server's own
    _: dataclasses.KW_ONLY
    max_bytes: int  # bound on the pieces of a version together
    key: str | None = None  # with which other servers are asked
    # Of certificates that are trusted of them; None: the system's authorities.
    context: ssl.SSLContext | None = None

    def __post_init__(self):
        self._arriving: dict[tuple[str, str], _Arrival] = {}
        self._pieces: dict[tuple[str, str], Piece] = {}  # that are here
        self._numbers = itertools.count()

    def directory(self, version: str) -> pathlib.Path | None:
        """Where the pieces of a version are; None: there are none."""
        directory = self.root / version
        return directory if directory.exists() else None

    async def receive(
        self, version: str, name: str, chunks: AsyncIterator[bytes], piece: Piece
    ) -> None:
        """Stores a piece as it comes. Pieces of other versions are removed.

        Args:
          version, name: of the version and of the file, both of characters that are safe in a path.
          chunks: of its bytes.
          piece: the one that it must be.

        Raises:
          PieceError: it is another one, or too large; or `chunks` ended early.
        """
        directory = self._make_room(version, name, piece)
        part = directory / f".{name}.{next(self._numbers)}"
        arrival = self._begin(version, name)
        arrival.begin(part, piece.num_bytes)
        digest = hashlib.sha256()
        try:
            with open(part, "wb") as file:
                async for chunk in chunks:
                    if arrival.num_bytes + len(chunk) > piece.num_bytes:
                        raise PieceError(f"{name} has more than its {piece.num_bytes} bytes")
                    file.write(chunk)
                    file.flush()
                    digest.update(chunk)
                    arrival.grow(len(chunk))
            if arrival.num_bytes != piece.num_bytes:
                came = f"{arrival.num_bytes} of its {piece.num_bytes} bytes"
                raise PieceError(f"{name} ended after {came}")
            if piece.sha256 not in (None, found := digest.hexdigest()):
                raise PieceError(f"{name} has SHA-256 {found}, the learner's has {piece.sha256}")
            if not directory.exists():
                raise PieceError(f"version {version} is superseded here")
            arrival.part = part.rename(directory / name)
            self._pieces[version, name] = piece
        except BaseException:
            arrival.part = None  # Nobody reads what is removed.
            raise
        finally:
            part.unlink(missing_ok=True)
            arrival.end()
            if self._arriving.get((version, name)) is arrival:
                del self._arriving[version, name]

    async def read(self, version: str, name: str) -> "Reading":
        """The bytes of a piece; of one that arrives, as they come.

        Raises:
          PieceError: it is not there, and did not begin to arrive within STALL_SECS.
        """
        key, file = (version, name), self.root / version / name
        arrival = self._arriving.get(key)
        if arrival is None and file.exists():
            return Reading(file.stat().st_size, _whole(open(file, "rb")))
        arrival = arrival or self._begin(version, name)
        try:
            part = await arrival.wait_for_more_than(-1)
        finally:
            if arrival.part is None and self._arriving.get(key) is arrival:
                del self._arriving[key]
        return Reading(arrival.wanted_bytes, _growing(arrival, open(part, "rb")))

    async def fetch(
        self, version: str, source: str, pieces: Mapping[str, Piece], *, timeout_secs: float
    ) -> None:
        """Gets pieces from another server that has them, or that they arrive at.

        Args:
          version: its name.
          source: "http://host:port" of the other server.
          pieces: by name. One that is here already is not asked for.
          timeout_secs: bound on the whole.

        Raises:
          SourceError: the other server is lost, late or silent for STALL_SECS, or has another piece. Pieces that
            arrived stay.
          PieceError: they are too large.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=STALL_SECS, sock_read=STALL_SECS)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        for name, piece in pieces.items():
            self._make_room(version, name, piece)
        try:
            async with (
                asyncio.timeout(timeout_secs),
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            ):
                for name, piece in pieces.items():
                    is_here = (self.root / version / name).exists()  # not removed since
                    if is_here and self._pieces.get((version, name)) == piece:
                        continue
                    url = source + protocol.file_route(version, name)
                    options: dict[str, Any] = {"ssl": self.context} if self.context else {}
                    async with session.get(url, allow_redirects=False, **options) as response:
                        if response.status != 200:
                            raise SourceError(f"{source} answers {response.status} for {name}")
                        await self.receive(version, name, response.content.iter_any(), piece)
        except SourceError:
            raise
        except TimeoutError:
            late = f"was not done after {timeout_secs:g} s"
            raise SourceError(f"{source} sent nothing for {STALL_SECS:g} s, or {late}") from None
        except (aiohttp.ClientError, PieceError, OSError) as error:
            raise SourceError(f"{source}: {error or type(error).__name__}") from error

    def close(self) -> None:
        """Ends the readers of pieces that still arrive."""
        for arrival in self._arriving.values():
            arrival.end()

    def _make_room(self, version: str, name: str, piece: Piece) -> pathlib.Path:
        """The directory of a version, alone in its root; raises PieceError where the piece is too large for it."""
        for other in self.root.iterdir():
            if other.name != version and other.name[0] != ".":
                aside = other.rename(self.root / f".{next(self._numbers)}")
                remove = functools.partial(shutil.rmtree, aside, ignore_errors=True)
                asyncio.get_running_loop().run_in_executor(None, remove)  # It takes a while.
                for key in [k for k in self._pieces if k[0] == other.name]:
                    del self._pieces[key]
        directory = self.root / version
        directory.mkdir(exist_ok=True)
        others = (f for f in directory.iterdir() if f.name != name and f.name[0] != ".")
        if sum(f.stat().st_size for f in others) + piece.num_bytes > self.max_bytes:
            bound = f"the files of a version have at most {self.max_bytes} bytes together"
            raise PieceError(f"{bound}: {name} is refused")
        return directory

    def _begin(self, version: str, name: str) -> "_Arrival":
        """The arrival of a piece that begins now, which readers may wait for already."""
        arrival = self._arriving.get((version, name))
        if arrival is None or arrival.part is not None:
            arrival = self._arriving[version, name] = _Arrival(name)
        return arrival


@dataclasses.dataclass(frozen=True)
class Reading:
    """A piece on its way to another server."""

    num_bytes: int
    chunks: AsyncGenerator[bytes, None]  # raises PieceError where no more come


class _Arrival:
    """A piece that arrives, or that is waited for."""

    def __init__(self, name: str):
        self.name = name
        self.part: pathlib.Path | None = None  # its file, once it begins
        self.wanted_bytes = self.num_bytes = 0
        self._has_ended = False
        self._changed = asyncio.Event()

    def begin(self, part: pathlib.Path, num_bytes: int) -> None:
        self.part, self.wanted_bytes = part, num_bytes
        self._tell()

    def grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._tell()

    def end(self) -> None:
        self._has_ended = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_more_than(self, num_bytes: int) -> pathlib.Path:
        """Its file, once it has more bytes; raises PieceError where no more can come, or none did for STALL_SECS."""
        while self.part is None or self.num_bytes <= num_bytes:
            if self._has_ended:
                raise PieceError(f"{self.name} did not arrive whole here")
            try:
                async with asyncio.timeout(STALL_SECS):
                    await self._changed.wait()
            except TimeoutError:
                reason = f"no byte of {self.name} arrived here for {STALL_SECS:g} s"
                raise PieceError(reason) from None
        return self.part


async def until_silence(chunks: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    """The chunks; raises PieceError where none comes for SENDER_SECS: a sender that vanishes ends no connection."""
    while True:
        try:
            async with asyncio.timeout(SENDER_SECS):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise PieceError(f"no byte of {name} came for {SENDER_SECS:g} s") from None
        yield chunk


async def _whole(stream: BinaryIO) -> AsyncGenerator[bytes, None]:
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


async def _growing(arrival: _Arrival, stream: BinaryIO) -> AsyncGenerator[bytes, None]:
    sent = 0
    with stream:
        while sent < arrival.wanted_bytes:
            await arrival.wait_for_more_than(sent)
            chunk = stream.read(min(arrival.num_bytes - sent, CHUNK_BYTES))
            sent += len(chunk)
            yield chunk
