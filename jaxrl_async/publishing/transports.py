"""Transports: the ways in which servers get a version.

A transport of files is called for one server. It returns when the server holds the version, verified, and samples
with it; otherwise it raises ServerError. In every case the server continues to sample, and unverified weights never
sample a token that a client accepts: until they are verified, their name is no version's. A transport sees no states
of servers, and "distributed" alone sees other servers (`collective`).
"""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import pickle
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from jaxrl_async.config.settings import PAUSE_MODES
from jaxrl_async.extras.collective import Collective
from jaxrl_async.publishing import differences, fanout, verification
from jaxrl_async.records import NOBODY, Identity
from jaxrl_async.security import is_loopback
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import ServerError, ServerTimeoutError
from jaxrl_async.versions import protocol
from jaxrl_async.versions import store as weight_store

log = logging.getLogger(__name__)


class ObsoleteVersionError(ServerError):
    """A push that was dropped for a newer version, while its server held verified weights or none."""


def always() -> bool:
    return True


def check_wanted(address: str, version: int | str, is_wanted: Callable[[], bool]) -> None:
    """Raises ObsoleteVersionError where a newer version has taken this one's place."""
    if not is_wanted():
        reason = f"version {version} was dropped for a newer one"
        raise ObsoleteVersionError(address, "", reason, retryable=True)


Pausing = Callable[[], AbstractAsyncContextManager[None]]  # `pauses.Pauses.turn`


class Transport(Protocol):
    """Gives one server a version."""

    async def __call__(
        self,
        client: InferenceClient,
        address: str,
        *,
        path: Any,
        version: int | str,
        timeout_secs: float,
        is_wanted: Callable[[], bool] = always,
        pausing: Pausing = contextlib.nullcontext,
    ) -> None:
        """Arguments and errors as of `FileTransport`; `path`: the version in its store."""


@dataclasses.dataclass(frozen=True)
class FileTransport:
    """A transport of files: one of TRANSPORTS, with its options.

    Raises:
      ValueError: there is no such transport or mode.
    """

    name: str  # in TRANSPORTS
    _: dataclasses.KW_ONLY
    # Of running requests. "retract": their tokens stay and their KV is computed again, so every token's log-prob is
    # exactly that of the version stamped on it. "in_place": stale KV stays, and later tokens come from a mixture of
    # versions.
    mode: str
    writer: Identity = NOBODY  # the learner; a server of this project refuses a superseded one
    # A server of this project continues by itself after a pause of this time, and drops a version that it prepared
    # this long ago; 0: never.
    pause_lease_secs: float = 0.0
    keep_adapters: int = 2  # versions of an adapter that an SGLang server keeps, ≥ 1
    delta: bool = False  # give a server of this project the difference from a version that it keeps
    fanout: int = (
        0  # servers to which the learner and each server hand a version on; 0: the learner to all
    )
    rendezvous: str = "127.0.0.1"  # the learner's address, at which "distributed" servers find it
    collective: Collective = dataclasses.field(
        default_factory=Collective, init=False, repr=False, compare=False
    )

    def __post_init__(self):
        for field, values in (("name", TRANSPORTS), ("mode", PAUSE_MODES)):
            if (value := getattr(self, field)) not in values:
                raise ValueError(f"{field} must be one of {', '.join(values)}, got {value!r}")

    async def __call__(
        self,
        client: InferenceClient,
        address: str,
        *,
        path: str | os.PathLike,
        version: int | str,
        timeout_secs: float,
        is_wanted: Callable[[], bool] = always,
        pausing: Pausing = contextlib.nullcontext,
    ) -> None:
        """Gives one server a version.

        Args:
          client: the HTTP client.
          address: "http://host:port", where the server takes control calls.
          path: the version's directory, as WeightStore wrote it; a StoredVersion is read once for all servers.
          version: its number, or its name in a later run epoch (`health.weight_name`).
          timeout_secs: bound on the whole call.
          is_wanted: whether the version is still the newest, asked before a load begins and between the parts of one.
          pausing: a context that the pause lies in; it may make the push wait.

        Raises:
          ObsoleteVersionError: it is not; the server loads nothing that is not wanted.
          ServerError: the version's files are damaged (no request was sent); or the server refused, was lost, was
            late, or holds other weights afterwards.
        """
        push = Push(
            self,
            client,
            address,
            path=path,
            version=version,
            deadline=time.monotonic() + timeout_secs,
            is_wanted=is_wanted,
            pausing=pausing,
        )
        await TRANSPORTS[self.name](push)


