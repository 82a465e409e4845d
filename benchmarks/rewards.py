r"""Throughput of the reward pool with 1, 2, 4 and 8 processes, for a reward that costs nothing and for math_verify.

    python benchmarks/rewards.py [--rounds=10] [--smoke]

A round gives the same calls, all at once, to pools of each size in turn and to the function itself in this process; the
next round gives other calls, as SymPy remembers what it has seen, in the opposite order. A call is a completion of some
200 words and a gold answer; half are right. For `last_number` the answer is an integer; for `math_verify` it is in
\boxed{}, a fifth each: a fraction that is not reduced, a decimal of one, a set, an interval and a product of binomials.

Calls per second and their ratio to one process in the same round: median over the rounds, with the quartiles. All pools
are there during the whole run, and idle but for their turn. `start_secs` is the time until a pool of one process is
ready, which is also what replacing a process costs it. `load` is the machine's, before and after.

Results are printed and written to benchmarks/results/rewards.json, or to --out.
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import time
from collections.abc import Sequence

import numpy as np
import record

from jaxrl_async.rewards import reward_function
from jaxrl_async.rewards.pool import RewardPool

ROOT = pathlib.Path(__file__).parent.parent
NUM_PROCESSES = (1, 2, 4, 8)
NUM_CALLS = {"last_number": 4000, "math_verify": 200}
SMOKE_CALLS = {"last_number": 40, "math_verify": 10}
IN_PROCESS = "in this process"
NUM_WORDS = 200

Calls = Sequence[tuple[str, str]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="few calls, pools of 1 and 2")
    args = parser.parse_args(argv)
    sizes, num_calls, rounds = NUM_PROCESSES, NUM_CALLS, args.rounds
    if args.smoke:
        sizes, num_calls, rounds = (1, 2), SMOKE_CALLS, 2
    result = {
        "rounds": rounds,
        "rewards": {
            reward: asyncio.run(throughput(reward, sizes, num, rounds))
            for reward, num in num_calls.items()
        },
    }
    print(json.dumps(result, indent=2))
    record.write(args.out / "rewards.json", result, seeds=[0])


async def throughput(reward: str, sizes: Sequence[int], num_calls: int, rounds: int) -> dict:
    """Calls per second of the function itself and of pools of each size, beside one process's."""
    rng, secs = np.random.default_rng(0), {name: [] for name in (IN_PROCESS, *sizes)}
    async with contextlib.AsyncExitStack() as stack:
        pools, starts = {}, {}
        for size in sizes:
            start = time.perf_counter()
            pools[size] = await stack.enter_async_context(make_pool(reward, size))
            starts[size] = time.perf_counter() - start
        order = list(secs)
        for turn in range(rounds + 1):  # The first one is not counted: it warms up.
            calls = make_calls(reward, num_calls, rng)
            found = {}
            for name in order:
                start = time.perf_counter()
                found[name] = await score(pools.get(name), reward, calls)
                if turn:
                    secs[name].append(time.perf_counter() - start)
            if any(rewards != [1.0, 0.0] * (num_calls // 2) for rewards in found.values()):
                raise ValueError(f"{reward} does not judge its calls as they were made")
            order.reverse()
    one = np.array(secs[1])
    return {
        "calls": num_calls,
        "start_secs": starts[1],
        "processes": {
            str(name): {
                "calls_per_sec": record.quartiles(num_calls / np.array(times)),
                "over_one": record.quartiles(one / np.array(times)),
            }
            for name, times in secs.items()
        },
    }


def make_pool(reward: str, num_processes: int) -> RewardPool:
    return RewardPool(
        reward,
        num_processes=num_processes,
        timeout_secs=60.0,
        memory_bytes=1 << 30,
        calls_per_process=0,
    )


async def score(pool: RewardPool | None, reward: str, calls: Calls) -> list[float]:
    """Without a pool, here."""
    if pool is not None:
        judgements = await asyncio.gather(*(pool.judge(*call) for call in calls))
        return [judgement.reward for judgement in judgements]
    function = reward_function(reward)
    return [function(completion, answer) for completion, answer in calls]


def make_calls(reward: str, num_calls: int, rng: np.random.Generator) -> Calls:
    """(completion, answer) pairs; every second completion is wrong."""
    kinds = (integer,) if reward == "last_number" else MATHEMATICS
    calls = []
    for i in range(num_calls):
        kind = kinds[i // 2 % len(kinds)]
        a, b = (int(n) for n in rng.integers(2, 1000, 2))
        answer, right, wrong = kind(a, b)
        words = " ".join(f"word{n}" for n in rng.integers(0, 1000, NUM_WORDS))
        calls.append((f"{words}. So the answer is {wrong if i % 2 else right}.", answer))
    return calls


def integer(a: int, b: int) -> tuple[str, str, str]:
    """(gold answer, a completion's end that is right, one that is wrong)"""
    return str(a * b), f"\n#### {a * b:,}", f"\n#### {a * b + 1:,}"


def fraction(a: int, b: int) -> tuple[str, str, str]:
    return over(a, b), boxed(over(3 * a, 3 * b)), boxed(over(a + 1, b))


def decimal(a: int, b: int) -> tuple[str, str, str]:
    return over(a, b), boxed(f"{a / b:.9f}"), boxed(f"{a / b + 0.01:.9f}")


def finite_set(a: int, b: int) -> tuple[str, str, str]:
    return rf"\{{{a}, -{b}, 1\}}", boxed(rf"\{{1, {a}, -{b}\}}"), boxed(rf"\{{{a}, -{b}\}}")


def interval(a: int, b: int) -> tuple[str, str, str]:
    return f"[{a}, {a + b})", boxed(f"[{a}, {a + b})"), boxed(f"({a}, {a + b})")


def product(a: int, b: int) -> tuple[str, str, str]:
    expanded = f"x^2 + {a + b}x + {a * b}"
    return expanded, boxed(f"(x + {a})(x + {b})"), boxed(f"(x + {a})(x - {b})")


MATHEMATICS = (fraction, decimal, finite_set, interval, product)


def boxed(text: str) -> str:
    return rf"$\boxed{{{text}}}$"


def over(a: int, b: int) -> str:
    return rf"\frac{{{a}}}{{{b}}}"


if __name__ == "__main__":
    main()
