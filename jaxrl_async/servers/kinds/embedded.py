"""The servers of this project: the embedded one, and SGLang-JAX behind this project's routes.

They verify a version by the digest of its manifest, and load it beside the one that they serve.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from jaxrl_async.servers.kinds.checks import Checks
from jaxrl_async.servers.kinds.intake import Intake
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import Push, ServerError
from jaxrl_async.versions import protocol


class Embedded(Intake, SglangApi):
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
        async def verify() -> None:
            said = (await self.verify_name(push)).get(protocol.WEIGHT_DIGEST)
            if said != (wanted := push.stored.digest):
                path = os.fspath(push.stored)
                reason = f"holds weights with digest {said}, the manifest of {path} says {wanted}"
                raise ServerError(self.address, self.INFO, reason, retryable=False)

        return verify

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
