"""The learner's programs: their rate, three policies in one pass, one block a step, and the cost of length.

    python benchmarks/learner.py [--part=rate|policies|blocks|length|all] [--updates=2] [--shape=NAME|all]

rate      Accumulate + update in tokens/s. Model FLOPs of a trained token are 6·P + 6·L·H·C·T (P parameters, attention
          at its causal half; no credit for what remat computes again), forward and backward. A 4096³ matmul in the same
          dtype takes turns with the microbatches: share_of_matmul is of its best rate in the run,
          share_of_matmul_beside, the median over updates, of its mean rate between the microbatches of the same
          update, for a machine whose own rate moves.
policies  Policy, proximal policy and reference of a microbatch, one update a step: one program and one pass, against
          three dispatches (score, score, accumulate). The proximal policy is then the policy itself, so one pass runs
          two forwards where three dispatches run three. Median ratio over rounds that take turns, with quartiles.
blocks    A step of each of --blocks blocks and one of all layers, in turns, at --shape: seconds, bytes of the gradients
          and the most memory of its programs by XLA's account, arguments included. Median ratios over
          --updates rounds, with quartiles. With --offload the blocks' moments lie in the host's memory, which does not
          count; on a CPU that is the same memory.
length    Seconds of an accumulate and its temporary memory by XLA's account, for rows of 128 to 2048 tokens and equally
          many tokens.

On a CPU set GLIBC_TUNABLES=glibc.malloc.hugetlb=1, as `train` does for the learner (supervisor.HUGE_PAGES).

The shapes qwen2.5-* run on accelerators only (bfloat16, remat, random weights). Results are printed and written to
benchmarks/results/learner.json; a part that was not run keeps what stands there.
"""

import argparse
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import record
import shapes

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.models import sharding
from jaxrl_async.types import Batch

ROOT = pathlib.Path(__file__).parent.parent
MATMUL_SIZE = 4096
FLOAT32 = {"dtype": "float32"}  # on any device

# Shape of the model; rows of a microbatch, tokens of a row, microbatches of an update, head chunk, prompt, completion.
SHAPES = {
    "quickstart": (
        shapes.MODELS["quickstart"] | FLOAT32,
        dict(rows=64, row_tokens=48, microbatches=1, head_chunk=None, prompt=6, completion=4),
    ),
    "100m": (
        shapes.MODELS["100m"] | FLOAT32,
        dict(rows=4, row_tokens=512, microbatches=8, head_chunk=128, prompt=256, completion=256),
    ),
    "smollm2": (  # the learner of configs/smollm2.py
        dict(vocab_size=49152, num_layers=30, model_dim=576, num_heads=9, num_kv_heads=3, head_dim=64, mlp_dim=1536,
             qk_norm=False, tied_embeddings=True) | FLOAT32,
        dict(rows=1, row_tokens=512, microbatches=3, head_chunk=128, prompt=48, completion=16),
    ),
    "qwen2.5-0.5b": (
        dict(vocab_size=151936, num_layers=24, model_dim=896, num_heads=14, num_kv_heads=2, head_dim=64, mlp_dim=4864,
             attention_bias=True, qk_norm=False, tied_embeddings=True, dtype="bfloat16", remat=True),
        dict(rows=4, row_tokens=4096, microbatches=2, head_chunk=512, prompt=2048, completion=2048),
    ),
    "qwen2.5-1.5b": (
        dict(vocab_size=151936, num_layers=28, model_dim=1536, num_heads=12, num_kv_heads=2, head_dim=128, mlp_dim=8960,
             attention_bias=True, qk_norm=False, tied_embeddings=True, dtype="bfloat16", remat=True),
        dict(rows=4, row_tokens=4096, microbatches=2, head_chunk=512, prompt=2048, completion=2048),
    ),
    "smoke": (
        shapes.MODELS["smoke"] | FLOAT32,
        dict(rows=2, row_tokens=8, microbatches=1, head_chunk=None, prompt=4, completion=4),
    ),
}  # fmt: skip
ON_CPU = ("quickstart", "100m")
MIDDLE = shapes.MODELS["17m"] | FLOAT32
LENGTHS = (128, 256, 512, 1024, 2048)
TOKENS = 2048  # of a microbatch in "policies" and "length"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ["rate", "policies", "blocks", "length", "all"]
    parser.add_argument("--part", choices=parts, default="all")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="of 'policies'")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--offload", action="store_true", help="the moments of blocks")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one round of each part")
    args = parser.parse_args(argv)
    shape, tokens, lengths, names = MIDDLE, TOKENS, LENGTHS, [args.shape]
    if args.shape == "all":
        names = ON_CPU if jax.devices()[0].platform == "cpu" else list(SHAPES)[:-1]
    if args.smoke:
        shape, tokens, lengths, names = SHAPES["smoke"][0], 16, (8, 16), ["smoke"]
        args.updates = args.rounds = args.blocks = 1
    path = args.out / "learner.json"
    result = record.read(path) | {"device": jax.devices()[0].device_kind}
    if args.part in ("rate", "all"):
        for name in names:
            result[name] = rate(*SHAPES[name], args.updates)
            report(name, result[name])
    if args.part in ("policies", "all"):
        result["policies"] = policies(shape, tokens, args.rounds)
        report("policies", result["policies"])
    if args.part in ("blocks", "all"):
        name = "100m" if args.shape == "all" else args.shape
        name = "smoke" if args.smoke else name
        part = "blocks_offloaded" if args.offload else "blocks"
        result[part] = {name: blocks(name, args.blocks, args.updates, args.offload)}
        report(f"{part} of {name}", result[part][name])
    if args.part in ("length", "all"):
        result["length"] = {}
        for length in lengths:
            result["length"][str(length)] = of_length(shape, tokens, length)
            report(f"rows of {length}", result["length"][str(length)])
    part = f"{args.part} {args.shape}" + " offload" * args.offload
    record.write(path, result, seeds=[0], raw=["raw"], part=part)


