"""The servers of this project: the embedded one, and SGLang-JAX behind this project's routes.

They verify a version by the digest of its manifest, and load it beside the one that they serve.
"""

import functools
import logging
import os
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from jaxrl_async.servers.kinds.checks import Checks
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import Push, ServerError
from jaxrl_async.versions import protocol
from jaxrl_async.versions.store import StoredVersion

log = logging.getLogger(__name__)


class Intake(SglangApi):
    """A server that takes versions while it samples: its own part, or that of a sidecar before it."""

    async def stream(self, push: Push) -> None:
        """Uploads the files of a version, without a shared file system, while the server samples."""
        verify = await self.verification(push)
        digest = await self.prepare(push, is_shared=False)
        async with push.paused(self, verify) as name:
            update = protocol.Update(
                weight_version=name,
                weight_digest=digest,
                writer=push.options.writer,
                flush_cache=push.flush_cache,
            )
            await self.update(protocol.UPDATE_FROM_UPLOAD, update.body(), push.left())

    async def verification(self, push: Push) -> Callable[[], Awaitable[None]]:
        """Makes ready what verifies a push in its pause."""
        raise NotImplementedError

    async def prepare(self, push: Push, *, is_shared: bool) -> str | None:
        """Lets the server load the version while it samples; the update is a swap then.

        Args:
          is_shared: whether the server sees the version's directory; else the files are sent.

        Returns:
          the digest by which the update finds it; None where the server loads in the pause: it has no room for two
          copies, or is older than preparations.
        """
        files = push.stored
        difference = await push.difference(self.info.get(protocol.DIFFERENCE_BASE))
        if difference is not None:
            try:
                await self._prepare(push, [difference], difference.name, is_shared)
                return files.digest
            except ServerError as error:
                if error.status != protocol.NO_DIFFERENCE:
                    raise
                log.warning("%s: gets version %s in full: %s", self.address, push.name, error)
        every = sorted(pathlib.Path(files).iterdir())
        try:
            wanted = [file for file in every if file.suffix in _SUFFIXES]
            await self._prepare(push, wanted, "", is_shared)
        except ServerError as error:
            if error.status not in protocol.LOADS_IN_THE_PAUSE:
                raise
            log.warning("%s: loads in the pause: %s", self.address, error.reason)
            return None
        return files.digest

    async def _prepare(
        self, push: Push, files: list[pathlib.Path], difference: str, is_shared: bool
    ) -> None:
        hands_on = bool(push.options.fanout and self.info.get(protocol.HANDS_ON))
        if not is_shared:
            await self._send(push, files, hands_on)
        push.check_wanted()
        preparation = protocol.Preparation(
            weight_version=push.name,
            weight_digest=push.stored.digest,
            model_path=os.fspath(push.stored) if is_shared else None,
            writer=push.options.writer,
            difference=difference,
            keep=push.options.delta,
            hand_on=hands_on and not is_shared,
        )
        lease = protocol.lease_headers(push.options.pause_lease_secs)
        await self.update(protocol.PREPARE, preparation.body(), push.left(), headers=lease)

    async def _send(self, push: Push, files: list[pathlib.Path], hands_on: bool) -> None:
        """Gets the files to the server: from another one in the tree, around those that fail, or from here."""
        pieces: Mapping[str, protocol.Piece] = {}
        if hands_on:
            tree = push.sources(files)
            pieces = await push.stored.once(_pieces, *files)  # They are read once for all servers.
            while (source := tree.source(self.address)) is not None:
                push.check_wanted()
                left = push.left()
                fetch = protocol.Fetch(
                    weight_version=push.name, source=source, files=pieces, timeout_secs=left
                )
                try:
                    await self.post(protocol.FETCH, fetch.body(), left)
                    return
                except ServerError as error:
                    if error.status != protocol.NO_SOURCE:
                        raise
                    tree.fail(source)
                    log.warning("%s: goes around %s: %s", self.address, source, error.reason)
        for file in files:
            push.check_wanted()
            sha256 = pieces[file.name].sha256 if pieces else None
            headers = {protocol.SHA256_HEADER: sha256} if sha256 else {}
            call = ("PUT", self.address, protocol.file_route(push.name, file.name))
            with open(file, "rb") as stream:  # In chunks.
                await self.client.call(*call, stream, push.left(), is_control=True, headers=headers)


class Embedded(Intake):
    """One server of this project."""

    WAYS: ClassVar = {
        "disk": (protocol.UPDATE_FROM_DISK,),
        "stream": (protocol.UPDATE_FROM_UPLOAD,),
    }
    verifies_itself = True
    ends_pauses = True

    @classmethod
    def recognises(cls, info: Mapping[str, Any]) -> bool:
        """It alone reports the digest of its weights."""
        return protocol.WEIGHT_DIGEST in info

    async def hold(self, push: Push) -> None:
        """Gives the server a version; see `port.Kind`."""
        if push.stored.is_adapter and not self.info.get("lora") and push.options.way in self.WAYS:
            raise push.error("takes no adapters")
        await super().hold(push)

    async def disk(self, push: Push) -> None:
        """The server reads the version from a directory that it can see."""
        verify = await self.verification(push)
        digest = await self.prepare(push, is_shared=True)
        async with push.paused(self, verify) as name:
            await self.update_from_disk(push, name, writer=push.options.writer, digest=digest)

    async def verification(self, push: Push) -> Callable[[], Awaitable[None]]:
        return functools.partial(self._verify, push)

    async def _verify(self, push: Push) -> None:
        """Raises ServerError where it holds other weights than the version's."""
        said, wanted = (
            (await self.verify_name(push)).get(protocol.WEIGHT_DIGEST),
            push.stored.digest,
        )
        if said != wanted:
            path = os.fspath(push.stored)
            reason = f"holds weights with digest {said}, the manifest of {path} says {wanted}"
            raise ServerError(self.address, self.INFO, reason, retryable=False)

    async def check_adapters(self, checks: Checks) -> None:
        """Compares the adapters that it was started for."""
        if "lora" not in self.info:
            raise checks.unfit(
                self.INFO,
                "it takes no adapters, as SGLang-JAX does not: use SGLang or embedded servers, or model.lora.rank = 0",
            )
        found = self.info["lora"] or {}
        for key in ("rank", "alpha", "targets", "base_dtype"):
            has, want = found.get(key), getattr(checks.expected.adapters, key)
            if has != (list(want) if key == "targets" else want):
                raise checks.unfit(self.INFO, f"its model.lora.{key} is {has}, the run's is {want}")


def _pieces(stored: StoredVersion, *files: pathlib.Path) -> dict[str, protocol.Piece]:
    return {file.name: protocol.Piece.of(file) for file in files}


_SUFFIXES = (".json", ".safetensors")  # of a version's own files
