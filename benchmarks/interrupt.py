"""Interruptible generation: pushes that interrupt running requests beside those that wait for them, on long tails.

    python benchmarks/interrupt.py [--seeds=5] [--requests=256] [--smoke]

The embedded engine, with a request in each slot, whose completions have log-normal lengths: σ = 1, a mean of some 60
tokens, at most 512. A push is due when 1 or 4 requests a slot have ended.

retract     pauses, loads, and computes the keys and values of the running requests again by the new weights
in_place    pauses, loads, and keeps them, stale
drain       begins no request when a push is due, and loads when the last one has ended

A decode step takes the same time for few requests as for all slots. Tokens are those of all requests until the last one
has ended that counts; seconds are of the clock and of the process's CPU, which other work on the machine changes less.
A seed draws the lengths, the same ones for each way; "over_drain" is the ratio of tokens per CPU second of one seed.
After "AReaL", Fu et al., arXiv 2505.24298, section 6.4. Results: benchmarks/results/interrupt.json.
"""

import argparse
import itertools
import pathlib
import queue
import tempfile
import time

import grid
import numpy as np
import record
from flax import nnx

from jaxrl_async import parts
from jaxrl_async.inference.fields import parse_sampling
from jaxrl_async.inference.requests import Request
from jaxrl_async.models import transformer

WAYS = ("retract", "in_place", "drain")
PER_SLOT = (1, 4)  # requests that end from one push to the next
LONGEST, MEDIAN, SIGMA = 512, 40, 1.0  # tokens; of the lengths' logarithm
PROMPT = np.arange(2, 10, dtype=np.int32)
TIMEOUT_SECS = 600.0
SETTINGS = {
    "model.model_dim": 128,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 32,
    "model.mlp_dim": 384,
    "server.num_slots": 16,
    "server.decode_chunk": 8,
    "server.max_total_tokens": LONGEST + len(PROMPT),
    "rollout.max_new_tokens": LONGEST,
    "learner.row_tokens": LONGEST + len(PROMPT),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256, help="that end in a run")
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS)
    parser.add_argument("--smoke", action="store_true", help="few requests")
    args = parser.parse_args(argv)
    if args.smoke:
        args.seeds, args.requests = 1, 80
    settings, rows = grid.settings_with(SETTINGS), []
    with tempfile.TemporaryDirectory() as workdir:
        engine, versions = started(settings, pathlib.Path(workdir))
        try:
            for seed, per_slot in itertools.product(range(args.seeds), PER_SLOT):
                for way in WAYS if seed % 2 else reversed(WAYS):
                    found = measure(engine, versions, way, per_slot, seed, args.requests)
                    rows.append({"seed": seed, "per_slot": per_slot, "way": way} | found)
                    print(rows[-1], flush=True)
        finally:
            engine.close(timeout_secs=TIMEOUT_SECS)
    result = {
        "settings": SETTINGS,
        "requests": args.requests,
        "table": tabulate(rows),
        "rows": rows,
    }
    print(*result["table"], sep="\n")
    record.write(args.out / "interrupt.json", result, seeds=list(range(args.seeds)))


def started(settings, workdir: pathlib.Path):
    """An engine, and two versions of its weights."""
    config = parts.model_config_of(settings, parts.tokenizer_of(settings, workdir))
    versions = [nnx.state(transformer.Transformer(config, rngs=nnx.Rngs(i))) for i in range(2)]
    engine = parts.engine_of(settings, workdir, name="interrupt")
    engine.start()
    return engine, versions


def measure(engine, versions, way: str, per_slot: int, seed: int, num_requests: int) -> dict:
    """Tokens, seconds of the clock and of the CPU, and pushes of a run."""
    lengths = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, 2 * num_requests)
    lengths = np.clip(np.round(lengths), 1, LONGEST).astype(int)
    done, slots = queue.Queue(), engine.num_slots
    begun = ended = pushes = tokens = recomputed = 0

    def begin(num: int) -> None:
        nonlocal begun
        for i in range(begun, begun + num):
            fields = {"max_new_tokens": int(lengths[i]), "ignore_eos": True}
            engine.submit(Request(str(i), PROMPT, parse_sampling(fields)), done.put)
        begun += num

    def ends() -> None:
        nonlocal ended, tokens, recomputed
        for _, outcome in done.get(timeout=TIMEOUT_SECS):
            ended, tokens = ended + 1, tokens + len(outcome.output_ids)
            recomputed += outcome.num_retractions

    def load() -> None:
        version = versions[(pushes + 1) % 2]
        engine.update_weights(version, str(pushes)).result(TIMEOUT_SECS)

    load()
    start = time.perf_counter(), time.process_time()
    begin(slots)
    while ended < num_requests:
        ends()
        if ended >= (pushes + 1) * per_slot * slots:
            pushes += 1
            if way == "drain":
                while ended < begun:
                    ends()
                load()
            else:
                engine.pause(way).result(TIMEOUT_SECS)
                load()
                engine.resume().result(TIMEOUT_SECS)
        begin(slots - (begun - ended))
    engine.abort(lambda rid: True).result(TIMEOUT_SECS)
    while ended < begun:
        ends()
    secs, cpu_secs = time.perf_counter() - start[0], time.process_time() - start[1]
    found = {"tokens": tokens, "secs": secs, "cpu_secs": cpu_secs, "pushes": pushes}
    return found | {"retractions": recomputed}


def tabulate(rows: list[dict]) -> list[dict]:
    """A row for each way and interval of pushes: tokens per CPU second, and over those of "drain" of the same seed."""
    rates = {(r["per_slot"], r["way"], r["seed"]): r["tokens"] / r["cpu_secs"] for r in rows}
    seeds = sorted({row["seed"] for row in rows})
    table = []
    for per_slot, way in itertools.product(PER_SLOT, WAYS):
        own = [rates[per_slot, way, seed] for seed in seeds]
        drain = [rates[per_slot, "drain", seed] for seed in seeds]
        over = grid.mean_and_interval(a / b for a, b in zip(own, drain, strict=True))
        table.append({"per_slot": per_slot, "way": way, "over_drain": over})
        table[-1]["tokens_per_cpu_sec"] = grid.mean_and_interval(own)
    return table


if __name__ == "__main__":
    main()
