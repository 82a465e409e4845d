"""The learner's accumulate + update in tokens/s, beside this machine's own matmul rate in the same run.

    python benchmarks/learner.py [--updates=2] [--shape=quickstart|100m|all]

Model FLOPs of a trained token are 6·P + 6·L·H·C·T (P parameters, attention at its causal half; no credit for what
remat computes again), forward and backward. They are given as a share of the best float32 4096³ matmul rate,
measured before and after in the same process. Results are printed and written to benchmarks/results/learner.json.
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
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    args = parser.parse_args()
    result = {"machine": platform.machine(), "jax": jax.__version__, "cores": os.cpu_count()}
    for name in SHAPES if args.shape == "all" else [args.shape]:
        before = matmul_rate()
        measured = measure(name, args.updates)
        rate = max(before, matmul_rate())
        measured |= {
            "matmul_flops_per_sec": rate,
            "share_of_matmul": measured["flops_per_sec"] / rate,
        }
        result[name] = measured
        print(name, {k: round(v, 3) if v < 1e4 else f"{v:.3e}" for k, v in measured.items()})
    out = ROOT / "benchmarks" / "results" / "learner.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


def matmul_rate(tries: int = 5) -> float:
    """Best float32 4096³ matmul of a few, in FLOP/s."""
    a, b = (jax.random.normal(jax.random.key(i), (MATMUL_SIZE, MATMUL_SIZE)) for i in range(2))
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
    config = transformer.ModelConfig(
        **shape,
        rope_theta=10_000.0,
        rope_scaling=None,
        norm_eps=1e-6,
        qk_norm=True,
        attention_bias=False,
        tied_embeddings=True,
        dtype="float32",
        remat=False,
    )
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    train_step = make_train_step(config, mesh, work)
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


def make_train_step(config, mesh, work) -> TrainStep:
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
        loss=LossConfig(),
        temperature=1.0,
        optimizer=adam,
        max_grad_norm=1.0,
        num_minibatches=1,
        head_chunk_tokens=work["head_chunk"],
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
    )


if __name__ == "__main__":
    main()