def report(name: str, measured: dict[str, Any]) -> None:
    numbers = {k: v for k, v in measured.items() if k != "raw"}
    rounded = {k: round(v, 3) if v < 1e4 else f"{v:.3e}" for k, v in numbers.items()}
    print(name, rounded, flush=True)


def rate(
    shape: dict, work: dict, updates: int, attention_kernel: str | None = None, profile: str = ""
) -> dict[str, float]:
    """Tokens/s and FLOP/s of whole updates, accumulate every microbatch and then update, beside the matmul rate.

    One more update, which does not count, is profiled into the directory `profile`.
    """
    config = shapes.model_config(shape)
    train_step = shapes.make_train_step(
        config,
        learning_rate=1e-4,
        head_chunk=work["head_chunk"],
        attention_kernel=attention_kernel,
    )
    state = train_step.init(sharding.init_sharded(config, shapes.one_device(), seed=0))
    accumulator, batches = train_step.zero_accumulator(), make_batches(config, work)

    matmul = make_matmul(config.dtype)
    secs, rates = np.zeros(updates + 1), [[] for _ in range(updates + 1)]

    def timed(number, function, *arguments):
        start = time.perf_counter()
        found = jax.block_until_ready(function(*arguments))
        secs[number] += time.perf_counter() - start
        return found

    for number in range(updates + 1):  # The first one compiles.
        for batch in batches:
            rates[number].append(matmul())
            arguments = state.params, accumulator, batch, None, 2
            accumulator = timed(number, train_step.accumulate, *arguments)
        rates[number].append(matmul())
        state, accumulator, metrics = timed(number, train_step.update, state, accumulator)
    if profile:
        with jax.profiler.trace(profile):
            for batch in batches:
                accumulator = train_step.accumulate(state.params, accumulator, batch, None, 2)
            state, accumulator, metrics = train_step.update(state, accumulator)
            jax.block_until_ready(metrics)
    assert metrics["finite"] == 1
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    idle = len(config.expert_layers) * (config.num_experts - config.experts_per_token)
    used = params - idle * 3 * config.model_dim * config.expert_mlp_dim  # by a token
    tokens = sum(batch.tokens.size for batch in batches)
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * sequence_length(work)
    flops = tokens * (6 * used + attention)
    beside = flops / secs[1:] / np.mean(rates[1:], axis=1)
    raw = {"update_secs": secs[1:].tolist(), "matmul_flops_per_sec": rates[1:]}
    secs, best = float(np.median(secs[1:])), max(itertools.chain(*rates))
    return {
        "parameters": params,
        "parameters_of_a_token": used,
        "tokens_per_update": tokens,
        "update_secs": secs,
        "tokens_per_sec": tokens / secs,
        "flops_per_sec": flops / secs,
        "compilations": train_step.num_compilations(),
        "matmul_flops_per_sec": best,
        "share_of_matmul": flops / secs / best,
        "share_of_matmul_beside": float(np.median(beside)),
        "raw": raw,
    }


