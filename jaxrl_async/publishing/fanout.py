"""The tree in which servers hand a version on: `width` get it from the learner, and each gives it to `width` others.

Servers take their places in the order in which their pushes begin. A server that failed as a source is no longer one:
those below it ask the one above it, and at last the learner.
"""

import pathlib
import weakref
from collections.abc import Sequence

from jaxrl_async.versions.store import StoredVersion

# Version → names of files → the tree in which they travel.
_TREES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Tree:
    """The places of servers for one set of files. Use within one event loop."""

    def __init__(self, width: int):
        """`width`: ≥ 1; 1 is a chain."""
        self._width = width
        self._places: dict[str, int] = {}
        self._servers: list[str] = []
        self._failed: set[str] = set()

    def source(self, address: str) -> str | None:
        """The server from which this one gets the files; None: from the learner."""
        if address not in self._places:
            self._places[address] = len(self._servers)
            self._servers.append(address)
        place = self._places[address]
        while (place := place // self._width - 1) >= 0:
            if self._servers[place] not in self._failed:
                return self._servers[place]
        return None

    def fail(self, address: str) -> None:
        """Takes a server out as a source."""
        self._failed.add(address)


def shared(version: StoredVersion, files: Sequence[pathlib.Path], width: int) -> Tree:
    """The tree of these files of a version, the same for all servers that get them."""
    trees = _TREES.setdefault(version, {})
    return trees.setdefault(tuple(sorted(file.name for file in files)), Tree(width))
