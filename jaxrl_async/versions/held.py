"""Versions in this process's memory, in the place of a WeightStore: no file is written, and nothing is copied."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_async.publishing.transports import Pausing, always, check_wanted


@dataclasses.dataclass(frozen=True, eq=False)
class HeldVersion:
    """One version."""

    version: int
    params: Any  # a tree of arrays on the device
    num_bytes: int
    digest: None = None  # Nothing is read back, so there is nothing to compare.


class HeldStore:
    """The last versions."""

    def __init__(self, *, keep: int):
        """`keep`: number of versions, ≥ 1. What an engine still holds lives on with it."""
        self._keep = keep
        self._versions: dict[int, HeldVersion] = {}

    def put(self, version: int, params: Any, num_bytes: int) -> None:
        """Keeps a version, and forgets those before the last `keep`."""
        self._versions[version] = HeldVersion(version, params, num_bytes)
        for old in self.versions()[: -self._keep]:
            del self._versions[old]

    def versions(self) -> list[int]:
        """The versions that are there, ascending."""
        return sorted(self._versions)

    def path(self, version: int) -> HeldVersion:
        """A version that is there, for `hand_over`."""
        return self._versions[version]

    def pin(self, version: int) -> contextlib.AbstractContextManager[None]:
        """Does nothing: who holds a version keeps it."""
        return contextlib.nullcontext()


async def hand_over(
    client: Any,
    address: str,
    *,
    path: HeldVersion,
    version: int | str,
    mode: str,
    timeout_secs: float,
    is_wanted: Callable[[], bool] = always,
    pausing: Pausing = contextlib.nullcontext,
) -> None:
    """The transport to an engine in this process: by reference. Arguments and errors as of `FileTransport`.

    Args:
      client: an `inference.direct.DirectClient`.
      path: the version.
    """
    check_wanted(address, version, is_wanted)
    async with pausing():
        await client.take_weights(
            address, params=path.params, version=str(version), mode=mode, timeout_secs=timeout_secs
        )
