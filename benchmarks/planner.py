"""The planner (`python -m jaxrl_async simulate`): against real runs, on AReaL's questions, and at 1,000 servers.

    python benchmarks/planner.py --part=calibrate [--steps=30]
    python benchmarks/planner.py --part=turns [--steps=30]
    python benchmarks/planner.py --part=areal
    python benchmarks/planner.py --part=scale

calibrate   Two synchronous runs on this machine, of B and B/2 groups, give what the planner is told: the lengths (from
            the journal), the learner's time for a step and for a token, the time of a push, and the two rates of the
            server, those at which the planner's own synchronous step waits for data as long as both runs did. Six other
            settings are then predicted and run. One core is pinned to the learner and one to the rest, and the learning
            rate is 1e-9, so that lengths do not drift. Not told: anything of an asynchronous or periodic run.
turns       The same with the calculator of configs/tools.py, after a warm start in which it is always used. In the two
            runs it takes no time, and they give the number of turns too. In the settings that are predicted and run it
            takes log-normal seconds, of which the planner is told median and σ.
areal       Fu et al., arXiv 2505.24298, published for 128 GPUs and 512 × 16 samples a step: throughput grows with η (a
            figure), and 41.0 h become 14.8 h, 2.77 times. Everything else here is an assumption, see AREAL.
scale       1,000 servers × 1,000 steps, and how a step of 512 groups scales with servers at each η.

Each part is printed and put into benchmarks/results/planner.json (or --out=DIR) under its name, with a plot.
"""

import argparse
import dataclasses
import logging
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import matplotlib
import record

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from modes import WORKLOAD
from scipy import optimize

from jaxrl_async.extras.planner.simulate import (
    Outcome,
    Plan,
    journal_lengths,
    lengths_of,
    limit_of,
    measured,
    simulate,
    split,
)
from jaxrl_async.metrics import read_metrics

ROOT = pathlib.Path(__file__).parent.parent
WARM_STEPS = 5
GROUP_SIZE = 8

GROUPS = 16
# On top of benchmarks/modes.py.
FROZEN = WORKLOAD | {
    "learner.learning_rate": 1e-9,
    "learner.groups_per_step": GROUPS,
    "learner.microbatch_rows": 8,
    "rollout.group_size": GROUP_SIZE,
    "server.num_slots": 64,
}
SETTINGS = {  # name → (mode, what differs)
    "periodic": ("periodic", {"queue.chunk_groups": 4}),
    "async, η = 1": ("async", {"queue.max_staleness": 1}),
    "async, η = 2": ("async", {"queue.max_staleness": 2}),
    "async, η = 4": ("async", {"queue.max_staleness": 4}),
    "async, η = 4, N = 4": ("async", {"queue.max_staleness": 4, "weights.push_every_steps": 4}),
    "async, η = 2, 20 tokens at most": (
        "async",
        {"queue.max_staleness": 2, "rollout.max_new_tokens": 20},
    ),
}

TOOLS = {name: value for name, value in FROZEN.items() if name.startswith("cpus.")} | {
    "task.args.guesses": 0.0,
    "task.args.mistakes": 0.0,
    "warm_start.num_steps": 150,
    "learner.learning_rate": 1e-9,
    "learner.groups_per_step": GROUPS,
    "rollout.group_size": GROUP_SIZE,
    "server.num_slots": FROZEN["server.num_slots"],
    "checkpoint.every_steps": FROZEN["checkpoint.every_steps"],
    "evaluate.every_steps": 0,
}
TOOL_SETTINGS = {  # name → (mode, what differs)
    "sync, tools of 0.1 s": ("sync", {"environment.args.median_secs": 0.1}),
    "async, η = 4, tools of 0.1 s": (
        "async",
        {"queue.max_staleness": 4, "environment.args.median_secs": 0.1},
    ),
    "async, η = 4, tools of 0.5 s": (
        "async",
        {"queue.max_staleness": 4, "environment.args.median_secs": 0.5},
    ),
}
TOOL_SIGMA = 1.0

