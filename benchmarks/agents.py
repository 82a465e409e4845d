"""Held-out success of a tiny policy before and after it learns to use a tool, and to play a text game; a turn's cost.

    python benchmarks/agents.py [--envs=calculator,game] [--modes=sync,async] [--seeds=1,2,3]
    python benchmarks/agents.py --turns

Each run is the two commands that a user types, `train` and `evaluate`, on configs/tools.py. Success is that of answers
sampled at the run's temperature (pass@1), and of greedy ones, with the intervals of `evaluate`. Rows are added to
benchmarks/results/agents.json as they come. Words that begin with --config. change the runs:

    python benchmarks/agents.py --envs=calculator --config.environment.args.median_secs=0.05

With both modes, a pair's speed-up is shown beside the bound of perfect overlap, (T_inf + T_train)/max(T_inf, T_train):
T_inf is what the synchronous learner waits in a step, T_train the rest of the step.

`--turns` samples as many tokens from the embedded engine in one request as in several, each of which continues the row
of the one before: the ratio of the times is what turns cost.
"""

import argparse
import functools
import itertools
import json
import pathlib
import queue
import tempfile
import time

import numpy as np
import record
from commands import WARM_STEPS, jaxrl

from jaxrl_async.metrics import read_metrics

ROOT = pathlib.Path(__file__).parent.parent