def make_matmul(dtype: str, tries: int = 3) -> Callable[[], float]:
    """A function that gives the best of a few 4096³ matmuls, in FLOP/s."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2))
    matmul = jax.jit(jnp.matmul)
    jax.block_until_ready(matmul(a, b))

    def rate() -> float:
        secs = []
        for _ in range(tries):
            start = time.perf_counter()
            jax.block_until_ready(matmul(a, b))
            secs.append(time.perf_counter() - start)
        return 2 * MATMUL_SIZE**3 / min(secs)

    return rate


def policies(shape: dict, tokens: int, rounds: int) -> dict[str, float]:
    """Three policies of a microbatch in one pass, over the same in three dispatches."""
    config, mesh = shapes.model_config(shape), shapes.one_device()
    (batch,) = make_batches(config, work_of(tokens, row_tokens=min(tokens, 128)))
    params, reference = (sharding.init_sharded(config, mesh, seed=seed) for seed in range(2))
    loss = dict(anchor="recompute", kl="k3", kl_coefficient=0.01)
    one = shapes.make_train_step(config, loss=LossConfig(**loss))
    # A program that is handed both log-probs costs what one with its KL to the recorded ones does.
    three = shapes.make_train_step(
        config, loss=LossConfig(**loss, kl_to="behavior"), num_minibatches=2
    )

    def in_one_pass(accumulator):
        return one.accumulate(params, accumulator, batch, None, 2, reference)

    def in_three(accumulator):
        proximal, _ = three.score(params, batch), three.score(reference, batch)
        return three.accumulate(params, accumulator, batch, proximal, 2)

    calls, secs = {"one": in_one_pass, "three": in_three}, {"one": [], "three": []}
    accumulators = {"one": one.zero_accumulator(), "three": three.zero_accumulator()}
    for number in range(rounds + 1):
        for name in sorted(calls, reverse=number % 2 == 1):
            start = time.perf_counter()
            accumulators[name] = jax.block_until_ready(calls[name](accumulators[name]))
            secs[name].append(time.perf_counter() - start)
    first, third = np.array(secs["one"][1:]), np.array(secs["three"][1:])  # The first ones compile.
    speedup = record.quartiles(third / first)
    return {
        "one_pass_secs": float(np.median(first)),
        "three_dispatches_secs": float(np.median(third)),
        "speedup": speedup["median"],
        "speedup_low": speedup["low"],
        "speedup_high": speedup["high"],
        "raw": {name: values[1:] for name, values in secs.items()},
    }


def blocks(name: str, num_blocks: int, rounds: int, offload: bool) -> dict[str, float]:
    """Steps of one block each, over steps of all layers on the same microbatches."""
    shape, work = SHAPES[name]
    config, mesh = shapes.model_config(shape), shapes.one_device()
    batches = make_batches(config, work)
    kinds = {"all": (1, 0)} | {f"block_{b}": (num_blocks, b) for b in range(num_blocks)}
    steps = {
        num: shapes.make_train_step(
            config,
            num_blocks=num,
            offload_moments=offload and num > 1,
            head_chunk=work["head_chunk"],
        )
        for num in {1, num_blocks}
    }
    states = {num: step.init(sharding.init_sharded(config, mesh, 0)) for num, step in steps.items()}
    secs = {kind: [] for kind in kinds}
    for number in range(rounds + 1):  # The first one compiles.
        for kind in sorted(kinds, reverse=number % 2 == 1):
            num, version = kinds[kind]
            step, start = steps[num], time.perf_counter()
            accumulator = step.zero_accumulator(version)
            for batch in batches:
                accumulator = step.accumulate(states[num].params, accumulator, batch, None, 2)
            states[num], _, metrics = step.update(states[num], accumulator)
            jax.block_until_ready(metrics)
            secs[kind].append(time.perf_counter() - start)
    found = {"num_blocks": num_blocks, "all_secs": float(np.median(secs["all"][1:]))}
    own = np.array([secs[kind][1:] for kind in kinds if kind != "all"])  # [blocks, rounds]
    ratios = {"mean": own.mean(axis=0)} | {f"block_{b}": row for b, row in enumerate(own)}
    for kind, row in ratios.items():
        ratio = record.quartiles(row / secs["all"][1:])
        found |= {f"{kind}_secs_over_all_{q}": ratio[q] for q in ("median", "low", "high")}
    found["raw"] = {kind: values[1:] for kind, values in secs.items()}
    for kind, (num, version) in kinds.items():
        accumulator = jax.eval_shape(lambda n=num, v=version: steps[n].zero_accumulator(v))
        found[f"{kind}_gradient_bytes"] = 4 * sum(
            g.size for g in jax.tree.leaves(accumulator.grads)
        )
        found[f"{kind}_bytes"] = most_bytes(steps[num], states[num], accumulator, batches[0])
    return found


def most_bytes(step, state, accumulator, batch) -> int:
    """The larger of what accumulate, with the optimizer's state beside it, and update need of the device."""
    block, rest = accumulator.block, dataclasses.replace(state, params=None)
    arguments = (state.params, None, None, accumulator, batch, None, np.int32(2))
    accumulate = step._accumulate[block].lower(*arguments).compile().memory_analysis()
    update = step._update[block].lower(state.params, rest, accumulator).compile().memory_analysis()
    leaves = jax.tree.leaves(state.opt_state)
    in_host = sum(x.nbytes for x in leaves if x.sharding.memory_kind == "pinned_host")
    beside = sum(x.nbytes for x in leaves) - in_host
    used = [m.argument_size_in_bytes + m.temp_size_in_bytes for m in (accumulate, update)]
    return max(used[0] + beside, used[1] - in_host)