async def disk(push: "Push") -> None:
    """A server reads the version from a directory that it can see. For every kind of server.

    An adapter goes to an SGLang server without a pause: it holds several, and a request keeps the one that it began
    with (`InferenceClient`).
    """
    client, address, path = push.client, push.address, os.fspath(push.files)
    digest = None
    if await push.verifies_itself():
        digest = await push.prepare(is_shared=True)
    elif push.files.is_adapter:
        await push.add_adapter(functools.partial(client.load_adapter, path=path))
        return
    async with push.paused() as name:
        await client.update_weights_from_disk(
            address,
            path=path,
            version=name,
            flush_cache=push.flush_cache,
            timeout_secs=push.left(),
            writer=push.writer,
            digest=digest,
        )


async def tensor(push: "Push") -> None:
    """Sends the tensors of a version to an SGLang server over HTTP, without a shared file system.

    Needs PyTorch (the CPU build does) in this process: SGLang's route takes pickled lists of (name, tensor). Only
    sending pickles; nothing is unpickled here.
    """
    client, address = push.client, push.address
    torch = await asyncio.to_thread(_torch)  # Its import takes seconds.
    if await push.verifies_itself():
        raise push.error("has no route for 'tensor': give it weights by 'disk' or 'stream'")
    num_ranks = (await client.server_info(address, timeout_secs=push.left())).get("tp_size", 1)
    if push.files.is_adapter:
        await _send_adapter(push, num_ranks, torch)
        return
    buckets = _buckets(push.files, BUCKET_BYTES)
    async with push.paused() as name, push.session():
        for number, bucket in enumerate(buckets, 1):
            push.check_wanted()
            payload = await asyncio.to_thread(_pickled, push.files, bucket, torch)
            await client.update_weights_from_tensor(
                address,
                serialized_named_tensors=[payload] * num_ranks,
                version=name,
                flush_cache=push.flush_cache and number == len(buckets),
                timeout_secs=push.left(),
            )


async def distributed(push: "Push") -> None:
    """Broadcasts the tensors of a version to all SGLang servers that want it now: NCCL between GPUs, else gloo.

    Needs PyTorch in this environment: rank 0 is a process of its own, with this one's interpreter.
    """
    if await push.verifies_itself():
        raise push.error("has no route for 'distributed': give it weights by 'disk' or 'stream'")
    if push.files.is_adapter:
        raise push.error("takes no adapters by 'distributed': give them by 'disk' or 'tensor'")
    info = await push.client.server_info(push.address, timeout_secs=push.left())
    for size in ("pp_size", "dp_size"):
        if (found := info.get(size, 1)) != 1:
            raise push.error(f"has {size} {found}, and 'distributed' needs 1")
    host = push.options.rendezvous
    if is_loopback(host) and not is_loopback(urllib.parse.urlsplit(push.address).hostname or ""):
        raise push.error(
            f"must find the learner at weights.rendezvous, and {host} is of this machine alone"
        )
    await push.options.collective.deliver(
        push,
        host=host,
        num_ranks=info.get("tp_size", 1),
        device=info.get("device", "cuda"),
        buckets=_buckets(push.files, BROADCAST_BYTES),
    )


async def _send_adapter(push, num_ranks, torch) -> None:
    payload = await asyncio.to_thread(_pickled, push.files, push.files.names(), torch, dict)
    file = pathlib.Path(push.files, f"{weight_store.ADAPTER}config.json")
    load = functools.partial(
        push.client.load_adapter_from_tensors,
        config=json.loads(file.read_text("utf-8")),
        serialized_named_tensors=[payload] * num_ranks,
    )
    await push.add_adapter(load)


