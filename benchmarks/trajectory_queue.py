"""Groups per second through the trajectory queue, beside a bare gRPC server and a bare SQLite loop of the same bytes.

    python benchmarks/trajectory_queue.py [--rounds=7] [--dir=DIRECTORY] [--routes] [--smoke]

A group is 8 trajectories of 512, 2,048 or 16,384 tokens, at 13 bytes per token on the wire. Each server is a process of
its own. 1, 16 or 256 workers, tasks of this process over four connections, submit one group after another to:

    off, on    the queue without and with its journal (synchronous = "normal"), as a run serves it
    echo       a grpc.aio server that sends every message back
    sink       a grpc.aio server with a reply as short as the queue's
    insert     no server: a fresh SQLite file in this process, WAL, synchronous = NORMAL, one transaction per group

All get the same bytes, prepared beforehand except for the permit. Then a learner leases the groups as arrays, in chunks
of 8.

A round measures every kind; each round reverses the order of the one before. A rate is the median over rounds with the
quartiles, a ratio is of rates of the same round, latencies are of all calls of all rounds. The first round is not
counted. The bars are off / echo ≥ 0.60 and on / insert ≥ 0.70. `load` is the machine's, before and after.

With --routes fewer groups, of 16 workers, are measured without and then with a record of the experts of each token: 8
of 128 in 48 layers. The result is queue_routes.json.

Results are printed and written to benchmarks/results/queue.json, or to --out. The journals are in a temporary directory
in --dir, which must be on a disk, and are removed.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import pathlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import record

from jaxrl_async.queue import service as queue_service
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.calls import BlockingGrpcCalls
from jaxrl_async.queue.client import LearnerQueue
from jaxrl_async.queue.journal import Journal, file_system_of
from jaxrl_async.records import Permit
from jaxrl_async.types import NO_RECORD, NOT_SAMPLED, Choices, Group, Record, Trajectory

ROOT = pathlib.Path(__file__).parent.parent
GROUP_SIZE, VOCAB_SIZE, CHUNK_GROUPS, NUM_CHANNELS = 8, 150_000, 8, 4
NUM_GROUPS = {512: 1024, 2048: 512, 16_384: 256}  # per measurement, by tokens per trajectory
NUM_WORKERS = (1, 16, 256)
ROUTES = Record(num_layers=48, experts_per_token=8, num_experts=128)
NUM_WITH_ROUTES = {512: 256, 2048: 64}  # groups
SMOKE_GROUPS, SMOKE_WORKERS = {16: 24}, (1, 4)
KINDS = ("off", "on", "echo", "sink", "insert")
BARS = {"off/echo": 0.60, "on/insert": 0.70}
RATIOS = (*BARS, "off/sink", "on/off")
START_SECS, CALL_SECS = 60.0, 300.0
MAX_MESSAGE_BYTES = 1 << 24
PUSH, ECHO = "/jaxrl_async.TrajectoryQueue/Push", "/bare/Echo"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=pathlib.Path, help="for the temporary journals")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--routes", action="store_true", help="measure their cost")
    parser.add_argument("--smoke", action="store_true", help="few and small groups, two rounds")
    args = parser.parse_args(argv)
    sizes, workers, rounds = NUM_GROUPS, NUM_WORKERS, args.rounds
    if args.routes:
        sizes, workers = NUM_WITH_ROUTES, (16,)
    if args.smoke:
        sizes, workers, rounds = SMOKE_GROUPS, SMOKE_WORKERS, 2
    result = {
        "grpc": grpc.__version__,
        "sqlite": sqlite3.sqlite_version,
        "rounds": rounds,
        "bars": BARS,
        "tokens": {},
    }
    with tempfile.TemporaryDirectory(prefix="jaxrl-queue-", dir=args.dir) as directory:
        result["file_system"] = file_system_of(directory)
        if result["file_system"] in ("tmpfs", "ramfs"):
            raise SystemExit(f"{directory} is in memory: name a directory on a disk with --dir")
        for num_tokens, num_groups in sizes.items():
            for choices in (NO_RECORD, ROUTES) if args.routes else (NO_RECORD,):
                of = (pathlib.Path(directory), num_tokens, num_groups, workers, rounds, choices)
                name = f"{num_tokens}{', routes' if choices.num_layers else ''}"
                result["tokens"][name] = found = measure(*of)
                print(json.dumps({name: found}, indent=2), flush=True)
    name = "queue_routes" if args.routes else "queue"
    record.write(args.out / f"{name}.json", result, seeds=[0])


def measure(
    directory: pathlib.Path,
    num_tokens: int,
    num_groups: int,
    workers: Sequence[int],
    rounds: int,
    choices: Record,
) -> dict:
    """Measures groups of one size: rates, latencies and ratios."""
    body = make_body(num_tokens, choices)
    calls = {n: {kind: [] for kind in KINDS} for n in workers}  # seconds of each call, by round
    secs = {n: {kind: [] for kind in KINDS} for n in workers}
    leases: dict[str, list[list[float]]] = {"off": [], "on": []}
    order = list(KINDS)
    for turn in range(rounds + 1):
        with servers(directory, num_groups, choices) as addresses:
            for step, num in enumerate(workers, 1):
                for kind in order:
                    taken = run(kind, addresses.get(kind), directory, body, num_groups, num, step)
                    if turn:
                        secs[num][kind].append(taken["secs"])
                        calls[num][kind].append(taken["calls"])
                    if turn and kind in leases:
                        leases[kind].append(taken["leases"])
        in_journal = addresses["bytes"]
        order.reverse()
    num_bytes = len(message(0, body))
    return {
        "group_bytes": num_bytes,
        "token_bytes": num_bytes / (GROUP_SIZE * num_tokens),
        "journal_token_bytes": in_journal / (len(workers) * num_groups * GROUP_SIZE * num_tokens),
        "groups": num_groups,
        "push": {
            str(num): {
                kind: rates(num_groups / np.array(secs[num][kind]), num_bytes)
                | latencies(calls[num][kind])
                for kind in KINDS
            }
            | {"ratios": {name: ratio(secs[num], name) for name in RATIOS}}
            for num in workers
        },
        "lease": {
            kind: rates(num_groups / np.array([sum(secs) for secs in leased]), num_bytes)
            | latencies(leased)
            for kind, leased in leases.items()
        },
    }


def run(
    kind: str,
    address: str | None,
    directory: pathlib.Path,
    body: bytes,
    num_groups: int,
    num_workers: int,
    step: int,
) -> dict:
    """Submits the groups of a step, and leases them from a queue: seconds in all and of each call."""
    first = (step - 1) * num_groups
    messages = [(index, body) for index in range(first, first + num_groups)]
    if kind == "insert":
        return insert(directory / "insert", messages)
    if kind in ("echo", "sink"):
        return asyncio.run(submit(address, ECHO, messages, num_workers))
    calls = BlockingGrpcCalls(
        address,
        connect_timeout_secs=START_SECS,
        call_timeout_secs=CALL_SECS,
        outage_secs=CALL_SECS,
    )
    with LearnerQueue(calls) as learner:
        learner.publish_version(step - 1, ())
        admit(address, num_groups)
        taken = asyncio.run(submit(address, PUSH, messages, num_workers))
        leases, start = [], time.perf_counter()
        for chunk in learner.lease(step, CALL_SECS, lambda: None):
            leases.append(time.perf_counter() - start)
            assert len(chunk.groups) == CHUNK_GROUPS
            start = time.perf_counter()
        learner.commit(step)
    return taken | {"leases": leases}


async def submit(
    address: str, method: str, messages: Sequence[tuple[int, bytes]], num_workers: int
) -> dict:
    """Sends every message once; each worker has one call at a time."""
    options = [
        ("grpc.use_local_subchannel_pool", 1)
    ]  # By default the channels share one connection.
    options += [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    calls: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        sends = []
        for _ in range(min(NUM_CHANNELS, num_workers)):
            channel = grpc.aio.insecure_channel(address, options=options)
            await stack.enter_async_context(channel)
            await channel.channel_ready()
            sends.append(channel.unary_unary(method))
        left = iter(messages)

        async def worker(number: int) -> None:
            send = sends[number % len(sends)]
            for index, body in left:
                start = time.perf_counter()
                await send(message(index, body), timeout=CALL_SECS)
                calls.append(time.perf_counter() - start)

        start = time.perf_counter()
        await asyncio.gather(*(worker(number) for number in range(num_workers)))
        secs = time.perf_counter() - start
    return {"secs": secs, "calls": calls}


def insert(path: pathlib.Path, messages: Sequence[tuple[int, bytes]]) -> dict:
    """Inserts every message into a new file, in a transaction of its own."""
    path.mkdir()
    connection = sqlite3.connect(path / "blobs", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("CREATE TABLE blobs (id INTEGER PRIMARY KEY, message BLOB NOT NULL)")
    calls = []
    begin = time.perf_counter()
    for index, body in messages:
        start = time.perf_counter()
        connection.execute("INSERT INTO blobs VALUES (?, ?)", (index, message(index, body)))
        calls.append(time.perf_counter() - start)
    secs = time.perf_counter() - begin
    connection.close()
    shutil.rmtree(path)
    return {"secs": secs, "calls": calls}


def admit(address: str, num_groups: int) -> None:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/jaxrl_async.TrajectoryQueue/Admit",
            request_serializer=pb.AdmitRequest.SerializeToString,
            response_deserializer=pb.AdmitReply.FromString,
        )
        reply = call(pb.AdmitRequest(max_permits=num_groups, wait_secs=0.0), timeout=CALL_SECS)
    if len(reply.permits) != num_groups:
        raise RuntimeError(f"the queue gave {len(reply.permits)} permits, not {num_groups}")


# Messages.


def journal_bytes(path: pathlib.Path) -> int:
    """Of its pages, wherever they lie."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        ((pages, size),) = connection.execute(
            "SELECT * FROM pragma_page_count, pragma_page_size"
        ).fetchall()
        return pages * size


