"""The learner's programs: their rate beside the machine's own, three policies in one pass, and the cost of length.

    python benchmarks/learner.py [--part=rate|policies|length|all] [--updates=2] [--shape=NAME|all]

rate      Accumulate + update in tokens/s. Model FLOPs of a trained token are 6·P + 6·L·H·C·T (P parameters, attention
          at its causal half; no credit for what remat computes again), forward and backward. They are given as a share
          of the best 4096³ matmul rate in the same dtype, measured before and after in the same process.
policies  Policy, proximal policy and reference of a microbatch, one update a step: one program and one pass, against
          three dispatches (score, score, accumulate). The proximal policy is then the policy itself, so one pass runs
          two forwards where three dispatches run three. Median ratio over rounds that take turns, with quartiles.
length    Seconds of an accumulate and its temporary memory by XLA's account, for rows of 128 to 2048 tokens and equally
          many tokens.

The shapes qwen2.5-* run on accelerators only (bfloat16, remat, random weights). Results are printed and written to
benchmarks/results/learner.json; a part that was not run keeps what stands there.
"""

import argparse
import json
import os
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.learner import optimizer, packing
from jaxrl_async.learner.train_step import TrainStep
from jaxrl_async.loss_config import LossConfig
from jaxrl_async.models import sharding, transformer
from jaxrl_async.types import Batch, Group, Trajectory

ROOT = pathlib.Path(__file__).parent.parent
MATMUL_SIZE = 4096

# Shape of the model; rows of a microbatch, tokens of a row, microbatches of an update, head chunk, prompt, completion.
SHAPES = {
    "quickstart": (
        dict(vocab_size=14, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=192),
        dict(rows=64, row_tokens=48, microbatches=1, head_chunk=None, prompt=6, completion=4),
    ),
    "100m": (
        dict(vocab_size=8192, num_layers=12, model_dim=768, num_heads=12, num_kv_heads=12, head_dim=64, mlp_dim=2304),
        dict(rows=8, row_tokens=512, microbatches=4, head_chunk=128, prompt=256, completion=256),
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
        dict(vocab_size=8, num_layers=1, model_dim=8, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=16),
        dict(rows=2, row_tokens=8, microbatches=1, head_chunk=None, prompt=4, completion=4),
    ),
}  # fmt: skip
ON_CPU = ("quickstart", "100m")
MIDDLE = dict(
    vocab_size=4096, num_layers=8, model_dim=384, num_heads=6, num_kv_heads=6, head_dim=64, mlp_dim=1152
)  # fmt: skip
LENGTHS = (128, 256, 512, 1024, 2048)
TOKENS = 2048  # of a microbatch in "policies" and "length"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=["rate", "policies", "length", "all"], default="all")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="of 'policies'")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one round of each part")
    args = parser.parse_args(argv)
    shape, tokens, lengths, names = MIDDLE, TOKENS, LENGTHS, [args.shape]
    if args.shape == "all":
        names = ON_CPU if jax.devices()[0].platform == "cpu" else list(SHAPES)[:-1]
    if args.smoke:
        shape, tokens, lengths, names = SHAPES["smoke"][0], 16, (8, 16), ["smoke"]
        args.updates = args.rounds = 1
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "learner.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= {"machine": platform.machine(), "jax": jax.__version__, "cores": os.cpu_count()}
    result["device"] = jax.devices()[0].device_kind
    if args.part in ("rate", "all"):
        for name in names:
            result[name] = rate(name, args.updates)
            report(name, result[name])
    if args.part in ("policies", "all"):
        result["policies"] = policies(shape, tokens, args.rounds)
        report("policies", result["policies"])
    if args.part in ("length", "all"):
        result["length"] = {}
        for length in lengths:
            result["length"][str(length)] = of_length(shape, tokens, length)
            report(f"rows of {length}", result["length"][str(length)])
    path.write_text(json.dumps(result, indent=2) + "\n")


def report(name: str, measured: dict[str, float]) -> None:
    rounded = {k: round(v, 3) if v < 1e4 else f"{v:.3e}" for k, v in measured.items()}
    print(name, rounded, flush=True)


def rate(name: str, updates: int) -> dict[str, float]:
    """`measure` beside the matmul rate."""
    dtype = make_config(SHAPES[name][0]).dtype
    before = matmul_rate(dtype)
    measured = measure(name, updates)
    best = max(before, matmul_rate(dtype))
    return measured | {
        "matmul_flops_per_sec": best,
        "share_of_matmul": measured["flops_per_sec"] / best,
    }


def matmul_rate(dtype: str, tries: int = 5) -> float:
    """Best 4096³ matmul of a few, in FLOP/s."""
    a, b = (
        jax.random.normal(jax.random.key(i), (MATMUL_SIZE, MATMUL_SIZE), dtype) for i in range(2)
    )
    matmul = jax.jit(jnp.matmul)
    jax.block_until_ready(matmul(a, b))
    secs = []
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(matmul(a, b))
        secs.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / min(secs)