# One GPU is one server of a 1.5B model. An H800 reads its 3 GB of weights in 1 ms, and for a sequence of 4,000 tokens
# 0.11 GB of keys and values in 35 µs: at a third of these rates 300 and 10,000 tokens a second. Half of the first, as
# launches are not free. Training is 4/3 · 6 · 1.5e9 FLOP a token (with a recomputed anchor) at 30 % of 990 TFLOP/s.
AREAL = dict(
    num_steps=70,
    warm_steps=40,  # more than twice the largest finite η: what was admitted at the start is trained on
    groups_per_step=512,  # published, as is the next
    group_size=16,
    push_every_steps=1,
    chunk_groups=0,
    permit_timeout_secs=math.inf,
    max_attempts=1,
    num_slots=256,  # 60 GB of keys and values at 8,000 tokens each
    request_rate=150.0,
    server_rate=10_000.0,
    step_secs=5.0,
    push_secs=5.0,
    pause_secs=5.0,  # weights are loaded and what was cached is computed again
    drop_share=0.0,
    seed=0,
)
TOKEN_SECS = 4e-5  # of one GPU that trains
GPUS = 128  # published
CUT = 27_000  # published: "27K"
MEAN, SIGMA = 8_000, 1.0  # of lengths: log-normal
ETAS = (0, 1, 2, 4, 8, 16, math.inf)
PUBLISHED_SPEEDUP = 41.0 / 14.8


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--steps", type=int, default=30, help="of each real run")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    if args.steps <= WARM_STEPS:
        parser.error(f"--steps must be > {WARM_STEPS}, got {args.steps}")
    # That generation waits for pushes at η = 1 is among what is shown.
    logging.getLogger("jaxrl_async.queue.admission").setLevel(logging.ERROR)
    path = args.out / "planner.json"
    result = record.read(path)
    result[args.part] = PARTS[args.part](args)
    record.write(path, result, seeds=[0], raw=[args.part], part=args.part)


# Calibration.


def calibrate(args) -> dict:
    """Predicted against measured."""
    runs = {
        GROUPS: real_run("sync", args.steps, {}),
        GROUPS // 2: real_run("sync", args.steps, HALF),
    }
    plan, rows = calibrated(runs)
    print(f"told: {costs_of(plan)}")
    table = {}
    for name, (mode, changes) in SETTINGS.items():
        predicted = simulate(
            plan_of(plan, mode, changes),
            measured_up_to(rows, changes.get("rollout.max_new_tokens")),
        )
        table[name] = compared(predicted, real_run(mode, args.steps, changes)["metrics"])
        print_row(name, table[name])
    load = os.getloadavg()[0]
    return {"steps": args.steps, "load_after": load, "told": costs_of(plan), "settings": table}