def make_body(num_tokens: int, choices: Record = NO_RECORD) -> bytes:
    """The message of a random group without its permit; a quarter of each trajectory is the prompt."""
    rng = np.random.default_rng(0)
    num_prompt = num_tokens // 4
    prompt = rng.integers(0, VOCAB_SIZE, num_prompt)
    mask = np.arange(num_tokens) >= num_prompt
    rows = []
    for _ in range(GROUP_SIZE):
        completion = rng.integers(0, VOCAB_SIZE, num_tokens - num_prompt)
        sizes = (num_tokens, choices.num_layers, choices.experts_per_token)
        routes = rng.integers(0, choices.num_experts or 1, sizes, choices.route_dtype)
        rows.append(
            Trajectory(
                tokens=np.append(prompt, completion).astype(np.int32),
                logprobs=np.where(mask, -rng.exponential(size=num_tokens), 0).astype(np.float32),
                versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
                mask=mask,
                prompt_length=num_prompt,
                reward=0.0,
                choices=Choices(routes if routes.size else None),
            )
        )
    encoded = wire.encode_group(Group(0, 0, tuple(rows)))
    encoded.ClearField("permit")
    return encoded.SerializeToString()


def message(index: int, body: bytes) -> bytes:
    """A group's message: its permit's, then its body."""
    permit = wire.encode_permit(Permit(index, 0))
    return pb.Group(permit=permit).SerializeToString() + body


