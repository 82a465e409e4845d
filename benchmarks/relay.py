"""A push to many servers behind links of one rate: sent by the learner to each, and handed on by the servers.

    python benchmarks/relay.py [--servers=16] [--megabytes=16] [--rate=4]
    python benchmarks/relay.py --predict [--servers=1000 --megabytes=14000 --rate=3000 --pause=1 --max_paused=50]

The transport, the HTTP server and its relay are those of a run. The engines load nothing, and all hosts are in one
process: before each server is a proxy that lets through `rate` MB a second of what its host sends, and of what the
learner sends to all. The time of one server, in the same run, is the least that a push can take.

`--predict` measures nothing. It places the servers by the transport's own tree, and computes when each has the
version, when the last one samples with it (v_pub), and the server-seconds of the pauses: all at once, and `max_paused`
at a time. A host's link is shared by those it sends to, a byte waits at each server for the rest of its chunk, and a
hop takes HOP_SECS. A server that has the version is paused for `pause` seconds. One that reads it in the pause, as
SGLang does from a shared store behind the learner's link, is paused for the read as well. Servers are equal, and none
fails.

Measured figures and predictions are kept side by side in benchmarks/results/relay.json (or --out=DIR).
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
import pathlib
import tempfile
import time
from concurrent.futures import Future

import numpy as np
import record
import shapes

from jaxrl_async import listener
from jaxrl_async.inference import http
from jaxrl_async.intake import relay
from jaxrl_async.publishing import fanout
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.versions.store import StoredVersion, WeightStore, read_manifest

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
        await listener.stop(server)


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
        transport = Transport("stream", mode="retract", fanout=fanout)
        stored = StoredVersion(path)
        start = time.monotonic()
        await asyncio.gather(
            *(
                transport(client, address, files=stored, version=1, timeout_secs=TIMEOUT_SECS)
                for address in addresses
            )
        )
        return time.monotonic() - start


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Servers that a push is predicted for."""

    servers: int
    num_bytes: float  # of a version
    rate: float  # bytes a second of each host's link
    pause_secs: float  # of a server that has the version

    def arrivals(self, width: int) -> list[float]:
        """Seconds until each server has the version; `width` as of `fanout.Tree`, 0: the learner sends to all."""
        if not width:
            return [self.servers * self.num_bytes / self.rate] * self.servers
        tree, behind = fanout.Tree(width), {}  # server → seconds behind the learner's first byte
        for server in map(str, range(self.servers)):
            hop_secs = HOP_SECS + width * relay.CHUNK_BYTES / self.rate
            behind[server] = behind.get(tree.source(server), 0.0) + hop_secs
        return [width * self.num_bytes / self.rate + secs for secs in behind.values()]

    def prepared(self, width: int, max_paused: int) -> tuple[float, float]:
        """(seconds to v_pub, server-seconds of pauses), where a version arrives before the pause; max_paused 0: all."""
        turns = [0.0] * (max_paused or self.servers)  # end of each one's last pause
        for arrival in sorted(self.arrivals(width)):
            heapq.heapreplace(turns, max(turns[0], arrival) + self.pause_secs)
        return max(turns), self.servers * self.pause_secs

    def read_in_the_pause(self, max_paused: int) -> tuple[float, float]:
        """The same where the paused servers share the learner's link; equal ones end their turns together."""
        secs = paused_secs = 0.0
        left, most = self.servers, max_paused or self.servers
        while left:
            num = min(left, most)
            turn_secs = num * self.num_bytes / self.rate + self.pause_secs
            secs, paused_secs, left = secs + turn_secs, paused_secs + num * turn_secs, left - num
        return secs, paused_secs


WIDTHS = {"each by the learner": 0, "chain": 1, "tree of 2": 2}


def predict(args: argparse.Namespace, measured: dict[str, float]) -> dict:
    """Every way at once, and rolled; `measured`: seconds until the last of these servers held a version."""
    fleet = Fleet(args.servers, args.megabytes << 20, args.rate * 1e6, args.pause)
    one = fleet.num_bytes / fleet.rate
    ways = {"read in the pause": fleet.read_in_the_pause}
    ways |= {name: functools.partial(fleet.prepared, width) for name, width in WIDTHS.items()}
    arrived = {name: round(max(fleet.arrivals(width)), 2) for name, width in WIDTHS.items()}
    rows = []
    print(f"{'':20} {'paused':>9}  time to v_pub  of one server  paused server-seconds")
    for (name, way), most in itertools.product(ways.items(), sorted({0, args.max_paused})):
        secs, paused_secs = way(most)
        found = {"secs": round(secs, 2), "paused_secs": round(paused_secs, 1)}
        rows.append({"way": name, "max_paused": most} | found)
        at_once = f"{most} a time" if most else "at once"
        print(f"{name:20} {at_once:>9}  {secs:11.2f} s  {secs / one:12.2f}x  {paused_secs:21,.1f}")
    for name in filter(measured.__contains__, arrived):
        print(f"{name:20} arrived after {arrived[name]:.2f} s, measured {measured[name]:.2f} s")
    keys = ("servers", "megabytes", "rate", "pause", "max_paused")
    return {key: getattr(args, key) for key in keys} | {"arrived_secs": arrived, "rows": rows}


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
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, with --predict")
    parser.add_argument(
        "--max_paused", type=int, default=0, help="servers, with --predict; 0: at once alone"
    )
    args = parser.parse_args(argv)
    for name, least in {"servers": 1, "megabytes": 1, "pause": 0, "max_paused": 0}.items():
        if not least <= getattr(args, name) < math.inf:
            parser.error(f"--{name} must be ≥ {least}, got {getattr(args, name)}")
    if not 0 < args.rate < math.inf:
        parser.error(f"--rate must be > 0, got {args.rate}")
    if (args.pause or args.max_paused) and not args.predict:
        parser.error("--pause and --max_paused need --predict")
    path = args.out / "relay.json"
    result = record.read(path)
    sizes = {name: getattr(args, name) for name in ("servers", "megabytes", "rate")}
    if args.predict:
        is_measured = all(result.get(name) == value for name, value in sizes.items())
        found = predict(args, result["secs"] if is_measured else {})
        others = (row for row in result.get("predicted", ()) if row["servers"] != args.servers)
        result["predicted"] = [*others, found]
    else:
        result |= sizes | {"secs": measure(args)}
    part = "predicted" if args.predict else "secs"
    record.write(path, result, seeds=[], raw=[part], part=part)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Seconds until the last server holds a version, by the way."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="jaxrl-relay-") as directory:
        path = write_version(pathlib.Path(directory), args.megabytes << 20)
        ways = {"one server": (1, 0), "chain": (args.servers, 1), "tree of 2": (args.servers, 2)}
        ways |= {"each by the learner": (args.servers, 0)}
        for name, (servers, fanout) in ways.items():
            secs = asyncio.run(push_secs(path, servers, args.rate * 1e6, fanout))
            found[name] = round(secs, 2)
            print(f"{name:20} {secs:7.2f} s  {secs / found['one server']:6.2f}x")
    return found


if __name__ == "__main__":
    main()