def turns(args) -> dict:
    """Predicted against measured, where a tool takes time between two turns."""

    def run(mode: str, changes: dict) -> dict:
        return real_run(mode, args.steps, changes, config="tools", base=TOOLS)

    runs = {GROUPS: run("sync", {}), GROUPS // 2: run("sync", HALF)}
    num = np.mean([row["component/turns"] for r in runs.values() for row in r["metrics"]])
    plan, rows = calibrated(runs, turns=f"{num:.4f}", tool_sigma=TOOL_SIGMA)
    print(f"told: {num:.3f} turns, {costs_of(plan)}")
    table = {}
    for name, (mode, changes) in TOOL_SETTINGS.items():
        planned = plan_of(plan, mode, changes)
        predicted = simulate(planned, measured(rows))
        limit = limit_of(planned, measured(rows))
        metrics = run(mode, changes | {"environment.args.sigma": TOOL_SIGMA})["metrics"]
        table[name] = compared(predicted, metrics) | {"limited_by": limit.by}
        print_row(name, table[name])
    told = costs_of(plan) | {"turns": float(num), "tool_sigma": TOOL_SIGMA}
    load = os.getloadavg()[0]
    return {"steps": args.steps, "load_after": load, "told": told, "settings": table}


def real_run(
    mode: str, steps: int, changes: dict, *, config: str = "quickstart", base: dict = FROZEN
) -> dict:
    """A run's metrics after the first steps, and the completion lengths of its groups."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-planner-") as directory:
        overrides = base | {"learner.num_steps": steps} | changes
        command = [sys.executable, "-m", "jaxrl_async", "train", f"--workdir={directory}/run"]
        command += [f"--config={ROOT}/configs/{config}.py:mode={mode}"]
        command += [f"--config.{name}={value}" for name, value in overrides.items()]
        with open(f"{directory}/log", "w+", encoding="utf-8") as log:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=600).returncode
            log.seek(0)
            if code:
                raise RuntimeError(f"{' '.join(command)}: exit code {code}\n{log.read()[-4000:]}")
        return {
            "metrics": read_metrics(f"{directory}/run")[WARM_STEPS:],
            "lengths": journal_lengths(f"{directory}/run/journal.sqlite"),
        }


def calibrated(runs: dict[int, dict], **known) -> tuple[Plan, list]:
    """What two synchronous runs of different sizes tell, as the plan of the larger; and the lengths.

    `known`: fields of the plan that are no cost.
    """
    rows = [row for run in runs.values() for row in run["lengths"]]
    seen = {groups: times_of(run["metrics"], groups) for groups, run in runs.items()}
    small, large = (seen[groups] for groups in sorted(seen))
    token_secs = (large["train"] - small["train"]) / (large["tokens"] - small["tokens"])
    token_secs = float(np.clip(token_secs, 0, large["train"] / large["tokens"]))
    plan = Plan(
        **AREAL
        | dict(
            mode="sync",
            num_steps=60,
            warm_steps=10,
            groups_per_step=max(runs),
            group_size=GROUP_SIZE,
            max_staleness=0,
            max_running_groups=128,
            num_servers=1,
            num_slots=FROZEN["server.num_slots"],
            step_secs=large["train"] - token_secs * large["tokens"],
            token_secs=token_secs,
            push_secs=large["push"],
            pause_secs=0.0,
        )
        | known
    )
    return fitted(plan, {groups: times["data"] for groups, times in seen.items()}, rows), rows


def times_of(metrics: list[dict], groups: int) -> dict[str, float]:
    """Median seconds of a synchronous step's parts, and its tokens."""
    data = np.array([row["time/wait_data_secs"] for row in metrics])
    push = np.array([row["time/wait_push_secs"] for row in metrics])
    step = np.array([row["time/step_secs"] for row in metrics])
    tokens = np.mean([row["tokens/completion_mean"] for row in metrics]) * groups * GROUP_SIZE
    return {
        "data": float(np.median(data)),
        "push": float(np.median(push)),
        "train": float(np.median(step - data - push)),
        "tokens": float(tokens),
    }


def fitted(plan: Plan, waits: dict[int, float], rows: list) -> Plan:
    """The plan with the two rates at which a synchronous step of each size waits for data as long as it did."""

    def with_rates(logs) -> Plan:
        request, server = np.exp(logs).tolist()
        return dataclasses.replace(plan, request_rate=request, server_rate=server)

    def errors(logs) -> list[float]:
        off = []
        for groups, secs in waits.items():
            sized = dataclasses.replace(with_rates(logs), groups_per_step=groups, num_steps=25)
            outcome = simulate(sized, measured(rows))
            off.append(outcome.wait_data_share / outcome.steps_per_sec / secs - 1)
        return off

    tokens = np.mean([sum(row) for row in rows])
    start = np.log([40 / min(waits.values()), max(waits) * tokens / waits[max(waits)]])
    low, high = start - math.log(100), start + math.log(100)
    return with_rates(optimize.least_squares(errors, start, bounds=(low, high), diff_step=0.02).x)


def plan_of(plan: Plan, mode: str, changes: dict) -> Plan:
    names = {
        "queue.max_staleness": "max_staleness",
        "queue.chunk_groups": "chunk_groups",
        "weights.push_every_steps": "push_every_steps",
        "environment.args.median_secs": "tool_secs",
    }
    known = {names[key]: value for key, value in changes.items() if key in names}
    return dataclasses.replace(plan, mode=mode, **known)


def measured_up_to(rows: list, most: int | None):
    return measured(np.minimum(rows, most or math.inf))


def compared(predicted: Outcome, metrics: list[dict]) -> dict:
    steps = 1 / float(np.mean([row["time/step_secs"] for row in metrics]))
    staleness = float(np.mean([row["staleness/mean"] for row in metrics]))
    return {
        "steps_per_sec": {"predicted": predicted.steps_per_sec, "measured": steps},
        "staleness_mean": {"predicted": predicted.staleness_mean, "measured": staleness},
        "steps_error": predicted.steps_per_sec / steps - 1,
        "staleness_error": (predicted.staleness_mean - staleness) / (staleness or 1),
    }


def print_row(name: str, row: dict) -> None:
    steps, staleness = row["steps_per_sec"], row["staleness_mean"]
    print(
        f"{name:32} steps/s {steps['predicted']:.3f} predicted, {steps['measured']:.3f} measured "
        f"({row['steps_error']:+.1%}); staleness {staleness['predicted']:.2f}, "
        f"{staleness['measured']:.2f} ({row['staleness_error']:+.1%})",
        flush=True,
    )


def costs_of(plan: Plan) -> dict:
    names = ("request_rate", "server_rate", "step_secs", "token_secs", "push_secs", "pause_secs")
    return {name: getattr(plan, name) for name in names}


# AReaL's questions.


def areal(args) -> dict:
    """Throughput by η, and the speed-up over the synchronous system, by the lengths' tail."""
    best, splits = best_split(SIGMA)
    print(f"best split of {GPUS} GPUs at η = 8: {best} servers")
    table = []
    for eta in ETAS:
        outcome = asynchronous(eta, best, tail(SIGMA))
        table.append({"eta": None if math.isinf(eta) else eta} | figures_of(outcome))
        print(f"η = {eta:3}: {say(outcome)}", flush=True)
    tails = [speedup(f"log-normal, σ = {sigma:g}", tail(sigma), best) for sigma in SIGMAS]
    for alpha in (2, 1.5):
        tails.append(
            speedup(f"Pareto, α = {alpha:g}", lengths_of(f"pareto:{MEAN}:{alpha}", CUT), best)
        )
    plot_areal(table, tails, args.out / "planner_areal.png")
    told = AREAL | {"token_secs_of_a_gpu": TOKEN_SECS, "mean": MEAN, "sigma": SIGMA, "cut": CUT}
    told["permit_timeout_secs"] = None
    return {"told": told, "servers": best, "splits": splits, "by_eta": table, "by_tail": tails}


SIGMAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)


