"""What it saves the learner that a group's prompt stands once in a row, and not once before each completion.

    python benchmarks/shared_prompts.py [--shape=17m|100m|all] [--rounds=8] [--remat] [--smoke]

The same groups (G completions of R tokens behind a prompt of P) are packed as G rows of P + R tokens and as one row
of P + G·R, both without padding. `accumulate`, which is a learner's work but for one `update` per minibatch, takes
turns on both in one process, in alternating order. Useful tokens are completion tokens. The ratio is the median over
rounds of (replicated / shared) seconds, with the quartiles; its ideal is that of the tokens laid down,
G·(P + R) / (P + G·R), as of all work that is per token. Results are printed and written to
benchmarks/results/shared_prompts.json, or to --out.
"""

import argparse
import pathlib
import time

import jax
import numpy as np
import record
import shapes

from jaxrl_async.config.settings import Learner
from jaxrl_async.learner import packing
from jaxrl_async.models import sharding, transformer
from jaxrl_async.types import Batch, Group

ROOT = pathlib.Path(__file__).parent.parent
VERSION = 2  # v_θ; tokens are 1 step old
KINDS = ("replicated", "shared")

# Shape of the model; groups of a microbatch, completions of a group, prompt, completion, head chunk.
SHAPES = {
    "17m": (
        shapes.MODELS["17m"],
        dict(groups=1, group_size=8, prompt=512, completion=128, head_chunk=128),
    ),
    "100m": (
        shapes.MODELS["100m"],
        dict(groups=1, group_size=8, prompt=512, completion=128, head_chunk=128),
    ),
    "smoke": (
        shapes.MODELS["smoke"],
        dict(groups=2, group_size=3, prompt=4, completion=2, head_chunk=None),
    ),
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two rounds")
    args = parser.parse_args(argv)
    if args.smoke:
        args.shape, args.rounds = "smoke", 2
    result = {
        "device": jax.devices()[0].device_kind,
        "rounds": args.rounds,
        "remat": args.remat,
        "shapes": {},
    }
    for name in ("17m", "100m") if args.shape == "all" else [args.shape]:
        shape, work = SHAPES[name]
        measured = result["shapes"][name] = measure(
            shapes.model_config(shape, remat=args.remat), work, args.rounds
        )
        report(name, work, measured)
    record.write(args.out / "shared_prompts.json", result, seeds=[0])


def measure(config: transformer.ModelConfig, work: dict, rounds: int) -> dict:
    """Seconds and useful tokens/s of `accumulate` on both kinds of rows, and their ratio beside its ideal."""
    train_step = shapes.make_train_step(config, head_chunk=work["head_chunk"])
    state = train_step.init(sharding.init_sharded(config, shapes.one_device(), seed=0))
    batches = {kind: make_batch(config, work, shared_prompts=kind == "shared") for kind in KINDS}
    secs, update_secs = {kind: [] for kind in KINDS}, []
    accumulator, order = train_step.zero_accumulator(), list(KINDS)
    for turn in range(1 + rounds):  # The first one compiles.
        for kind in order:
            start = time.perf_counter()
            accumulator = train_step.accumulate(
                state.params, accumulator, batches[kind], None, VERSION
            )
            jax.block_until_ready(accumulator)
            accumulated = time.perf_counter()
            state, accumulator, metrics = train_step.update(state, accumulator)
            if not jax.device_get(metrics)["finite"]:
                raise FloatingPointError("a loss or a gradient norm is not finite")
            if turn:
                secs[kind].append(accumulated - start)
                update_secs.append(time.perf_counter() - accumulated)
        order.reverse()
    ratio = record.quartiles(np.divide(secs["replicated"], secs["shared"]))
    laid_down = {kind: int(np.count_nonzero(batches[kind].segment_ids)) for kind in KINDS}
    ideal = laid_down["replicated"] / laid_down["shared"]
    useful = int(batches["shared"].mask.sum())
    return {
        kind: {
            "rows": list(batches[kind].tokens.shape),
            "tokens": laid_down[kind],
            "padding_share": packing.padding_share([batches[kind]]),
            "accumulate_secs": record.quartiles(secs[kind]),
            "useful_tokens_per_sec": useful / float(np.median(secs[kind])),
        }
        for kind in KINDS
    } | {
        "useful_tokens": useful,
        "ratio": ratio,
        "ideal": ideal,
        "share_of_ideal": ratio["median"] / ideal,
        "update_secs": float(np.median(update_secs)),
    }


def make_batch(config, work: dict, *, shared_prompts: bool) -> Batch:
    """One microbatch of rows filled to the end: of one trajectory each, or of one group each."""
    rng = np.random.default_rng(0)
    G, P, R, V = work["group_size"], work["prompt"], work["completion"], config.vocab_size
    groups = []
    for index in range(work["groups"]):
        prompt = rng.integers(0, V, P)
        trajectories = tuple(
            shapes.make_trajectory(rng, prompt, R, vocab_size=V, version=VERSION - 1)
            for _ in range(G)
        )
        groups.append(Group(index, 0, trajectories))
    learner = Learner(
        microbatch_rows=len(groups) * (1 if shared_prompts else G),
        row_tokens=P + (G * R if shared_prompts else R),
        shared_prompts=shared_prompts,
    )
    advantages = rng.normal(size=(len(groups), G)).astype(np.float32)
    (batch,) = packing.Packer(learner)(groups, advantages, last=True)
    return batch


def report(name: str, work: dict, measured: dict) -> None:
    G, P, R = work["group_size"], work["prompt"], work["completion"]
    print(f"\n{name}: {work['groups']} group(s) of {G} completions of {R} tokens, prompt of {P}")
    for kind in KINDS:
        row = measured[kind]
        secs = row["accumulate_secs"]
        print(
            f"  {kind:11}{row['rows'][0]:4d} × {row['rows'][1]:<6d}{row['tokens']:7d} tokens"
            f"{secs['median']:9.3f} s ({secs['low']:.3f}–{secs['high']:.3f})"
            f"{row['useful_tokens_per_sec']:10.1f} useful tokens/s"
        )
    ratio = measured["ratio"]
    print(
        f"  ratio {ratio['median']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f}), ideal {measured['ideal']:.3f}: "
        f"{measured['share_of_ideal']:.1%} of it; an update {measured['update_secs']:.3f} s on top of either"
    )


if __name__ == "__main__":
    main()
