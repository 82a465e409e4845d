"""Seconds to a stated accuracy, in real processes: what asynchrony, periodic steps and A-3PO's anchor are worth.

    python benchmarks/time_to_accuracy.py --part=prepare
    python benchmarks/time_to_accuracy.py --part=train --seeds=0
    python benchmarks/time_to_accuracy.py --part=score
    python benchmarks/time_to_accuracy.py --part=report

Five arms train the same number of steps from one version 0, whose demonstrations forget 4 % of the letters. The task
is a recitation of log-normal lengths from 8 to 96 letters (`recitation.py`): a step that waits for its longest answer
waits for long. A seed is one of the prompts' order and of the samples. Synchronous and asynchronous steps make two
updates, a periodic one makes one. One core is pinned to the learner and one to server, worker and queue.

*prepare* makes version 0. *train* runs the arms of a seed in turn, in an order that rotates with the seed: on an idle
machine, one seed at a time. Nothing is evaluated meanwhile: the versions that the learner writes for its pushes are
kept, and *score* has every tenth of them answer the held-out prompts. What is done is kept in --cache and not done
again. *report* writes benchmarks/results/time_to_accuracy.json and .png.

Time starts with the first step, after the learner has compiled its programs; by then an asynchronous run may have
generated max_staleness + 1 batches, a synchronous one has generated one. The learning rate, THRESHOLD and MARGIN were
set on seed 100, which is not reported, before the others were run.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import grid
import matplotlib
import numpy as np
import record
import scipy.special
from in_process import complete, request_of, text_of
from recitation import ALPHABET

from jaxrl_async import parts
from jaxrl_async.config.settings import Settings
from jaxrl_async.inference.engine import Engine
from jaxrl_async.metrics import column, read_metrics
from jaxrl_async.rewards import reward_function
from jaxrl_async.tasks.prompts import held_out_prompts
from jaxrl_async.tasks.tokenizer import Tokenizer
from jaxrl_async.types import Prompt

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BENCHMARKS = pathlib.Path(__file__).parent
ROOT = BENCHMARKS.parent
SEEDS = tuple(range(5))
PREPARED = 100  # seed of version 0, and of the trials
THRESHOLD = 0.75  # held-out accuracy, sampled at the temperature of training
MARGIN = 0.05  # of the final accuracy: a loss whose interval ends above −MARGIN is none
SCORE_EVERY = 10  # steps
WARM_STEPS = 5  # of a run, left out of the seconds of a step
NUM_SAMPLES = 4  # of each held-out prompt
LONGEST = 96  # letters of an answer
TIMEOUT_SECS = 600.0  # of one version's answers

WORKLOAD = {
    "task.name": "recitation:Recitation",
    "task.args": {
        "num_train": 20_000,
        "num_test": 256,
        "longest": LONGEST,
        "forget": 0.04,
        "reward": "positions",
    },
    "tokenizer.alphabet": ALPHABET,
    "model.num_layers": 2,
    "model.model_dim": 128,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 32,
    "model.mlp_dim": 384,
    "warm_start.num_steps": 300,
    "warm_start.batch_size": 64,
    "warm_start.row_tokens": 4 + LONGEST,
    "warm_start.learning_rate": 3e-3,
    "rollout.max_prompt_tokens": 3,
    "rollout.max_new_tokens": LONGEST + 1,
    "server.max_total_tokens": 4 + LONGEST,
    "server.num_slots": 64,
    "server.decode_chunk": 4,
    "learner.num_steps": 151,  # The last version is not pushed.
    "learner.groups_per_step": 16,
    "learner.num_minibatches": 2,
    "learner.packing": "first_fit",
    "learner.microbatch_rows": 8,
    "learner.row_tokens": 4 + LONGEST,
    "learner.learning_rate": 3e-4,
    "weights.keep": 1_000_000,
    "checkpoint.every_steps": 1_000_000,
    "evaluate.every_steps": 0,
    "evaluate.num_validation": 0,
    "evaluate.num_prompts": 256,
    "cpus.learner": (0,),
    "cpus.server": (1,),
    "cpus.rollout": (1,),
    "cpus.queue": (1,),
}
RECOMPUTE = {"loss.preset": "decoupled_ppo"}
A3PO = {"loss.preset": "a3po"}
# A periodic step has one update, around the weights that it starts from.
PERIODIC = {"learner.num_minibatches": 1, "loss.anchor": "current", "queue.chunk_groups": 4}
ASYNC = {"queue.max_staleness": 4}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync, recompute": ("sync", RECOMPUTE),
    "sync, A-3PO": ("sync", A3PO),
    "periodic": ("periodic", PERIODIC),
    "async, recompute": ("async", ASYNC | RECOMPUTE),
    "async, A-3PO": ("async", ASYNC | A3PO),
}
# A slower arm over a faster one: what is claimed of the pair.
PAIRS = (
    ("sync, recompute", "async, A-3PO"),
    ("async, recompute", "async, A-3PO"),
    ("sync, recompute", "async, recompute"),
    ("sync, recompute", "sync, A-3PO"),
    ("sync, recompute", "periodic"),
)
# busy_secs: seconds of a step in which the learner does not wait.
COMPARED = ("seconds_to_accuracy", "steps_to_accuracy", "step_secs", "busy_secs")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=("prepare", "train", "score", "report"), required=True)
    parser.add_argument(
        "--seeds", type=lambda text: [int(n) for n in text.split(",")], default=SEEDS
    )
    parser.add_argument("--arms", type=lambda text: text.split("|"), default=list(ARMS))
    cache = pathlib.Path("/tmp/jaxrl-time-to-accuracy")
    parser.add_argument("--cache", type=pathlib.Path, default=cache)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="11 steps of a smaller model")
    args = parser.parse_args(argv)
    workload = WORKLOAD | (SMOKE if args.smoke else {})
    {"prepare": prepare, "train": train, "score": score, "report": report}[args.part](
        workload, args
    )


SMOKE = {
    "model.model_dim": 64,
    "model.head_dim": 16,
    "model.mlp_dim": 128,
    "warm_start.num_steps": 10,
    "learner.num_steps": 11,
    "evaluate.num_prompts": 16,
    "cpus.learner": (),
    "cpus.server": (),
    "cpus.rollout": (),
    "cpus.queue": (),
}


def prepare(workload: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Version 0, if there is none."""
    if not (directory := args.cache / "version-0").exists():
        command("init", "sync", workload | {"seed": PREPARED}, "--warm_start", f"--out={directory}")