def tail(sigma: float):
    return lengths_of(f"lognormal:{MEAN}:{sigma}", CUT)


def best_split(sigma: float) -> tuple[int, dict[str, float]]:
    sizes = dict(
        num_steps=40, warm_steps=20, max_staleness=8, max_running_groups=2048, num_servers=1
    )
    plan = Plan(**AREAL | sizes, mode="async", token_secs=TOKEN_SECS)
    rows = split(plan, tail(sigma), devices=GPUS, max_splits=16)
    rates = {str(servers): outcome.steps_per_sec for servers, outcome in rows}
    return int(max(rates, key=rates.get)), rates


def asynchronous(eta: float, servers: int, lengths) -> Outcome:
    """η = 0 is the synchronous loop with learner and servers on GPUs of their own."""
    finite = AREAL["num_steps"] if math.isinf(eta) else eta
    plan = Plan(
        **AREAL,
        mode="async",
        max_staleness=finite,
        max_running_groups=servers * AREAL["num_slots"] // AREAL["group_size"],
        num_servers=servers,
        token_secs=TOKEN_SECS / (GPUS - servers),
    )
    return simulate(plan, lengths)


def colocated(lengths) -> Outcome:
    """The synchronous system: all GPUs generate, then all train."""
    plan = Plan(
        **AREAL,
        mode="sync",
        max_staleness=0,
        max_running_groups=512,
        num_servers=GPUS,
        token_secs=TOKEN_SECS / GPUS,
    )
    return simulate(plan, lengths)