def of_length(shape: dict, tokens: int, length: int, tries: int = 3) -> dict[str, float]:
    """Seconds and temporary memory of an accumulate over rows of a length."""
    config, mesh = shapes.model_config(shape), shapes.one_device()
    (batch,) = make_batches(config, work_of(tokens, row_tokens=length))
    train_step = shapes.make_train_step(config)
    params, accumulator = sharding.init_sharded(config, mesh, seed=0), train_step.zero_accumulator()
    secs = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        accumulator = train_step.accumulate(params, accumulator, batch, None, 2)
        jax.block_until_ready(accumulator)
        secs.append(time.perf_counter() - start)
    arguments = (params, None, None, accumulator, batch, None, np.int32(2))
    program = train_step._accumulate[0].lower(*arguments)
    return {
        "accumulate_secs": min(secs[1:]),
        "tokens_per_sec": tokens / min(secs[1:]),
        "temporary_bytes": program.compile().memory_analysis().temp_size_in_bytes,
        "raw": secs[1:],
    }


def work_of(tokens: int, row_tokens: int) -> dict:
    half = row_tokens // 2
    return dict(
        rows=tokens // row_tokens, row_tokens=row_tokens, microbatches=1, prompt=half, completion=half
    )  # fmt: skip


def sequence_length(work) -> int:
    return work["prompt"] + work["completion"]


def make_batches(config, work) -> list[Batch]:
    """Sampled by the version before the one that is trained."""
    return shapes.full_rows(
        work,
        vocab_size=config.vocab_size,
        num_microbatches=work["microbatches"],
        versions=(1,),
    )


if __name__ == "__main__":
    main()
