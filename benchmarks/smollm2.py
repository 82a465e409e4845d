"""Held-out scores of configs/smollm2.py by seed, as `./launch/smollm2.sh seed=N` trains and scores it.

    python benchmarks/smollm2.py --seeds=3[,4…] [--smoke]

The commands are the script's, `train` and `evaluate`, in this environment; the checkpoint lies where the config has it.
Before and after each run the rate of 4096³ matmuls is measured, of which the seconds are to be read. Each seed's row
goes into benchmarks/results/smollm2.json (or --out=DIR) as its run ends, in place of an earlier one.
"""

import argparse
import json
import pathlib
import resource
import tempfile
import time

import grid
import learner
import numpy as np
import record
from agents import WARM_STEPS, jaxrl

from jaxrl_async.metrics import read_metrics

SCORES = ("greedy", "pass@1", "pass@4")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", required=True, help="such as 3,4")
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS)
    parser.add_argument("--smoke", action="store_true", help="the config's tiny model, two steps")
    args = parser.parse_args(argv)
    path, matmul = args.out / "smollm2.json", learner.make_matmul("float32")
    for seed in map(int, args.seeds.split(",")):
        before = matmul()
        row = {"seed": seed} | run(f"seed={seed}" + ",smoke" * args.smoke)
        row["matmul_flops_per_sec"] = [before, matmul()]
        print(row, flush=True)
        result = record.read(path)
        rows = [one for one in result.get("rows", []) if one["seed"] != seed] + [row]
        result["rows"] = sorted(rows, key=lambda one: one["seed"])
        result["pass@1"] = grid.mean_and_interval(one["after"]["pass@1"] for one in rows)
        record.write(path, result, seeds=[seed], part=f"seed {seed}")


def run(arg: str) -> dict:
    """Trains and evaluates once; scores by step, seconds, memory, and the medians of the steps."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-smollm2-") as directory:
        workdir = pathlib.Path(directory, "run")
        start = time.monotonic()
        jaxrl("train", f"--config=configs/smollm2.py:{arg}", f"--workdir={workdir}")
        train_secs = time.monotonic() - start
        # Of the largest process, of the seeds before too.
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        jaxrl("evaluate", f"--workdir={workdir}", "--steps=0,last")
        rows = json.loads((workdir / "evaluation.json").read_text("utf-8"))
        steps = read_metrics(workdir)
    scores = {f"{k}{end}" for k in SCORES for end in ("", "_low", "_high")}

    def median(name: str) -> float:
        return float(np.median([row[name] for row in steps[WARM_STEPS:] or steps]))

    rewards = np.array_split([row["reward/mean"] for row in steps], min(12, len(steps)))
    return {
        "before": {k: v for k, v in rows[0].items() if k in scores},
        "after": {k: v for k, v in rows[-1].items() if k in scores},
        "num_steps": len(steps),
        "train_secs": train_secs,
        "peak_memory_bytes": memory,
        "step_secs": median("time/step_secs"),
        "trained_tokens_per_sec": median("learner/tokens_per_sec"),
        "sampled_tokens_per_sec": median("rollout/tokens_per_sec"),
        "staleness_mean": float(np.mean([row["staleness/mean"] for row in steps])),
        "rewards": [float(part.mean()) for part in rewards],
    }


if __name__ == "__main__":
    main()
