"""Sync, periodic and async side by side on the same work, through the real processes and wire.

    python benchmarks/modes.py [--steps=30] [--rounds=1] [--out=DIR]

One core is pinned to the learner and one to server, rollout worker and queue, in every mode. The modes run in
turn, `rounds` times, and each figure is the median over its steps after the first five; shares of bounds are given by
round, too. From the sync run:

    T_inf   = the learner's waiting for data and for pushes         T_train = the rest of the step
    tail    = min(T_inf, T_train) · chunk / B                       periodic: the first chunk is not there before it is
                                                                    generated, the last one not trained before the end
    bound   = (T_inf + T_train) / (max(T_inf, T_train) + tail)      what perfect overlap would give; async has no tail

and the share of the bound that a mode reaches is (sync step / its step) / bound. A step has 16 samples for each slot of
the server, so that its groups end one after another: were all of them generated at once, they would end together, and
no schedule could overlap them. `secs` has the medians of the learner's stages: in periodic mode update, publish and
wait_push come after the last chunk. Results are printed and written to benchmarks/results/modes.json.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import numpy as np
import record

from jaxrl_async.metrics import read_metrics

ROOT = pathlib.Path(__file__).parent.parent
MODES = ("sync", "periodic", "async")
WARM_STEPS = 5
CHUNK_GROUPS = 4  # of the periodic mode

# A model large enough that computing, not Python, fills the step, and both sides weigh about the same.
WORKLOAD = {
    "model.num_layers": 4,
    "model.model_dim": 256,
    "model.num_heads": 8,
    "model.num_kv_heads": 4,
    "model.head_dim": 32,
    "model.mlp_dim": 768,
    "warm_start.num_steps": 0,
    "rollout.max_new_tokens": 40,
    "server.max_total_tokens": 48,
    "server.num_slots": 16,
    "server.decode_chunk": 8,
    "learner.groups_per_step": 32,
    "learner.num_minibatches": 1,
    "learner.microbatch_rows": 4,
    "learner.row_tokens": 128,
    "loss.anchor": "current",
    "checkpoint.every_steps": 1_000_000,
    "evaluate.every_steps": 0,
    "cpus.learner": "(0,)",
    "cpus.server": "(1,)",
    "cpus.rollout": "(1,)",
    "cpus.queue": "(1,)",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS)
    args = parser.parse_args()
    rows, by_round = {mode: [] for mode in MODES}, []
    for _ in range(args.rounds):
        found = {mode: run(mode, args.steps)[WARM_STEPS:] for mode in MODES}
        by_round.append(table_of(found))
        for mode in MODES:
            rows[mode] += found[mode]
    table = table_of(rows)
    for mode in MODES:
        shares = [of_round[mode]["share_of_bound"] for of_round in by_round]
        table[mode]["share_of_bound_by_round"] = record.quartiles(shares)
    report(table, *split(rows["sync"]), args)


def table_of(rows: Mapping[str, list[dict]]) -> dict[str, dict]:
    """The figures of each mode, from its rows."""
    table = {mode: summary(steps) for mode, steps in rows.items()}
    waiting, training = split(rows["sync"])
    for mode in table:
        speedup = table["sync"]["step_secs"] / table[mode]["step_secs"]
        bound = bound_of(mode, waiting, training)
        table[mode] |= {"speedup_over_sync": speedup, "bound": bound}
        table[mode]["share_of_bound"] = speedup / bound
    return table


def run(mode: str, steps: int) -> list[dict]:
    """One training run; its metrics rows."""
    with tempfile.TemporaryDirectory() as workdir:
        overrides = WORKLOAD | {"learner.num_steps": steps}
        overrides |= {"queue.chunk_groups": CHUNK_GROUPS} if mode == "periodic" else {}
        command = [sys.executable, "-m", "jaxrl_async", "train", f"--workdir={workdir}/run"]
        command += [f"--config={ROOT}/configs/quickstart.py:mode={mode}"]
        command += [f"--config.{name}={value}" for name, value in overrides.items()]
        subprocess.run(
            command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return read_metrics(f"{workdir}/run")


def bound_of(mode: str, waiting: float, training: float) -> float:
    """What perfect overlap would give; see the top."""
    share = CHUNK_GROUPS / WORKLOAD["learner.groups_per_step"] if mode == "periodic" else 0.0
    tail = min(waiting, training) * share
    return (waiting + training) / (max(waiting, training) + tail)


def split(rows: list[dict]) -> tuple[float, float]:
    """(T_inf, T_train) of a run, median seconds a step."""
    waiting = np.array(
        [row["time/wait_data_secs"] + row.get("time/wait_push_secs", 0) for row in rows]
    )
    step = np.array([row["time/step_secs"] for row in rows])
    return float(np.median(waiting)), float(np.median(step - waiting))


def summary(rows: list[dict]) -> dict[str, float]:
    waiting, training = split(rows)
    step = float(np.median([row["time/step_secs"] for row in rows]))
    return {
        "step_secs": step,
        "learner_waiting_share": waiting / (waiting + training),
        "rollout_tokens_per_sec": float(np.median([row["rollout/tokens_per_sec"] for row in rows])),
        "learner_tokens_per_sec": float(np.median([row["learner/tokens_per_sec"] for row in rows])),
        "staleness_mean": float(np.mean([row["staleness/mean"] for row in rows])),
        "secs": stages(rows),
        "raw": [row["time/step_secs"] for row in rows],
    }


def stages(rows: list[dict]) -> dict[str, float]:
    """Median seconds a step of each stage of the learner, and of a push."""
    names = {name for row in rows for name in row if name.startswith("time/")}
    names |= {"weights/push_secs"}
    return {
        name.partition("/")[2].removesuffix("_secs"): float(
            np.median([row.get(name) or 0.0 for row in rows])
        )
        for name in sorted(names)
    }


def report(table, waiting, training, args) -> None:
    print(f"T_inf {waiting:.3f} s, T_train {training:.3f} s")
    names = [name for name, value in table["sync"].items() if isinstance(value, float)]
    print("mode      " + "".join(f"{name:>24}" for name in names))
    for mode, values in table.items():
        print(f"{mode:10}" + "".join(f"{values[name]:>24.3f}" for name in names))
    for mode, values in table.items():
        print(f"{mode:10}" + " ".join(f"{k} {v:.3f}" for k, v in values["secs"].items()))
    result = {"steps": args.steps, "rounds": args.rounds, "modes": table}
    result |= {"T_inf_secs": waiting, "T_train_secs": training}
    record.write(args.out / "modes.json", result, seeds=[0])


if __name__ == "__main__":
    main()
