"""Differences: of two versions of the same layout, the changed elements of every tensor; lossless.

    8 bytes   MAGIC
    8 bytes   length of the header, little-endian
    header    zlib of JSON: {"base", "digest": of the versions, "manifest": text of the new version's manifest,
              "files": {name: bytes}, "tensors": [{file, start, item, count, changed, packed: [[codec, bytes], …]}]}
    data      of the tensors, in their order

An element is an unsigned integer of its dtype's size. Its change is new − old, modulo 2ⁿ, zigzag: of weights after a
small step it is small, so its high bytes are mostly zero. Where at most half of the elements changed, the gaps between
their positions come first, as 32-bit integers. Gaps and changes are stored byte plane by byte plane, each as it is or
by zlib, whichever is shorter.

A server applies it to a copy of the base's files that is its own; the loader then compares every tensor with the new
manifest, as it does for any version, so a wrong base or an altered difference is refused. Imports NumPy alone, so that
the environment of another server can use it.
"""

import json
import math
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO, Literal

import numpy as np

from jaxrl_async.versions import layout

MAGIC = b"jaxrldif"
SUFFIX = ".difference"
# Of the version's bytes; a longer difference saves too little to be worth its computation.
MAX_SHARE = 0.8
_MAX_HEADER_BYTES = 256 << 20
_SAMPLE_BYTES = 64 << 10  # of a plane, to see whether zlib makes it shorter
_MAX_SPARSE = 0.5  # share of changed elements up to which their positions are stored
# The errors of a reader of a difference that was altered.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, zlib.error)


class DifferenceError(ValueError):
    """A difference that cannot be made or applied; the full version is the way then."""


def write(base: str | os.PathLike, version: str | os.PathLike) -> pathlib.Path:
    """Writes the difference of a version's directory from that of another, into the former.

    Returns:
      its file, "from-BASE.difference".

    Raises:
      DifferenceError: their tensors differ in more than values, or it would be longer than MAX_SHARE of the version.
      OSError, ValueError: a file is missing or damaged.
    """
    base, version = pathlib.Path(base), pathlib.Path(version)
    manifest = (version / layout.MANIFEST).read_text("utf-8")
    old, new = _entries(base), _entries(version)
    if _places(old) != _places(new) or _others(base) != _others(version):
        raise DifferenceError(f"{base} and {version} differ in more than the values of tensors")
    total = sum(entry.num_bytes for entry in new.values())
    tensors, data, num_bytes = [], [], 0
    for name, entry in new.items():
        count, item = _shape_of(entry)
        place = {"file": entry.file.name, "start": entry.start, "item": item, "count": count}
        changed, planes = _changes(_view(old[name], "r"), _view(entry, "r"))
        packed = [_pack(plane) for plane in planes]
        table = [[codec, len(plane)] for codec, plane in packed]
        tensors.append(place | {"changed": changed, "packed": table})
        data += [plane for _, plane in packed]
        num_bytes += sum(len(plane) for _, plane in packed)
        if num_bytes > MAX_SHARE * total:
            raise DifferenceError(f"{version} differs from {base} by more than {MAX_SHARE:g} of it")
    header = {
        "base": _digest(base),
        "digest": _digest(version),
        "manifest": manifest,
        "files": {file.name: file.stat().st_size for file in _shards(version)},
        "tensors": tensors,
    }
    encoded = zlib.compress(json.dumps(header, separators=(",", ":")).encode())
    target = version / f"from-{base.name}{SUFFIX}"
    aside = target.with_suffix(".aside")
    with open(aside, "wb") as stream:
        stream.write(MAGIC + len(encoded).to_bytes(8, "little") + encoded)
        stream.writelines(data)
    aside.rename(target)
    return target


def apply(
    file: str | os.PathLike, directory: pathlib.Path, *, base: str | None, digest: str
) -> None:
    """Turns the files of a version into those of another, which nobody has verified yet.

    Args:
      file: of the difference.
      directory: of the files, which are the caller's own.
      base, digest: of the manifests of the version that they are of, and of the one that it must lead to.

    Raises:
      DifferenceError: it is of another base, to another version, or damaged. The files may be neither's then.
    """
    try:
        with open(file, "rb") as stream:
            header = _read_header(stream)
            if base is None or header["base"] != base or header["digest"] != digest:
                raise DifferenceError(
                    f"it leads from {header['base']} to {header['digest']}, "
                    f"the copy is of {base}, the push of {digest}"
                )
            for name, num_bytes in header["files"].items():
                if (directory / os.path.basename(name)).stat().st_size != num_bytes:
                    raise DifferenceError(f"{name} has another size here")
            for tensor in header["tensors"]:
                _patch(directory, tensor, stream)
            (directory / layout.MANIFEST).write_text(header["manifest"], "utf-8")
    except DifferenceError as error:
        raise DifferenceError(f"{file}: {error}") from None
    except _DAMAGED as error:
        raise DifferenceError(f"{file}: {type(error).__name__}: {error}") from error