# Servers, each in its own process.


@contextlib.contextmanager
def servers(directory: pathlib.Path, num_groups: int, choices: Record) -> Iterator[dict[str, Any]]:
    """Starts fresh servers; yields their addresses by kind, and later the "bytes" of the journal."""
    path = directory / "journal"
    path.mkdir()
    targets = {
        "off": (serve_queue, (num_groups, choices, None)),
        "on": (serve_queue, (num_groups, choices, path / "journal.sqlite")),
        "echo": (serve_bare, (True,)),
        "sink": (serve_bare, (False,)),
    }
    context, processes = multiprocessing.get_context("spawn"), []
    addresses: dict[str, Any] = {}
    try:
        for kind, (target, args) in targets.items():
            here, there = context.Pipe()
            process = context.Process(target=target, args=(there, *args), name=kind)
            process.start()
            processes.append(process)
            if not here.poll(START_SECS):
                raise TimeoutError(f"the server {kind} did not start within {START_SECS:g} s")
            addresses[kind] = here.recv()
        yield addresses
    finally:
        for process in processes:
            process.terminate()
            process.join()
        addresses["bytes"] = journal_bytes(path / "journal.sqlite")
        shutil.rmtree(path)


def serve_queue(bound: Any, num_groups: int, choices: Record, path: pathlib.Path | None) -> None:
    """Serves the queue, with `num_groups` groups per step."""
    admission = Admission(
        batch_groups=num_groups,
        max_staleness=0,
        push_every_steps=1,
        max_running_groups=num_groups,
        max_attempts=1,
        permit_timeout_secs=CALL_SECS,
        max_bytes=1 << 40,
        chunk_groups=CHUNK_GROUPS,
    )
    service = queue_service.QueueService(
        admission,
        group_size=GROUP_SIZE,
        vocab_size=VOCAB_SIZE,
        max_tokens=1 << 20,
        record=choices,
        journal=None if path is None else Journal(path, batch_groups=num_groups),
    )
    asyncio.run(
        queue_service.serve(
            "127.0.0.1:0", service, max_message_bytes=MAX_MESSAGE_BYTES, on_bound=bound.send
        )
    )


def serve_bare(bound: Any, echo: bool) -> None:
    """Serves every message back, or the shortest reply of the queue."""
    answer = pb.PushReply(outcome="held").SerializeToString()

    async def reply(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return raw if echo else answer

    async def serve() -> None:
        options = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        server = grpc.aio.server(options=options)
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(reply)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        bound.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    asyncio.run(serve())


# Figures.


def rates(groups_per_sec: np.ndarray, group_bytes: int) -> dict:
    return {
        "groups_per_sec": record.quartiles(groups_per_sec),
        "mb_per_sec": record.quartiles(groups_per_sec * group_bytes / 1e6),
    }


def latencies(calls: Sequence[Sequence[float]]) -> dict:
    """Quantiles over all calls of all rounds."""
    p50, p99 = np.quantile(np.concatenate([np.array(c) for c in calls]), (0.5, 0.99)) * 1e3
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


def ratio(secs: dict[str, list[float]], name: str) -> dict:
    """Quartiles over rounds of the ratio of two rates."""
    this, other = name.split("/")
    return record.quartiles(np.array(secs[other]) / np.array(secs[this]))


if __name__ == "__main__":
    main()
