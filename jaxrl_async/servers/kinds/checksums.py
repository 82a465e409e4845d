"""SGLang's checksums of a version: a hash of each tensor, under SGLang's names, some of them fused."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_async.servers.port import ServerError
from jaxrl_async.versions import layout
from jaxrl_async.versions import store as weight_store

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The checksums that an SGLang server should have once it holds a version."""

    path: str
    names: frozenset[str]  # of the tensors, SGLang's
    # By name; None where the server hashes by a GPU kernel, or shards: only names are compared then.
    checksums: Mapping[str, str] | None
    dtype: str | None = None  # that the server computes in


async def expect(
    address: str,
    files: weight_store.StoredVersion,
    settings: Mapping[str, Any],
    *,
    timeout_secs: float,
) -> Expected:
    """Computes, before a push, the checksums that `compare` takes after it.

    The values can be compared where SGLang hashes on the CPU and a tensor lies on one rank. A warning says once where
    they cannot; they are not computed then. Pushes of one version compute them once.

    Args:
      settings: the server's /server_info.
      timeout_secs: bound on the computation.

    Raises:
      ServerError: the files differ from their manifest, or it took too long.
    """
    device, tp_size, dtype = (settings.get(key) for key in ("device", "tp_size", "dtype"))
    names = frozenset(fused_names(files.names()))
    if device != "cpu" or tp_size != 1:
        _warn_once(
            f"{address}: only the names of tensors are verified: their hashes on device {device!r} "
            f"with tp_size {tp_size} cannot be computed here; watch mismatch/mean_abs"
        )
        return Expected(os.fspath(files), names, None)
    try:
        async with asyncio.timeout(timeout_secs):
            found = await files.once(checksums_of, dtype)
            return Expected(os.fspath(files), names, found, dtype)
    except TimeoutError:
        reason = f"the checksums of the version took longer than {timeout_secs:g} s to compute"
        raise ServerError(address, "", reason, retryable=True) from None
    except weight_store.WeightStoreError as error:
        raise ServerError(address, "", f"was not asked: {error}", retryable=False) from error


def part_of(expected: Expected, number: int) -> Expected:
    """An eighth of the tensors, by the number of a version: eight pushes compare all."""
    names = sorted(expected.names)[number % NUM_PARTS :: NUM_PARTS] or sorted(expected.names)[:1]
    checksums = expected.checksums and {name: expected.checksums[name] for name in names}
    return dataclasses.replace(expected, names=frozenset(names), checksums=checksums)


def difference(found: Mapping[str, str], expected: Expected) -> str | None:
    """The difference between the checksums of a server and those expected, in words; None: none."""
    if odd := sorted(expected.names ^ found.keys()):
        return f"the server holds another model: tensors {', '.join(odd[:4])} differ in name"
    for name, checksum in (expected.checksums or {}).items():
        if found[name] != checksum:
            said = (
                f"tensor {name} has checksum {found[name]}, that of {expected.path} is {checksum}"
            )
            return said + _origin(name, found[name], expected)
    return None


def _origin(name: str, checksum: str, expected: Expected) -> str:
    """The version beside the expected one whose tensor this is, in words; "" where none is."""
    beside = pathlib.Path(expected.path).parent.iterdir()
    for other in sorted((o for o in beside if o.name.isdecimal()), reverse=True):
        with contextlib.suppress(weight_store.WeightStoreError, OSError):
            files = weight_store.StoredVersion(other)
            parts = fused_names(files.names()).get(name, ())
            tensors = (_padded(part, files.tensor(part)) for part in parts)
            if parts and _checksum(tensors, expected.dtype) == checksum:
                return f": it still holds version {files.version}"
    return ""


def checksums_of(files: weight_store.StoredVersion, dtype: str | None) -> dict[str, str]:
    """SGLang's checksums of a version, by SGLang's names.

    Args:
      dtype: that the server computes in, its "dtype"; an unknown one leaves the tensors as they are.

    Raises:
      WeightStoreError: the files differ from their manifest.
    """
    files.verify()
    return {
        into: _checksum((_padded(name, files.tensor(name)) for name in parts), dtype)
        for into, parts in fused_names(files.names()).items()
    }


def fused_names(names: Iterable[str]) -> dict[str, list[str]]:
    """SGLang's name of a tensor → Hugging Face's names of its parts, in the order of their stacking."""
    fused: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        into, expert, place = name, 0, 0
        if match := _EXPERT.fullmatch(name):
            into, expert = match[1] + _EXPERTS_INTO[match[3]], int(match[2])
            place = _EXPERT_ORDER.index(match[3])
        elif match := _FUSED.fullmatch(name):
            into, place = match[1] + _INTO[match[2]] + match[3], _ORDER.index(match[2])
        fused.setdefault(into, []).append((expert, place, name))
    return {into: [name for *_, name in sorted(parts)] for into, parts in fused.items()}


def _padded(name: str, tensor: np.ndarray) -> np.ndarray:
    missing = -tensor.shape[0] % _VOCAB_MULTIPLE
    if name not in _VOCAB_TABLES or not missing:
        return tensor
    return np.concatenate([tensor, np.zeros((missing, *tensor.shape[1:]), tensor.dtype)])


def _checksum(parts: Iterable[np.ndarray], dtype: str | None) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        part = part.astype(_DTYPES.get(dtype or "", part.dtype), copy=False)
        hasher.update(layout.raw(part))
    return hasher.digest()[:8].hex()


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    log.warning("%s", message)


_DTYPES = {np.dtype(of).name: of for of in (np.float32, np.float16, ml_dtypes.bfloat16)}
NUM_PARTS = 8  # of the tensors, for "rotating"
_INTO = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_ORDER = tuple(_INTO)
# All experts of a layer are one tensor: gate and up of one after another, and down. Qwen3-MoE's names, then Mixtral's.
_EXPERTS_INTO = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "w13_weight"),
    **dict.fromkeys(("down_proj", "w2"), "w2_weight"),
}
_EXPERT_ORDER = tuple(_EXPERTS_INTO)
_EXPERT = re.compile(rf"(.*\.experts\.)([0-9]+)\.({'|'.join(_EXPERTS_INTO)})\.weight")
_FUSED = re.compile(rf"(.*\.)({'|'.join(_INTO)})(\.(?:weight|bias))")
_VOCAB_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_MULTIPLE = 64
