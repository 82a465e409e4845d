"""What a sample costs in Python, by thread: from a permit to a submitted group, without a learner.

    python benchmarks/wire.py [--groups=256] [--rounds=5] [--smoke]

A rollout worker of `train`, with its reward process, turns permits into groups of 8 samples of 16 + 16 tokens, as those
of peers.py; an engine with a tiny model answers. Between them is one of

    requests   HTTP, a request for each sample, as SGLang gets them
    batches    HTTP, a request for all samples that begin together, each answered when it ends
    calls      no wire: all in one process

and a queue that takes everything. The sides take turns, forwards in one round and backwards in the next. A figure is
milliseconds of a core a sample, the median over rounds, with quartiles: of the worker's thread, of the server's, and of
the engine's, whose programs count there as far as its own thread runs them. CPU time counts, not waits. Results are
printed and written to benchmarks/results/wire.json, or to --out.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import peers
import record
from flax import nnx

from jaxrl_async import parts
from jaxrl_async.config.settings import Settings
from jaxrl_async.inference import http
from jaxrl_async.inference.direct import DirectClient
from jaxrl_async.inference.engine import Engine
from jaxrl_async.models import transformer
from jaxrl_async.queue import wire
from jaxrl_async.records import Permit, ServerRecord, Wait
from jaxrl_async.roles import rollout
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.fleet import HEALTHY
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.types import Group

SIDES = ("requests", "batches", "calls")
MODEL = {
    "model.num_layers": 1,
    "model.model_dim": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.mlp_dim": 16,
}
DIRECT = "engine"  # its address
WARM_GROUPS = 32


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=256, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=peers.BENCHMARKS / "results")
    parser.add_argument("--smoke", action="store_true", help="few groups, one round")
    args = parser.parse_args(argv)
    groups, rounds = (2, 1) if args.smoke else (args.groups, args.rounds)
    settings = peers.settings_with("sync", peers.WORKLOAD | MODEL)
    found = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as directory, served(settings, directory) as engine:
        order = list(SIDES)
        for _ in range(rounds):
            for side in order:
                found[side].append(turn(side, engine, settings, pathlib.Path(directory), groups))
            order.reverse()
    result = {"groups": groups, "rounds": rounds}
    result["milliseconds_a_sample"] = {
        side: {name: record.quartiles([t[name] for t in turns]) for name in turns[0]}
        for side, turns in found.items()
    }
    report(result["milliseconds_a_sample"])
    record.write(args.out / "wire.json", result, seeds=[0])


@contextlib.contextmanager
def served(settings: Settings, directory: str) -> Iterator[Engine]:
    """An engine with the weights of version 0."""
    parts.tokenizer_of(settings, pathlib.Path(directory))
    engine = parts.engine_of(settings, pathlib.Path(directory), name="engine")
    engine.start()
    try:
        model = transformer.Transformer(engine.config, rngs=nnx.Rngs(0))
        engine.update_weights(nnx.state(model), "0").result(peers.TIMEOUT_SECS)
        yield engine
    finally:
        engine.close(timeout_secs=peers.TIMEOUT_SECS)


def turn(side: str, engine: Engine, settings: Settings, workdir: pathlib.Path, groups: int) -> dict:
    """Milliseconds a sample by thread, of one turn of a side."""
    with contextlib.ExitStack() as stack:
        threads = {"engine": next(t for t in threading.enumerate() if t.name == "engine")}
        if side == "calls":
            client, address = DirectClient({DIRECT: engine}), DIRECT
        else:
            server = stack.enter_context(Server(engine))
            threads["server"] = server.thread
            client = InferenceClient() if side == "batches" else Singles()
            address = server.address
        queue = Permits(address, threads, WARM_GROUPS, groups)
        settings = dataclasses.replace(
            settings, server=dataclasses.replace(settings.server, addresses=(address,))
        )
        asyncio.run(work(settings, workdir, client, queue))
    samples = groups * settings.rollout.group_size
    return {name: 1e3 * secs / samples for name, secs in queue.secs.items()}


async def work(settings: Settings, workdir: pathlib.Path, client, queue: "Permits") -> None:
    """A worker, until the queue has all groups."""
    worker = asyncio.create_task(rollout.work(settings, workdir, 0, client=client, queue=queue))
    done = asyncio.create_task(queue.done.wait())
    await asyncio.wait({worker, done}, return_when=asyncio.FIRST_COMPLETED)
    if worker.done():
        worker.result()
    worker.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await worker


class Singles(InferenceClient):
    """A client that never learns that a server takes batches."""

    def _server(self, address):
        return self._servers.setdefault(address, Alone(self, address))


class Alone(SglangApi):
    """A server that gets a call for each request."""

    async def generate(self, request, *, timeout_secs):
        return await self.generate_alone(request, timeout_secs)


class Server:
    """HTTP over an engine, in a thread."""

    def __init__(self, engine: Engine):
        self._engine, self._ready = engine, threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "Server":
        self.thread.start()
        if not self._ready.wait(peers.TIMEOUT_SECS):
            raise TimeoutError("the server does not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(peers.TIMEOUT_SECS)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with http.serve(self._engine, host="127.0.0.1", port=0) as port:
            self.address = f"http://127.0.0.1:{port}"
            self._ready.set()
            await self._stop.wait()


class Permits:
    """A queue of one worker: gives permits by steps, encodes groups and keeps none. Use in the worker's loop."""

    run_id, v_pub, table_v_pub = "", 0, 0

    def __init__(self, address: str, threads: dict, warm: int, count: int):
        """`threads`: name → thread whose CPU time counts after the first `warm` groups, with the caller's own."""
        self._address, self._threads = address, dict(threads)
        self._warm, self._left, self._out, self._next = warm, warm + count, 0, 0
        self._changed = asyncio.Event()
        self.done = asyncio.Event()
        self.secs: dict[str, float] = {}

    async def __aenter__(self) -> "Permits":
        self._threads["worker"] = threading.current_thread()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def watch_fleet(self) -> AsyncIterator[tuple[ServerRecord, ...]]:
        yield (ServerRecord(self._address, HEALTHY, 0),)
        await asyncio.Event().wait()

    async def admit(self, count: int, wait_secs: float, **_: object) -> list[Permit]:
        """The permits of the next step, when all of the step before are done."""
        while self._out or not self._left:
            self._changed.clear()
            await self._changed.wait()
        if not self._warm and not self.secs:
            self.secs = self._now()
        self._out = min(count, self._warm or self._left, peers.WORKLOAD["learner.groups_per_step"])
        first, self._next = self._next, self._next + self._out
        return [Permit(index, 0) for index in range(first, self._next)]

    async def submit(self, group: Group) -> str:
        wire.encode_group(group)
        self._out, self._left, self._warm = self._out - 1, self._left - 1, max(0, self._warm - 1)
        self._changed.set()
        if not self._left:
            self.secs = {name: secs - self.secs[name] for name, secs in self._now().items()}
            self.done.set()
        return "held"

    async def return_permit(self, permit: Permit, reason: str, detail: str, **_: object) -> None:
        raise RuntimeError(f"{permit} is returned as {reason}: {detail}")

    async def report(self, role: str, waits: Sequence[Wait], *_: object) -> None:
        pass

    async def leave(self, worker: str) -> None:
        pass

    def _now(self) -> dict[str, float]:
        clocks = {n: time.pthread_getcpuclockid(t.ident) for n, t in self._threads.items()}
        return {name: time.clock_gettime(clock) for name, clock in clocks.items()}


def report(found: dict) -> None:
    for side, by_thread in found.items():
        total = sum(values["median"] for values in by_thread.values())
        line = f"{side:10}{total:8.3f} ms a sample"
        for name, values in sorted(by_thread.items()):
            line += f"   {name} {values['median']:.3f} [{values['low']:.3f} {values['high']:.3f}]"
        print(line, flush=True)


if __name__ == "__main__":
    main()
