"""Steps to reinforcement learning's score by distillation from where it ended.

    python benchmarks/distillation.py [--seeds=0,1,2,3,4]

The two-digit sums of benchmarks/staleness.py from the version 0 that all runs of a seed share, on policy, in one
process. `rl` trains on rewards; the last version of the best of its rates is then the teacher (`loss.teacher`, from
files) of runs from version 0 on: `teacher` learns from it alone, `both` from it beside the rewards. Rates: three.

Score: share of 512 held-out sums whose greedy answer is right, every 5 steps. Steps: of the first score of a share of
the teacher's; none where there is no such. Result: benchmarks/results/distillation.json.
"""

import argparse
import itertools
import pathlib
import shutil
import tempfile
from collections.abc import Sequence

import grid
import record
import staleness
from in_process import Laboratory

from jaxrl_async import parts
from jaxrl_async.models import hf
from jaxrl_async.versions.store import WeightStore

RATES = staleness.RATES
SHARES = (0.95, 1.0)  # of the teacher's score
EVERY = 5  # steps between evaluations
ADVANTAGES = {"rl": "grpo", "teacher": "none", "both": "grpo"}  # kind → loss.advantage


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS)
    args = parser.parse_args(argv)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    with tempfile.TemporaryDirectory() as directory, Laboratory(f"{directory}/lab") as laboratory:
        study = Study(laboratory, pathlib.Path(directory), args.steps)
        runs = [row for seed in seeds for row in study.of_seed(seed)]
    result = {"base": staleness.BASE, "steps": args.steps, "table": tabulate(runs), "runs": runs}
    record.write(args.out / "distillation.json", result, seeds=seeds)
    print(*result["table"], sep="\n")


class Study:
    """Runs of seeds, whose teacher lies at one path, so that all share their programs."""

    def __init__(self, laboratory: Laboratory, directory: pathlib.Path, num_steps: int):
        self._laboratory, self._num_steps = laboratory, num_steps
        self._directory, self._teacher = directory, directory / "teacher"

    def of_seed(self, seed: int) -> list[dict]:
        """The runs of every kind at every rate; `rl`'s best end is the teacher."""
        rows, best = [], -1.0
        for rate in RATES:
            row, params, config = self._run("rl", seed, rate)
            rows.append(row)
            if (score := row["curve"][-1][1]) > best:
                best = score
                tensors = hf.to_tensors(params, config, "float32")
                found = WeightStore(self._directory / "store", keep=1).write(
                    0, tensors, hf.write_config(config)
                )
                shutil.rmtree(self._teacher, ignore_errors=True)
                pathlib.Path(found).rename(self._teacher)
        for kind, rate in itertools.product(("teacher", "both"), RATES):
            rows.append(self._run(kind, seed, rate)[0])
        return [row | {"steps_to": steps_to(row["curve"], best)} for row in rows]

    def _run(self, kind: str, seed: int, rate: float) -> tuple[dict, object, object]:
        overrides = staleness.BASE | staleness.TASKS["arithmetic"] | staleness.METHODS["ppo"]
        overrides |= {"seed": seed, "task.seed": seed, "learner.learning_rate": rate}
        overrides |= {"learner.num_steps": self._num_steps, "checkpoint.every_steps": EVERY}
        overrides |= {"loss.advantage": ADVANTAGES[kind]}
        overrides |= {} if kind == "rl" else {"loss.teacher": str(self._teacher)}
        settings = grid.settings_with(overrides)
        outcome = self._laboratory.run(settings)
        curve = [[e["step"], e["exact"]] for e in outcome.evaluations]
        row = {"kind": kind, "seed": seed, "rate": rate, "curve": curve}
        if kind != "rl":
            row["kl_teacher"] = [r["policy/kl_teacher"] for r in outcome.metrics[::EVERY]]
        print(f"{kind} {seed} {rate:g}: {curve[0][1]:.3f} → {curve[-1][1]:.3f}", flush=True)
        tokenizer = parts.tokenizer_of(settings, self._directory / "tokenizer")
        return row, outcome.params, parts.model_config_of(settings, tokenizer)


def steps_to(curve: Sequence[Sequence[float]], score: float) -> dict[str, int | None]:
    """Share → the step of the first evaluation with that share of a score; None where there is none."""
    return {
        f"{share:g}": next((step for step, found in curve if found >= share * score), None)
        for share in SHARES
    }


def tabulate(runs: Sequence[dict]) -> list[dict]:
    """A row for each kind and rate: means over seeds of its last score, and of its steps where it has any."""
    table = []
    for kind, rate in itertools.product(ADVANTAGES, RATES):
        rows = [row for row in runs if (row["kind"], row["rate"]) == (kind, rate)]
        cell = {"kind": kind, "rate": rate}
        cell |= {"score": grid.mean_and_interval(row["curve"][-1][1] for row in rows)}
        for share in rows[0]["steps_to"]:
            steps = [row["steps_to"][share] for row in rows]
            found = [n for n in steps if n is not None]
            means = grid.mean_and_interval(found) if found else {}
            cell[f"steps_to_{share}"] = means | {"never": steps.count(None)}
        table.append(cell)
    return table


if __name__ == "__main__":
    main()
