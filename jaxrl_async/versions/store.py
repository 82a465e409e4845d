"""Versions of the weights on disk, each a directory in Hugging Face layout, with digests.

    root/00000012/config.json
    root/00000012/model.safetensors            (or model-00001-of-00003.safetensors … and their index)
    root/00000012/manifest.json                digests of the bytes as written, after any cast

Of an adapter the first two are adapter_config.json and adapter_model.safetensors, in PEFT's layout.

A version is written under a temporary name, synced and renamed: it is there in full or not at all. One learner
writes a store, of one process or of several that write parts of one version; any process may read it. A learner that
another one superseded neither replaces nor removes a version of that one. Imports no JAX.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import mmap
import os
import pathlib
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxrl_async import sealed
from jaxrl_async.records import NOBODY, Identity, SupersededError
from jaxrl_async.versions import layout

MANIFEST = layout.MANIFEST
SCORES = "scores.npy"
ADAPTER = "adapter_"  # prefix of the files of an adapter
MAX_SHARD_BYTES = 1 << 28  # A shard is closed before it grows beyond; a larger tensor has its own.
MAX_MAPPED_FILES = 4  # of a StoredVersion, besides those whose tensors are in use

log = logging.getLogger(__name__)

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_VERSION_NAME = re.compile(r"\d{8,}")
_TEMPORARY = ".aside-"


class WeightStoreError(sealed.DamagedError):
    """A version is missing or differs from its manifest; names the file and the tensor."""


@dataclasses.dataclass(eq=False, repr=False)
class WeightStore:
    """The versions under one directory, which is made where it does not exist."""

    root: str | os.PathLike
    _: dataclasses.KW_ONLY
    keep: int  # newest versions that are kept, ≥ 1
    # Bound on a safetensors file, and on the memory of a write, unless one tensor alone is larger.
    max_shard_bytes: int = MAX_SHARD_BYTES
    writer: Identity = NOBODY  # the learner; it stands in the manifests

    def __post_init__(self):
        if self.keep < 1:
            raise ValueError(f"keep must be ≥ 1, got {self.keep}")
        self._root = pathlib.Path(self.root).absolute()
        self._root.mkdir(parents=True, exist_ok=True)
        self._pins: collections.Counter[int] = collections.Counter()
        self._pruning = threading.Lock()

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, np.ndarray]],
        config: Mapping[str, Any],
        *,
        prefix: str = "",
    ) -> pathlib.Path:
        """Writes a version and removes old ones.

        The version written last is the newest: higher ones belong to a future that a resumed run has left, and are
        removed too. An existing version is replaced.

        Args:
          version: ≥ 0.
          tensors: (name, array of the dtype to write), taken one at a time.
          config, prefix: as of `finish`.

        Returns:
          The version's directory.

        Raises:
          ValueError: a name comes twice, there is no tensor, or a dtype has no safetensors name.
          SupersededError: a learner of a later generation wrote the version.
        """
        self.begin(version)
        self.write_part(version, 0, tensors)
        return self.finish(version, 1, config, prefix=prefix)

    def begin(self, version: int) -> None:
        """Makes the directory for the parts of a version; one process calls it, before any writes a part."""
        self._sweep()
        self._temporary(version).mkdir()

    def write_part(
        self, version: int, part: int, tensors: Iterable[tuple[str, np.ndarray]]
    ) -> None:
        """Writes some tensors of a version as they come, and a table: [[file, {name: entry of the manifest}]].

        Args:
          version: begun by `begin`.
          part: ≥ 0, another one for each process.
          tensors: as of `write`; there may be none.

        Raises:
          ValueError: a name comes twice, or a dtype has no safetensors name.
        """
        directory, shards = self._temporary(version), []
        for number, shard in enumerate(_split(tensors, self.max_shard_bytes)):
            described = {name: _describe(array) for name, array in shard.items()}
            file = f"shard-{part}-{number}"
            _write_safetensors(directory / file, shard, described)
            shards.append((file, described))
            shard.clear()  # Freed before the next one is gathered.
        _write_json(directory / f"part-{part}.json", shards)

    def finish(
        self,
        version: int,
        num_parts: int,
        config: Mapping[str, Any],
        *,
        prefix: str = "",
        scores: np.ndarray | None = None,
    ) -> pathlib.Path:
        """Makes one version of its parts, and removes old ones; see `write`.

        Args:
          version: begun by `begin`.
          num_parts: that were written.
          config: the content of config.json.
          prefix: of the names of both kinds of files, ADAPTER for an adapter.
          scores: of `StoredVersion.scores`.

        Raises:
          WeightStoreError: a part is missing.
          ValueError: a name comes twice, or there is no tensor.
          SupersededError: a learner of a later generation wrote the version.
        """
        temporary = self._temporary(version)
        table = _join_parts(temporary, num_parts, prefix)
        _write_json(temporary / f"{prefix}config.json", config)
        _write_json(temporary / MANIFEST, _manifest(version, self.writer, table))
        if scores is not None:
            with open(temporary / SCORES, "wb") as stream:
                np.save(stream, scores)
                _flush(stream)
        _sync(temporary)
        if self._is_younger(version):
            raise SupersededError(
                f"{self.path(version)} was written by generation {self._generation(version)} of run "
                f"{self.writer.run_id}, after this learner, generation {self.writer.generation}"
            )
        if (path := self.path(version)).exists():
            self._put_aside(path)
        temporary.rename(path)
        _sync(self._root)
        self._prune(version)
        return path

    @contextlib.contextmanager
    def pin(self, version: int) -> Iterator[None]:
        """Keeps a version from being pruned by this object: a server is still reading it."""
        with self._pruning:
            self._pins[version] += 1
        try:
            yield
        finally:
            with self._pruning:
                self._pins[version] -= 1

    def path(self, version: int) -> pathlib.Path:
        """The directory of a version, there or not."""
        return self._root / f"{version:08d}"

    def get(self, version: int) -> "StoredVersion":
        """A version that is there. Raises WeightStoreError: its manifest is missing, or is none."""
        return StoredVersion(self.path(version))

    def versions(self) -> list[int]:
        """The versions that are there, ascending."""
        names = (entry.name for entry in self._root.iterdir())
        return sorted(int(name) for name in names if _VERSION_NAME.fullmatch(name))

    def manifest(self, version: int) -> dict[str, Any]:
        """{version, writer, total_bytes, digest, tensors: {name: {file, dtype, shape, num_bytes, digest}}}.

        Raises:
          WeightStoreError: there is no such version.
        """
        if not self.path(version).exists():
            there = self.versions()
            raise WeightStoreError(f"no version {version} in {self._root}; it holds {there}")
        manifest = read_manifest(path := self.path(version))
        if manifest["version"] != version:
            raise WeightStoreError(f"{path / MANIFEST} is of version {manifest['version']}")
        return manifest

    def _temporary(self, version: int) -> pathlib.Path:
        return self._root / f"{_TEMPORARY}{self.writer.generation}-{version}"

    def _sweep(self) -> None:
        """Removes the leftovers of a crash, but for those of a younger learner.

        On NFS a directory stays as long as a server has a file of it open: it is removed with a later version.
        """
        for entry in self._root.glob(f"{_TEMPORARY}*"):
            generation = entry.name.removeprefix(_TEMPORARY).partition("-")[0]
            if not generation.isdecimal() or int(generation) <= self.writer.generation:
                try:
                    shutil.rmtree(entry)
                except OSError as error:
                    log.warning("%s cannot be removed yet: %s", entry, error)

    def _generation(self, version: int) -> int:
        """The generation of the learner that wrote a version; 0 where it is of another run, or unknown."""
        try:
            writer = read_manifest(self.path(version)).get("writer", {})
        except WeightStoreError:
            return 0
        return writer["generation"] if writer.get("run_id") == self.writer.run_id else 0

    def _is_younger(self, version: int) -> bool:
        """Whether a version was written by a learner that superseded this one."""
        return self._generation(version) > self.writer.generation

    def _prune(self, newest: int) -> None:
        keep = [version for version in self.versions() if version <= newest][-self.keep :]
        with self._pruning:
            for version in self.versions():
                if version in keep or self._pins[version] or self._is_younger(version):
                    continue
                self._put_aside(self.path(version))
        self._sweep()

    def _put_aside(self, path: pathlib.Path) -> None:
        """Makes a version a leftover, since a half-removed one must not look like a version.

        Another leftover of its number may still be there.
        """
        path.rename(self._root / f"{_TEMPORARY}old-{path.name}-{uuid.uuid4().hex}")


class StoredVersion(os.PathLike):
    """One version that several pushes read, a `Version`: its manifest is read once, its files are checked once.

    A file is mapped when a tensor of it is asked for, and MAX_MAPPED_FILES stay mapped. Use from any thread.
    """

    def __init__(self, path: str | os.PathLike):
        """Reads the manifest. Raises WeightStoreError: there is none, or it is no manifest."""
        self._path = pathlib.Path(path)
        self.manifest = read_manifest(path)
        self.is_checked = False
        self._entries: dict[str, layout.TensorEntry] = {}
        self._mapped: collections.OrderedDict[str, mmap.mmap] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._computed: dict[Hashable, asyncio.Task] = {}

    def __fspath__(self) -> str:
        return str(self._path)

    @property
    def version(self) -> int:
        return self.manifest["version"]

    @property
    def digest(self) -> str:
        return self.manifest["digest"]

    @property
    def total_bytes(self) -> int:
        """The size of its files."""
        return sum(file.stat().st_size for file in self._path.iterdir())

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter in PEFT's layout, and no whole model."""
        return any(entry["file"].startswith(ADAPTER) for entry in self.manifest["tensors"].values())

    def names(self) -> list[str]:
        """The names of its tensors."""
        return list(self.manifest["tensors"])

    def num_bytes(self, name: str) -> int:
        """The size of a tensor."""
        return self.manifest["tensors"][name]["num_bytes"]

    def kind(self, name: str) -> tuple[str, list[int]]:
        """The dtype, by numpy's name, and shape of a tensor."""
        entry = self.manifest["tensors"][name]
        return _DTYPES[entry["dtype"]].name, entry["shape"]

    def scores(self) -> np.ndarray | None:
        """The learner's log-probs after the prompts of `publishing.scored`: float32 [K, V]; None where it has none."""
        try:
            return np.load(self._path / SCORES)
        except (OSError, EOFError, ValueError):  # missing, or damaged
            return None

    def forget_scores(self) -> None:
        """Removes its scores."""
        (self._path / SCORES).unlink(missing_ok=True)

    def check(self) -> None:
        """Compares the length of every file with its header, and the headers with the manifest; once.

        Raises:
          WeightStoreError: a file is missing or truncated, or a tensor of the manifest is in none, or of another dtype
            or shape.
        """
        with self._lock:
            if not self.is_checked:
                self._entries = _read_entries(self._path, self.manifest["tensors"])
                self.is_checked = True

    def tensor(self, name: str) -> np.ndarray:
        """A tensor, read-only, as a map of its file. Raises WeightStoreError: as of `check`."""
        self.check()
        with self._lock:
            mapped, entry = self._map(self.manifest["tensors"][name]["file"]), self._entries[name]
        dtype = _DTYPES[entry.dtype]
        count = entry.num_bytes // dtype.itemsize
        return np.frombuffer(mapped, dtype, count, entry.start).reshape(entry.shape)

    async def once(self, work: Callable[..., Any], *args: Hashable) -> Any:
        """`work(self, *args)`, in a thread and once for all that ask in this event loop; a failure is forgotten."""
        if (key := (work, *args)) not in self._computed:
            self._computed[key] = asyncio.create_task(asyncio.to_thread(work, self, *args))
        try:
            # One push that is cancelled leaves it to the others.
            return await asyncio.shield(self._computed[key])
        except Exception:  # Files on a network may come back.
            self._computed.pop(key, None)
            raise

    def verify(self) -> None:
        """Compares every tensor with the manifest.

        Raises:
          WeightStoreError: names the first file and tensor that differ.
        """
        for name, said in self.manifest["tensors"].items():
            _compare(self._path / said["file"], name, _describe(self.tensor(name)), said)

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._mapped:
            self._mapped[file] = _map(self._path / file)
        self._mapped.move_to_end(file)
        while len(self._mapped) > MAX_MAPPED_FILES:
            self._mapped.popitem(last=False)  # It is closed with the last tensor that uses it.
        return self._mapped[file]


