"""Versions in this process's memory, in the place of a WeightStore: no file is written, and nothing is copied."""

import contextlib
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryVersion:
    """One version: a `Version`."""

    version: int
    params: Any  # a tree of arrays on the device
    total_bytes: int
    digest: None = None  # Nothing is read back, so there is nothing to compare.


class MemoryStore:
    """The last versions."""

    def __init__(self, *, keep: int):
        """`keep`: number of versions, ≥ 1. What an engine still holds lives on with it."""
        self._keep = keep
        self._versions: dict[int, MemoryVersion] = {}

    def put(self, version: int, params: Any, total_bytes: int) -> None:
        """Keeps a version, and forgets those before the last `keep`."""
        self._versions[version] = MemoryVersion(version, params, total_bytes)
        for old in self.versions()[: -self._keep]:
            del self._versions[old]

    def versions(self) -> list[int]:
        """The versions that are there, ascending."""
        return sorted(self._versions)

    def get(self, version: int) -> MemoryVersion:
        """A version that is there."""
        return self._versions[version]

    def pin(self, version: int) -> contextlib.AbstractContextManager[None]:
        """Does nothing: who holds a version keeps it."""
        return contextlib.nullcontext()