def _changes(old: np.ndarray, new: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """The number of changed elements, and the byte planes of gaps and changes, or of the changes of all elements."""
    at = np.flatnonzero(old != new)
    if not len(at):
        return 0, []
    is_dense = len(at) > _MAX_SPARSE * len(new)
    if is_dense or (gaps := np.diff(at, prepend=0)).max() >= 1 << 32:
        return len(new), _planes(_zigzag(new - old))
    return len(at), _planes(gaps.astype(np.uint32)) + _planes(_zigzag(new[at] - old[at]))


def _patch(directory: pathlib.Path, tensor: Mapping[str, Any], stream: BinaryIO) -> None:
    count, item, changed = (int(tensor[key]) for key in ("count", "item", "changed"))
    if not 0 <= changed <= count:
        raise DifferenceError(f"{changed} of {count} elements changed")
    if not changed:
        return
    sparse = changed < count
    lengths = [changed] * ((4 if sparse else 0) + item)
    if len(tensor["packed"]) != len(lengths):
        raise DifferenceError(f"{len(tensor['packed'])} planes instead of {len(lengths)}")
    planes = [
        _unpack(stream.read(num_bytes), codec, length)
        for (codec, num_bytes), length in zip(tensor["packed"], lengths, strict=True)
    ]
    file = directory / os.path.basename(tensor["file"])
    entry = layout.TensorEntry(file, f"U{8 * item}", (count,), int(tensor["start"]), count * item)
    if entry.start < 8 or entry.start + entry.num_bytes > file.stat().st_size:
        raise DifferenceError(f"a tensor lies outside {file.name}")
    view = _view(entry, "r+")
    if not sparse:
        view += _unzigzag(_join(planes))
    else:
        at = np.cumsum(_join(planes[:4]), dtype=np.int64)
        if at[-1] >= count or (changed > 1 and (at[1:] <= at[:-1]).any()):
            raise DifferenceError(f"positions up to {at[-1]} of {count} elements")
        view[at] += _unzigzag(_join(planes[4:]))


def _view(entry: layout.TensorEntry, mode: Literal["r", "r+"]) -> np.ndarray:
    """The elements of a tensor as unsigned integers, a map of its file."""
    count, item = _shape_of(entry)
    mapped = np.memmap(entry.file, np.uint8, mode, offset=entry.start, shape=entry.num_bytes)
    return np.ndarray((count,), f"<u{item}", buffer=mapped)


def _shape_of(entry: layout.TensorEntry) -> tuple[int, int]:
    """(elements, bytes of one)."""
    count = math.prod(entry.shape)
    if not count or entry.num_bytes % count or entry.num_bytes // count not in (1, 2, 4, 8):
        raise DifferenceError(f"a tensor of {entry.dtype} {entry.shape} has no difference")
    return count, entry.num_bytes // count


def _zigzag(change: np.ndarray) -> np.ndarray:
    """0, −1, 1, −2, … as 0, 1, 2, 3, …"""
    signed = change.view(change.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * change.itemsize - 1))).view(change.dtype)


def _unzigzag(coded: np.ndarray) -> np.ndarray:
    one = coded.dtype.type(1)
    return (coded >> one) ^ (np.zeros_like(coded) - (coded & one))


def _planes(array: np.ndarray) -> list[np.ndarray]:
    """The first bytes of all elements, then the second ones, …, least significant first."""
    table = array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8)
    return list(np.ascontiguousarray(table.reshape(-1, array.itemsize).T))


def _join(planes: list[np.ndarray]) -> np.ndarray:
    table = np.ascontiguousarray(np.stack(planes, axis=1))
    return table.view(f"<u{len(planes)}").reshape(-1)


def _pack(plane: np.ndarray) -> tuple[str, bytes]:
    raw = plane.tobytes()
    sample = raw[:_SAMPLE_BYTES]
    if len(zlib.compress(sample, 1)) < 0.9 * len(sample):
        packed = zlib.compress(raw, 1)
        if len(packed) < len(raw):
            return "zlib", packed
    return "raw", raw


def _unpack(data: bytes, codec: str, length: int) -> np.ndarray:
    if codec == "zlib":
        data = zlib.decompressobj().decompress(data, length + 1)
    elif codec != "raw":
        raise DifferenceError(f"unknown codec {codec!r:.20}")
    if len(data) != length:
        raise DifferenceError(f"a plane of {len(data)} bytes instead of {length}; truncated?")
    return np.frombuffer(data, np.uint8)


def _read_header(stream: BinaryIO) -> dict[str, Any]:
    magic, length = stream.read(8), int.from_bytes(stream.read(8), "little")
    if magic != MAGIC or not 0 < length <= _MAX_HEADER_BYTES:
        raise DifferenceError("no difference")
    unpacked = zlib.decompressobj().decompress(stream.read(length), _MAX_HEADER_BYTES)
    return json.loads(unpacked)


def _entries(directory: pathlib.Path) -> dict[str, layout.TensorEntry]:
    headers = map(layout.read_header, _shards(directory))
    return {name: entry for header in headers for name, entry in header.items()}


def _places(entries: Mapping[str, layout.TensorEntry]) -> list[tuple]:
    return [(name, e.file.name, e.dtype, e.shape, e.start) for name, e in entries.items()]


def _shards(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(directory.glob("*.safetensors"))


def _others(directory: pathlib.Path) -> dict[str, bytes]:
    """The config and the index, which a difference leaves as they are."""
    return {f.name: f.read_bytes() for f in directory.glob("*.json") if f.name != layout.MANIFEST}


def _digest(directory: pathlib.Path) -> str:
    return str(json.loads((directory / layout.MANIFEST).read_text("utf-8"))["digest"])