def read_manifest(path: str | os.PathLike) -> dict[str, Any]:
    """The manifest of a version's directory; see WeightStore.manifest.

    Raises:
      WeightStoreError: there is none, or it is no manifest.
    """
    file = pathlib.Path(path) / MANIFEST
    try:
        manifest = sealed.unsealed(json.loads(file.read_text()))
        return manifest | {"tensors": dict(manifest["tensors"]), "digest": str(manifest["digest"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightStoreError(f"{file}: cannot be read: {error!r}") from error


def _read_entries(
    directory: pathlib.Path, table: Mapping[str, Mapping[str, Any]]
) -> dict[str, layout.TensorEntry]:
    """The places of a manifest's tensors, from the headers of their files."""
    entries = {}
    for file in sorted({directory / entry["file"] for entry in table.values()}):
        try:
            entries |= layout.read_header(file)
        except (OSError, ValueError, KeyError) as error:
            raise WeightStoreError(f"{file}: cannot be read: {error}") from error
    for name, said in table.items():
        file = directory / said["file"]
        if (entry := entries.get(name)) is None:
            raise WeightStoreError(f"{file}: tensor {name} is missing")
        found = {"dtype": entry.dtype, "shape": list(entry.shape), "num_bytes": entry.num_bytes}
        _compare(file, name, found, said)
    return entries


def _compare(
    file: pathlib.Path, name: str, found: Mapping[str, Any], said: Mapping[str, Any]
) -> None:
    for key, value in found.items():
        if value != said[key]:
            raise WeightStoreError(
                f"{file}: tensor {name} has {key} {value}, its manifest says {said[key]}"
            )


def _map(file: pathlib.Path) -> mmap.mmap:
    try:
        with open(file, "rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightStoreError(f"{file}: cannot be read: {error}") from error


def _join_parts(directory: pathlib.Path, num_parts: int, prefix: str) -> dict[str, dict[str, Any]]:
    """Gives the files of all parts their names; returns the manifest's table."""
    shards = [shard for part in range(num_parts) for shard in _take_part(directory, part)]
    if not shards:
        raise ValueError("a version needs at least one tensor")
    table = {}
    for number, (written, described) in enumerate(shards, start=1):
        file = f"{prefix}model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else f"{prefix}model.safetensors"
        (directory / written).rename(directory / file)
        if twice := sorted(table.keys() & described.keys()):
            raise ValueError(f"tensor {twice[0]} comes twice")
        table |= {name: {"file": file, **entry} for name, entry in described.items()}
    if len(shards) > 1:
        weight_map = {name: entry["file"] for name, entry in table.items()}
        index = {"metadata": {"total_size": _total_bytes(table)}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)
    return table


def _take_part(directory: pathlib.Path, part: int) -> list[tuple[str, dict[str, Any]]]:
    file = directory / f"part-{part}.json"
    try:
        shards = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise WeightStoreError(f"{file}: this part of the version was not written") from error
    file.unlink()
    return shards


def _split(
    tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Cuts the stream of tensors so that each part fits a shard."""
    shard: dict[str, np.ndarray] = {}
    num_bytes, seen = 0, set()
    for name, array in tensors:
        if name in seen:
            raise ValueError(f"tensor {name} comes twice")
        if shard and num_bytes + array.nbytes > max_shard_bytes:
            yield shard
            shard, num_bytes = {}, 0
        seen.add(name)
        shard[name] = array
        num_bytes += array.nbytes
    if shard:
        yield shard


def _write_safetensors(
    file: pathlib.Path, tensors: dict[str, np.ndarray], described: dict[str, dict[str, Any]]
) -> None:
    # transformers refuses files without.
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in described.items():
        end = offset + entry["num_bytes"]
        header[name] = {k: entry[k] for k in ("dtype", "shape")} | {"data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # The data starts aligned.
    with open(file, "wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for array in tensors.values():
            stream.write(layout.raw(array))
        _flush(stream)


def _describe(array: np.ndarray) -> dict[str, Any]:
    if array.dtype not in _DTYPE_NAMES:
        raise ValueError(f"dtype {array.dtype} is none of {', '.join(map(str, _DTYPE_NAMES))}")
    return {
        "dtype": _DTYPE_NAMES[array.dtype],
        "shape": list(array.shape),
        "num_bytes": array.nbytes,
        "digest": layout.tensor_digest(array),
    }


def _manifest(version: int, writer: Identity, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    manifest = {
        "version": version,
        "writer": dataclasses.asdict(writer),
        "total_bytes": _total_bytes(table),
        "digest": layout.version_digest({name: entry["digest"] for name, entry in table.items()}),
        "tensors": table,
    }
    return sealed.sealed(manifest)


def _total_bytes(table: dict[str, dict[str, Any]]) -> int:
    return sum(entry["num_bytes"] for entry in table.values())


def _write_json(file: pathlib.Path, values: Any) -> None:
    with open(file, "wb") as stream:
        stream.write(json.dumps(values, indent=2).encode())
        _flush(stream)


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync(directory: pathlib.Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
