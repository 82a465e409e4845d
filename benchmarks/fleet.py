"""A fleet on one machine: 1,000 fake inference servers, 64 real workers, the real queue with its journal and publisher.

    python benchmarks/fleet.py [--minutes=30] [--smoke]

A server answers after --secs on average, in [0.5, 1.5] of it, with tokens that nobody sampled; its port, its routes and
its weights by directory are real. The learner is a script: it leases, commits and publishes a version of one tensor.
There is no JAX. With 2,048 groups of 4 and 60 s a machine of two cores has some 140 completions in a second to carry.

Results: the share of servers without a request, over time; the CPU of the publisher's thread and of the queue, as
shares of a core; the latency of Push by workers, and of Admit by a probe that does not wait; resident memory of every
process over time. They are printed and written to benchmarks/results/fleet.json, or to --out.
"""

import argparse
import asyncio
import json
import multiprocessing
import pathlib
import random
import tempfile
import threading
import time

import numpy as np
import psutil
import record
from aiohttp import web

from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.publishing.publisher import Publisher
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.queue import service
from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.calls import BlockingGrpcCalls, GrpcCalls
from jaxrl_async.queue.client import LearnerQueue, QueueClient
from jaxrl_async.queue.journal import Journal
from jaxrl_async.rewards.pool import Judgement
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.rollout.sampler import Sampler
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.rollout.worker import Worker
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.descriptors import raise_open_file_limit
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.types import Prompt
from jaxrl_async.versions.store import WeightStore

ROOT = pathlib.Path(__file__).parent.parent
VOCAB_SIZE, PROMPT_TOKENS, NEW_TOKENS, GROUP_SIZE = 100, 8, 16, 4
SAMPLE_SECS = 1.0  # between two looks at the servers and the processes
TIMEOUTS = {"connect_timeout_secs": 120.0, "call_timeout_secs": 60.0, "outage_secs": 600.0}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--groups", type=int, default=32, help="of each worker, at a time")
    parser.add_argument("--secs", type=float, default=60.0, help="of one completion")
    parser.add_argument("--processes", type=int, default=4, help="of the workers")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="10 servers, 4 workers, 10 seconds")
    args = parser.parse_args(argv)
    if args.smoke:
        args.minutes, args.servers, args.workers = 1 / 6, 10, 4
        args.groups, args.secs, args.processes = 8, 0.5, 1
    raise_open_file_limit()
    with tempfile.TemporaryDirectory() as directory:
        result = run(args, pathlib.Path(directory))
    print(json.dumps({k: v for k, v in result.items() if k != "over_time"}, indent=2))
    record.write(args.out / "fleet.json", result, seeds=[0], raw=["over_time"])


