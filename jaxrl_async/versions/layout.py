"""The bytes of a version: the layout of a safetensors file, the digests of its tensors, and who may give them.

Imports NumPy alone, so that the environment of another server can use it. The safetensors library, which the learner
reads checkpoints with, copies each tensor; here files are mapped, or read in pieces.

The format is https://github.com/huggingface/safetensors#format.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np


class Writers:
    """Which learner may give a server weights: the one of the newest generation, in each run."""

    def __init__(self):
        self._run_id, self._generation = "", 0

    def check(self, writer: Any) -> None:
        """Takes the learner of an update; None for one without a run, such as a tool.

        Raises:
          ValueError: it is no {"run_id": text, "generation": number}, or another learner has superseded it; the
            message names both generations.
        """
        if writer is None:
            return
        if not isinstance(writer, dict) or writer.keys() != {"run_id", "generation"}:
            raise ValueError(f"writer must have run_id and generation, got {writer!r:.80}")
        run_id, generation = writer["run_id"], writer["generation"]
        if not isinstance(run_id, str) or type(generation) is not int:
            raise ValueError(f"writer must have a text and a number, got {writer!r:.80}")
        if run_id == self._run_id and generation < self._generation:
            raise ValueError(
                f"learner generation {generation} of run {run_id} is superseded by generation {self._generation}"
            )
        self._run_id, self._generation = run_id, generation


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
    """SHA-256 over a line "name digest" of each tensor, sorted by name, in hex: "digest" of a manifest.

    Args:
      digests: of the tensors, by name.
    """
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array in C order; a view where it is contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