def run(env: str, mode: str, seed: int, changes: list[str]) -> dict:
    """Trains and evaluates once."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-agents-") as directory:
        workdir = pathlib.Path(directory, "run")
        start = time.monotonic()
        config = f"--config=configs/tools.py:env={env},mode={mode},seed={seed}"
        jaxrl("train", config, f"--workdir={workdir}", *changes)
        seconds = time.monotonic() - start
        jaxrl("evaluate", f"--workdir={workdir}", "--steps=0,last")
        before, after = json.loads((workdir / "evaluation.json").read_text("utf-8"))
        steps = read_metrics(workdir)
    last = steps[-1]
    return {
        "env": env,
        "mode": mode,
        "seed": seed,
        "changes": changes,
        "before": before,
        "after": after,
        "train_secs": seconds,
        "step_secs": float(np.median([row["time/step_secs"] for row in steps[WARM_STEPS:]])),
        "wait_secs": float(np.median([waited(row) for row in steps[WARM_STEPS:]])),
        "turns": [steps[0]["component/turns"], last["component/turns"]],
        "staleness_mean": float(np.mean([row["staleness/mean"] for row in steps])),
        "returned": {k: v for k, v in last.items() if k.startswith("returned/") and v},
    }


def waited(step: dict) -> float:
    """Seconds of a step in which the learner waited; for pushes it does so in some modes alone."""
    return step["time/wait_data_secs"] + step.get("time/wait_push_secs", 0.0)


def line(row: dict) -> str:
    before, after = row["before"], row["after"]
    shown = ", ".join(
        f"{name} {before[name]:.3f} → {after[name]:.3f} ({after[f'{name}_low']:.3f}–{after[f'{name}_high']:.3f})"
        for name in ("greedy", "pass@1")
    )
    return (
        f"{row['env']} {row['mode']} seed {row['seed']}: {shown}, {row['train_secs']:.0f} s, "
        f"{row['step_secs']:.2f} s a step, returned {row['returned']}"
    )


def speed_up(sync: dict, other: dict) -> str:
    """A pair of runs of one seed: seconds a step, and what perfect overlap would give."""
    waiting, training = sync["wait_secs"], sync["step_secs"] - sync["wait_secs"]
    gained = sync["step_secs"] / other["step_secs"]
    bound = sync["step_secs"] / max(waiting, training)
    return (
        f"{sync['env']} seed {sync['seed']}: sync over {other['mode']} {gained:.2f}, bound {bound:.2f} "
        f"(T_inf {waiting:.2f} s, T_train {training:.2f} s): {gained / bound:.0%}"
    )


def turns(
    prompt_tokens: int, num_rows: int, num_tokens: int = 32, rounds: int = 5
) -> dict[str, float]:
    """Seconds for num_tokens of each row, by the number of requests they are sampled in; medians of paired rounds."""
    import jax

    from jaxrl_async import parts
    from jaxrl_async.cli.config import load_config, settings_of
    from jaxrl_async.inference import engine as engines
    from jaxrl_async.inference.fields import parse_sampling
    from jaxrl_async.inference.requests import Request
    from jaxrl_async.models import sharding
    from jaxrl_async.tasks.tokenizer import CharTokenizer

    settings = settings_of(load_config(str(ROOT / "configs/tools.py:env=game")))
    tokenizer = CharTokenizer(settings.tokenizer.alphabet)
    config = parts.model_config_of(settings, tokenizer)
    engine = engines.Engine(
        config,
        num_slots=num_rows,
        max_total_tokens=1 << (prompt_tokens + num_tokens).bit_length(),
        decode_chunk=4,
        max_queued_requests=num_rows,
        name="turns",
    )
    engine.start()
    params = sharding.init_sharded(config, sharding.make_mesh(1, 1, 1, jax.devices()[:1]), 0)
    engine.update_weights(params, "0").result(600)
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.integers, 2, tokenizer.vocab_size, prompt_tokens, dtype=np.int32)
    prompts = [draw() for _ in range(num_rows)]

    def seconds(num_turns: int) -> float:
        assert engine.flush().result(60)
        rows, start = dict(enumerate(prompts)), time.monotonic()
        for turn in range(num_turns):
            done: queue.Queue = queue.Queue()
            for i, row in rows.items():
                ask = parse_sampling(
                    {
                        "max_new_tokens": num_tokens // num_turns,
                        "temperature": 1.0,
                        "sampling_seed": i,
                    }
                )
                engine.submit(Request(f"{turn}-{i}", row, ask), done.put)
            left = num_rows
            while left:
                for rid, completion in done.get(timeout=600):
                    i = int(rid.partition("-")[2])
                    rows[i] = np.append(rows[i], completion.output_ids)
                    left -= 1
        return time.monotonic() - start

    try:
        times = {n: [] for n in (1, 2, 4, 8)}
        for _ in range(rounds + 1):
            for n, found in times.items():
                found.append(seconds(n))
    finally:
        engine.close(timeout_secs=60)
    whole = np.array(times[1][1:])  # The first round warms up.
    return {"1 turn, s": float(np.median(whole))} | {
        f"{n} turns over 1": float(np.median(np.array(t[1:]) / whole)) for n, t in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--envs", default="calculator,game")
    parser.add_argument("--modes", default="sync,async")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--turns", action="store_true", help="what a turn costs, alone")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/agents.json"))
    args, changes = parser.parse_known_args()
    if args.turns:
        for prompt_tokens, num_rows in ((40, 256), (400, 32)):
            found = turns(prompt_tokens, num_rows)
            print(f"prompts of {prompt_tokens} tokens:", json.dumps(found), flush=True)
        return
    out = pathlib.Path(args.out)
    result = {"rows": []} | record.read(out)
    points = itertools.product(
        map(int, args.seeds.split(",")), args.modes.split(","), args.envs.split(",")
    )
    for seed, mode, env in points:
        row = run(env, mode, seed, changes)
        print(line(row), flush=True)
        others = [r for r in result["rows"] if point_of(r) != point_of(row)]
        result["rows"] = [*others, row]
        words = (word.removeprefix("--config.") for word in changes)
        part = " ".join([env, mode, f"seed={seed}", *words])
        result = record.write(out, result, seeds=[seed], part=part)
        pair = [r for r in result["rows"] if point_of(r) == point_of(row | {"mode": "sync"})]
        if mode != "sync" and pair:
            print(speed_up(pair[0], row), flush=True)


def point_of(row: dict) -> tuple:
    """What a row was measured of."""
    return row["env"], row["mode"], row["seed"], row["changes"]


if __name__ == "__main__":
    main()