def run(args: argparse.Namespace, directory: pathlib.Path) -> dict:
    """Starts every process, runs the learner's script for the time, and returns the figures."""
    context = multiprocessing.get_context("spawn")
    processes: dict[str, multiprocessing.Process] = {}
    pipes = {}

    def start(name, target, *values):
        pipes[name], theirs = context.Pipe()
        processes[name] = context.Process(target=target, args=(theirs, *values), daemon=True)
        processes[name].start()

    try:
        start("servers", serve_fleet, args.servers, args.secs)
        addresses = pipes["servers"].recv()
        start("queue", serve_queue, directory, args.workers * args.groups)
        queue = pipes["queue"].recv()
        for i in range(args.processes):
            names = [f"rollout-{n}" for n in range(i, args.workers, args.processes)]
            start(f"workers-{i}", run_workers, queue, names, args)
        figures = learn(args, directory, queue, addresses, processes)
        ends = {}
        for name, pipe in pipes.items():
            if name != "queue":
                pipe.send("end")
                ends[name] = pipe.recv()
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    pushes = [t for name in pipes if name.startswith("workers") for t in ends[name]]
    # The first tenth, while the fleet fills up, is left out.
    idle = ends["servers"]
    settled = idle[len(idle) // 10 :]
    return {
        **{
            name: getattr(args, name)
            for name in ("minutes", "servers", "workers", "groups", "secs")
        },
        "group_size": GROUP_SIZE,
        "idle_share": {"mean": float(np.mean(settled)), "max": float(np.max(settled))},
        "push_ms": _quantiles(pushes),
        "groups_pushed": len(pushes),
        **figures,
        "over_time": figures["over_time"] | {"idle_share": idle},
    }


def serve_fleet(pipe, count: int, secs: float) -> None:
    """All the servers, in one process: an address each."""
    raise_open_file_limit()
    asyncio.run(_serve_fleet(pipe, count, secs))


async def _serve_fleet(pipe, count: int, secs: float) -> None:
    running, versions, digests = {}, {}, {}
    rng = random.Random(0)

    async def handle(request):
        port = request.transport.get_extra_info("sockname")[1]
        payload = await request.json() if request.can_read_body else {}
        if request.path == "/model_info":
            version, digest = versions.get(port, "default"), digests.get(port)
            return web.json_response({"weight_version": version, "weight_digest": digest})
        if request.path == "/update_weight_version":
            versions[port] = payload["new_version"]
        if request.path == "/update_weights_from_disk":
            versions[port] = payload["weight_version"]
            manifest = pathlib.Path(payload["model_path"]) / "manifest.json"
            digests[port] = (
                json.loads(manifest.read_text())["digest"] if manifest.exists() else None
            )
        if request.path != "/generate":
            return web.json_response({"success": True, "message": "done"})
        running[port] = running.get(port, 0) + 1
        try:
            await asyncio.sleep(secs * rng.uniform(0.5, 1.5))
        finally:
            running[port] -= 1
        ids = [1 + rng.randrange(VOCAB_SIZE - 1) for _ in range(NEW_TOKENS)]
        meta = {
            "finish_reason": {"type": "length"},
            "weight_versions": [{"version": versions[port], "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})

    app = web.Application()
    app.router.add_route("*", "/{route:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    ports = []
    for _ in range(count):
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(site._server.sockets[0].getsockname()[1])
    pipe.send([f"http://127.0.0.1:{port}" for port in ports])
    idle = []
    while not pipe.poll():
        idle.append(sum(not running.get(port) for port in ports) / count)
        await asyncio.sleep(SAMPLE_SECS)
    pipe.send(idle)
    await asyncio.sleep(3600)  # Until it is killed: the workers end after it.


def serve_queue(pipe, directory: pathlib.Path, max_running_groups: int) -> None:
    """The real queue, with its journal."""
    raise_open_file_limit()
    batch = max(max_running_groups // 8, 4)
    admission = Admission(
        batch_groups=batch,
        max_staleness=16,
        push_every_steps=1,
        max_running_groups=max_running_groups,
        max_attempts=4,
        permit_timeout_secs=600.0,
        max_bytes=1 << 30,
    )
    journal = Journal(directory / "journal.sqlite", batch_groups=batch, keep="checkpointed")
    queue = service.QueueService(
        admission,
        group_size=GROUP_SIZE,
        vocab_size=VOCAB_SIZE,
        max_tokens=PROMPT_TOKENS + NEW_TOKENS,
        journal=journal,
    )
    asyncio.run(service.serve("127.0.0.1:0", queue, max_message_bytes=16 << 20, on_bound=pipe.send))


class TimedClient(QueueClient):
    """A client that keeps the seconds of every Push."""

    push_secs: list[float]

    async def submit(self, group):
        start = time.monotonic()
        outcome = await super().submit(group)
        self.push_secs.append(time.monotonic() - start)
        return outcome


class Prompts:
    def __getitem__(self, index):
        tokens = np.full(PROMPT_TOKENS, 1 + index % (VOCAB_SIZE - 1), np.int32)
        return Prompt(index=index, tokens=tokens, text="", answer="")


class Rewards:
    async def judge(self, text, answer, seen):
        return Judgement(float(len(text) % 2))

    def waits_for(self):
        return "its reward"


def run_workers(pipe, queue: str, names: list[str], args: argparse.Namespace) -> None:
    """Some of the workers, in one process."""
    raise_open_file_limit()
    asyncio.run(_run_workers(pipe, queue, names, args))


async def _run_workers(pipe, queue: str, names: list[str], args: argparse.Namespace) -> None:
    push_secs: list[float] = []

    async def work(name):
        fleet = Fleet(suspect_secs=2.0, clock=time.monotonic, speeds={})
        client = TimedClient(GrpcCalls(queue, **TIMEOUTS))
        client.push_secs = push_secs
        clock = ActiveClock()
        async with InferenceClient() as inference, client:
            sampler = Sampler(
                client=inference,
                fleet=fleet,
                controls={},
                sampling={"max_new_tokens": NEW_TOKENS, "temperature": 1.0},
                run_seed=0,
                request_timeout_secs=600.0,
                max_retries=3,
                clock=clock,
            )
            runner = Runner(
                single_turn,
                encode=lambda text: [1],
                decode=lambda ids: " ".join(map(str, ids)),
                stop_token_ids=(0,),
                vocab_size=VOCAB_SIZE,
                max_new_tokens=NEW_TOKENS,
                max_request_tokens=PROMPT_TOKENS + NEW_TOKENS,
                max_tokens=PROMPT_TOKENS + NEW_TOKENS,
            )
            await Worker(
                name=name,
                queue=client,
                sampler=sampler,
                fleet=fleet,
                rewards=Rewards(),
                prompts=Prompts(),
                runner=runner,
                group_size=GROUP_SIZE,
                max_running_groups=args.groups,
                drop_equal_rewards=False,
                overlong=lambda num_tokens: 0.0,
                frictions=None,
                run_seed=0,
                clock=clock,
            ).run()

    tasks = [asyncio.create_task(work(name), name=name) for name in names]
    while not pipe.poll():
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.5)
    pipe.send(push_secs)


def learn(args, directory: pathlib.Path, queue: str, addresses: list[str], processes) -> dict:
    """The learner's script: leases, commits and publishes, until the time is over."""
    admit_secs: list[float] = []
    over = threading.Event()
    probe = threading.Thread(target=_probe, args=(queue, admit_secs, over), daemon=True)
    rows, steps = [], 0
    with LearnerQueue(BlockingGrpcCalls(queue, **TIMEOUTS)) as learner:
        identity = learner.begin()
        store = WeightStore(directory / "weights", keep=2, writer=identity)
        publisher = Publisher(
            {address: (address,) for address in addresses},
            client=InferenceClient(),
            transport=Transport("disk", mode="retract", writer=identity),
            pin=store.pin,
            announce=learner.publish_version,
            push_timeout_secs=120.0,
            poll_secs=2.0,
            start_timeout_secs=300.0,
        )

        def publish(version):
            tensors = [("weight", np.full(4, version, np.float32))]

            def write():
                store.write(version, tensors, {})
                return store.get(version)

            publisher.publish(version, write, timeout_secs=600.0)

        try:
            publish(0)
            publisher.wait(0, timeout_secs=600.0)
            learner.commit(0)
            probe.start()
            start, cpu = time.monotonic(), _cpu(publisher, processes)
            sampler = threading.Thread(
                target=_sample, args=(processes, rows, start, over), daemon=True
            )
            sampler.start()
            while time.monotonic() - start < 60 * args.minutes:
                ended = list(
                    learner.lease(
                        steps + 1,
                        600.0,
                        lambda: time.monotonic() - start > 60 * args.minutes,
                    )
                )
                if not ended:
                    break
                steps += 1
                learner.commit(steps)
                learner.checkpointed(steps)
                publish(steps)
            secs, now = time.monotonic() - start, _cpu(publisher, processes)
            over.set()
            sampler.join(10.0)
            probe.join(10.0)
        finally:
            over.set()
            publisher.close()
    return {
        "steps": steps,
        "cpu_share": {name: (now[name] - cpu[name]) / secs for name in cpu},
        "admit_ms": _quantiles(admit_secs),
        "rss_mb": {name: [rows[0]["rss_mb"][name], rows[-1]["rss_mb"][name]] for name in processes},
        "over_time": {"processes": rows},
    }


def _probe(queue: str, admit_secs: list[float], over: threading.Event) -> None:
    """Times an Admit that does not wait. A permit that comes with it is given back, and its index retired."""

    async def run():
        async with QueueClient(GrpcCalls(queue, **TIMEOUTS)) as client:
            while not over.is_set():
                start = time.monotonic()
                permits = await client.admit(1, 0.0, worker="probe")
                admit_secs.append(time.monotonic() - start)
                for permit in permits:
                    await client.return_permit(permit, "invalid", "a probe")
                await asyncio.sleep(0.2)

    asyncio.run(run())


def _sample(processes, rows: list[dict], start: float, over: threading.Event) -> None:
    while True:
        rss = {
            name: psutil.Process(p.pid).memory_info().rss / 2**20 for name, p in processes.items()
        }
        rows.append({"secs": time.monotonic() - start, "rss_mb": rss})
        if over.wait(10 * SAMPLE_SECS):
            return


def _cpu(publisher: Publisher, processes) -> dict[str, float]:
    """Seconds of CPU so far: of every process, and of the publisher's thread in this one."""
    clock = time.pthread_getcpuclockid(publisher._thread.ident)
    spent = {"publisher": time.clock_gettime(clock)}
    for name, process in processes.items():
        times = psutil.Process(process.pid).cpu_times()
        spent[name] = times.user + times.system
    return spent


def _quantiles(secs: list[float]) -> dict[str, float] | None:
    if not secs:
        return None
    return {f"p{q}": 1000 * float(np.percentile(secs, q)) for q in (50, 99)}


if __name__ == "__main__":
    main()
