"""The receiver of versions under a server: an engine's weights come and go through it, whatever the web framework.

A call has a JSON object or bytes, and an answer is (status, JSON object). See `versions.protocol`: here its routes are
methods. The receiver refuses what is not the learner's; how weights lie on a device is the engine's.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
import pathlib
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import IO, Any, Protocol

from jaxrl_async import security
from jaxrl_async.intake.copy import Copy, Source
from jaxrl_async.intake.pause_lease import PauseLease
from jaxrl_async.intake.prepared import Prepared, Weights
from jaxrl_async.intake.relay import PieceError, Reading, Relay, SourceError, until_silence
from jaxrl_async.records import NOBODY, Identity
from jaxrl_async.versions import difference, protocol
from jaxrl_async.versions.layout import NoRoomError
from jaxrl_async.versions.protocol import Piece, Preparation, RequestError, Update

Answer = tuple[int, dict[str, Any]]

log = logging.getLogger(__name__)

# Of this host: on a network's file system each may have locks of its own.
_PREFIX = f"jaxrl-files-{os.uname().nodename}-"
_LOCK = ".lock"


class RefusedError(ValueError):
    """A refusal of another server, which is the answer of this one."""

    def __init__(self, answer: Answer):
        super().__init__(str(answer))
        self.answer = answer


class Engine(Protocol):
    """The owner of the weights. A refusal is a ValueError; where one changed nothing, the old weights stay."""

    async def load(self, directory: pathlib.Path) -> Weights:
        """Reads and verifies a version, and places it beside the served one.

        Raises:
          NoRoomError: the device has no room for both.
        """
        ...

    async def swap(self, weights: Any, update: Update) -> int:
        """Serves weights that were loaded; returns the number of requests that it held."""
        ...

    async def update(self, directory: pathlib.Path, update: Update) -> int:
        """Loads a version, and serves it; returns as `swap`."""
        ...

    async def resume(self) -> object:
        """Ends a pause."""
        ...


def _answering(method: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Answer]]:
    """A method whose refusals are answers."""

    @functools.wraps(method)
    async def answering(*args: Any) -> Answer:
        try:
            return await method(*args)
        except RefusedError as error:
            return error.answer
        except (RequestError, PieceError) as error:
            return refused(error, protocol.NO_SOURCE if isinstance(error, SourceError) else 400)
        except (ValueError, OSError) as error:
            log.warning("weights are refused: %s", error)
            status = _STATUS.get(type(error), 400)
            return status, {"success": False, "message": str(error), "num_paused_requests": 0}

    return answering


@dataclasses.dataclass(eq=False, repr=False)
class Receiver:
    """The versions that come to one server. Use within one event loop, between `open` and `close`."""

    engine: Engine  # the owner of the weights
    _: dataclasses.KW_ONLY
    roots: Sequence[str | os.PathLike] = ()  # the directories within which a model_path lies
    max_bytes: int | None = None  # bound on the files of a version together; None: of the disk
    key: str | None = None  # with which other servers are asked for files; None: none
    # Of certificates that are trusted of them; None: the system's authorities.
    context: ssl.SSLContext | None = None
    # `Engine.swap` reads the directory of the prepared weights again, so that it stays; and an update without its
    # preparation is refused.
    reads_in_the_pause: bool = False

    def __post_init__(self):
        self._writer = NOBODY  # the learner of the newest generation that came
        self._prepared = Prepared()
        self.lease = PauseLease(self.engine.resume)

    def open(self, parent: str = "") -> None:
        """Makes a private directory for files, in `parent`; "": the temporary directory. Those of killed servers go."""
        parent = parent or tempfile.gettempdir()
        _remove_orphans(pathlib.Path(parent))
        self._root = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent)
        self._lock = _locked(pathlib.Path(self._root.name))
        files = pathlib.Path(self._root.name) / "versions"
        files.mkdir()
        max_bytes = self.max_bytes or shutil.disk_usage(files).free
        self._relay = Relay(files, max_bytes=max_bytes, key=self.key, context=self.context)
        self._copy = Copy(self._root.name)

    def close(self) -> None:
        """Ends the readers of files that still arrive, and drops all that was not served yet."""
        self.lease.end()
        self._relay.close()
        self._prepared.drop()
        self.remove_files()

    def remove_files(self) -> None:
        """Removes the private directory."""
        self._root.cleanup()
        self._lock.close()

    def info(self) -> dict[str, Any]:
        """Keys of the answer of MODEL_INFO."""
        return {protocol.DIFFERENCE_BASE: self._copy.digest, protocol.HANDS_ON: True}

    @_answering
    async def prepare(self, body: dict[str, Any], lease: str | None) -> Answer:
        """Loads a version beside the served one, while the server samples; an update to it is a swap then.

        Args:
          body: a Preparation. Files that came are removed, unless they are handed on or kept.
          lease: the header, after whose seconds the version is dropped if no update took it.
        """
        asked, lease_secs = Preparation.read(body), protocol.read_lease(lease)
        version, digest = asked.weight_version, asked.weight_digest
        self._check_writer(asked.writer)
        path = asked.model_path
        directory = self._arrived(version) if path is None else self._confined(path)
        is_own = path is None and not asked.hand_on
        source = Source(directory, asked.difference, asked.keep, is_upload=is_own)
        load = functools.partial(self._copy.load, source, digest, self.engine.load)
        await self._prepared.prepare(version, digest, load, lease_secs)
        if is_own and not self.reads_in_the_pause:
            await _remove(directory)
        return 200, {"success": True, "message": f"version {version} is prepared"}

    @_answering
    async def update_from_disk(self, body: dict[str, Any]) -> Answer:
        """Serves a version: the prepared one, or that of the directory in a DiskUpdate."""
        update = protocol.DiskUpdate.read(body)
        return await self._update(self._confined(update.model_path), update)

    @_answering
    async def update_from_upload(self, body: dict[str, Any]) -> Answer:
        """Serves a version: the prepared one, or that of the files that came, which are removed then."""
        update = Update.read(body)
        if self._prepared.version == _name(update):  # Its files may be gone.
            return await self._update(None, update)
        directory = self._arrived(update.weight_version)
        try:
            return await self._update(directory, update)
        finally:
            await _remove(directory)

    async def _update(self, directory: pathlib.Path | None, update: Update) -> Answer:
        self._check_writer(update.writer)
        weights = self._prepared.take(_name(update), update.weight_digest)
        if weights is not None:
            num_paused = await self.engine.swap(weights, update)
        elif directory is None or self.reads_in_the_pause:
            raise ValueError(f"no version with digest {update.weight_digest!r:.80} was prepared")
        else:
            num_paused = await self.engine.update(directory, update)
        message = f"weights are now version {update.weight_version}"
        return 200, {"success": True, "message": message, "num_paused_requests": num_paused}

    def _check_writer(self, writer: Identity) -> None:
        """Raises ValueError for a learner that another one of its run has superseded; NOBODY is a tool."""
        newest = self._writer
        if writer.run_id == newest.run_id and writer.generation < newest.generation:
            raise ValueError(
                f"learner generation {writer.generation} of run {writer.run_id} is superseded by generation "
                f"{newest.generation}"
            )
        if writer != NOBODY:
            self._writer = writer

    def _confined(self, path: str) -> pathlib.Path:
        """The directory of a model_path; raises ValueError for one that weights may not come from."""
        try:
            return security.confined(path, self.roots)
        except ValueError as error:
            raise ValueError(f"model_path {error}") from None

    def _arrived(self, version: str) -> pathlib.Path:
        """The directory of the files of a version that came."""
        is_name = protocol.VERSION.fullmatch(version)
        directory = self._relay.directory(version) if is_name else None
        if directory is None:
            raise RequestError(f"no file of version {version!r:.80} was uploaded")
        return directory

    @_answering
    async def receive(
        self,
        version: str,
        name: str,
        num_bytes: int | None,
        sha256: str | None,
        chunks: AsyncIterator[bytes],
    ) -> Answer:
        """Stores one file of a version as it comes; `num_bytes` and `sha256` are headers. See Relay.receive."""
        _check_names(version, name)
        if num_bytes is None:
            raise RequestError(f"an upload needs Content-Length, {name} has none")
        piece = Piece(num_bytes, sha256)
        await self._relay.receive(version, name, until_silence(chunks, name), piece)
        return 200, {"success": True, "message": f"stored {num_bytes} bytes of {name}"}

    async def hand_on(self, version: str, name: str) -> Reading | Answer:
        """One file of a version for another server; one that still arrives, as it comes. See Relay.read."""
        try:
            _check_names(version, name)
            return await self._relay.read(version, name)
        except (RequestError, PieceError) as error:
            return refused(error, 404 if isinstance(error, PieceError) else 400)

    @_answering
    async def fetch(self, body: dict[str, Any]) -> Answer:
        """Gets files of a version from another server that has them, or gets them. See Relay.fetch."""
        asked = protocol.Fetch.read(body)
        version, files = asked.weight_version, asked.files
        for name in files:
            _check_names(version, name)
        await self._relay.fetch(version, asked.source, files, timeout_secs=asked.timeout_secs)
        return 200, {"message": f"{len(files)} files of version {version} are here"}


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; an empty body is {}. Raises RequestError: it is none."""
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:  # The last of "[[[[…".
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def refused(error: object, status: int = 400) -> Answer:
    """The answer to a request that cannot be, in SGLang's form."""
    return status, {"error": {"message": str(error)}}


