"""Accuracy of training one block of layers a step against training all of them, on the quickstart's task.

    python benchmarks/blocks.py [--jobs=2] [--only='blocks=2,seed=0']

The quickstart's model, warm start, batch and loss, with weights that sample one step late, as where a block goes out
while the next one is computed (`rollout.delay_steps` = 1). The model's two layers make two blocks. With blocks = 2 a
run takes twice the steps: half way it has trained as many samples as all layers at once, and at its end each parameter
has had as many updates. Accuracy: share of held-out sums that greedy answers get exactly.

Finished runs are kept in --cache and never run again. Results: benchmarks/results/blocks.json.
"""

import collections
from typing import Any

import grid
import record
from in_process import Outcome

SEEDS = (0, 1, 2)
STEPS = {1: 100, 2: 200}  # blocks → steps
BASE = {"rollout.delay_steps": "1", "checkpoint.every_steps": 20}


def main(argv: list[str] | None = None) -> None:
    args = grid.arguments(__doc__.split("\n")[0], name="blocks").parse_args(argv)
    rows = grid.finish(runs(), summary, args)
    table = tabulate(rows)
    result = {"base": BASE, "table": table, "runs": rows}
    record.write(args.results / "blocks.json", result, seeds=list(SEEDS))
    report(table)


def runs() -> list[grid.Run]:
    """Both numbers of blocks for the first seed, then for the next."""
    return [run_of(seed, blocks) for seed in SEEDS for blocks in STEPS]


def run_of(seed: int, blocks: int) -> grid.Run:
    overrides = BASE | {"seed": seed, "task.seed": seed, "learner.num_steps": STEPS[blocks]}
    overrides |= {"learner.blocks": blocks}
    return grid.Run({"blocks": blocks, "seed": seed}, grid.settings_with(overrides))


def summary(outcome: Outcome) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "curve": [[e["step"], e["exact"]] for e in outcome.evaluations],
        "seconds": outcome.seconds,
    }


def tabulate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each number of blocks and step of an evaluation: accuracy, and differences to training all layers.

    equal_steps: after as many steps and samples; equal_updates: after as many updates of each parameter. Both are of
    runs of one seed; None where the other run has no such step.
    """
    found = collections.defaultdict(dict)
    for row in rows:
        for step, accuracy in row.get("curve", ()):  # None of a run that was stopped.
            found[row["blocks"], step][row["seed"]] = accuracy
    return [
        {
            "blocks": blocks,
            "step": step,
            "accuracy": grid.mean_and_interval(own.values()),
            "equal_steps": _difference(own, found.get((1, step), {})),
            "equal_updates": _difference(own, found.get((1, step / blocks), {})),
        }
        for (blocks, step), own in sorted(found.items())
    ]


def report(table: list[dict[str, Any]]) -> None:
    print("blocks  step   accuracy         at equal steps   at equal updates")
    for row in table:
        cells = (row["accuracy"], row["equal_steps"], row["equal_updates"])
        texts = [f"{c['mean']:+.3f} ± {c['half_width']:.3f}" if c else "" for c in cells]
        print(
            f"{row['blocks']:>6}{row['step']:>6}   {'   '.join(text.ljust(14) for text in texts)}"
        )


def _difference(own: dict[int, float], others: dict[int, float]) -> dict[str, float | int] | None:
    pairs = [own[seed] - others[seed] for seed in own if seed in others]
    return grid.mean_and_interval(pairs) if pairs else None


if __name__ == "__main__":
    main()
