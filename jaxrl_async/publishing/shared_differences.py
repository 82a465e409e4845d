"""The differences of a store's versions: each is computed once, for all servers that have kept its base."""

import asyncio
import logging
import os
import pathlib
import weakref

from jaxrl_async.versions import difference
from jaxrl_async.versions.store import StoredVersion, WeightStoreError, read_manifest

log = logging.getLogger(__name__)

# Version → digest of a base → the task that writes, or has written, the difference.
_WRITTEN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


async def shared(version: StoredVersion, base: str) -> pathlib.Path | None:
    """The file of the difference of a version from one beside it in its store.

    Args:
      version: of which a server is to get the difference.
      base: digest of the version that the server has kept.

    Returns:
      its file; None where the store has no such base, or the full version is the better way.
    """
    written = _WRITTEN.setdefault(version, {})
    if base not in written:
        path = pathlib.Path(version)
        written[base] = asyncio.create_task(asyncio.to_thread(_write, path, base))
    # One push that is cancelled leaves it to the others.
    return await asyncio.shield(written[base])


def _write(version: pathlib.Path, base: str) -> pathlib.Path | None:
    for other in sorted(version.parent.iterdir(), reverse=True):
        try:
            if not (other.name.isdecimal() and read_manifest(other)["digest"] == base):
                continue
            file = difference.write(other, version)
        except WeightStoreError:
            continue  # It is being removed.
        except (OSError, ValueError) as error:  # of DifferenceError's kind too
            log.info("%s goes to the servers in full: %s", version, error)
            return None
        num_bytes = sum(os.path.getsize(f) for f in version.glob("*.safetensors"))
        size = os.path.getsize(file)
        log.info("%s: %d bytes, %.3g of the version", file, size, size / num_bytes)
        return file
    return None
