"""Verification of a push: the weights that a server holds, compared with the version's files.

The servers of this project report the digest of the weights they loaded. SGLang reports a hash of each tensor under
its own names, some of them fused; the same hashes are computed here from the version's files.
"""

import asyncio
import dataclasses
import functools
import hashlib
import logging
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import ServerError
from jaxrl_async.versions import protocol
from jaxrl_async.versions import store as weight_store

log = logging.getLogger(__name__)


def reports_digest(model_info: Mapping[str, Any]) -> bool:
    """Whether a server is one of this project's, which verifies a version before it samples with it."""
    return protocol.WEIGHT_DIGEST in model_info


def verify_digest(
    address: str, info: Mapping[str, Any], *, files: weight_store.StoredVersion
) -> None:
    """Compares a server's report of its weights with the version's manifest.

    Args:
      address: of the server, for the error.
      info: its /model_info.
      files: the version.

    Raises:
      ServerError: another digest.
    """
    said, wanted = info.get(protocol.WEIGHT_DIGEST), files.digest
    if said != wanted:
        reason = (
            f"holds weights with digest {said}, the manifest of {os.fspath(files)} says {wanted}"
        )
        raise ServerError(address, "/model_info", reason, retryable=False)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The report that an SGLang server should give once it holds a version."""

    path: str
    names: frozenset[str]  # of the tensors, SGLang's
    # By name; None where the server hashes by a GPU kernel, or shards: only names are compared then.
    checksums: Mapping[str, str] | None


async def expect(
    client: InferenceClient,
    address: str,
    *,
    files: weight_store.StoredVersion,
    timeout_secs: float,
) -> Expected:
    """Computes, before a push, the checksums that `verify_checksums` compares after it.

    The values can be compared where SGLang hashes on the CPU and a tensor lies on one rank. A warning says once where
    they cannot; they are not computed then. Pushes of one version compute them once.

    Raises:
      ServerError: the version's files differ from their manifest, or the server did not answer.
    """
    server = await client.server_info(address, timeout_secs=timeout_secs)
    device, tp_size, dtype = (server.get(key) for key in ("device", "tp_size", "dtype"))
    names = frozenset(fused_names(files.names()))
    if device != "cpu" or tp_size != 1:
        _warn_once(
            f"{address}: only the names of tensors are verified: their hashes on device {device!r} "
            f"with tp_size {tp_size} cannot be computed here; watch mismatch/mean_abs"
        )
        return Expected(os.fspath(files), names, None)
    try:
        async with asyncio.timeout(timeout_secs):
            return Expected(os.fspath(files), names, await _shared_checksums(files, dtype))
    except TimeoutError:
        reason = f"the checksums of the version took longer than {timeout_secs:g} s to compute"
        raise ServerError(address, "", reason, retryable=True) from None
    except weight_store.WeightStoreError as error:
        raise ServerError(address, "", f"was not asked: {error}", retryable=False) from error


async def verify_checksums(
    client: InferenceClient, address: str, *, expected: Expected, timeout_secs: float
) -> None:
    """Compares every tensor that an SGLang server holds with its expected checksum.

    Raises:
      ServerError: a tensor is missing, unexpected or different, or the server did not answer.
    """
    found = await client.checksums(address, timeout_secs=timeout_secs)
    if odd := sorted(expected.names ^ found.keys()):
        reason = f"the server holds another model: tensors {', '.join(odd[:4])} differ in name"
        raise ServerError(address, "/weights_checker", reason, retryable=False)
    for name, checksum in (expected.checksums or {}).items():
        if found[name] != checksum:
            reason = (
                f"tensor {name} has checksum {found[name]}, that of {expected.path} is {checksum}"
            )
            raise ServerError(address, "/weights_checker", reason, retryable=False)


async def _shared_checksums(
    files: weight_store.StoredVersion, dtype: str | None
) -> Mapping[str, str]:
    """`checksums_of` in a thread, once for all that ask at the same time or later."""
    computed = _COMPUTED.setdefault(files, {})
    if dtype not in computed:
        computed[dtype] = asyncio.create_task(asyncio.to_thread(checksums_of, files, dtype))
    task = computed[dtype]
    try:
        return await asyncio.shield(task)  # One push that is cancelled leaves it to the others.
    except Exception:
        computed.pop(dtype, None)  # Files on a network may come back.
        raise


def checksums_of(files: weight_store.StoredVersion, dtype: str | None) -> dict[str, str]:
    """SGLang's checksums of a version, by SGLang's names.

    Args:
      files: the version.
      dtype: that the server computes in, its "dtype"; an unknown one leaves the tensors as they are.

    Raises:
      WeightStoreError: the files differ from their manifest.
    """
    files.verify()
    return {
        into: _checksum((_padded(name, files.tensor(name)) for name in parts), dtype)
        for into, parts in fused_names(files.names()).items()
    }


def fuse(tensors: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Groups a Hugging Face checkpoint as SGLang's Qwen2, Qwen3 and Llama hold it.

    Args:
      tensors: by Hugging Face's names.

    Returns:
      SGLang's name → the tensors that are stacked in it along their first axis; vocabulary tables are padded with
      zeros to a multiple of 64 rows.
    """
    return {
        into: [_padded(name, tensors[name]) for name in parts]
        for into, parts in fused_names(tensors).items()
    }


def fused_names(names: Iterable[str]) -> dict[str, list[str]]:
    """SGLang's name of a tensor → Hugging Face's names of its parts, in the order of their stacking."""
    fused: dict[str, dict[str, str]] = {}
    for name in names:
        match = _FUSED.fullmatch(name)
        into, part = (match[1] + _INTO[match[2]] + match[3], match[2]) if match else (name, "")
        fused.setdefault(into, {})[part] = name
    return {name: [parts[p] for p in _ORDER if p in parts] for name, parts in fused.items()}


def _padded(name: str, tensor: np.ndarray) -> np.ndarray:
    missing = -tensor.shape[0] % _VOCAB_MULTIPLE
    if name not in _VOCAB_TABLES or not missing:
        return tensor
    return np.concatenate([tensor, np.zeros((missing, *tensor.shape[1:]), tensor.dtype)])


def _checksum(parts: Iterable[np.ndarray], dtype: str | None) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        part = part.astype(_DTYPES.get(dtype, part.dtype), copy=False)
        hasher.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    return hasher.digest()[:8].hex()


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    log.warning("%s", message)


# Version → dtype → the task that computes, or has computed, its checksums.
_COMPUTED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_INTO = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_ORDER = ("", *_INTO)
_FUSED = re.compile(rf"(.*\.)({'|'.join(_INTO)})(\.(?:weight|bias))")
_VOCAB_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_MULTIPLE = 64
