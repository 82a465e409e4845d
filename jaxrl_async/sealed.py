"""JSON objects with a checksum: a file of the workdir that was altered is named, and not taken for what was written.

A seal is the key "crc", the CRC-32 of the other keys and values. An object without one, of an earlier version or
written by hand, is read as it is. Independent of the files' contents.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TextIO

SEAL = "crc"
CONFIG_REMEDY = f"mend it, or delete it and resume with a --config; of a change of your own, delete the key {SEAL!r}"


class DamagedError(ValueError):
    """A file that is not as it was written; the message names it, the damage and the remedy."""


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its seal."""
    return {**values, SEAL: _crc(values)}


def unsealed(found: Any) -> dict[str, Any]:
    """The object without its seal. Raises ValueError: it is no object, or its seal is of another one."""
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}")
    values = {name: value for name, value in found.items() if name != SEAL}
    if SEAL in found and found[SEAL] != (crc := _crc(values)):
        raise ValueError(f"its checksum is {crc}, its key {SEAL!r} says {found[SEAL]}")
    return values


def write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes an object with its seal, as of `replace`."""
    replace(path, json.dumps(sealed(values), indent=2))


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file; who reads it meanwhile has the one before, in full."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read(path: pathlib.Path, *, remedy: str, keys: Collection[str] = (), kind: type = dict) -> Any:
    """The object in a file, or with `kind` list its objects, without seals.

    Args:
      remedy: what is to be done about a damage, for the message.
      keys: that every object has.

    Raises:
      DamagedError: it cannot be read, or is not as it was written.
    """
    try:
        found = _content(path.read_text("utf-8"))
        if not isinstance(found, kind):
            raise ValueError(f"expected a JSON {kind.__name__}, got {type(found).__name__}")
        for one in found if kind is list else [found]:
            if missing := sorted(set(keys) - one.keys()):
                raise ValueError(f"it has no {missing[0]!r}")
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} is damaged: {error}; {remedy}") from error
    return found


def open_lines(path: pathlib.Path) -> TextIO:
    """Opens a file to append lines: on a fresh one, as a process that died, or a full disk, may have left a half."""
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read() == b"\n" else b"\n")
    return open(path, "a", encoding="utf-8")


def lines(path: pathlib.Path, say: Callable[[str], None]) -> Iterator[Any]:
    """The JSON of each complete line of a file, without the seals of its objects; nothing without a file.

    Args:
      say: gets a sentence for each line that is damaged, and left out.
    """
    # What follows the last newline is still being written.
    content = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(content, start=1):
        try:
            yield _content(line)
        except ValueError as error:
            say(f"{path}:{number} is damaged, and left out: {error}")


def _content(text: str | bytes) -> Any:
    found = json.loads(text)
    return [unsealed(one) for one in found] if isinstance(found, list) else unsealed(found)


def _crc(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
