"""Held-out scores, seconds and memory (of the largest process) of whole runs of this repository's configs, by seed.

    python benchmarks/scores.py quickstart:seed=21 smollm2:lora,seed=0 … [--set=task.args.directory=DIR …] [--smoke]

A run is configs/NAME.py with its argument, trained and scored as the launch scripts do: `train`, then `evaluate`, in
this environment; a checkpoint lies where the config has it. Before and after, the rate of 4096³ matmuls is measured,
beside which the seconds are to be read. A row goes into benchmarks/results/scores.json (or --out=DIR) as its run ends,
in place of an earlier one of the same argument and settings. "over_seeds": means of what differs in its seed alone.
"""

import argparse
import collections
import json
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import grid
import learner
import numpy as np
import record
from commands import WARM_STEPS, jaxrl

from jaxrl_async.metrics import read_metrics

SCORES = ("greedy", "pass@1", "pass@4")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="such as smollm2:lora,seed=0")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the config")
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS)
    parser.add_argument("--smoke", action="store_true", help="the config's few steps")
    args = parser.parse_args(argv)
    path, matmul = args.out / "scores.json", learner.make_matmul("float32")
    for name in args.runs:
        before = matmul()
        config, words = parts_of(name)
        words += ["smoke"] if args.smoke else []
        row = {"run": name, "set": args.set}
        row |= train_and_score(f"{config}.py:{','.join(words)}", args.set)
        row["matmul_flops_per_sec"] = [before, matmul()]
        print(row, flush=True)
        result = record.read(path)
        rows = [one for one in result.get("rows", []) if _key(one) != _key(row)] + [row]
        result["rows"] = sorted(rows, key=_key)
        result["over_seeds"] = over_seeds(rows)
        record.write(path, result, seeds=[seed_of(name)], part=" ".join([name, *args.set]))


def _key(row: dict[str, Any]) -> tuple[str, list[str]]:
    return row["run"], row["set"]


def parts_of(name: str) -> tuple[str, list[str]]:
    """Of a run: its config's name, and the words of its argument."""
    config, _, arg = name.partition(":")
    return config, [word for word in arg.split(",") if word]


def seed_of(name: str) -> int:
    """0 where the argument has none."""
    _, words = parts_of(name)
    return int(dict(word.partition("=")[::2] for word in words).get("seed", 0))


def train_and_score(config: str, settings: Sequence[str]) -> dict[str, Any]:
    """Scores before and after, seconds, memory, and the medians of the steps."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-scores-") as directory:
        workdir = pathlib.Path(directory, "run")
        words = [f"--config=configs/{config}", *(f"--config.{one}" for one in settings)]
        start = time.monotonic()
        memory = jaxrl("train", *words, f"--workdir={workdir}")
        train_secs = time.monotonic() - start
        jaxrl("evaluate", f"--workdir={workdir}", "--steps=0,last")
        rows = json.loads((workdir / "evaluation.json").read_text("utf-8"))
        steps = read_metrics(workdir)
    scores = {f"{k}{end}" for k in SCORES for end in ("", "_low", "_high")}

    def median(name: str) -> float:
        return float(np.median([row[name] for row in steps[WARM_STEPS:] or steps]))

    def course(name: str) -> list[float]:
        parts = np.array_split([row[name] for row in steps], min(12, len(steps)))
        return [float(part.mean()) for part in parts]

    compared = [row for row in steps if row["mismatch/tokens"]]
    return {
        "before": {k: v for k, v in rows[0].items() if k in scores},
        "after": {k: v for k, v in rows[-1].items() if k in scores},
        "num_prompts": rows[0]["num_prompts"],
        "num_steps": len(steps),
        "train_secs": train_secs,
        "peak_memory_bytes": memory,
        "step_secs": median("time/step_secs"),
        "trained_tokens_per_sec": median("learner/tokens_per_sec"),
        "sampled_tokens_per_sec": median("rollout/tokens_per_sec"),
        "staleness_mean": float(np.mean([row["staleness/mean"] for row in steps])),
        "rewards": course("reward/mean"),
        "completion_tokens": course("tokens/completion_mean"),
        # The worst step, and the worst token, of those of staleness 0.
        "mismatch_mean": max((row["mismatch/mean_abs"] for row in compared), default=None),
        "mismatch_max": max((row["mismatch/max_abs"] for row in compared), default=None),
    }


def over_seeds(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run without its seed → score → mean over seeds, and half of its 95 % interval, before and after."""
    found = collections.defaultdict(list)
    for row in rows:
        config, words = parts_of(row["run"])
        arg = ",".join(word for word in words if not word.startswith("seed="))
        found[" ".join([f"{config}:{arg}" if arg else config, *row["set"]])].append(row)
    return {
        name: {
            end: {
                k: grid.mean_and_interval(one[end][k] for one in same)
                for k in SCORES
                if k in same[0][end]
            }
            for end in ("before", "after")
        }
        for name, same in sorted(found.items())
    }


if __name__ == "__main__":
    main()
