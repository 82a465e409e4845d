"""What a scrape of a run's metrics costs its queue, of many servers and workers.

    python benchmarks/scrape.py [--servers=1000] [--workers=256] [--scrapes=20] [--out=DIR]

A queue with the table of that many servers, and the last reports of that many workers, in a process of its own, with
the page of runtime/monitoring.py. This process reads the page again and again, as Prometheus does, with its
compression. A scrape's cost is the CPU time of the queue's process over all scrapes, less that of the same time without
any, divided by them; the share is of one core at a scrape every 15 s. The bar is 1 %.

Results are printed and written to benchmarks/results/scrape.json, or to DIR.
"""

import argparse
import asyncio
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

import psutil
import record

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.queue.calls import BlockingGrpcCalls
from jaxrl_async.queue.client import LearnerQueue
from jaxrl_async.records import ServerRecord, Wait
from jaxrl_async.roles import queue as queue_role
from jaxrl_async.runtime import monitoring
from jaxrl_async.runtime.supervisor import free_port

ROOT = pathlib.Path(__file__).parent.parent
EVERY_SECS, BAR = 15.0, 0.01  # between two scrapes; share of a core
START_SECS = 60.0
NUM_WAITS = 4  # of a worker's report


def settings(port: int) -> Settings:
    """A run's, whose queue listens at a port of loopback and keeps no journal."""
    config = load_config(str(ROOT / "configs/quickstart.py"))
    config.queue.address = f"127.0.0.1:{port}"
    config.monitoring.address = "127.0.0.1:0"
    config.journal.keep = "none"
    return settings_of(config)


async def serve(run: Settings, workdir: pathlib.Path) -> None:
    """The queue's process."""
    monitoring.serve(run, workdir, "queue", 0)
    await queue_role.run(run, workdir)


def fill(run: Settings, num_servers: int, num_workers: int) -> None:
    """Gives the queue its table of servers, and reports of workers."""
    calls = BlockingGrpcCalls(
        run.queue.address, connect_timeout_secs=START_SECS, outage_secs=START_SECS
    )
    with LearnerQueue(calls) as queue:
        queue.join(queue.begin().generation)
        table = [
            ServerRecord(f"http://10.0.{i >> 8}.{i & 255}:30000", "HEALTHY", 0)
            for i in range(num_servers)
        ]
        queue.publish_version(0, table)
        for i in range(num_workers):
            waits = [
                Wait(f"group {i}.{j}", f"server {table[j].address}", 1.0) for j in range(NUM_WAITS)
            ]
            queue.report(f"rollout-{i}", waits)


def measure(num_servers: int, num_workers: int, num_scrapes: int) -> dict[str, Any]:
    """The cost of a scrape."""
    with tempfile.TemporaryDirectory() as place:
        run = settings(port := free_port())
        process = subprocess.Popen(
            [sys.executable, __file__, f"--port={port}", f"--workdir={place}"]
        )
        try:
            fill(run, num_servers, num_workers)
            (target,) = json.loads((pathlib.Path(place) / "scrape" / "queue.json").read_text())
            url = f"http://{target['targets'][0]}/metrics"
            request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
            queue, cost, secs = psutil.Process(process.pid), [], []
            for scrapes in (2, num_scrapes):  # The first ones import what they need.
                before, start = sum(queue.cpu_times()[:2]), time.monotonic()
                for _ in range(scrapes):
                    since = time.monotonic()
                    with urllib.request.urlopen(request, timeout=START_SECS) as answer:
                        num_bytes = len(answer.read())
                    secs.append(time.monotonic() - since)
                cost = [sum(queue.cpu_times()[:2]) - before, time.monotonic() - start]
            before = sum(queue.cpu_times()[:2])
            time.sleep(max(2.0, cost[1]))
            idle = (sum(queue.cpu_times()[:2]) - before) / max(2.0, cost[1])
            with urllib.request.urlopen(url, timeout=START_SECS) as answer:
                lines = [line for line in answer.read().decode().splitlines() if line[0] != "#"]
        finally:
            process.terminate()
            process.wait(START_SECS)
    each = (cost[0] - idle * cost[1]) / num_scrapes
    return {
        "num_servers": num_servers,
        "num_workers": num_workers,
        "num_scrapes": num_scrapes,
        "num_samples": len(lines),
        "compressed_bytes": num_bytes,
        "cpu_secs_each": each,
        "secs_median": sorted(secs[2:])[num_scrapes // 2],
        "raw": secs[2:],
        "share_of_core": each / EVERY_SECS,
        "bar": BAR,
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--scrapes", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # of the queue's process
    parser.add_argument("--workdir", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.port:
        asyncio.run(serve(settings(args.port), args.workdir))
        return {}
    result = measure(args.servers, args.workers, args.scrapes)
    print(json.dumps(result, indent=2))
    record.write(args.out / "scrape.json", result, seeds=[])
    return result


if __name__ == "__main__":
    main()
