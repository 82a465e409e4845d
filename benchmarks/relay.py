"""A push to many servers behind links of one rate: sent by the learner to each, and handed on by the servers.

    python benchmarks/relay.py [--servers=16] [--megabytes=16] [--rate=4]
    python benchmarks/relay.py --predict [--servers=1000] [--megabytes=14000] [--rate=3000]

The transport, the HTTP server and its relay are those of a run. The engines load nothing, and all hosts are in one
process: before each server is a proxy that lets through `rate` MB a second of what its host sends, and of what the
learner sends to all. The time of one server, in the same run, is the least that a push can take.

`--predict` measures nothing: it places the servers by the transport's own tree, and computes when each has the version.
A host's link is shared by those it sends to, a byte waits at each server for the rest of its chunk, and a hop takes
HOP_SECS.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import tempfile
import time
from concurrent.futures import Future

import numpy as np
import shapes

from jaxrl_async.inference import http
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.weights import fanout, relay, transports
from jaxrl_async.weights.store import StoredVersion, WeightStore, read_manifest

ROOT = pathlib.Path(__file__).parent.parent
NUM_FILES = 8  # of a version
CHUNK_BYTES = 1 << 14  # that a link lets through at once
HOP_SECS = 1e-3  # between two hosts, in predictions
TIMEOUT_SECS = 600.0
CONFIG = shapes.model_config(shapes.MODELS["100m"])  # Bounds an upload, no more.


@dataclasses.dataclass
class Loaded:
    digest: str


class Engine:
    """An engine that holds a version's name and digest alone."""

    config, max_total_tokens = CONFIG, 64
    name = weight_version = weight_digest = ""

    def load_weights(self, path: str) -> Future:
        return done(Loaded(read_manifest(path)["digest"]))

    def swap_weights(self, weights: Loaded, *, version: str, **_) -> Future:
        self.weight_version, self.weight_digest = version, weights.digest
        return done(0)

    def pause(self, mode: str) -> Future:
        return done(None)

    def resume(self) -> Future:
        return done(None)

    def __getattr__(self, name):  # What /model_info tells besides.
        return None


def done(value) -> Future:
    future = Future()
    future.set_result(value)
    return future


class Link:
    """What one host sends, at a rate."""

    def __init__(self, bytes_per_sec: float):
        self._rate, self._free_at = bytes_per_sec, 0.0

    async def send(self, num_bytes: int) -> None:
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._rate
        await asyncio.sleep(self._free_at - time.monotonic())


@contextlib.asynccontextmanager
async def proxy(port: int, of_learner: Link, of_host: Link):
    """A server's address on the network; yields its port."""

    async def pump(reader, writer, link):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await link.send(len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader, writer):
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            pump(reader, inner_writer, of_learner), pump(inner_reader, writer, of_host)
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def push_secs(path: pathlib.Path, num_servers: int, rate: float, fanout: int) -> float:
    """Seconds until the last of so many servers holds a version."""
    learner = Link(rate)
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for _ in range(num_servers):
            serving = http.serve(Engine(), host="127.0.0.1", port=0)
            port = await stack.enter_async_context(serving)
            port = await stack.enter_async_context(proxy(port, learner, Link(rate)))
            addresses.append(f"http://127.0.0.1:{port}")
        client = await stack.enter_async_context(InferenceClient())
        transport = transports.FileTransport("stream", mode="retract", fanout=fanout)
        stored = StoredVersion(path)
        start = time.monotonic()
        await asyncio.gather(
            *(
                transport(client, address, path=stored, version=1, timeout_secs=TIMEOUT_SECS)
                for address in addresses
            )
        )
        return time.monotonic() - start


def predicted_secs(num_bytes: float, rate: float, num_servers: int, width: int) -> float:
    """Seconds until the last of so many servers has a version; `width` 0: the learner sends to all."""
    if not width:
        return num_servers * num_bytes / rate
    tree, behind = fanout.Tree(width), {}  # server → seconds behind the learner's first byte
    for server in map(str, range(num_servers)):
        source = tree.source(server)
        behind[server] = behind.get(source, 0.0) + HOP_SECS + width * relay.CHUNK_BYTES / rate
    return width * num_bytes / rate + max(behind.values())


def predict(args: argparse.Namespace) -> None:
    num_bytes, rate = args.megabytes * 1e6, args.rate * 1e6
    one = num_bytes / rate
    for name, width in {
        "chain": 1,
        "tree of 2": 2,
        "tree of 4": 4,
        "each by the learner": 0,
    }.items():
        secs = predicted_secs(num_bytes, rate, args.servers, width)
        print(f"{name:20} {secs:10.2f} s  {secs / one:8.2f}x of one server")


def write_version(root: pathlib.Path, num_bytes: int) -> pathlib.Path:
    rng, size = np.random.default_rng(0), num_bytes // NUM_FILES
    tensors = [
        (f"model.layers.{i}.weight", rng.normal(size=size // 4).astype(np.float32))
        for i in range(NUM_FILES)
    ]
    return WeightStore(root, keep=1, max_shard_bytes=size).write(1, tensors, {})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=16, help="of a version")
    parser.add_argument("--rate", type=float, default=4.0, help="MB a second of each host")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results")
    parser.add_argument(
        "--predict", action="store_true", help="compute, for links that are not here"
    )
    args = parser.parse_args(argv)
    if args.predict:
        predict(args)
        return
    result = {"machine": platform.machine(), "cores": os.cpu_count()} | vars(args) | {"secs": {}}
    del result["out"], result["predict"]
    with tempfile.TemporaryDirectory(prefix="jaxrl-relay-") as directory:
        path = write_version(pathlib.Path(directory), args.megabytes << 20)
        ways = {"one server": (1, 0), "chain": (args.servers, 1), "tree of 2": (args.servers, 2)}
        ways |= {"each by the learner": (args.servers, 0)}
        for name, (servers, fanout) in ways.items():
            secs = asyncio.run(push_secs(path, servers, args.rate * 1e6, fanout))
            result["secs"][name] = round(secs, 2)
            print(f"{name:20} {secs:7.2f} s  {secs / result['secs']['one server']:6.2f}x")
    (args.out / "relay.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
