"""Which loss at which age, on a language model: two losses of which_loss.py on the sums of configs/smollm2.py.

    python benchmarks/which_loss_smollm2.py [--only='method=topr,staleness=16'] [--smoke]

As in which_loss.py the weights that sample are exactly η steps old, each loss has at each age the best of RATES by a
seed that is not reported, and other seeds are then run at it. SmolLM2-135M-Instruct, all its weights in float32, half
the config's prompts a step and 40 of its 60 steps. The checkpoint lies where the config has it. The last 17 versions
are kept in memory, .54 GB each.

Score: of greedy answers to the config's 256 held-out sums, the share that the reward calls right. Finished
runs are kept in --cache and never run again. Results: benchmarks/results/which_loss_smollm2.json.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import grid
import numpy as np
import record
import staleness
import which_loss
from in_process import Outcome

TASK = "word_sums"
METHODS = {name: which_loss.METHODS[name] for name in ("a3po", "topr")}
AGES = which_loss.AGES
RATES = (3e-6, 1e-5, 3e-5)
CHOOSING_SEEDS, SEEDS = (100,), (0, 1, 2)
BASE = {key: value for key, value in staleness.BASE.items() if key.startswith("loss.")} | {
    "learner.num_steps": 40,
    "learner.groups_per_step": 4,
    "learner.row_tokens": 256,
    "server.num_slots": 32,
    "checkpoint.every_steps": 40,
}
SMOKE = {"learner.num_steps": 2, "checkpoint.every_steps": 1}
LAST = 5  # steps over which the mean reward at the end is taken


def main(argv: list[str] | None = None) -> None:
    parser = grid.arguments(__doc__.split("\n")[0], name="which_loss_smollm2")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two steps, one age")
    args = parser.parse_args(argv)
    ages = AGES[:1] if args.smoke else AGES
    cells = list(itertools.product(METHODS, ages))
    choosing = [
        run_of(*cell, seed, rate, args.smoke)
        for seed in CHOOSING_SEEDS
        for cell in cells
        for rate in RATES
    ]
    choosing = grid.finish(choosing, summary, args)
    best = staleness.best_rates(choosing)
    reported = [
        run_of(method, age, seed, rate, args.smoke)
        for seed in SEEDS
        for (_, method, age), rate in best.items()
    ]
    rows = grid.finish(reported, summary, args)
    result = {"base": BASE, "methods": METHODS, "rates": RATES, "table": tabulate(rows)}
    result |= {"choosing": staleness.tabulate_rates(choosing), "runs": choosing + rows}
    for row in result["table"]:
        print(row)
    seeds = sorted({row["seed"] for row in result["runs"]})
    record.write(args.results / "which_loss_smollm2.json", result, seeds=seeds)


def run_of(method: str, age: int, seed: int, rate: float, smoke: bool) -> grid.Run:
    labels = {"task": TASK, "method": method, "staleness": age, "seed": seed, "rate": rate}
    overrides = BASE | METHODS[method] | {"learner.learning_rate": rate}
    overrides |= {"rollout.delay_steps": str(age)} | (SMOKE if smoke else {})
    arg = f"mode=sync,seed={seed}" + ",smoke" * smoke
    return grid.Run(labels, grid.settings_with(overrides, arg=arg, name="smollm2"))


def summary(outcome: Outcome) -> dict[str, Any]:
    """What is kept of a run; its curve is of the reward."""
    rewards = [row["reward/mean"] for row in outcome.metrics]
    return staleness.summary(outcome) | {
        "curve": [[one["step"], one["reward"]] for one in outcome.evaluations],
        "rewards": [round(reward, 6) for reward in rewards],
    }


def tabulate(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each loss and age: means over seeds with their intervals.

    score: of greedy answers at the end; reward: of the samples of the last LAST steps, by weights η steps old;
    over: the difference of the score to the other loss's of the same seeds.
    """
    cells = which_loss.cells_of(rows)
    table = []
    for (_, method, age), seeds in cells.items():
        (other,) = set(METHODS) - {method}
        ended = [row for row in seeds if "stopped" not in row]
        last = [float(np.mean(row["rewards"][-LAST:])) for row in ended]
        table.append(
            {"method": method, "staleness": age, "rate": seeds[0]["rate"]}
            | {"score": grid.mean_and_interval(map(staleness.accuracy, seeds))}
            | {"reward": grid.mean_and_interval(last) if last else None}
            | {"over": staleness.difference(seeds, cells.get((TASK, other, age), []))}
            | {"stopped": len(seeds) - len(ended)}
        )
    return table


if __name__ == "__main__":
    main()
