"""A server's own copy of a version's files, to which differences are applied. It knows no engine."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shutil
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl_async.versions import difference
from jaxrl_async.versions.difference import DifferenceError


@dataclasses.dataclass(frozen=True)
class Source:
    """The place that a preparation reads a version from."""

    directory: pathlib.Path
    difference: str = ""  # file in it; "": the version in full
    is_kept: bool = False  # as the base of later differences
    is_upload: bool = False  # the server's own, to be moved rather than copied


class Copy:
    """The files of one version, which a difference turns into the next one."""

    def __init__(self, root: str | os.PathLike):
        """`root`: an empty directory of the server's own."""
        self.path = pathlib.Path(root) / "copy"
        # of the version that it holds, verified; None: it holds none
        self.digest: str | None = None
        self._lock = threading.Lock()  # A thread whose caller is gone still works on the files.

    async def load(
        self, source: Source, digest: str, read: Callable[[pathlib.Path], Awaitable[Any]]
    ) -> Any:
        """Reads a version: by the copy, where the source is a difference or is to be kept.

        Args:
          source, digest: of the version, and of its manifest.
          read: reads and verifies a directory; returns weights with a digest.

        Raises:
          DifferenceError: the difference does not lead from the copy to the version; the copy is gone then.
          Exception: of `read`.
        """
        if not (source.difference or source.is_kept):
            return await read(source.directory)
        try:
            if source.difference:
                await asyncio.to_thread(self.patch, source.directory / source.difference, digest)
            else:
                await asyncio.to_thread(self._take, source)
            weights = await read(self.path)
        except BaseException as error:
            if source.is_upload and not source.difference:
                with contextlib.suppress(OSError):  # A new upload has begun there.
                    self.path.rename(source.directory)  # A load in the pause reads it.
            self.drop()
            if source.difference and isinstance(error, ValueError):
                raise DifferenceError(str(error)) from error
            raise
        self.digest = weights.digest if weights.digest == digest else None
        return weights

    def patch(self, file: str | os.PathLike, digest: str) -> None:
        """Applies a difference that must lead to this digest; errors as of `difference.apply`."""
        with self._lock:
            held, self.digest = self.digest, None
            try:
                difference.apply(file, self.path, base=held, digest=digest)
            except DifferenceError:
                self.drop()
                raise

    def drop(self) -> None:
        """Removes the copy."""
        self.digest = None
        shutil.rmtree(self.path, ignore_errors=True)

    def _take(self, source: Source) -> None:
        with self._lock:
            self.drop()
            if source.is_upload:
                source.directory.rename(self.path)
            else:
                ignore = shutil.ignore_patterns(f"*{difference.SUFFIX}", "*.aside")
                shutil.copytree(source.directory, self.path, ignore=ignore)
