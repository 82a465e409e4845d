"""Token reversal under what goes wrong between actors and a learner: which policy gradients survive it.

    python benchmarks/delight_reversal.py [--jobs=2] [--only='method=dg|pg,seed=0']

After the experiment of Delightful Distributed Policy Gradient (Osband, arXiv 2603.20521v1; v2 claims "often nearly"
the order of magnitude that v1 claims), made smaller: FOUR tokens of 4 symbols for its ten of 2, 2 blocks for its 3 and
a higher learning rate, so that a run takes half a minute. Batch, width and heads are the paper's: 10 prompts × 10
samples a step, 64 and 4. It does not publish the sizes of its frictions; these are ours (FRICTIONS), the same for
every method. No warm start. A run is measured by its sequence error: the share of held-out prompts that a greedy
sampler without frictions does not answer exactly.

Finished runs are kept in --cache and never run again. Results: benchmarks/results/delight_reversal.json and .png.
"""

import collections
import pathlib
from typing import Any

import grid
import matplotlib
import numpy as np
import record
from in_process import Outcome

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SEEDS = tuple(range(3))
NUM_TOKENS = 4  # H

BASE = {
    "task.name": "token_reversal",
    "task.args": {"num_tokens": NUM_TOKENS, "num_symbols": 4, "num_test": 64, "seed": 0},
    "tokenizer.alphabet": "0123>",
    "model.num_layers": 2,
    "model.mlp_dim": 192,
    "warm_start.num_steps": 0,
    "server.num_slots": 100,
    "server.decode_chunk": NUM_TOKENS,
    "server.max_total_tokens": 2 * NUM_TOKENS + 1,
    "rollout.group_size": 10,
    "rollout.max_prompt_tokens": NUM_TOKENS + 1,
    "rollout.max_new_tokens": NUM_TOKENS,
    "learner.num_steps": 1000,
    "learner.groups_per_step": 10,
    "learner.num_minibatches": 1,
    "learner.microbatch_rows": 100,
    "learner.row_tokens": 2 * NUM_TOKENS + 1,
    "learner.learning_rate": 6e-4,
    "checkpoint.every_steps": 200,
    "evaluate.num_prompts": 64,
    "evaluate.num_validation": -1,  # No version is chosen: every one is scored.
    "loss.advantage": "dr_grpo",
    "loss.anchor": "behavior",
    "loss.behavior_weight": "none",
    "loss.behavior_cap": None,
}

METHODS = {
    "pg": {"loss.surrogate": "reinforce"},
    "ppo": {"loss.surrogate": "clipped"},
    "decoupled_a3po": {
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
    "dg": {"loss.surrogate": "dg"},
}
NAMES = {
    "pg": "PG",
    "ppo": "PPO",
    "decoupled_a3po": "decoupled PPO, A-3PO",
    "tis": "PG with TIS",
    "dg": "DG",
}

ALONE = {
    "stale": {"rollout.delay_steps": "uniform(20)"},
    "actor_bug": {"rollout.frictions.actor_bug": 0.05},
    "reward_corruption": {"rollout.frictions.reward_corruption": 0.1},
    "rare_discovery": {"rollout.frictions.rare_discovery": 0.3},
}
ALL = {key: value for friction in ALONE.values() for key, value in friction.items()}
FRICTIONS = {"none": {}, **ALONE, "all": ALL}
# Where tokens are recorded as the policy sampled them, a step's only update has ratios and weights of 1: these are PG.
ON_POLICY = ("none", "reward_corruption", "rare_discovery")
PG_ON_POLICY = ("ppo", "decoupled_a3po", "tis")


def main():
    args = grid.arguments(__doc__.split("\n")[0], name="delight_reversal").parse_args()
    rows = grid.finish(runs(), summary, args)
    table = collections.defaultdict(dict)
    for friction, method in {(row["friction"], row["method"]): None for row in rows}:
        seeds = [r for r in rows if (r["friction"], r["method"]) == (friction, method)]
        table[friction][method] = grid.mean_and_interval(map(error, seeds))
    result = {"base": BASE, "methods": METHODS, "frictions": FRICTIONS}
    result |= {"sequence_error": table, "runs": rows}
    seeds = sorted({row["seed"] for row in rows})
    record.write(args.results / "delight_reversal.json", result, seeds=seeds)
    report(table)
    plot(table, rows, args.results / "delight_reversal.png")


def runs() -> list[grid.Run]:
    """Every friction and method for the first seed, then for the next."""
    return [
        grid.Run(
            {"friction": friction, "method": method, "seed": seed},
            grid.settings_with(
                BASE | {"seed": seed, "task.seed": seed} | METHODS[method] | FRICTIONS[friction]
            ),
        )
        for seed in SEEDS
        for friction in FRICTIONS
        for method in METHODS
        if friction not in ON_POLICY or method not in PG_ON_POLICY
    ]


def summary(outcome: Outcome) -> dict[str, Any]:
    """What is kept of a run."""
    last = outcome.metrics[-50:]
    return {
        "curve": [[e["step"], 1 - e["exact"]] for e in outcome.evaluations],
        "held_out_reward": outcome.evaluations[-1]["reward"],
        "last_entropy": float(np.mean([row["policy/entropy"] for row in last])),
        "max_ratio": float(max(row["policy/max_ratio"] for row in outcome.metrics)),
        "seconds": outcome.seconds,
    }


def error(row: dict[str, Any]) -> float:
    """Sequence error of a run at its end; 1 where it met a number that is not finite."""
    return 1.0 if "stopped" in row else row["curve"][-1][1]


def report(table: dict[str, dict[str, dict]]) -> None:
    print("sequence error".ljust(18) + "".join(f"{NAMES[m]:>22}" for m in METHODS))
    for friction, methods in table.items():
        cells = [methods.get(m) for m in METHODS]
        texts = [f"{c['mean']:.3f} ± {c['half_width']:.3f}" if c else "" for c in cells]
        print(friction.ljust(18) + "".join(f"{text:>22}" for text in texts))


def plot(table: dict[str, dict[str, dict]], rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Errors by friction and method, and the curves without and with all frictions."""
    figure, (bars, *curves) = plt.subplots(
        1, 3, figsize=(13, 4), width_ratios=(2, 1, 1), layout="constrained"
    )
    frictions = [name for name in FRICTIONS if name in table]
    for i, method in enumerate(METHODS):
        cells = [table[friction].get(method) for friction in frictions]
        found = [(x + (i - 2) * 0.16, cell) for x, cell in enumerate(cells) if cell]
        bars.errorbar(
            [x for x, _ in found],
            [cell["mean"] for _, cell in found],
            [cell["half_width"] for _, cell in found],
            fmt="o",
            capsize=3,
            label=NAMES[method],
        )
    bars.set_xticks(range(len(frictions)), [name.replace("_", "\n") for name in frictions])
    bars.set(ylabel="sequence error, held out", ylim=(-0.03, 1.03), title="After training")
    bars.legend(fontsize="small")
    for axes, friction in zip(curves, ("none", "all"), strict=True):
        for method in METHODS:
            runs = [r for r in rows if (r["friction"], r["method"]) == (friction, method)]
            found = [row["curve"] for row in runs if "curve" in row]
            if found:
                steps = [step for step, _ in found[0]]
                axes.plot(
                    steps, np.mean(found, axis=0)[:, 1], color=f"C{list(METHODS).index(method)}"
                )
        axes.set(xlabel="step", ylim=(-0.03, 1.03), title=f"Frictions: {friction}")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