def train(workload: Mapping[str, Any], args: argparse.Namespace) -> None:
    """The arms of each seed in turn; each leaves its rows of metrics and the versions to be scored."""
    for seed in args.seeds:
        turns = collections.deque(args.arms)
        turns.rotate(-seed)
        for arm in turns:
            kept = args.cache / f"{arm.replace(', ', '-')}-{seed}"
            if kept.exists():
                continue
            with tempfile.TemporaryDirectory(dir=args.cache) as directory:
                workdir = pathlib.Path(directory) / "run"
                mode, overrides = ARMS[arm]
                overrides = started_from(args.cache, seed, workload) | overrides
                command("train", mode, overrides, f"--workdir={workdir}")
                keep(workdir, pathlib.Path(directory) / "kept")
                (pathlib.Path(directory) / "kept").rename(kept)
            rows = read_metrics(kept)
            print(f"seed {seed}, {arm}: {seconds_of(rows)[-1]:.1f} s", flush=True)


def started_from(cache: pathlib.Path, seed: int, workload: Mapping[str, Any]) -> dict[str, Any]:
    """The workload of a seed, from version 0."""
    path = {"model.path": str(cache / "version-0"), "warm_start.num_steps": 0}
    return {**workload, **path, "seed": seed, "task.seed": seed}


def command(verb: str, mode: str, overrides: Mapping[str, Any], *flags: str) -> None:
    """Runs a verb of the product, with programs that earlier runs compiled.

    Raises:
      RuntimeError: it failed; ends with its last lines.
    """
    paths = filter(None, (str(BENCHMARKS), str(ROOT), os.environ.get("PYTHONPATH")))
    words = [sys.executable, "-m", "jaxrl_async", verb, *flags]
    words += [f"--config={ROOT}/configs/quickstart.py:mode={mode}"]
    words += [f"--config.{name}={value}" for name, value in overrides.items()]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{verb} failed:\n{done.stdout[-4000:]}")


def keep(workdir: pathlib.Path, kept: pathlib.Path) -> None:
    """Of a run: its metrics and every SCORE_EVERY-th version."""
    (kept / "weights").mkdir(parents=True)
    shutil.copy(workdir / "metrics.jsonl", kept)
    for version in sorted((workdir / "weights").iterdir()):
        if version.name.isdigit() and int(version.name) % SCORE_EVERY == 0:
            shutil.move(version, kept / "weights")


