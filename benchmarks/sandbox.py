"""Programs a second in the sandbox, with 1 and 2 processes, beside a bare subprocess of Python.

    python benchmarks/sandbox.py [--rounds=8] [--smoke]

A round runs the same programs in each way in turn; the next round in the opposite order. A program defines a function
and evaluates three calls of it. Bare: `python -I -S -c PROGRAM`, without bounds and walls. Boxed: one
sandbox for each process. `code`: the reward, from the text of a completion to its score, in the reward pool.
"over_bare" is of the same number of processes in the same round: median and quartiles.

`start_secs` is the time until a sandbox is ready. Results are printed and written to
benchmarks/results/sandbox.json, or to --out.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import record
from record import quartiles

from jaxrl_async.extras.programs.sandbox import Sandbox
from jaxrl_async.rewards.pool import RewardPool

ROOT = pathlib.Path(__file__).parent.parent
NUM_PROCESSES = (1, 2)
PROGRAM = "def f(n):\n    return sum(k * k for k in range(n))\n"
CALLS = ("f(10)", "f(20)", "f(30)")
WAYS = ("bare", "boxed", "code")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="few programs, two rounds")
    args = parser.parse_args(argv)
    num, rounds = (4, 2) if args.smoke else (60, args.rounds)
    result = {
        "rounds": rounds,
        "programs": num,
        **{str(size): asyncio.run(throughput(size, num, rounds)) for size in NUM_PROCESSES},
    }
    print(json.dumps(result, indent=2))
    record.write(args.out / "sandbox.json", result, seeds=[])


async def throughput(size: int, num: int, rounds: int) -> dict:
    """Programs a second of each way with `size` processes, and beside bare ones."""
    secs = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        started = time.perf_counter()
        boxes = [stack.enter_context(Sandbox()) for _ in range(size)]
        start_secs = (time.perf_counter() - started) / size
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(size))
        pool = RewardPool(
            "code", num_processes=size, timeout_secs=60.0, memory_bytes=1 << 30, calls_per_process=0
        )
        async with pool:
            order = list(WAYS)
            for turn in range(rounds + 1):  # The first one is not counted: it warms up.
                for way in order:
                    begin = time.perf_counter()
                    if way == "code":
                        await score(pool, num)
                    else:
                        run = bare if way == "bare" else boxed
                        shares = [num // size] * size
                        list(threads.map(run, shares, boxes))
                    if turn:
                        secs[way].append(time.perf_counter() - begin)
                order.reverse()
    reference = np.array(secs["bare"])
    return {"start_secs": start_secs} | {
        way: {
            "runs_per_sec": quartiles(num / np.array(times)),
            "over_bare": quartiles(reference / np.array(times)),
        }
        for way, times in secs.items()
    }


def bare(num: int, _) -> None:
    program = PROGRAM + "".join(f"print({call})\n" for call in CALLS)
    command = [sys.executable, "-I", "-S", "-c", program]
    for _ in range(num):
        done = subprocess.run(command, capture_output=True, check=True)
        if len(done.stdout.splitlines()) != len(CALLS):
            raise ValueError(f"a bare program printed {done.stdout!r}")


def boxed(num: int, sandbox: Sandbox) -> None:
    for _ in range(num):
        outcome = sandbox.run(PROGRAM, expressions=CALLS)
        if len(outcome.results) != len(CALLS):
            raise ValueError(f"a boxed program gave {outcome}")


async def score(pool: RewardPool, num: int) -> None:
    answer = json.dumps(["assert f(10) == 285", "assert f(20) == 2470", "assert f(30) == 8555"])
    calls = (pool.judge(PROGRAM, answer, {"metadata": {}}) for _ in range(num))
    rewards = [judged.reward for judged in await asyncio.gather(*calls)]
    if rewards != [1.0] * num:
        raise ValueError(f"right programs scored {rewards}")


if __name__ == "__main__":
    main()
