"""The part of SGLang and vLLM that is the same: they verify nothing themselves, and hold several adapters.

Weights have no version's name until the checksums of their tensors are compared. A request names the newest adapter,
and keeps it.
"""

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, ClassVar

from jaxrl_async.servers.completions import read_version
from jaxrl_async.servers.kinds import checksums
from jaxrl_async.servers.kinds.base import HttpKind
from jaxrl_async.servers.port import Push, ServerError
from jaxrl_async.versions import protocol

MODELS = "/v1/models"


class Compared(HttpKind):
    """A server whose tensors are compared with a version's, by their checksums."""

    CHECKSUMS: ClassVar[str]  # the route that tells them
    _settings: Mapping[str, Any] | None = None  # as of its last start

    async def settings(self, *, timeout_secs: float) -> dict[str, Any]:
        """Its settings, "device", "tp_size" and "dtype" among them."""
        raise NotImplementedError

    async def checksums(
        self, *, timeout_secs: float, names: Collection[str] = (), skipped: Collection[str] = ()
    ) -> dict[str, str]:
        """A hash of each tensor of its first rank, by its own (fused) names: first 8 bytes of the SHA-256, in hex.

        Args:
          timeout_secs: bound on the call.
          names: of a part of them; () for all.
          skipped: the names of the others.
        """
        raise NotImplementedError

    async def load_adapter(self, name: str, *, path: str, timeout_secs: float) -> None:
        """Gives it one more adapter, from a directory in PEFT's layout that it can see."""
        raise NotImplementedError

    async def unload_adapter(self, name: str, *, timeout_secs: float) -> None:
        """Removes an adapter."""
        raise NotImplementedError

    async def rename(self, name: str, *, timeout_secs: float) -> None:
        """Renames the weights that it holds. Earlier tokens keep their name."""
        raise NotImplementedError

    def digests_parts(self, settings: Mapping[str, Any]) -> bool:
        """Whether it can hash a part of its tensors."""
        return True

    async def settings_of(self, push: Push) -> Mapping[str, Any]:
        """Its settings, asked for at the first push after each of its starts."""
        if self._settings is None or push.is_first:
            self._settings = await self.settings(timeout_secs=push.left())
        return self._settings

    async def verification(self, push: Push) -> Callable[[], Awaitable[None]]:
        """Computes the checksums of a version while the server still samples; returns their comparison.

        It raises ServerError where the server holds other weights; else these get the version's name.
        """
        settings = await self.settings_of(push)
        expected = await checksums.expect(
            self.address, push.stored, settings, timeout_secs=push.left()
        )
        part, asked = expected, {}
        if not push.compares_all and self.digests_parts(settings):
            part = checksums.part_of(expected, push.files.version)
            asked = {"names": sorted(part.names), "skipped": sorted(expected.names - part.names)}

        async def verify() -> None:
            found = await self.checksums(timeout_secs=push.left(), **asked)
            # It reads the versions beside the expected one.
            reason = await asyncio.to_thread(checksums.difference, found, part)
            if reason is not None:
                raise ServerError(self.address, self.CHECKSUMS, reason, retryable=False)
            await self.rename(push.name, timeout_secs=push.left())
            await self.verify_name(push)

        return verify

    # Adapters.

    async def add_adapter(
        self, push: Push, load: Callable[..., Awaitable[None]] | None = None
    ) -> None:
        """Gives the server one more adapter, which new requests then ask for, and removes old ones first.

        The name of the server's own weights becomes the adapter's: it tells the newest one, and a server that has
        restarted has another. `load`: another way than `load_adapter`'s.
        """
        load = load or functools.partial(self.load_adapter, path=os.fspath(push.stored))
        push.check_wanted()
        held = await self.adapters(timeout_secs=push.left())
        others = [other for other in held if other != push.name]
        for old in others[: max(len(others) - push.options.keep_adapters, 0)]:
            # Once no request uses it. SGLang takes no other adapter before.
            await self.unload_adapter(old, timeout_secs=push.left())
        if push.name not in held:  # A name has the same weights for ever.
            await load(push.name, timeout_secs=push.left())
        await self.rename(push.name, timeout_secs=push.left())
        await self.verify_name(push)

    async def adapters(self, *, timeout_secs: float) -> list[str]:
        """The names of the adapters that it holds, the one to remove first at the head."""
        answer = await self.get(MODELS, timeout_secs)
        with self.reading(MODELS):
            return [model["id"] for model in answer["data"] if model.get("parent")]

    async def newest_adapter(self, run_id: str, timeout_secs: float) -> tuple[str, float]:
        """The name of the adapter that it got last, and the seconds that are left of timeout_secs.

        Raises:
          ForeignVersionError: it has none of a push, as after its restart.
        """
        start = time.monotonic()
        name = (await self.report(timeout_secs=timeout_secs)).get(protocol.WEIGHT_VERSION)
        with self.reading(self.INFO):
            read_version(name, run_id)
        return str(name), max(timeout_secs - (time.monotonic() - start), 1e-3)
