"""The one type of a version: `store.StoredVersion` in files, `memory.MemoryVersion` in this process's memory."""

from typing import Protocol


class Version(Protocol):
    """A version of the weights, wherever it is. Its transport knows which of the two it takes."""

    @property
    def version(self) -> int:
        """Its number, ≥ 0."""
        ...

    @property
    def digest(self) -> str | None:
        """The digest of its manifest; None of one in memory."""
        ...

    @property
    def total_bytes(self) -> int:
        """The size of its files or arrays."""
        ...
