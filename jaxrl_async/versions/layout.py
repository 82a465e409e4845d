"""The bytes of a version: the layout of a safetensors file, the digests of its tensors, and their manifest.

Imports NumPy alone, so that the environment of another server can use it. The safetensors library, which the learner
reads checkpoints with, copies each tensor; here files are mapped, or read in pieces.

The format is https://github.com/huggingface/safetensors#format.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np

MANIFEST = "manifest.json"  # {"digest", "tensors": {name: {"digest", …}}, …}


class WeightsError(ValueError):
    """Weights that were refused; the message names the file, tensor or field."""


class NoRoomError(WeightsError):
    """Weights that do not fit on the device beside what is there."""


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor in a safetensors file."""

    file: pathlib.Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    num_bytes: int


def read_header(file: pathlib.Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by name, in the file's order.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is truncated, too long, or no safetensors file.
    """
    num_bytes = file.stat().st_size
    with open(file, "rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        if not 8 < start <= num_bytes:
            raise ValueError(f"{file}: {num_bytes} bytes do not hold its header; truncated?")
        try:
            header = json.loads(stream.read(start - 8))
        except ValueError as error:
            raise ValueError(f"{file}: the safetensors header is not JSON: {error}") from error
    header.pop("__metadata__", None)
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != num_bytes:
        raise ValueError(f"{file}: has {num_bytes} bytes, its header says {end}; truncated?")
    entries = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if not 0 <= first <= last:
            raise ValueError(f"{file}: tensor {name} has the offsets {first} to {last}")
        shape = tuple(entry["shape"])
        entries[name] = TensorEntry(file, entry["dtype"], shape, start + first, last - first)
    return entries


def tensor_digest(array: np.ndarray) -> str:
    """SHA-256 of a tensor's bytes in C order, in hex."""
    return hashlib.sha256(raw(array)).hexdigest()


def version_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 over a line "name digest" of each tensor, sorted by name, in hex: "digest" of a manifest."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def check_manifest(directory: str | os.PathLike, digests: Mapping[str, str]) -> None:
    """Compares tensors with the manifest beside them, where there is one: what the writer wrote.

    Raises:
      ValueError: they differ in a name or a digest.
      OSError, KeyError, TypeError, AttributeError: it is no manifest.
    """
    file = pathlib.Path(directory) / MANIFEST
    if not file.exists():
        return
    manifest = json.loads(file.read_bytes())
    said = {name: entry["digest"] for name, entry in manifest["tensors"].items()}
    if odd := sorted(said.keys() ^ digests.keys()):
        where = "manifest" if odd[0] in said else "files"
        raise ValueError(f"{file}: tensor {odd[0]} is in the {where} only ({len(odd)} such)")
    for name, found in digests.items():
        if found != said[name]:
            what = f"{file}: tensor {name} has digest {found}"
            raise ValueError(f"{what}, its manifest says {said[name]}")
    if manifest.get("digest", total := version_digest(digests)) != total:
        raise ValueError(f"{file}: the digest is {total}, the manifest says {manifest['digest']}")


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order; a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
