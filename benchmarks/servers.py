"""The same training run on each inference server: held-out accuracy, step time, mismatch.

    python benchmarks/servers.py [--servers=embedded,sglang,sglang_jax,vllm] [--every=1,4] [--seeds=21,22,23]

Two-digit addition (configs/arithmetic_sglang.py and arithmetic_sglang_jax.py), async, with a push every N steps and a
staleness bound of N + 1; the embedded server and vLLM run the first of them, with `embedded` and `vllm`. Each run is
the two commands that a user types, `train` and `evaluate`. All runs of a seed start from the same weights: those of one
warm start. The real servers need their environments (tests/real/*.sh install VENV). Rows are added to
benchmarks/results/servers.json as they come.
"""

import argparse
import itertools
import json
import pathlib
import tempfile
import time

import numpy as np
import record
from commands import WARM_STEPS, jaxrl

from jaxrl_async.metrics import read_metrics

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = {
    "embedded": "configs/arithmetic_sglang.py:embedded,",
    "sglang": "configs/arithmetic_sglang.py:",
    "sglang_jax": "configs/arithmetic_sglang_jax.py:",
    "vllm": "configs/arithmetic_sglang.py:vllm,",
}


def warm_start(seed: int, workdir: pathlib.Path) -> pathlib.Path:
    """Version 0 of a seed, in Hugging Face layout: what RL starts from."""
    config = f"--config={CONFIGS['embedded']}seed={seed}"
    jaxrl("train", config, f"--workdir={workdir}", "--config.learner.num_steps=1")
    return workdir / "weights" / "00000000"


def run(server: str, every: int, seed: int, model: pathlib.Path) -> dict:
    """Trains and evaluates once, from the weights in `model`."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-servers-") as directory:
        workdir = f"--workdir={directory}/run"
        start = time.monotonic()
        config = f"--config={CONFIGS[server]}every={every},seed={seed}"
        weights = ("--config.warm_start.num_steps=0", f"--config.model.path={model}")
        jaxrl("train", config, workdir, *weights)
        seconds = time.monotonic() - start
        jaxrl("evaluate", workdir)
        steps = read_metrics(f"{directory}/run")
        before, *_, after = json.loads(
            pathlib.Path(directory, "run", "evaluation.json").read_text("utf-8")
        )

    def of(name, over=np.median):
        values = [row[name] for row in steps[WARM_STEPS:] if row.get(name) is not None]
        return float(over(values)) if values else None

    returned = {k: v for k, v in steps[-1].items() if k.startswith("returned/") and v}
    return {
        "server": server,
        "every": every,
        "seed": seed,
        "greedy_before": before["greedy"],
        "greedy_after": after["greedy"],
        "train_secs": seconds,
        "step_secs": of("time/step_secs"),
        "rollout_tokens_per_sec": of("rollout/tokens_per_sec"),
        "staleness_mean": of("staleness/mean", np.mean),
        "staleness_max": of("staleness/max", np.max),
        "push_secs": of("weights/push_secs"),
        "first_mismatch_mean_abs": steps[0].get("mismatch/mean_abs"),
        "mismatch_mean_abs": of("mismatch/mean_abs", np.mean),
        "mismatch_max_abs": of("mismatch/max_abs", np.max),
        "returned": returned,
        "compile_count": [steps[1]["compile/count"], steps[-1]["compile/count"]],
    }


def line(row: dict) -> str:
    return (
        f"{row['server']:11} N={row['every']} seed {row['seed']}: greedy {row['greedy_before']:.3f} → "
        f"{row['greedy_after']:.3f}, {row['step_secs']:.2f} s a step, staleness "
        f"{row['staleness_mean']:.2f}, push {row['push_secs']:.2f} s, mismatch "
        f"{row['mismatch_mean_abs'] or row['first_mismatch_mean_abs']:.1e}, returned {row['returned']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--servers", default=",".join(CONFIGS))
    parser.add_argument("--every", default="1,4", help="steps between pushes, N")
    parser.add_argument("--seeds", default="21,22,23")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/servers.json"))
    args = parser.parse_args()
    out = pathlib.Path(args.out)
    result = {"rows": []} | record.read(out)
    for seed in map(int, args.seeds.split(",")):
        with tempfile.TemporaryDirectory(prefix="jaxrl-servers-") as directory:
            model = warm_start(seed, pathlib.Path(directory) / "warm")
            for every, server in itertools.product(args.every.split(","), args.servers.split(",")):
                row = run(server, int(every), seed, model)
                print(line(row), flush=True)
                result["rows"] = [r for r in result["rows"] if not _same(r, row)] + [row]
                part = f"{server} N={every} seed {seed}"
                result = record.write(out, result, seeds=[seed], part=part)


def _same(one: dict, other: dict) -> bool:
    return all(one[key] == other[key] for key in ("server", "every", "seed"))


if __name__ == "__main__":
    main()
