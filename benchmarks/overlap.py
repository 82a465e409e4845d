"""A block on its way to the server beside the training of the next: bytes in flight and the work of the learner.

    python benchmarks/overlap.py [--steps=20] [--rate=4] [--smoke]

Queue, rollout worker, learner and server are processes of their own. Before the server's control address is a proxy,
which lets through `rate` MB a second of what the learner sends, and notes when. The model is that of modes.py, which
reverses tokens here; each step is pushed by transport `stream` as a difference. Arms: all layers and four blocks in
mode async, where a step begins while the version before is on its way, and four blocks in mode sync, which waits.

Of the steps after the first five: seconds a step, bytes a step, seconds a step that bytes are in flight, and seconds
that the learner waits for data and for pushes. "beside": the least share of the seconds in flight in which the learner
works, by the steps' rows: in a step of 3 s with 1 s of waits, bytes are in flight beside its work for all but 1 s.
Results: benchmarks/results/overlap.json.
"""

import argparse
import asyncio
import pathlib
import socket
import sys
import tempfile
import time

import modes
import numpy as np
import record
import relay

from jaxrl_async.metrics import read_metrics

ROOT = pathlib.Path(__file__).parent.parent
ARMS = {
    "async, all layers": ("async", 1),
    "async, 4 blocks": ("async", 4),
    "sync, 4 blocks": ("sync", 4),
}
WORKLOAD = {k: v for k, v in modes.WORKLOAD.items() if not k.startswith("cpus.")}
WORKLOAD |= {"weights.transport": "stream", "weights.delta": True, "weights.push_every_steps": 1}
# Rewards for a part of an answer: those of sums would all be 0, and a version that is the one before is sent in full.
WORKLOAD |= {"task.name": "token_reversal", "tokenizer.alphabet": "0123456789>"}
WORKLOAD |= {"task.args": {"num_tokens": 5, "num_symbols": 10, "num_test": 512, "seed": 0}}
SMOKE = {"model.model_dim": 32, "model.mlp_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 1}
START_SECS, RUN_SECS = 300.0, 1800.0


class Noted(relay.Link):
    """A link that keeps [begin, end, bytes] of each send, by the clock of the metrics' rows."""

    def __init__(self, bytes_per_sec: float):
        super().__init__(bytes_per_sec)
        self.sends: list[tuple[float, float, int]] = []

    async def send(self, num_bytes: int) -> None:
        begin = max(self._free_at, time.monotonic()) - time.monotonic() + time.time()
        await super().send(num_bytes)
        self.sends.append((begin, begin + num_bytes / self._rate, num_bytes))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=4.0, help="MB a second of the link")
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, seven steps")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps = 7
    arms = {}
    for name, (mode, blocks) in ARMS.items():
        own = WORKLOAD | (SMOKE if args.smoke else {}) | {"learner.num_steps": args.steps}
        arms[name] = asyncio.run(run(mode, own | {"learner.blocks": blocks}, args.rate * 1e6))
        print(name, {k: v for k, v in arms[name].items() if k != "rows"}, flush=True)
    result = {"steps": args.steps, "megabytes_per_sec": args.rate, "workload": WORKLOAD}
    record.write(args.out / "overlap.json", result | {"arms": arms}, seeds=[0])


async def run(mode: str, overrides: dict, bytes_per_sec: float) -> dict:
    """One training run, its server behind the link."""
    with tempfile.TemporaryDirectory() as directory:
        port, link = free_port(), Noted(bytes_per_sec)
        async with relay.proxy(port, link, relay.Link(1e12)) as control:
            where = {"server.addresses": (f"http://127.0.0.1:{port}",)}
            where |= {"server.control_addresses": (f"http://127.0.0.1:{control}",)}
            flags = [f"--config={ROOT}/configs/quickstart.py:mode={mode}"]
            flags += [f"--config.{name}={value}" for name, value in (overrides | where).items()]
            server = await started([*flags, "--role=server", f"--workdir={directory}/server"])
            try:
                await listening(port, server)
                learner = await started([*flags, f"--workdir={directory}/run"])
                code = await asyncio.wait_for(learner.wait(), RUN_SECS)
                if code:
                    raise RuntimeError(f"the run ended with {code}")
            finally:
                server.terminate()
                await server.wait()
        return summary(read_metrics(f"{directory}/run"), link.sends)


async def started(flags: list[str]) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "jaxrl_async", "train", *flags]
    none = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=none, stderr=none)


async def listening(port: int, server: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline and server.returncode is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.5)
            continue
        return writer.close()
    raise RuntimeError("the server did not start")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def summary(rows: list[dict], sends: list[tuple[float, float, int]]) -> dict:
    """Means over the steps after the first five, and their rows."""
    begin, end, size = np.array(sends).T
    steps = []
    for row in rows[modes.WARM_STEPS :]:
        to, secs = row["unix_time"], row["time/step_secs"]
        flight = np.clip(np.minimum(end, to) - np.maximum(begin, to - secs), 0, None)
        waits = {n: row.get(f"time/{n}_secs", 0.0) for n in ("wait_data", "wait_push")}
        waited = sum(waits.values())
        steps.append({"step_secs": secs, "flight_secs": flight.sum()} | waits)
        steps[-1]["beside_secs"] = max(0.0, flight.sum() - waited)
        steps[-1]["bytes"] = (size * flight / (end - begin)).sum()
    means = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
    means["beside"] = means.pop("beside_secs") / means["flight_secs"]
    staleness = float(np.mean([row["staleness/mean"] for row in rows[modes.WARM_STEPS :]]))
    rows = [{name: float(value) for name, value in step.items()} for step in steps]
    return means | {"staleness": staleness, "rows": rows}


if __name__ == "__main__":
    main()
