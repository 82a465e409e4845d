"""Padding and time of microbatches that are packed by length ("dynamic") and of those that are not ("fixed").

    python benchmarks/packing.py [--only=padding|host|accumulate] [--rounds=12] [--smoke]

A trajectory's length, prompt and completion together, is log-normal, μ = log 450 and σ = 0.8, rounded, and brought into
[16, 2048]: 594 tokens in the mean, 3 % of them cut off. "fixed" is one trajectory to a row. Padding is all of it, the
tails of the rows and the empty rows of the last microbatch, which holds 16,384 tokens whatever the row; `tails` is the
part of the former. Mean, least and most of five draws.

"host" is the time of `packing.assign_rows` by itself. "accumulate" is that of the backward passes over the same 96
trajectories, an eighth as long, of a small model: fixed, and packed by each policy into rows of the same static shape,
so that all run one compiled program; they take turns in one process, in alternating order, and a figure is the median
over rounds of (fixed / dynamic in the same round), with the quartiles. Seconds are of the process's CPU, and tokens
those of trajectories, without padding. That the gradients are the same is checked.

Results are printed and written to benchmarks/results/packing.json, or to --out; parts that were not asked for stay as
they were there.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np
import record
import shapes

from jaxrl_async.config.settings import PACKINGS, Learner
from jaxrl_async.learner import packing
from jaxrl_async.models import sharding
from jaxrl_async.types import Batch, Group

ROOT = pathlib.Path(__file__).parent.parent
PARTS = ("padding", "host", "accumulate")
MU, SIGMA, SHORTEST, LONGEST = float(np.log(450)), 0.8, 16, 2048  # of the logarithm; tokens
MICROBATCH_TOKENS = 16_384
ROW_TOKENS = (2048, 4096, 8192)
NUM_SEQUENCES = (64, 512, 4096)
HOST_SEQUENCES = (512, 10_000)
SEEDS = range(5)
FIXED = "fixed"

# Shape of the model; trajectories, how much shorter they are, rows of a microbatch and tokens of a row.
WORK = (
    dict(vocab_size=1024, num_layers=4, model_dim=128, num_heads=4, num_kv_heads=4, head_dim=32, mlp_dim=384),
    dict(num_sequences=96, shorter=8, rows=8, row_tokens=256),
)  # fmt: skip
SMOKE_WORK = (
    shapes.MODELS["smoke"],
    dict(num_sequences=12, shorter=64, rows=4, row_tokens=32),
)  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=PARTS, help="one part of three")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="few sequences, a tiny model")
    args = parser.parse_args(argv)
    row_tokens, sizes, host_sizes = ROW_TOKENS, NUM_SEQUENCES, HOST_SEQUENCES
    (model, work), rounds = WORK, args.rounds
    if args.smoke:
        row_tokens, sizes, host_sizes = (2048, 4096), (64,), (64,)
        (model, work), rounds = SMOKE_WORK, 2
    parts = {
        "padding": lambda: padding(row_tokens, sizes),
        "host": lambda: host_seconds(host_sizes),
        "accumulate": lambda: accumulate_times(model, work, rounds),
    }
    path = args.out / "packing.json"
    result = record.read(path)
    result["lengths"] = {
        "mu": MU,
        "sigma": SIGMA,
        "shortest": SHORTEST,
        "longest": LONGEST,
        "mean": float(draw_lengths(100_000, seed=0).mean()),
    }
    for part in [args.only] if args.only else PARTS:
        result[part] = parts[part]()
        print(json.dumps({part: result[part]}, indent=2))
    raw = ["raw", "padding", "host"]
    record.write(path, result, seeds=[0], raw=raw, part=args.only or "all")


def draw_lengths(num_sequences: int, seed: int) -> np.ndarray:
    """int [num_sequences], tokens."""
    drawn = np.random.default_rng(seed).lognormal(MU, SIGMA, num_sequences)
    return np.clip(np.round(drawn), SHORTEST, LONGEST).astype(np.int64)


def padding(row_tokens: Sequence[int], sizes: Sequence[int]) -> list[dict]:
    """One entry for each number of sequences and of tokens of a row."""
    return [
        {
            "num_sequences": size,
            "row_tokens": tokens,
            "microbatch_rows": MICROBATCH_TOKENS // tokens,
            "policies": {policy: shares(size, tokens, policy) for policy in (FIXED, *PACKINGS)},
        }
        for size in sizes
        for tokens in row_tokens
    ]


def shares(num_sequences: int, row_tokens: int, policy: str) -> dict[str, dict[str, float]]:
    """Of all the tokens of the microbatches of a batch, in [0, 1]."""
    padding_shares, tails = [], []
    for seed in SEEDS:
        lengths, num_rows = draw_lengths(num_sequences, seed), num_sequences
        if policy != FIXED:
            rows, _ = packing.assign_rows(lengths, row_tokens=row_tokens, policy=policy)
            num_rows = int(rows.max()) + 1
        total = -(-num_rows * row_tokens // MICROBATCH_TOKENS) * MICROBATCH_TOKENS
        padding_shares.append(float(1 - lengths.sum() / total))
        tails.append(float((num_rows * row_tokens - lengths.sum()) / total))
    return {"padding_share": mean_and_range(padding_shares), "tails": mean_and_range(tails)}


def host_seconds(sizes: Sequence[int]) -> dict:
    """Median seconds of `assign_rows`, by policy and number of sequences, into rows of 4096 tokens."""
    return {policy: {str(size): assign_secs(size, policy) for size in sizes} for policy in PACKINGS}


def assign_secs(num_sequences: int, policy: str, tries: int = 9) -> float:
    lengths, secs = draw_lengths(num_sequences, seed=0), []
    for _ in range(tries):
        start = time.perf_counter()
        packing.assign_rows(lengths, row_tokens=4096, policy=policy)
        secs.append(time.perf_counter() - start)
    return float(np.median(secs))


def accumulate_times(model: dict, work: dict, rounds: int) -> dict:
    """Tokens per CPU second of an accumulation of each kind, and how many times as long the fixed one takes."""
    config = shapes.model_config(model | {"dtype": "float32"})
    train_step = shapes.make_train_step(config)
    params = sharding.init_sharded(config, shapes.one_device(), seed=0)
    groups = make_groups(model["vocab_size"], work)
    batches = {FIXED: fixed(groups, work)}
    batches |= {policy: pack(groups, work, policy) for policy in PACKINGS}

    def accumulated(policy):
        accumulator = train_step.zero_accumulator()
        for batch in batches[policy]:
            accumulator = train_step.accumulate(params, accumulator, batch, None, policy_version=0)
        return jax.block_until_ready(accumulator)

    gradients = {policy: flat(accumulated(policy).grads) for policy in batches}  # Compiles.
    for policy, gradient in gradients.items():
        error = np.linalg.norm(gradient - gradients[FIXED]) / np.linalg.norm(gradients[FIXED])
        if not error <= 1e-5:
            raise ValueError(f"the gradient of {policy} differs by {error} of its norm")
    order, secs = list(batches), {policy: [] for policy in batches}
    for _ in range(rounds):
        for policy in order:
            start = time.process_time()
            accumulated(policy)
            secs[policy].append(time.process_time() - start)
        order.reverse()
    num_tokens = sum(len(t.tokens) for group in groups for t in group.trajectories)
    return {
        "rounds": rounds,
        "compilations": train_step.num_compilations(),
        "policies": {
            policy: {
                "microbatches": len(batches[policy]),
                "padding_share": packing.padding_share(batches[policy]),
                "tokens_per_sec": record.quartiles(num_tokens / np.array(secs[policy])),
                "fixed_over_this": record.quartiles(np.array(secs[FIXED]) / np.array(secs[policy])),
            }
            for policy in batches
        },
    }


def make_groups(vocab_size: int, work: dict) -> list[Group]:
    """Made-up trajectories, one to a group; a quarter of each is its prompt."""
    rng, groups = np.random.default_rng(0), []
    lengths = np.maximum(draw_lengths(work["num_sequences"], seed=0) // work["shorter"], 2)
    for index, length in enumerate(lengths.tolist()):
        num_prompt = max(length // 4, 1)
        prompt = rng.integers(0, vocab_size, num_prompt)
        trajectory = shapes.make_trajectory(
            rng, prompt, length - num_prompt, vocab_size=vocab_size, version=0
        )
        groups.append(Group(index, 0, (trajectory,)))
    return groups


def pack(groups: Sequence[Group], work: dict, policy: str, rows: int | None = None) -> list[Batch]:
    indexes = np.array([[group.prompt_index] for group in groups])
    learner = Learner(
        microbatch_rows=rows or work["rows"], row_tokens=work["row_tokens"], packing=policy
    )
    advantages = np.where(indexes % 2, 1.0, -1.0).astype(np.float32)
    return packing.Packer(learner)(groups, advantages, last=True)


def fixed(groups: Sequence[Group], work: dict) -> list[Batch]:
    """Microbatches with one trajectory to a row."""
    rows = [row for group in groups for row in pack([group], work, "in_order", rows=1)]
    rows += [packing.empty_batch(1, work["row_tokens"])] * (-len(rows) % work["rows"])
    names = [name for name, array in vars(rows[0]).items() if array is not None]
    return [
        Batch(**{n: np.concatenate([getattr(r, n) for r in rows[i : i + work["rows"]]]) for n in names})
        for i in range(0, len(rows), work["rows"])
    ]  # fmt: skip


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))])


def mean_and_range(values: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