async def stream(push: "Push") -> None:
    """Uploads the files of a version to a server of this project, without a shared file system.

    The upload runs while the server samples.
    """
    if not (await push.verifies_itself() or push.has_sidecar):
        raise push.error(
            "has no route for 'stream': give it weights by 'disk' or 'tensor', or put a sidecar before it "
            "(python -m jaxrl_async relay)"
        )
    digest = await push.prepare(is_shared=False)
    async with push.paused() as name:
        await push.client.update_weights_from_upload(
            push.address,
            version=name,
            flush_cache=push.flush_cache,
            timeout_secs=push.left(),
            writer=push.writer,
            digest=digest,
        )


TRANSPORTS: dict[str, Callable[["Push"], Awaitable[None]]] = {
    "disk": disk,
    "tensor": tensor,
    "stream": stream,
    "distributed": distributed,
}


class Push:
    """The common part of the transports: checked files, the pause around the change, verification after it."""

    def __init__(
        self,
        options: FileTransport,
        client,
        address,
        *,
        path,
        version,
        deadline,
        is_wanted,
        pausing,
    ):
        """Arguments as of `FileTransport`; deadline on the monotonic clock."""
        self.client, self.address = client, address
        self.options, self._deadline = options, deadline
        self.is_wanted, self._pausing = is_wanted, pausing
        self.name = str(version)  # of the weights
        self.held = None  # name of the weights that the server has, once it was asked
        self._base = None  # digest of the version that the server has kept
        self._hands_on = False  # whether the server takes part in a tree
        self.has_sidecar = False  # which takes a version for a server that verifies nothing itself
        self.writer = NOBODY  # for a server of this project; others do not know it
        self._expected: verification.Expected | None = None  # of a server that does not verify
        self._may_differ = False  # whether the server may hold weights that were not verified
        self.flush_cache = options.mode != "in_place"  # SGLang refuses to flush under stale KV.
        try:
            is_shared = isinstance(path, weight_store.StoredVersion)
            self.files = path if is_shared else weight_store.StoredVersion(path)
        except weight_store.WeightStoreError as error:
            raise self.error(f"was not asked: {error}") from error

    def left(self) -> float:
        """Seconds until the push is late."""
        return max(self._deadline - time.monotonic(), 1e-3)

    def error(self, reason: str) -> ServerError:
        """An error of this push that a retry does not mend."""
        return ServerError(self.address, "", reason, retryable=False)

    def check_wanted(self) -> None:
        """Raises ObsoleteVersionError where a newer version has taken this one's place."""
        check_wanted(self.address, self.name, self.is_wanted)

    async def verifies_itself(self) -> bool:
        """Whether the server is one of this project's, which verifies a version itself.

        For another one the expected checksums are computed here, while it still samples.
        """
        try:
            if not self.files.is_checked:  # A truncated file kills an SGLang server.
                await asyncio.to_thread(self.files.check)
        except weight_store.WeightStoreError as error:
            raise self.error(f"was not asked: {error}") from error
        info = await self.client.model_info(self.address, timeout_secs=self.left())
        self.held = info.get("weight_version")
        is_ours = verification.reports_digest(info)
        is_sent = self.options.name == "stream"
        self.has_sidecar = not is_ours and is_sent and bool(info.get(protocol.HANDS_ON))
        if is_ours or self.has_sidecar:
            self.writer, self._base = self.options.writer, info.get(protocol.DIFFERENCE_BASE)
            self._hands_on = bool(self.options.fanout and info.get(protocol.HANDS_ON))
        if is_ours:
            if self.files.is_adapter and not info.get("lora"):
                raise self.error("takes no adapters")
            return True
        if self.files.is_adapter:  # Such a server tells the names of its adapters alone.
            return False
        self._expected = await verification.expect(
            self.client, self.address, files=self.files, timeout_secs=self.left()
        )
        return False

    async def prepare(self, *, is_shared: bool) -> str | None:
        """Lets a server of this project load the version while it samples; the update is a swap then.

        Args:
          is_shared: whether the server sees the version's directory; else the files are uploaded.

        Returns:
          the digest by which the update finds it; None where the server loads in the pause: it has no room for two
          copies, or is older than preparations.
        """
        difference = await self._difference()
        if difference is not None:
            try:
                await self._prepare([difference], difference.name, is_shared)
                return self.files.digest
            except ServerError as error:
                if error.status != protocol.NO_DIFFERENCE:
                    raise
                log.warning("%s: gets version %s in full: %s", self.address, self.name, error)
        every = sorted(pathlib.Path(self.files).iterdir())
        try:
            await self._prepare([f for f in every if f.suffix in _SUFFIXES], "", is_shared)
        except ServerError as error:
            if error.status not in protocol.LOADS_IN_THE_PAUSE:
                raise
            log.warning("%s: loads in the pause: %s", self.address, error.reason)
            return None
        return self.files.digest

    async def _difference(self) -> pathlib.Path | None:
        """The file that leads from the version which the server has kept; None: it needs the full one."""
        if not self.options.delta or self._base in (None, self.files.digest):
            return None
        try:
            async with asyncio.timeout(self.left()):
                return await differences.shared(self.files, self._base)
        except TimeoutError:
            return None

    async def _prepare(self, files: list[pathlib.Path], difference: str, is_shared: bool) -> None:
        if not is_shared:
            await self._send(files)
        self.check_wanted()
        await self.client.prepare_weights(
            self.address,
            path=os.fspath(self.files) if is_shared else None,
            version=self.name,
            digest=self.files.digest,
            timeout_secs=self.left(),
            writer=self.writer,
            lease_secs=self.options.pause_lease_secs,
            keep=self.options.delta,
            difference=difference,
            hand_on=self._hands_on and not is_shared,
        )

    async def _send(self, files: list[pathlib.Path]) -> None:
        """Gets the files to the server: from another one in the tree, around those that fail, or from here."""
        pieces = {}
        if self._hands_on:
            tree = fanout.shared(self.files, files, self.options.fanout)
            pieces = await tree.pieces(files)
            while (source := tree.source(self.address)) is not None:
                self.check_wanted()
                try:
                    await self.client.fetch_weights(
                        self.address,
                        source=source,
                        pieces=pieces,
                        version=self.name,
                        timeout_secs=self.left(),
                    )
                    return
                except ServerError as error:
                    if error.status != protocol.NO_SOURCE:
                        raise
                    tree.fail(source)
                    log.warning("%s: goes around %s: %s", self.address, source, error.reason)
        for file in files:
            self.check_wanted()
            await self.client.upload(
                self.address,
                file=file,
                version=self.name,
                timeout_secs=self.left(),
                sha256=pieces[file.name].sha256 if pieces else None,
            )

    @contextlib.asynccontextmanager
    async def paused(self):
        """As `_paused`, in a turn of the roll."""
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(self.left()):
                    await turn.enter_async_context(self._pausing())
            except TimeoutError:
                raise ServerTimeoutError(
                    self.address, "", "no turn to pause came in time", retryable=True
                ) from None
            async with self._paused() as name:
                yield name

    @contextlib.asynccontextmanager
    async def _paused(self):
        """Pauses; yields the name to load the weights under; verifies them and continues.

        A server of this project verifies before it changes anything, so the name is the version's. Another one
        gets a name that no client accepts as a version, before its first byte changes and until the weights have
        been verified: a load that fails halfway leaves no mixture under the name of the version before.
        """
        client, address = self.client, self.address
        name = self.name if self._expected is None else self.name + protocol.UNVERIFIED
        self.check_wanted()
        try:
            lease = {"lease_secs": self.options.pause_lease_secs}
            await client.pause(address, mode=self.options.mode, timeout_secs=self.left(), **lease)
            if self._expected is not None:
                self._may_differ = True
                await client.update_weight_version(address, version=name, timeout_secs=self.left())
            yield name
            await self._verify()
        except BaseException:
            await self._abandon()
            raise
        await client.continue_(address, timeout_secs=self.left())

    async def add_adapter(self, load: Callable[..., Awaitable[None]]) -> None:
        """Gives the server one more adapter, which new requests then ask for, and removes old ones first.

        The name of the server's own weights becomes the adapter's: it tells the newest one, and a server that has
        restarted has another.
        """
        client, address, name = self.client, self.address, self.name
        self.check_wanted()
        held = await client.adapters(address, timeout_secs=self.left())
        others = [other for other in held if other != name]
        for old in others[: max(len(others) - self.options.keep_adapters, 0)]:
            await client.unload_adapter(address, name=old, timeout_secs=self.left())
        if name not in held:  # A name has the same weights for ever.
            await load(address, name=name, timeout_secs=self.left())
        await client.update_weight_version(address, version=name, timeout_secs=self.left())
        await self._verify_name()

    @contextlib.asynccontextmanager
    async def session(self):
        """Opens a session of tensors, and closes it whatever happens: an open one blocks every later push.

        One that a killed learner left open is closed first.
        """
        client, address = self.client, self.address
        with contextlib.suppress(ServerError):  # Refused where none is open.
            await client.end_weight_update(address, timeout_secs=self.left())
        await client.begin_weight_update(address, timeout_secs=self.left())
        try:
            yield
        except BaseException:
            with contextlib.suppress(ServerError):
                await client.end_weight_update(address, timeout_secs=CONTINUE_TIMEOUT_SECS)
            raise
        await client.end_weight_update(address, timeout_secs=self.left())

    async def _verify(self) -> None:
        """Raises ServerError when the server holds other weights than the version's."""
        client, address = self.client, self.address
        if self._expected is not None:
            await verification.verify_checksums(
                client, address, expected=self._expected, timeout_secs=self.left()
            )
            await client.update_weight_version(address, version=self.name, timeout_secs=self.left())
        info = await self._verify_name()
        if self._expected is None:
            verification.verify_digest(address, info, files=self.files)

    async def _verify_name(self) -> Mapping[str, Any]:
        info = await self.client.model_info(self.address, timeout_secs=self.left())
        if info.get("weight_version") != self.name:
            held = info.get("weight_version")
            reason = f"reports version {held!r} after a push of version {self.name}"
            raise ServerError(self.address, "/model_info", reason, retryable=False)
        return info

    async def _abandon(self) -> None:
        """Lets the server continue, without its requests where its weights may be unverified.

        The requests of a server that was only paused stay: their weights are those they began with.
        """
        call = {"timeout_secs": CONTINUE_TIMEOUT_SECS}
        with contextlib.suppress(ServerError):
            if self._may_differ:
                await self.client.abort(self.address, rid=None, **call)
        with contextlib.suppress(ServerError):
            await self.client.continue_(self.address, **call)


