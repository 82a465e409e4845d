"""Groups trained by prompt or by completion (`queue.order`): speed, drops and the lengths that are trained on.

    python benchmarks/order.py --part=predicted
    python benchmarks/order.py --part=agents [--seeds=1,2,3,4,5] [--steps=30]

predicted   The planner at AReaL's sizes (benchmarks/planner.py says what is assumed), where the servers are the slower
            side; and with servers to spare, a fast learner and answers of up to ten times the mean, where a step waits
            for its slowest alone. By η and by the lengths' tail, two seeds.
agents      Real runs of configs/tools.py after a warm start, whose calculator takes log-normal seconds (σ = 1.5: some
            samples take many times as long as most): both orders in turn for each seed.

Each part is printed and put into benchmarks/results/order.json (or --out=DIR) under its name.
"""

import argparse
import logging
import pathlib
import statistics

import planner
import record

from jaxrl_async.extras.planner.simulate import Outcome, Plan, lengths_of, simulate

ORDERS = ("prompt", "completion")
ETAS = (1, 4, 16)
LENGTHS = ("lognormal:{}:1", "pareto:{}:1.5")  # of a mean, in tokens
SIZES = {  # name → mean length; servers, groups a step, the learner's seconds a token
    "AReaL's sizes": (planner.MEAN, (100, 512, planner.TOKEN_SECS / (planner.GPUS - 100))),
    "servers to spare": (2_700, (32, 64, 0.0)),
}
PREDICTED_SEEDS = (0, 1)
AGENTS = planner.TOOLS | {
    "queue.max_staleness": 4,
    "environment.args.median_secs": 0.3,
    "environment.args.sigma": 1.5,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--seeds", default="1,2,3,4,5", help="of the real runs")
    parser.add_argument("--steps", type=int, default=30, help="of each real run")
    parser.add_argument("--out", type=pathlib.Path, default=planner.ROOT / "benchmarks/results")
    args = parser.parse_args(argv)
    logging.getLogger("jaxrl_async.queue.admission").setLevel(logging.ERROR)
    path = args.out / "order.json"
    result = record.read(path)
    result[args.part] = found = PARTS[args.part](args)
    record.write(path, result, seeds=found["seeds"], raw=[args.part], part=args.part)


def predicted(args) -> dict:
    """Both orders of the planner's plans."""
    table = []
    for where, (mean, sizes) in SIZES.items():
        for spec in (spec.format(mean) for spec in LENGTHS):
            for eta in ETAS:
                row = {"sizes": where, "lengths": spec, "eta": eta}
                for order in ORDERS:
                    plans = (planned(*sizes, eta, order, seed) for seed in PREDICTED_SEEDS)
                    lengths = lengths_of(spec, planner.CUT)
                    row[order] = [figures_of(simulate(plan, lengths)) for plan in plans]
                row["speedup"] = [
                    by_completion["steps_per_sec"] / by_prompt["steps_per_sec"]
                    for by_prompt, by_completion in zip(*(row[o] for o in ORDERS), strict=True)
                ]
                table.append(row)
                print(f"{where}, {spec}, η = {eta:2}: {say(row)}", flush=True)
    return {"seeds": PREDICTED_SEEDS, "plans": table}


def planned(servers: int, groups: int, token_secs: float, eta: int, order: str, seed: int) -> Plan:
    sizes = dict(max_staleness=eta, num_servers=servers, groups_per_step=groups)
    sizes |= dict(max_running_groups=10**6, max_attempts=4)
    steps = dict(warm_steps=2 * eta + 10, num_steps=2 * eta + 40)
    own = dict(mode="async", order=order, seed=seed, token_secs=token_secs)
    return Plan(**planner.AREAL | sizes | steps | own)


def figures_of(o: Outcome) -> dict:
    return planner.figures_of(o) | {
        "length_bias": o.length_bias,
        "drop_share": o.drop_share,
        "dropped": o.dropped,
    }


def agents(args) -> dict:
    """Both orders of real runs, in turn."""
    seeds, runs = [int(seed) for seed in args.seeds.split(",")], []
    for seed in seeds:
        for order in ORDERS:
            changes = AGENTS | {"queue.order": order, "seed": seed}
            metrics = planner.real_run("async", args.steps, {}, config="tools", base=changes)
            run = {"seed": seed, "order": order} | measured(metrics["metrics"])
            runs.append(run)
            print(run, flush=True)
    by_order = {o: [run for run in runs if run["order"] == o] for o in ORDERS}
    speedups = [
        b["steps_per_sec"] / a["steps_per_sec"]
        for a, b in zip(*(by_order[o] for o in ORDERS), strict=True)
    ]
    print(f"speed-up by seed: {speedups}, median {statistics.median(speedups):.3f}")
    return {
        "steps": args.steps,
        "seeds": seeds,
        "config": AGENTS,
        "runs": runs,
        "speedup": speedups,
    }


def measured(metrics: list[dict]) -> dict:
    """Of a run's steps after the first ones."""
    last = metrics[-1]
    return {
        "steps_per_sec": 1 / statistics.mean(row["time/step_secs"] for row in metrics),
        "staleness_mean": statistics.mean(row["staleness/mean"] for row in metrics),
        "staleness_max": max(row["staleness/max"] for row in metrics),
        "returned": {name: n for name, n in last.items() if name.startswith("returned/")},
        "fairness": {name: n for name, n in last.items() if name.startswith("fairness/")},
        "reward_mean": statistics.mean(row["reward/mean"] for row in metrics),
    }


def say(row: dict) -> str:
    by_completion = row["completion"]
    means = {
        name: statistics.mean(one[name] for one in by_completion)
        for name in ("drop_share", "length_bias", "staleness_mean", "staleness_max")
    }
    return (
        f"{statistics.mean(row['speedup']):.2f} times as fast, {means['drop_share']:.1%} of groups dropped, trained "
        f"lengths {means['length_bias']:.3f} of generated, staleness {means['staleness_mean']:.1f} "
        f"(at most {means['staleness_max']:.0f})"
    )


PARTS = {"predicted": predicted, "agents": agents}


if __name__ == "__main__":
    main()
