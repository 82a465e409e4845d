"""Final accuracy against staleness: what the age of the weights that sample costs each objective.

    python benchmarks/staleness.py [--jobs=2] [--only='task=arithmetic,method=ppo|recompute'] [--rates | --ess]

In every step the weights that sample are exactly η steps old (`rollout.delay_steps`; fewer in the first η steps), a
step makes two optimizer updates, and everything but the objective is equal. Two tasks, each from a SHORT warm start on
right demonstrations that all runs of a seed share, so that RL has to build most of the skill: token reversal (five
tokens of 4 symbols) and two-digit addition. Accuracy: share of held-out prompts that greedy answers get exactly.

With --rates each method has its own learning rate at each task and η: of three, the one of the highest mean accuracy
over seeds that are not reported. Ten other seeds are then run at it.

With --ess A-3PO trains on the sums with and without `learner.rate_by_ess`, at η = 1 and 8 and each of three rates.

Finished runs are kept in --cache and never run again. Results: benchmarks/results/staleness.json and .png,
staleness_rates.json and staleness_ess.json.
"""

import argparse
import collections
import itertools
import pathlib
from typing import Any

import grid
import matplotlib
import numpy as np
import record
from in_process import Outcome

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SEEDS = tuple(range(5))
STALENESS = (0, 1, 2, 4, 8, 16)  # η, in steps
# Of --rates:
RATES = (1e-4, 3e-4, 1e-3)
CHOOSING_SEEDS = (100, 101, 102)
REPORTED_SEEDS = tuple(range(10))
# Of --ess:
ESS_STALENESS = (1, 8)

BASE = {
    "model.num_layers": 2,
    "model.mlp_dim": 192,
    "warm_start.batch_size": 128,
    "rollout.group_size": 8,
    "learner.num_minibatches": 2,
    "learner.learning_rate": 3e-4,
    "checkpoint.every_steps": 50,
    "loss.advantage": "grpo",
    "loss.behavior_weight": "none",
    "loss.behavior_cap": None,
}

TASKS = {
    "token_reversal": {
        "task.name": "token_reversal",
        "task.args": {"num_tokens": 5, "num_symbols": 4, "num_test": 256, "seed": 0},
        "tokenizer.alphabet": "0123>",
        "warm_start.num_steps": 40,
        "warm_start.row_tokens": 12,
        "warm_start.learning_rate": 1e-3,
        "server.num_slots": 128,
        "server.decode_chunk": 5,
        "server.max_total_tokens": 11,
        "rollout.max_prompt_tokens": 6,
        "rollout.max_new_tokens": 5,
        "learner.num_steps": 400,
        "learner.groups_per_step": 16,
        "learner.microbatch_rows": 64,
        "learner.row_tokens": 11,
        "evaluate.num_prompts": 256,
    },
    "arithmetic": {
        "task.name": "arithmetic",
        "task.args": {"num_digits": 2, "num_test": 512, "forget_carry": 0.0, "seed": 0},
        "tokenizer.alphabet": "0123456789+=",
        "warm_start.num_steps": 160,
        "warm_start.row_tokens": 10,
        "warm_start.learning_rate": 3e-3,
        "server.num_slots": 256,
        "server.decode_chunk": 4,
        "server.max_total_tokens": 10,
        "rollout.max_prompt_tokens": 6,
        "rollout.max_new_tokens": 4,
        "learner.num_steps": 200,
        "learner.groups_per_step": 32,
        "learner.microbatch_rows": 128,
        "learner.row_tokens": 10,
        "evaluate.num_prompts": 512,
    },
}

METHODS = {
    "ppo": {"loss.surrogate": "clipped", "loss.anchor": "behavior"},
    "recompute": {
        "loss.surrogate": "clipped",
        "loss.anchor": "recompute",
        "loss.behavior_weight": "mask",
        "loss.behavior_cap": 5.0,
    },
    "a3po": {
        "loss.surrogate": "clipped",
        "loss.anchor": "a3po",
        "loss.behavior_weight": "mask",
        "loss.behavior_cap": 5.0,
    },
    "tis": {
        "loss.surrogate": "reinforce",
        "loss.anchor": "current",
        "loss.behavior_weight": "tis",
        "loss.behavior_cap": 2.0,
    },
    "dg": {"loss.surrogate": "dg", "loss.anchor": "behavior", "loss.advantage": "dr_grpo"},
}
NAMES = {
    "ppo": "PPO against behavior",
    "recompute": "decoupled, recompute",
    "a3po": "decoupled, A-3PO",
    "tis": "REINFORCE with TIS",
    "dg": "DG",
}