def _buckets(stored: weight_store.StoredVersion, max_bytes: int) -> list[list[str]]:
    """The names of a version's tensors in parts of at most max_bytes; a larger tensor is a part of its own."""
    buckets: list[list[str]] = []
    size = 0
    for name in stored.names():
        if not buckets or size + stored.num_bytes(name) > max_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += stored.num_bytes(name)
    return buckets


def _torch():
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "weights.transport 'tensor' needs PyTorch in the learner's environment; a CPU build does"
        ) from error
    return torch


def _pickled(stored: weight_store.StoredVersion, names: Sequence[str], torch, form=list) -> str:
    """Base64 of a pickled list of (name, CPU tensor), the format of update_weights_from_tensor, or of such a dict."""
    named = []
    for name in names:
        array = stored.tensor(name)
        raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        named.append((name, raw.view(getattr(torch, array.dtype.name)).reshape(array.shape)))
    return base64.b64encode(pickle.dumps(form(named))).decode("ascii")


# SGLang reads large bodies slowly: in parts of 256 MB a push took several times as long.
BUCKET_BYTES = 8 << 20
BROADCAST_BYTES = 256 << 20  # A server has room for one more of these.
CONTINUE_TIMEOUT_SECS = 5.0
_SUFFIXES = (".json", ".safetensors")  # of a version's own files