def measure(name: str, updates: int) -> dict[str, float]:
    """Tokens/s and FLOP/s of whole updates: accumulate every microbatch, then update."""
    shape, work = SHAPES[name]
    config = make_config(shape)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    train_step = make_train_step(config, mesh, LossConfig(), 1, work["head_chunk"])
    state = train_step.init(sharding.init_sharded(config, mesh, seed=0))
    accumulator, batches = train_step.zero_accumulator(), make_batches(config, work)

    def update(state, accumulator):
        for batch in batches:
            accumulator = train_step.accumulate(state.params, accumulator, batch, None, 2)
        return train_step.update(state, accumulator)

    state, accumulator, metrics = update(state, accumulator)  # compiles
    jax.block_until_ready(metrics)
    secs = []
    for _ in range(updates):
        start = time.perf_counter()
        state, accumulator, metrics = update(state, accumulator)
        jax.block_until_ready(metrics)
        secs.append(time.perf_counter() - start)
    assert metrics["finite"] == 1
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    tokens = sum(batch.tokens.size for batch in batches)
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * sequence_length(work)
    secs = float(np.median(secs))
    return {
        "parameters": params,
        "tokens_per_update": tokens,
        "update_secs": secs,
        "tokens_per_sec": tokens / secs,
        "flops_per_sec": tokens * (6 * params + attention) / secs,
        "compilations": train_step.num_compilations(),
    }


def policies(shape: dict, tokens: int, rounds: int) -> dict[str, float]:
    """Three policies of a microbatch in one pass, over the same in three dispatches."""
    config, mesh = make_config(shape), sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    (batch,) = make_batches(config, work_of(tokens, row_tokens=min(tokens, 128)))
    params, reference = (sharding.init_sharded(config, mesh, seed=seed) for seed in range(2))
    loss = dict(anchor="recompute", kl="k3", kl_coefficient=0.01)
    one = make_train_step(config, mesh, LossConfig(**loss), 1, None)
    # A program that is handed both log-probs costs what one with its KL to the recorded ones does.
    three = make_train_step(config, mesh, LossConfig(**loss, kl_to="behavior"), 2, None)

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
    low, median, high = np.quantile(third / first, (0.25, 0.5, 0.75))
    return {
        "one_pass_secs": float(np.median(first)),
        "three_dispatches_secs": float(np.median(third)),
        "speedup": float(median),
        "speedup_low": float(low),
        "speedup_high": float(high),
    }


def of_length(shape: dict, tokens: int, length: int, tries: int = 3) -> dict[str, float]:
    """Seconds and temporary memory of an accumulate over rows of a length."""
    config, mesh = make_config(shape), sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    (batch,) = make_batches(config, work_of(tokens, row_tokens=length))
    train_step = make_train_step(config, mesh, LossConfig(), 1, None)
    params, accumulator = sharding.init_sharded(config, mesh, seed=0), train_step.zero_accumulator()
    secs = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        accumulator = train_step.accumulate(params, accumulator, batch, None, 2)
        jax.block_until_ready(accumulator)
        secs.append(time.perf_counter() - start)
    program = train_step._accumulate.lower(params, None, accumulator, batch, None, np.int32(2))
    return {
        "accumulate_secs": min(secs[1:]),
        "tokens_per_sec": tokens / min(secs[1:]),
        "temporary_bytes": program.compile().memory_analysis().temp_size_in_bytes,
    }


def work_of(tokens: int, row_tokens: int) -> dict:
    half = row_tokens // 2
    return dict(
        rows=tokens // row_tokens, row_tokens=row_tokens, microbatches=1, prompt=half, completion=half
    )  # fmt: skip


def make_config(shape: dict) -> transformer.ModelConfig:
    plain = dict(attention_bias=False, qk_norm=True, tied_embeddings=True)
    plain |= dict(dtype="float32", remat=False)
    return transformer.ModelConfig(
        **plain | shape, rope_theta=10_000.0, rope_scaling=None, norm_eps=1e-6
    )


def make_train_step(config, mesh, loss, num_minibatches, head_chunk) -> TrainStep:
    adam = optimizer.make_optimizer(
        learning_rate=1e-4,
        warmup_updates=0,
        decay_updates=None,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.0,
    )
    return TrainStep(
        config,
        mesh,
        loss=loss,
        temperature=1.0,
        optimizer=adam,
        max_grad_norm=1.0,
        num_minibatches=num_minibatches,
        head_chunk_tokens=head_chunk,
    )


def sequence_length(work) -> int:
    return work["prompt"] + work["completion"]


def make_batches(config, work) -> list[Batch]:
    """Rows filled to the end with made-up trajectories, so that every token is a model's token."""
    rng = np.random.default_rng(0)
    length = sequence_length(work)
    per_row = work["row_tokens"] // length
    groups = []
    for index in range(work["rows"] * work["microbatches"] * per_row):
        mask = np.arange(length) >= work["prompt"]
        trajectory = Trajectory(
            tokens=rng.integers(0, config.vocab_size, length).astype(np.int32),
            logprobs=np.where(mask, -np.log(config.vocab_size), 0).astype(np.float32),
            versions=np.where(mask, 1, -1).astype(np.int32),
            mask=mask,
            prompt_length=work["prompt"],
        )
        groups.append(Group(index, 0, (trajectory,)))
    advantages = rng.normal(size=(len(groups), 1)).astype(np.float32)
    return packing.pack(
        groups,
        advantages,
        microbatch_rows=work["rows"],
        row_tokens=work["row_tokens"],
        policy="in_order",
        shared_prompts=False,
    )


if __name__ == "__main__":
    main()
