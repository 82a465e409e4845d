"""A learner's step and a push of adapters beside those of the whole model.

    python benchmarks/lora.py [--checkpoint=DIR] [--rank=16] [--rows=8] [--rounds=5] [--smoke]

Both train the same model on the same microbatches, in one process and in turns, whose order alternates: `accumulate` on
--rows rows of 512 tokens, then `update`. A push is the files of a version as the store writes them, and the time from
parameters on the device to synced files. The ratios are medians over rounds of (LoRA / full), with the quartiles.
Results are printed and written to benchmarks/results/lora.json, or to --out.
"""

import argparse
import dataclasses
import pathlib
import tempfile
import time

import jax
import numpy as np
import record
import shapes

from jaxrl_async.models import hf, lora, sharding, transformer
from jaxrl_async.versions.store import ADAPTER, WeightStore

ROOT = pathlib.Path(__file__).parent.parent
VERSION = 2  # v_θ; tokens are 1 step old
KINDS = ("full", "lora")
WORK = {"rows": 1, "row_tokens": 512, "prompt": 40, "completion": 24}
SMOKE = {"rows": 1, "row_tokens": 16, "prompt": 4, "completion": 4}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    checkpoint = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"
    parser.add_argument("--checkpoint", type=pathlib.Path, default=checkpoint)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="microbatches of a step, a row each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, two rounds")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rows, args.rounds, args.rank = 1, 2, 2
    result = {
        "device": jax.devices()[0].device_kind,
        "rank": args.rank,
        "rows": args.rows,
        "rounds": args.rounds,
    }
    result |= measure(*read(args), SMOKE if args.smoke else WORK, args.rows, args.rounds)
    report(result)
    record.write(args.out / "lora.json", result, seeds=[0])


def read(args):
    """(config with adapters, base)"""
    mesh = shapes.one_device()
    if args.smoke:
        config = shapes.model_config(shapes.MODELS["smoke"])
        params = sharding.init_sharded(config, mesh, seed=0)
    else:
        config = hf.read_config(args.checkpoint, dtype="float32", remat=False)
        shardings = sharding.param_shardings(mesh, transformer.abstract_params(config))
        params = hf.load(hf.read_tensors(args.checkpoint), config, shardings)
    adapters = lora.LoRA(rank=args.rank, alpha=2.0 * args.rank, targets=tuple(lora.LAYERS))
    return dataclasses.replace(config, lora=adapters), params


def measure(config, base, work, num_rows: int, rounds: int) -> dict:
    """Seconds of a step and of a push, bytes of a push and of the trained state, of both kinds, and their ratios."""
    configs = {"full": dataclasses.replace(config, lora=None), "lora": config}
    steps = {kind: shapes.make_train_step(c, head_chunk=128) for kind, c in configs.items()}
    steps["lora"].freeze(base)
    copy = jax.tree.map(lambda leaf: leaf.copy(), base)  # Its updates consume it.
    adapters = sharding.init_adapters(config, shapes.one_device(), seed=0)
    states = {"full": steps["full"].init(copy), "lora": steps["lora"].init(adapters)}
    sums = {kind: steps[kind].zero_accumulator() for kind in KINDS}
    vocab_size = config.vocab_size
    batches = shapes.full_rows(
        work, vocab_size=vocab_size, num_microbatches=num_rows, versions=[VERSION - 1]
    )
    step_secs, push_secs = ({kind: [] for kind in KINDS} for _ in range(2))
    num_bytes, order = {}, list(KINDS)
    for turn in range(1 + rounds):  # The first one compiles.
        for kind in order:
            start = time.perf_counter()
            for batch in batches:
                sums[kind] = steps[kind].accumulate(
                    states[kind].params, sums[kind], batch, None, VERSION
                )
            states[kind], sums[kind], metrics = steps[kind].update(states[kind], sums[kind])
            if not jax.device_get(metrics)["finite"]:
                raise FloatingPointError("a loss or a gradient norm is not finite")
            stepped = time.perf_counter()
            num_bytes[kind] = push(configs[kind], states[kind].params)
            if turn:
                step_secs[kind].append(stepped - start)
                push_secs[kind].append(time.perf_counter() - stepped)
        order.reverse()
    state_bytes = {
        kind: sum(leaf.nbytes for leaf in jax.tree.leaves(states[kind])) for kind in KINDS
    }
    return {
        "step_secs": {kind: record.quartiles(step_secs[kind]) for kind in KINDS},
        "write_secs": {kind: record.quartiles(push_secs[kind]) for kind in KINDS},
        "push_bytes": num_bytes,
        "state_bytes": state_bytes,
        "step_ratio": record.quartiles(np.divide(step_secs["lora"], step_secs["full"])),
        "write_ratio": record.quartiles(np.divide(push_secs["lora"], push_secs["full"])),
        "push_bytes_ratio": num_bytes["lora"] / num_bytes["full"],
        "state_bytes_ratio": state_bytes["lora"] / state_bytes["full"],
    }


def push(config, params) -> int:
    """Writes a version, as the learner does; returns the bytes of its files."""
    with tempfile.TemporaryDirectory() as directory:
        tensors = hf.to_tensors(params, config, "float32")
        if config.lora:
            content, prefix = hf.write_adapter_config(config.lora, ""), ADAPTER
        else:
            content, prefix = hf.write_config(config), ""
        path = WeightStore(directory, keep=2).write(VERSION, tensors, content, prefix=prefix)
        return sum(file.stat().st_size for file in path.iterdir())


def report(result: dict) -> None:
    for kind in KINDS:
        step, write = (result[name][kind]["median"] for name in ("step_secs", "write_secs"))
        push, state = (result[name][kind] for name in ("push_bytes", "state_bytes"))
        print(
            f"{kind:5} step {step:9.3f} s  write {write:7.3f} s  push {push:12,} bytes  state {state:14,} bytes"
        )
    step, write = result["step_ratio"], result["write_ratio"]["median"]
    print(
        f"LoRA over full: step {step['median']:.3f} ({step['low']:.3f}–{step['high']:.3f}), write {write:.3f}, bytes "
        f"of a push {result['push_bytes_ratio']:.4f}, of the state {result['state_bytes_ratio']:.4f}"
    )


if __name__ == "__main__":
    main()
