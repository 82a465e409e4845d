"""Rank 0 of a group with the ranks of SGLang servers: it broadcasts the tensors of versions.

A process of its own, because a broadcast that a silent rank holds up ends with its process alone: torch has no other
way to close its connections. Commands come as lines of JSON on stdin, each is answered by one on stdout; deadlines are
its parent's, which kills it. It ends with its stdin. It needs PyTorch, and knows no HTTP.
"""

import functools
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_async.versions.store import StoredVersion


class RankZero:
    """One group at a time; methods are commands."""

    def __init__(self, torch):
        self._torch, self._dist = torch, torch.distributed
        self._store = self._group = None
        self._device = "cpu"

    def open(self, host: str, world_size: int) -> dict[str, Any]:
        """Leaves the group before, and listens for the ranks of a new one on a free port of the host."""
        self._group = self._store = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self._store = self._dist.TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            # Its own socket listens on all interfaces.
            master_listen_fd=listener.detach(),
        )
        return {"port": port}

    def join(self, host: str, world_size: int, name: str, backend: str) -> dict[str, Any]:
        """Makes the group, once all ranks have come. The backend is the one that the servers were given."""
        dist = self._dist
        self._device = "cuda" if backend == NCCL else "cpu"
        place = "cuda" if backend == NCCL else backend.partition(":")[0]
        store = dist.PrefixStore(name, self._store)
        # torch adds these two on the servers' side.
        store = dist.PrefixStore(f"{place}/", dist.PrefixStore(f"{name}/", store))
        if backend == NCCL:
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(store, 0, world_size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            self._group = dist.ProcessGroupGloo(store, 0, world_size, options)
        return {}

    def send(self, path: str, names: Sequence[str]) -> dict[str, Any]:
        """Broadcasts tensors of a version, in their order."""
        version, options = _stored(path), self._dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        works = []
        for name in names:
            tensor = self._tensor(version.tensor(name))
            works.append((self._group.broadcast([tensor], options), tensor))
        for work, _ in works:
            work.wait()
        if self._device == "cuda":
            self._torch.cuda.synchronize()  # There a wait is one of the stream.
        return {}

    def _tensor(self, array: np.ndarray):
        torch = self._torch
        raw = torch.empty(array.nbytes, dtype=torch.uint8)
        raw.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        tensor = raw.view(getattr(torch, array.dtype.name)).reshape(array.shape)
        return tensor.to(self._device)


@functools.lru_cache(maxsize=1)
def _stored(path: str) -> StoredVersion:
    return StoredVersion(path)


def _read(commands: queue.SimpleQueue) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    os._exit(0)  # Also out of a broadcast: the parent has ended.


def _answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    """Serves commands until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends it.
    commands: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        _answer(missing=str(error))
        return
    torch.set_num_threads(1)
    rank = RankZero(torch)
    _answer(nccl=torch.cuda.is_available() and dist.is_nccl_available())
    while True:
        command = commands.get()
        try:
            _answer(**getattr(rank, command.pop("do"))(**command))
        except Exception as error:
            _answer(error=f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS])


NCCL = "nccl"
MAX_ERROR_CHARS = 500

if __name__ == "__main__":
    main()
