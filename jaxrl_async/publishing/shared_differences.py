"""The difference that servers get in place of a version, where they have kept a base of it."""

import logging
import os
import pathlib

from jaxrl_async.versions import difference
from jaxrl_async.versions.store import StoredVersion, WeightStoreError, read_manifest

log = logging.getLogger(__name__)


def write(stored: StoredVersion, base: str) -> pathlib.Path | None:
    """Writes the difference of a version from one beside it in its store.

    Args:
      stored: of which a server is to get the difference.
      base: digest of the version that the server has kept.

    Returns:
      its file; None where the store has no such base, or the full version is the better way.
    """
    version = pathlib.Path(stored)
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