def main():
    parser = grid.arguments(__doc__.split("\n")[0], name="staleness")
    parser.add_argument("--rates", action="store_true", help="each method at its best of three")
    parser.add_argument("--ess", action="store_true", help="with and without learner.rate_by_ess")
    args = parser.parse_args()
    if args.rates or args.ess:
        return rates(args) if args.rates else ess(args)
    rows = grid.finish(runs(), summary, args)
    table = tabulate(rows)
    config = {"base": BASE, "tasks": TASKS, "methods": METHODS}
    result = config | {"table": table, "runs": rows}
    record.write(args.results / "staleness.json", result, seeds=list(SEEDS))
    report(table)
    plot(table, args.results / "staleness.png")


def rates(args: argparse.Namespace) -> None:
    """Chooses each method's learning rate, and compares the methods at theirs."""
    args.name = "staleness_rates"
    cells = list(itertools.product(TASKS, METHODS, STALENESS))
    choosing = [
        run_of(*cell, seed, rate=rate)
        for seed in CHOOSING_SEEDS
        for rate in RATES
        for cell in cells
    ]
    choosing = grid.finish(choosing, summary, args)
    chosen = best_rates(choosing)
    reported = [
        run_of(*cell, seed, rate=rate) for seed in REPORTED_SEEDS for cell, rate in chosen.items()
    ]
    rows = grid.finish(reported, summary, args)
    table = tabulate(rows)
    for (task, method, staleness), rate in chosen.items():
        if cell := table.get(task, {}).get(method, {}).get(str(staleness)):
            cell["rate"] = rate
    config = {"base": BASE, "tasks": TASKS, "methods": METHODS, "rates": RATES}
    result = config | {"table": table, "choosing": tabulate_rates(choosing)}
    result |= {"runs": choosing + rows}
    seeds = sorted({row["seed"] for row in result["runs"]})
    record.write(args.results / "staleness_rates.json", result, seeds=seeds)
    report(table)


def ess(args: argparse.Namespace) -> None:
    """Compares the same seeds with and without a rate by the effective sample size."""
    args.name = "staleness_ess"
    cells = list(itertools.product(ESS_STALENESS, RATES, (False, True)))
    rows = grid.finish(
        [
            run_of("arithmetic", "a3po", staleness, seed, rate=rate, rate_by_ess=by_ess)
            for seed in SEEDS
            for staleness, rate, by_ess in cells
        ],
        summary,
        args,
    )
    found = collections.defaultdict(list)
    for row in rows:
        found[row["staleness"], row["rate"], row["rate_by_ess"]].append(row)
    table = []
    for staleness, rate in itertools.product(ESS_STALENESS, RATES):
        without, by_ess = (found[staleness, rate, name] for name in (False, True))
        cell = {"staleness": staleness, "rate": rate}
        cell |= {"without": grid.mean_and_interval(map(accuracy, without))}
        cell |= {"rate_by_ess": grid.mean_and_interval(map(accuracy, by_ess))}
        cell |= {"difference": difference(by_ess, without)}
        scales = [row["rate_scale"] for row in by_ess if "stopped" not in row]
        cell |= {"rate_scale": grid.mean_and_interval(scales)}
        table.append(cell)
        print(cell)
    result = {"base": BASE, "tasks": TASKS, "methods": METHODS, "table": table, "runs": rows}
    seeds = sorted({row["seed"] for row in rows})
    record.write(args.results / "staleness_ess.json", result, seeds=seeds)


def best_rates(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], float]:
    """(task, method, staleness) → the rate of the highest mean accuracy, the lowest of equals."""
    best = {}
    for cell, means in _by_rate(rows).items():
        best[cell] = max(sorted(means), key=lambda rate: means[rate]["mean"])
    return best