def score(workload: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Held-out answers by each version that was kept and not scored yet, on one engine; versions are then removed."""
    settings = grid.settings_with(workload | {"warm_start.num_steps": 0})
    tokenizer = parts.tokenizer_of(settings, args.cache)
    task = parts.task_of(settings)
    prompts = held_out_prompts(
        task, tokenizer, max_prompt_tokens=settings.rollout.max_prompt_tokens
    )
    prompts = prompts[: settings.evaluate.num_prompts]
    positions = reward_function("positions")
    # A seed to a sample: equal ones would draw the same noise at the same position.
    asked = [(p, p.index * NUM_SAMPLES + i) for p in prompts for i in range(NUM_SAMPLES)]
    engine = parts.engine_of(settings, args.cache, name="score")
    engine.start()
    try:
        for directory in sorted(args.cache.glob("*/weights")):
            scores = []
            for version in sorted(directory.iterdir()):
                engine.update_weights_from_disk(
                    str(version), version=version.name, flush_cache=False, abort_all_requests=False
                ).result(TIMEOUT_SECS)
                texts = answers_of(engine, tokenizer, settings, asked)
                found = [positions(t, p.answer) for t, (p, _) in zip(texts, asked, strict=True)]
                right = float(np.mean(np.array(found) == 1))
                row = {"version": int(version.name), "accuracy": right}
                scores.append(row | {"positions": float(np.mean(found))})
            (directory.parent / "scores.json").write_text(json.dumps(scores))
            shutil.rmtree(directory)
            print(directory.parent.name, scores[0]["accuracy"], scores[-1]["accuracy"], flush=True)
    finally:
        engine.close(timeout_secs=TIMEOUT_SECS)


def answers_of(
    engine: Engine, tokenizer: Tokenizer, settings: Settings, asked: Sequence[tuple[Prompt, int]]
) -> list[str]:
    """Texts of the answers to (prompt, seed) by a started engine, at the temperature of training."""
    temperature = settings.rollout.temperature
    requests = [
        request_of(settings, tokenizer, str(number), prompt, temperature, seed)
        for number, (prompt, seed) in enumerate(asked)
    ]
    ended = {done.rid: done.output_ids for done in complete(engine, requests)}
    return [text_of(tokenizer, ended[request.rid]) for request in requests]


def report(workload: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Writes the table, the runs and the plot, of the seeds in which every arm is scored."""
    runs: dict[str, dict[int, dict]] = {arm: {} for arm in args.arms}
    for arm in runs:
        for seed in args.seeds:
            kept = args.cache / f"{arm.replace(', ', '-')}-{seed}"
            if (kept / "scores.json").exists():
                scores = json.loads((kept / "scores.json").read_text())
                runs[arm][seed] = summary(read_metrics(kept), scores)
    seeds = [seed for seed in args.seeds if all(seed in found for found in runs.values())]
    if not seeds:
        raise SystemExit(f"no seed of {args.seeds} has scores of every arm in {args.cache}")
    table = {arm: tabulate([found[seed] for seed in seeds]) for arm, found in runs.items()}
    pairs = [compared(runs, *pair, seeds) for pair in PAIRS if set(pair) <= set(runs)]
    config = {"workload": dict(workload), "arms": ARMS, "threshold": THRESHOLD, "margin": MARGIN}
    rows = [{"arm": a, "seed": s} | runs[a][s] for a in runs for s in seeds]
    result = config | {"seeds": seeds, "table": table, "pairs": pairs, "runs": rows}
    record.write(args.out / "time_to_accuracy.json", result, seeds=seeds)
    show(table, pairs)
    plot(rows, pairs, args.out / "time_to_accuracy.png")


def seconds_of(rows: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Seconds from the start of step 1 to the end of each step."""
    ends = column(rows, "unix_time")
    return ends - (ends[0] - rows[0]["time/step_secs"])


def summary(rows: Sequence[Mapping[str, float]], scores: Sequence[Mapping[str, float]]) -> dict:
    """What is kept of a run."""
    seconds = np.concatenate([[0.0], seconds_of(rows)])
    versions = np.array([s["version"] for s in scores])
    accuracy = np.array([s["accuracy"] for s in scores])
    steps = crossing(versions, accuracy, THRESHOLD)
    timed = rows[WARM_STEPS:]
    waiting = [r["time/wait_data_secs"] + r.get("time/wait_push_secs", 0.0) for r in timed]
    step = column(timed, "time/step_secs")
    return {
        "seconds_to_accuracy": None
        if steps is None
        else float(np.interp(steps, range(len(seconds)), seconds)),
        "steps_to_accuracy": steps,
        "step_secs": float(step.mean()),
        "waiting_share": float(np.sum(waiting) / step.sum()),
        "busy_secs": float((step - waiting).mean()),
        "accuracy": float(accuracy[-1]),
        "positions": scores[-1]["positions"],
        "clip_fraction": float(np.nanmean(column(rows, "policy/clip_fraction"))),
        "dropped_by_cap": float(np.nanmean(column(rows, "policy/dropped_by_cap"))),
        "max_ratio": float(np.nanmax(column(rows, "policy/max_ratio"))),
        "median_max_ratio": float(np.nanmedian(column(rows, "policy/max_ratio"))),
        "staleness": float(np.nanmean(column(timed, "staleness/mean"))),
        "generated_length": rows[-1]["fairness/completion/admitted"],
        "trained_length": rows[-1]["fairness/completion/trained"],
        "curve": [
            [int(v), float(seconds[v]), float(a)] for v, a in zip(versions, accuracy, strict=True)
        ],
    }


def crossing(steps: np.ndarray, values: np.ndarray, threshold: float) -> float | None:
    """Where a curve first reaches a threshold, between its points by a straight line; None where it does not."""
    above = np.flatnonzero(values >= threshold)
    if not len(above):
        return None
    i = int(above[0])
    if i == 0:
        return float(steps[0])
    share = (threshold - values[i - 1]) / (values[i] - values[i - 1])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def tabulate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds with their intervals, and how many seeds reached the accuracy."""
    names = [name for name in rows[0] if name != "curve"]
    table: dict[str, Any] = {"reached": sum(r["seconds_to_accuracy"] is not None for r in rows)}
    for name in names:
        if values := [r[name] for r in rows if r[name] is not None]:
            table[name] = grid.mean_and_interval(values)
    return table


def compared(
    runs: Mapping[str, Mapping[int, dict]], slow: str, fast: str, seeds: Sequence[int]
) -> dict:
    """One arm over another, seed by seed."""
    pairs = [(runs[slow][seed], runs[fast][seed]) for seed in seeds]
    result: dict[str, Any] = {"slow": slow, "fast": fast}
    for name in COMPARED:
        both = [(a[name], b[name]) for a, b in pairs if a[name] is not None and b[name] is not None]
        result[name] = ratio([a / b for a, b in both]) if both else None
    gained = grid.mean_and_interval([b["accuracy"] - a["accuracy"] for a, b in pairs])
    low = gained["mean"] - gained["half_width"]
    return result | {"accuracy_gained": gained, "loses_nothing": bool(low > -MARGIN)}


def ratio(values: Sequence[float]) -> dict[str, float | int]:
    """Geometric mean with its 95 % interval, of the logarithms by Student's t."""
    logs, n = np.log(values), len(values)
    half = scipy.special.stdtrit(n - 1, 0.975) * logs.std(ddof=1) / math.sqrt(n) if n > 1 else 0.0
    low, mean, high = (math.exp(logs.mean() + sign * half) for sign in (-1, 0, 1))
    return {"mean": mean, "low": low, "high": high, "seeds": n}


def show(table: Mapping[str, Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]) -> None:
    names = [name for name in next(iter(table.values())) if name != "reached"]
    for name in ["reached", *names]:
        cells = [values.get(name) for values in table.values()]
        texts = [
            str(c) if not isinstance(c, dict) else f"{c['mean']:.3f} ± {c['half_width']:.3f}"
            for c in cells
        ]
        print(name.ljust(24) + "".join(f"{text:>20}" for text in texts))
    print(" " * 24 + "".join(f"{arm:>20}" for arm in table))
    for pair in pairs:
        print(f"{pair['slow']} over {pair['fast']}")
        for name in COMPARED:
            if r := pair[name]:
                print(
                    f"  {name:22} {r['mean']:.2f} ({r['low']:.2f}–{r['high']:.2f}), {r['seeds']} seeds"
                )
        gained = pair["accuracy_gained"]
        print(f"  accuracy gained        {gained['mean']:+.3f} ± {gained['half_width']:.3f}")


def plot(
    rows: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], path: pathlib.Path
) -> None:
    """Held-out accuracy by seconds, a line for each run; and the ratios of the pairs."""
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for number, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        for i, row in enumerate(r for r in rows if r["arm"] == arm):
            _, seconds, accuracy = zip(*row["curve"], strict=True)
            label = arm if i == 0 else None
            curves.plot(seconds, accuracy, color=f"C{number}", linewidth=1, label=label)
    curves.axhline(THRESHOLD, color="black", linewidth=0.8, linestyle=":")
    curves.set(xlabel="seconds of training", ylabel="held-out accuracy, sampled", ylim=(0, 1.02))
    curves.legend(fontsize="small")
    measures = {
        "seconds_to_accuracy": ("seconds to accuracy", 0.12, "C0"),
        "step_secs": ("seconds a step", -0.12, "C7"),
    }
    for name, (label, shift, color) in measures.items():
        known = [(y, pair[name]) for y, pair in enumerate(reversed(pairs)) if pair[name]]
        places = [y + shift for y, _ in known]
        means = np.array([r["mean"] for _, r in known])
        ends = np.array([(r["low"], r["high"]) for _, r in known]).reshape(-1, 2)
        errors = np.abs(ends.T - means)
        bars.errorbar(means, places, xerr=errors, fmt="o", capsize=3, color=color, label=label)
    names = [f"{pair['slow']}\nover {pair['fast']}" for pair in reversed(pairs)]
    bars.set_yticks(range(len(pairs)), names, fontsize="small")
    bars.axvline(1, color="black", linewidth=0.8)
    bars.set(xlabel="ratio, 95 % interval")
    bars.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
