"""Checks of a checkpoint in Hugging Face's layout that need its files alone.

Every byte is read, in pieces: SGLang-JAX loads the files itself afterwards. This runs in SGLang-JAX's environment,
which has no protobuf, gRPC or flax of this project's versions.
"""

import hashlib
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_async.versions.layout import TensorEntry, WeightsError, check_manifest, read_header

_CHUNK_BYTES = 4 << 20
# safetensors dtype → bits of an element as an integer, and those of its exponent: all ones is inf or NaN.
_EXPONENTS = {
    "F64": (np.dtype(np.uint64), 0x7FF0_0000_0000_0000),
    "F32": (np.dtype(np.uint32), 0x7F80_0000),
    "F16": (np.dtype(np.uint16), 0x7C00),
    "BF16": (np.dtype(np.uint16), 0x7F80),
}
# Fields of a config.json that do not change what the weights compute.
_UNDECIDING = {
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "pad_token_id",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def check_checkpoint(directory: str | os.PathLike, served: Mapping[str, Any]) -> dict[str, str]:
    """Reads every byte of a checkpoint in Hugging Face's layout, and checks all that files alone can tell.

    Args:
      directory: holds *.safetensors; its config.json, index and manifest.json are checked if present.
      served: the content of the served model's config.json.

    Returns:
      sha256 in hex by tensor name.

    Raises:
      WeightsError: missing, truncated, altered, of another architecture, or not finite.
    """
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory")
    try:
        _check_config(directory, served)
        tensors = read_headers(directory)
        _check_index(directory, tensors)
        digests = {name: digest(name, entry) for name, entry in tensors.items()}
        check_manifest(directory, digests)
    except WeightsError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # The last three: JSON that is well formed and not what it should be.
        raise WeightsError(f"{directory}: {type(error).__name__}: {error}") from error
    return digests


def read_headers(directory: pathlib.Path) -> dict[str, TensorEntry]:
    """Every tensor of every *.safetensors file of a directory, by name.

    Raises:
      ValueError: no file, one that is truncated or no safetensors file, or a name in two files.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"no *.safetensors file in {directory}")
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in _entries(file).items():
            if name in tensors:
                raise WeightsError(f"{file}: tensor {name} stands in {tensors[name].file.name} too")
            tensors[name] = entry
    return tensors


def digest(name: str, entry: TensorEntry) -> str:
    """sha256 in hex of a tensor's bytes. Raises WeightsError: a number that is not finite, or the file ends early."""
    bits, exponent = _EXPONENTS[entry.dtype]
    sha, buffer, left = hashlib.sha256(), bytearray(_CHUNK_BYTES), entry.num_bytes
    with open(entry.file, "rb") as stream:
        stream.seek(entry.start)
        while left:
            chunk = memoryview(buffer)[: min(left, _CHUNK_BYTES)]
            if stream.readinto(chunk) != len(chunk):
                raise WeightsError(f"{entry.file}: ends within tensor {name}")
            sha.update(chunk)
            if ((np.frombuffer(chunk, bits) & exponent) == exponent).any():
                raise WeightsError(f"{entry.file}: tensor {name} holds a number that is not finite")
            left -= len(chunk)
    return sha.hexdigest()


def identity(directory: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """What changes when a *.safetensors file of the directory is written or replaced."""
    stats = {file.name: file.stat() for file in pathlib.Path(directory).glob("*.safetensors")}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}


def _entries(file: pathlib.Path) -> dict[str, TensorEntry]:
    entries = read_header(file)
    for name, entry in entries.items():
        if entry.dtype not in _EXPONENTS:
            known = ", ".join(_EXPONENTS)
            raise WeightsError(f"{file}: tensor {name} is {entry.dtype}, not one of {known}")
        num_bytes = math.prod(entry.shape) * _EXPONENTS[entry.dtype][0].itemsize
        if num_bytes != entry.num_bytes:
            raise WeightsError(
                f"{file}: tensor {name} has {entry.num_bytes} bytes, not those of {entry.shape} {entry.dtype}"
            )
    return entries


def _check_config(directory: pathlib.Path, served: Mapping[str, Any]) -> None:
    """Shapes alone do not tell one rope_theta or norm from another."""
    file = directory / "config.json"
    if not file.exists():
        return
    found, wanted = deciding_fields(read_json(file)), deciding_fields(served)
    differ = [
        f"{name} {found[name]!r} (the served model's is {wanted[name]!r})"
        for name in sorted(found.keys() & wanted.keys())
        if found[name] != wanted[name]
    ]
    if differ:
        raise WeightsError(f"{file} is of another model: {', '.join(differ)}")


def deciding_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that decide what the weights compute, in one form.

    transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters and prefers rope_scaling; defaults are
    left out by some.
    """
    fields = {k: v for k, v in config.items() if k not in _UNDECIDING and v is not None}
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    fields["rope"] = (float(theta), kind, {} if kind == "default" else rope)
    fields.setdefault("tie_word_embeddings", False)
    if heads := config.get("num_attention_heads"):
        fields.setdefault("num_key_value_heads", heads)
        fields.setdefault("head_dim", config.get("hidden_size", 0) // heads)
    return fields


def _check_index(directory: pathlib.Path, tensors: Mapping[str, TensorEntry]) -> None:
    file = directory / "model.safetensors.index.json"
    if not file.exists():
        return
    for name, shard in read_json(file)["weight_map"].items():
        if name not in tensors or tensors[name].file.name != shard:
            raise WeightsError(f"{file}: tensor {name} is not in {shard}")


def read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise WeightsError(f"{file} is not JSON: {error}") from error
