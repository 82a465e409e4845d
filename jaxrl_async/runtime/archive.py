"""The workdir of a finished run in the bucket of its checkpoints, as one file, which is there whole or not at all."""

import pathlib
import tarfile

import fsspec

from jaxrl_async.config.fields import StartError
from jaxrl_async.runtime.workdir import reached

NAME = "workdir-{step}.tar.gz"  # until this step
# What a run makes anew, and keys.
_STAYS = ("weights", "keys", "roles.json", "scrape", "pod", "servers")


def sync(workdir: pathlib.Path, directory: str, step: int) -> str:
    """Copies the workdir of a finished run to its bucket, or one from there to a workdir without a config.json.

    A copy that was cut short counts as none: config.json is the last file of it.

    Returns:
      A sentence on what was copied; "" where both are there already.

    Raises:
      ValueError: the bucket cannot be read or written; names the remedy.
    """
    try:
        with reached(directory):
            place = f"{directory}/{NAME.format(step=step)}"
            store, path = fsspec.url_to_fs(place)
            is_here, is_there = (workdir / "config.json").exists(), store.exists(path)
            if is_here and not is_there:
                found = [p for p in workdir.iterdir() if p.name not in _STAYS and p.name[0] != "."]
                found.sort(key=lambda p: p.name == "config.json")
                with store.transaction, store.open(path, "wb") as file:  # An error discards it.
                    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
                        for part in found:
                            tar.add(part, part.name)
                return f"{workdir} is copied to {place}"
            if is_there and not is_here:
                with store.open(path, "rb") as file:
                    with tarfile.open(fileobj=file, mode="r|gz") as tar:
                        tar.extractall(workdir, filter="data")
                return f"{workdir} is that of {place}"
            return ""
    except StartError as error:
        raise ValueError(
            f"the run is done, its workdir not copied; --resume copies it: {error}"
        ) from error