def tabulate_rates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy at each rate, a row for each task, method and staleness."""
    return [
        dict(zip(("task", "method", "staleness"), cell, strict=True))
        | {"accuracy": {f"{rate:g}": mean for rate, mean in means.items()}}
        for cell, means in _by_rate(rows).items()
    ]


def _by_rate(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[float, dict]]:
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        cell = (row["task"], row["method"], row["staleness"])
        found[cell][row["rate"]].append(accuracy(row))
    return {
        cell: {rate: grid.mean_and_interval(values) for rate, values in by_rate.items()}
        for cell, by_rate in found.items()
    }


def runs() -> list[grid.Run]:
    """Every task, method and staleness for the first seed, then for the next."""
    cells = list(itertools.product(TASKS, METHODS, STALENESS))
    return [run_of(*cell, seed) for seed in SEEDS for cell in cells]


def run_of(
    task: str,
    method: str,
    staleness: int,
    seed: int,
    *,
    rate: float | None = None,
    rate_by_ess: bool | None = None,
) -> grid.Run:
    """One run, at the learning rate of BASE where none is given."""
    labels = {"task": task, "method": method, "staleness": staleness, "seed": seed}
    overrides = BASE | TASKS[task] | METHODS[method]
    overrides |= {"seed": seed, "task.seed": seed, "rollout.delay_steps": str(staleness)}
    if rate is not None:
        labels["rate"] = rate
        overrides["learner.learning_rate"] = rate
    if rate_by_ess is not None:
        labels["rate_by_ess"] = overrides["learner.rate_by_ess"] = rate_by_ess
    return grid.Run(labels, grid.settings_with(overrides))


def summary(outcome: Outcome) -> dict[str, Any]:
    """What is kept of a run."""
    rows = outcome.metrics

    def of(name: str, over=np.mean) -> float:
        return float(over([row[name] for row in rows]))

    return {
        "curve": [[e["step"], e["exact"]] for e in outcome.evaluations],
        "max_ratio": of("policy/max_ratio", np.max),
        "median_max_ratio": of("policy/max_ratio", np.median),
        "clip_fraction": of("policy/clip_fraction"),
        "effective_sample_share": of("policy/ess"),
        "dropped_by_cap": of("policy/dropped_by_cap"),
        "kl_behavior": of("policy/kl_behavior"),
        "entropy_last": rows[-1]["policy/entropy"],
        "staleness_mean": of("staleness/mean"),
        "rate_scale": float(np.mean([row.get("learner/rate_scale", 1.0) for row in rows])),
        "seconds": outcome.seconds,
    }


def tabulate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """{task: {method: {staleness: means over seeds with their intervals}}}.

    change: of the accuracy, from the same method and seed at η = 0; seeds start from different versions 0.
    over: of the accuracy, the difference to each other method's of the same seed and η.
    """
    cells = collections.defaultdict(list)
    for row in rows:
        cells[row["task"], row["method"], str(row["staleness"])].append(row)
    table: dict[str, Any] = {}
    for (task, method, staleness), seeds in cells.items():
        ended = [row for row in seeds if "stopped" not in row]
        cell = {"accuracy": grid.mean_and_interval(map(accuracy, seeds))}
        cell["change"] = difference(seeds, cells.get((task, method, "0"), []))
        cell["over"] = {
            name: difference(seeds, cells.get((task, name, staleness), []))
            for name in METHODS
            if name != method
        }
        cell["stopped"] = len(seeds) - len(ended)
        for name in ("max_ratio", "median_max_ratio", "clip_fraction", "effective_sample_share"):
            if ended:
                cell[name] = grid.mean_and_interval(row[name] for row in ended)
        table.setdefault(task, {}).setdefault(method, {})[staleness] = cell
    return table


def difference(
    rows: list[dict[str, Any]], others: list[dict[str, Any]]
) -> dict[str, float | int] | None:
    """Of the accuracies of one and another setting with the same seeds; None where no seed has both."""
    theirs = {row["seed"]: accuracy(row) for row in others}
    found = [accuracy(row) - theirs[row["seed"]] for row in rows if row["seed"] in theirs]
    return grid.mean_and_interval(found) if found else None


def accuracy(row: dict[str, Any]) -> float:
    """Of a run at its end; 0 where it met a number that is not finite."""
    return 0.0 if "stopped" in row else row["curve"][-1][1]


def report(table: dict[str, Any]) -> None:
    for task, methods in table.items():
        print(f"\n{task}: accuracy (largest π_θ/π_b)\n" + " " * 24, end="")
        print("".join(f"{'η = ' + str(staleness):>22}" for staleness in STALENESS))
        for method, cells in methods.items():
            print(NAMES[method].ljust(24), end="")
            for staleness in map(str, STALENESS):
                print(f"{_cell(cells.get(staleness)):>22}", end="")
            print()


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    ratio = f" ({cell['max_ratio']['mean']:.1f})" if "max_ratio" in cell else ""
    return f"{cell['accuracy']['mean']:.3f} ± {cell['accuracy']['half_width']:.3f}{ratio}"


def plot(table: dict[str, Any], path: pathlib.Path) -> None:
    """Accuracy, and the largest ratio of a run, by staleness and method, for each task."""
    figure, grid_axes = plt.subplots(
        2, len(TASKS), figsize=(11, 7), squeeze=False, layout="constrained"
    )
    for column, (task, methods) in zip(grid_axes.T, table.items(), strict=False):
        for i, (method, cells) in enumerate(methods.items()):
            xs = [STALENESS.index(int(s)) + (i - 2) * 0.08 for s in cells]
            for axes, name in zip(column, ("accuracy", "max_ratio"), strict=True):
                found = [(x, c[name]) for x, c in zip(xs, cells.values(), strict=True) if name in c]
                axes.errorbar(
                    [x for x, _ in found],
                    [c["mean"] for _, c in found],
                    [c["half_width"] for _, c in found],
                    marker="o",
                    markersize=4,
                    capsize=2,
                    label=NAMES[method],
                )
        column[0].set(title=task.replace("_", " "), ylabel="held-out accuracy")
        column[1].set(xlabel="staleness η, steps", ylabel="largest π_θ/π_b of a run", yscale="log")
        for axes in column:
            axes.set_xticks(range(len(STALENESS)), STALENESS)
    grid_axes[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