def _check_names(version: str, name: str) -> None:
    """Raises RequestError where a name is not safe in a path."""
    if not (protocol.VERSION.fullmatch(version) and protocol.FILE.fullmatch(name)):
        raise RequestError(
            "a version must be a name of letters, digits, - and _, and a file *.safetensors, *.difference or the JSON "
            f"of a version; got {version!r:.80} and {name!r:.80}"
        )


def _name(update: Update) -> str:
    """The name under which a version was prepared."""
    return update.weight_version.removesuffix(protocol.UNVERIFIED)


def _locked(root: pathlib.Path) -> IO[str]:
    """Locks a directory as long as this process lives: the lock is held before it can be found there."""
    file = open(root / f"{_LOCK}.new", "w")
    with contextlib.suppress(OSError):  # Without locks it stays where this process is killed.
        fcntl.flock(file, fcntl.LOCK_EX)
        (root / f"{_LOCK}.new").rename(root / _LOCK)
    return file


def _remove_orphans(parent: pathlib.Path) -> None:
    """Removes the directories of this user's processes that were killed, each as large as a version or two."""
    for root in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # Its process lives, or another one removes it.
            if root.lstat().st_uid == os.getuid():
                with open(root / _LOCK) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(root)


async def _remove(directory: pathlib.Path) -> None:
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


_STATUS = {difference.DifferenceError: protocol.NO_DIFFERENCE, NoRoomError: protocol.NO_ROOM}
