"""Tasks, settings and losses of the studies of old weights; and A-3PO with and without `learner.rate_by_ess`.

    python benchmarks/staleness.py [--jobs=2] [--only='staleness=8,rate=0.001']

In every step the weights that sample are exactly η steps old (`rollout.delay_steps`; fewer in the first η steps), a
step makes two optimizer updates, and everything but what is compared is equal. Two tasks, each from a SHORT warm start
on right demonstrations that all runs of a seed share, so that RL has to build most of the skill: token reversal (five
tokens of 4 symbols) and two-digit addition. Accuracy: share of held-out prompts that greedy answers get exactly.

The script trains on the sums at η = 1 and 8 and each of three rates. Finished runs are kept in --cache and never run
again. Result: benchmarks/results/staleness_ess.json. which_loss.py compares the losses.
"""

import collections
import itertools
from typing import Any

import grid
import numpy as np
import record
from in_process import Outcome

SEEDS = tuple(range(5))
ESS_STALENESS = (1, 8)  # η, in steps
RATES = (1e-4, 3e-4, 1e-3)
# Of which_loss.py:
CHOOSING_SEEDS = (100, 101, 102)
REPORTED_SEEDS = tuple(range(10))

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
    args = grid.arguments(__doc__.split("\n")[0], name="staleness_ess").parse_args()
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


if __name__ == "__main__":
    main()
