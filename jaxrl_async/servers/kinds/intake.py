"""The way of a version in pieces: to a server that takes them while it samples, or to the sidecar before one."""

import logging
import os
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from jaxrl_async.servers.kinds.base import HttpKind
from jaxrl_async.servers.port import Pausable, Push, ServerError, ServerTimeoutError
from jaxrl_async.versions import protocol
from jaxrl_async.versions.store import StoredVersion

log = logging.getLogger(__name__)


class Intake(HttpKind):
    """A server that takes versions while it samples, itself or by its sidecar."""

    async def stream(self, push: Push) -> None:
        """Uploads the files of a version, without a shared file system, while the server samples."""
        verify = await self.verification(push)
        digest = await self.prepare(push, is_shared=False)
        async with push.paused(cast(Pausable, self), verify) as name:
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
        wanted = [file for file in every if file.suffix in _SUFFIXES]
        try:
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
                    is_late = isinstance(error, ServerTimeoutError)
                    if is_late or error.status == protocol.NO_SOURCE:
                        tree.fail(source)  # Where it drips, the next attempt goes around it.
                    if error.status != protocol.NO_SOURCE:
                        raise
                    log.warning("%s: goes around %s: %s", self.address, source, error.reason)
        for file in files:
            push.check_wanted()
            sha256 = pieces[file.name].sha256 if pieces else None
            headers = {protocol.SHA256_HEADER: sha256} if sha256 else {}
            call = ("PUT", self.address, protocol.file_route(push.name, file.name))
            with open(file, "rb") as stream:  # In chunks.
                await self.client.call(*call, stream, push.left(), is_control=True, headers=headers)


def _pieces(stored: StoredVersion, *files: pathlib.Path) -> dict[str, protocol.Piece]:
    return {file.name: protocol.Piece.of(file) for file in files}


_SUFFIXES = (".json", ".safetensors")  # of a version's own files