def speedup(name: str, lengths, servers: int) -> dict:
    sync, free = colocated(lengths), asynchronous(8, servers, lengths)
    row = {"lengths": name, "mean": sync.mean_generated, "sync": figures_of(sync)}
    row |= {"async": figures_of(free), "speedup": free.steps_per_sec / sync.steps_per_sec}
    print(
        f"{name:24} mean {row['mean']:6.0f}: a step takes {1 / sync.steps_per_sec:6.1f} s sync, "
        f"{1 / free.steps_per_sec:6.1f} s async: {row['speedup']:.2f} times",
        flush=True,
    )
    return row


def figures_of(o: Outcome) -> dict:
    names = ("steps_per_sec", "trained_tokens_per_sec", "wait_data_share", "wait_push_share")
    names += ("servers_idle_share", "slots_used_share", "staleness_mean", "staleness_max")
    return {name: getattr(o, name) for name in names}


def say(o: Outcome) -> str:
    return (
        f"{o.trained_tokens_per_sec:10,.0f} tokens/s, {1 / o.steps_per_sec:6.1f} s a step; learner waits "
        f"{o.wait_data_share:5.1%}, servers idle {o.servers_idle_share:5.1%}; staleness {o.staleness_mean:.2f}"
    )


def plot_areal(table: list[dict], tails: list[dict], path: pathlib.Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    names = ["∞" if row["eta"] is None else str(row["eta"]) for row in table]
    left.plot(names, [row["trained_tokens_per_sec"] / 1e3 for row in table], "o-")
    left.set(xlabel="η", ylabel="thousand trained tokens/s", title="Throughput by η")
    left.set_ylim(bottom=0)
    bars = right.barh([row["lengths"] for row in tails], [row["speedup"] for row in tails])
    right.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    right.invert_yaxis()
    right.axvline(PUBLISHED_SPEEDUP, color="black", linestyle=":", label="AReaL, 2.77")
    right.set(
        xlabel="speed-up over the synchronous system", title="Asynchronous, η = 8", xlim=(0, 4)
    )
    right.legend(loc="upper right")
    figure.savefig(path, dpi=80)
    plt.close(figure)


# Scale.


def scale(args) -> dict:
    """The planner's own time at 1,000 servers, and a step's by the number of servers."""
    large = scaled(1000, 4, num_steps=1000, warm_steps=50)
    wall, cpu = time.monotonic(), time.process_time()
    outcome = simulate(large, tail(SIGMA))
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    print(
        f"1,000 servers × 1,000 steps of 512 groups: {wall:.1f} s, of which {cpu:.1f} s computing"
    )
    print(say(outcome))
    table = []
    for eta in SCALE_ETAS:
        for servers in SCALE_SERVERS:
            plan = scaled(servers, eta, warm_steps=2 * eta + 10, num_steps=2 * eta + 35)
            row = figures_of(simulate(plan, tail(SIGMA)))
            table.append({"eta": eta, "servers": servers} | row)
            print(
                f"η = {eta:2}, {servers:4} servers: {1 / row['steps_per_sec']:7.1f} s a step",
                flush=True,
            )
    plot_scale(table, args.out / "planner_scale.png")
    took = {"wall_secs": wall, "process_secs": cpu}
    return {"thousand": took | figures_of(outcome), "by_servers": table}


SCALE_ETAS, SCALE_SERVERS = (0, 1, 4, 16), (16, 32, 64, 128, 256, 512, 1000)


def scaled(servers: int, eta: int, **steps: int) -> Plan:
    """As `areal`, with a learner that is never the slower side."""
    sizes = dict(num_servers=servers, max_staleness=eta, max_running_groups=10**6, token_secs=0.0)
    return Plan(**AREAL | dict(mode="async") | sizes | steps)


def plot_scale(table: list[dict], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for eta in SCALE_ETAS:
        rows = [row for row in table if row["eta"] == eta]
        servers = [row["servers"] for row in rows]
        axes.loglog(servers, [row["steps_per_sec"] for row in rows], "o-", label=f"η = {eta}")
    axes.set(xlabel="servers", ylabel="steps/s", title="512 × 16 samples a step")
    axes.legend()
    figure.savefig(path, dpi=80)
    plt.close(figure)


HALF = {"learner.groups_per_step": GROUPS // 2}
PARTS = {"calibrate": calibrate, "turns": turns, "areal": areal, "scale": scale}


if __name__ == "__main__":
    main()
