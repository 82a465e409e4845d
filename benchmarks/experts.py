"""Mixtures of experts: the upcycled model, the routes of engine and learner, and what experts cost.

    python benchmarks/experts.py --part=start|routes|train|speed|memory|products [--steps=12] [--seeds=0,1] [--smoke]

start     The mixture of launch/upcycle.py beside its dense model, on prompts of configs/smollm2_moe.py: |Δ logits|.
routes    The embedded engine answers prompts, and the learner computes the answers again with the engine's experts and
          with its own, in float32 and bfloat16. `differ`: share of (token, layer) whose experts are others; KL by
          exp(d) − 1 − d, d = learner's − engine's log-prob of a sampled token; mean and largest |d|. --noise first
          moves each expert by noise of this share of its kernels' own deviation, as copies would hide it.
train     Runs of configs/smollm2_moe.py with learner.replay_routes on and off, one after the other, the same seeds:
          rows of metrics.jsonl, and after the run how far experts are from their mean, over how far that is from the
          first weights.
speed     A step of a made-up model of 8 experts, 2 used, over one of a dense model whose MLP is as wide as two experts,
          in turns, with the memory of each by XLA's account.
memory    The memory of both by `fit`, for one H100. Its compiler must be on the path.
products  The compiler of a v5p: one layer's experts of Qwen3-30B-A3B, 4,096 tokens, forwards and backwards, by
          jax.lax.ragged_dot and by the learner's grouped_dot. A prediction.

Results are printed and written to benchmarks/results/experts.json, or to --out; a part that was not run keeps what
stands there.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import bfloat16
import jax
import jax.numpy as jnp
import learner as learner_benchmark
import numpy as np
import record
import shapes
from flax import nnx

from jaxrl_async import parts
from jaxrl_async.cli.config import parse_flags, settings_of
from jaxrl_async.config.settings import DTYPES, Settings
from jaxrl_async.learner.packing import Packer
from jaxrl_async.learner.train_step import policy_outputs
from jaxrl_async.metrics import read_metrics
from jaxrl_async.models import experts, hf, sharding, transformer
from jaxrl_async.models.state import mapped

CONFIG = str(record.ROOT / "configs" / "smollm2_moe.py")
DENSE = "checkpoints/SmolLM2-135M-Instruct"
KERNELS = ("gate_kernel", "up_kernel", "down_kernel")
KEPT = ("step", "reward/mean", "experts/routes_differ", "experts/routes_known", "experts/load", "experts/entropy",
        "mismatch/mean_abs", "mismatch/max_abs", "policy/kl_behavior", "policy/ess", "staleness/mean",
        "time/step_secs", "policy/grad_norm")  # fmt: skip
SPEED = dict(vocab_size=4096, num_layers=4, model_dim=512, num_heads=8, num_kv_heads=4, head_dim=64)
SPEED_F = 768  # of an expert


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--model", help="directory of the mixture, in place of the config's")
    parser.add_argument("--noise", type=float, default=0.1, help="of routes")
    parser.add_argument("--prompts", type=int, default=4, help="of start and routes")
    parser.add_argument("--samples", type=int, default=4, help="of routes")
    parser.add_argument("--steps", type=int, default=12, help="of train")
    parser.add_argument(
        "--seeds", type=lambda text: tuple(map(int, text.split(","))), default=(0, 1)
    )
    parser.add_argument("--set", action="append", default=[], help="of train: KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=10, help="of speed")
    parser.add_argument("--workdirs", type=pathlib.Path, help="of train; kept there")
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    path = args.out / "experts.json"
    for found in PARTS[args.part](args):  # of train after each run
        print(json.dumps(_without_raw(found), indent=1), flush=True)
        result = record.read(path) | {args.part: found}
        record.write(path, result, seeds=args.seeds, part=args.part)


def start(args) -> dict[str, Any]:
    settings = _settings(args)
    tokens = _prompts(settings, args.prompts)
    dense, mixture = (_logits(path, tokens) for path in (DENSE, settings.model.path))
    apart = np.abs(mixture - dense)
    return {"tokens": apart.shape[0], "max": float(apart.max()), "largest_logit": float(np.abs(dense).max()),
            "same_argmax": float((mixture.argmax(-1) == dense.argmax(-1)).mean()),
            "raw": apart.max(axis=-1).tolist()}  # fmt: skip


def _prompts(settings, num) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as workdir:
        tokenizer = parts.tokenizer_of(settings, pathlib.Path(workdir))
    longest = settings.rollout.max_prompt_tokens
    found = bfloat16.held_out_prompts(parts.task_of(settings), tokenizer, max_prompt_tokens=longest)
    return [found[i].tokens for i in range(num)]


def _logits(directory, prompts) -> np.ndarray:
    config = hf.read_config(directory, dtype="float32", remat=False)
    model = nnx.merge(
        transformer.graphdef(config), hf.from_tensors(hf.read_tensors(directory), config)
    )
    tokens = np.concatenate(prompts)[None]
    ids = np.repeat(1 + np.arange(len(prompts)), [len(p) for p in prompts])[None]
    positions = np.concatenate([np.arange(len(p)) for p in prompts])[None]
    call = jax.jit(lambda model: model.logits(model(tokens, positions, (ids,))))
    return np.asarray(call(model))[0]


def routes(args) -> dict[str, Any]:
    found = {"noise": args.noise}
    for dtype in DTYPES:
        settings = _settings(args, {"model.dtype": dtype})
        with tempfile.TemporaryDirectory() as workdir:
            found[dtype] = _routes(settings, pathlib.Path(workdir), args)
    return found


def _routes(settings: Settings, workdir: pathlib.Path, args) -> dict[str, Any]:
    tokenizer = parts.tokenizer_of(settings, workdir)
    config = parts.model_config_of(settings, tokenizer)
    params = parts.first_params_of(settings, config, shapes.one_device(), tokenizer)
    params = _moved(params, args.noise)
    groups = bfloat16.sample(settings, workdir, params, args.prompts, args.samples)
    numbers = np.zeros((len(groups), args.samples), np.float32)
    batches = Packer(settings.learner, record=parts.record_of(settings))(groups, numbers, last=True)

    @functools.partial(jax.jit, static_argnames="replay")
    def outputs(params, batch, replay):
        batch = batch if replay else dataclasses.replace(batch, routes=None)
        logprobs, _, routing = policy_outputs(
            config, params, batch, temperature=settings.rollout.temperature, head_chunk_tokens=None
        )
        return logprobs, routing.routes

    found = {}
    for replay in (True, False):
        apart, differ, known = [], [], 0
        for batch in batches:
            logprobs, own = jax.device_get(outputs(params, batch, replay))
            given = np.moveaxis(batch.routes, 2, 0)  # [L, B, T, K]
            is_known = (given != np.iinfo(given.dtype).max).all(axis=(0, 3))
            others = (np.sort(own, axis=3) != np.sort(given, axis=3)).any(axis=3)[:, is_known]
            differ.append(others.sum(axis=1))
            known += is_known.sum()
            apart.append((logprobs - batch.behavior_logprobs)[batch.mask].astype(np.float64))
        d, by_layer = np.concatenate(apart), np.sum(differ, axis=0) / known
        found["replay" if replay else "own"] = {
            "sampled_tokens": len(d),
            "token_layers": int(known) * len(by_layer),
            "differ": float(by_layer.mean()),
            "differ_last_layer": float(by_layer[-1]),
            "kl": float(np.mean(np.expm1(d) - d)),
            "mean_abs": float(np.abs(d).mean()),
            "max_abs": float(np.abs(d).max()),
            "raw": {"differ_by_layer": by_layer.tolist(), "apart": d.tolist()},
        }
    return found


def _moved(params, noise):
    rng = np.random.default_rng(0)

    def of(path, param):
        if not noise or path[-1] not in KERNELS or "experts" not in path:
            return param
        x = param[...]
        for layer in range(len(x)):  # one at a time, for memory
            more = rng.standard_normal(x.shape[1:], np.float32) * np.float32(
                noise * np.std(x[layer])
            )
            x = x.at[layer].add(more.astype(x.dtype))
        return param.replace(x)

    return mapped(of, params)


def train(args) -> Iterator[dict[str, Any]]:
    found = {"steps": args.steps, "changes": args.set, "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            for replay in ("on", "off"):
                workdir = (args.workdirs or pathlib.Path(scratch)) / f"{replay}-{seed}"
                found["runs"].append(
                    {"seed": seed, "replay": replay} | _run(args, workdir, seed, replay)
                )
                yield found


def _run(args, workdir: pathlib.Path, seed: int, replay: str) -> dict[str, Any]:
    arg = f"{CONFIG}:seed={seed}" + ",smoke" * args.smoke
    words = [f"--config={arg}", f"--config.learner.replay_routes={replay}"]
    words += [f"--config.learner.num_steps={args.steps}"] + [
        f"--config.{word}" for word in args.set
    ]
    began = time.monotonic()
    train = [sys.executable, "-m", "jaxrl_async", "train", f"--workdir={workdir}"]
    subprocess.run([*train, *words], check=True, cwd=record.ROOT)
    rows = [{name: row[name] for name in KEPT if name in row} for row in read_metrics(workdir)]
    settings = settings_of(parse_flags("", words, config=True).config)
    return {"secs": time.monotonic() - began, "rows": rows} | _divergence(settings, workdir)


def _divergence(settings: Settings, workdir: pathlib.Path) -> dict[str, float]:
    """How far experts are from their mean, and the mean from the first weights, as norms over the first's norm."""
    tokenizer = parts.tokenizer_of(settings, workdir)
    _, params = parts.checkpoint_params(settings, workdir, None)
    config = parts.model_config_of(settings, tokenizer)
    first = parts.first_params_of(settings, config, shapes.one_device(), tokenizer)
    squares = np.zeros(3)
    for name in KERNELS:
        now, before = (np.asarray(p["blocks"]["experts"][name][...]) for p in (params, first))
        for x, y in zip(now, before, strict=True):  # of layers
            moved = x - y
            common = moved.mean(axis=0)
            squares += [np.sum((moved - common) ** 2), len(x) * np.sum(common**2), np.sum(y**2)]
    apart, common, size = np.sqrt(squares)
    return {"experts_apart": float(apart / size), "experts_together": float(common / size)}


def _made_up(smoke: bool):
    """The configs of a dense model and of a mixture of as many active parameters, and the work of a step."""
    shape = dict(SPEED, num_layers=1, model_dim=64, vocab_size=64) if smoke else SPEED
    F = 16 if smoke else SPEED_F
    mixture = dict(family="qwen3_moe", num_experts=8, experts_per_token=2, expert_mlp_dim=F)
    dense = shape | {"mlp_dim": 2 * F}
    work = learner_benchmark.work_of(64 if smoke else 2048, row_tokens=32 if smoke else 512)
    work |= {"microbatches": 1 if smoke else 4}
    configs = {"dense": dense, "experts": dense | mixture}
    return {name: shapes.model_config(own) for name, own in configs.items()}, work


def speed(args) -> dict[str, Any]:
    configs, work = _made_up(args.smoke)
    steps, states, accumulators, batches, secs = {}, {}, {}, {}, {}
    for name, config in configs.items():
        steps[name] = shapes.make_train_step(config)
        states[name] = steps[name].init(sharding.init_sharded(config, shapes.one_device(), seed=0))
        accumulators[name] = steps[name].zero_accumulator()
        batches[name] = learner_benchmark.make_batches(config, work)
        secs[name] = {"accumulate": [], "step": []}
    for number in range(args.rounds + 1):  # The first one compiles.
        for name in sorted(configs, reverse=number % 2 == 1):
            began = time.perf_counter()
            for batch in batches[name]:
                accumulators[name] = steps[name].accumulate(
                    states[name].params, accumulators[name], batch, None, 2
                )
            jax.block_until_ready(accumulators[name])
            secs[name]["accumulate"].append(time.perf_counter() - began)
            states[name], accumulators[name], metrics = steps[name].update(
                states[name], accumulators[name]
            )
            jax.block_until_ready(metrics)
            secs[name]["step"].append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "shape": dataclasses.asdict(configs["experts"]),
        "tokens": sum(b.tokens.size for b in batches["dense"]),
    }
    for part in ("accumulate", "step"):
        dense, experts = (np.array(secs[name][part][1:]) for name in ("dense", "experts"))
        found[f"{part}_over_dense"] = record.quartiles(experts / dense)
        found[f"{part}_secs"] = {
            "dense": float(np.median(dense)),
            "experts": float(np.median(experts)),
        }
    for name in configs:
        found[f"{name}_bytes"] = learner_benchmark.most_bytes(
            steps[name], states[name], accumulators[name], batches[name][0]
        )
    return found


def memory(args) -> dict[str, Any]:
    """What each program of the learner needs of one H100, in bfloat16 with remat."""
    import fit

    configs, work = _made_up(args.smoke)
    learner = dict(microbatch_rows=work["rows"], row_tokens=work["row_tokens"])
    settings, target = fit.small_settings("h100-1", **learner), fit.target_of("h100-1")
    found: dict[str, Any] = {"raw": {}}
    for name, config in configs.items():
        config = dataclasses.replace(config, dtype="bfloat16", remat=True)
        made = fit.programs.compile_run(settings, config, target, fit.programs.devices_of(target))
        found["raw"][name] = {program.name: program.needed_bytes for program in made.programs}
        found[name] = max(found["raw"][name].values())
    return found


def products(args) -> dict[str, Any]:
    from jaxrl_async.fit import flops, programs
    from jaxrl_async.fit.targets import target_of

    target = target_of("v5p-8")
    device = programs.devices_of(target)[0]
    where = jax.sharding.SingleDeviceSharding(device)
    N, K, E, D, F = 4096, 8, 128, 2048, 768

    def by(product):
        def loss(x_RD, gate, up, down, sizes_E):
            h = jax.nn.silu(product(x_RD, gate, sizes_E)) * product(x_RD, up, sizes_E)
            return jnp.sum(product(h, down, sizes_E).astype(jnp.float32))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    half = jnp.bfloat16
    arguments = (
        array(half, N * K, D),
        array(half, E, D, F),
        array(half, E, D, F),
        array(half, E, F, D),
        array(jnp.int32, E),
    )
    model = 3 * 3 * 2.0 * N * K * D * F
    found: dict[str, Any] = {
        "chip": "v5p",
        "ideal_ms": 1e3 * model / target.chip.peak_flops,
        "rows": [],
    }
    ours = functools.partial(experts.grouped_dot, 128)
    for name, product in (("ragged_dot", jax.lax.ragged_dot), ("grouped_dot", ours)):
        began = time.monotonic()
        traced = by(product).trace(*arguments)
        compiled = traced.lower().compile()
        kernels = flops.of_jaxpr(traced.jaxpr, kernels_alone=True)
        # A kernel computes each row once, however its grid is cut.
        kernel_flops = model if kernels else 0.0
        times = programs.times_of(
            compiled.as_text(),
            target,
            None,
            num_devices=1,
            model_flops=model,
            kernel_flops=kernel_flops,
        )
        memory = compiled.memory_analysis()
        row = {
            "way": name,
            "cycles_ms": 1e3 * times.secs,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
        row["kernels_ms"] = [1e3 * secs for secs in times.kernel_secs]
        found["rows"].append(row | {"compile_secs": time.monotonic() - began})
        print(found["rows"][-1], flush=True)
    return found


def _settings(args, changes: dict[str, Any] | None = None) -> Settings:
    words = [f"--config={CONFIG}" + ":smoke" * args.smoke]
    words += [f"--config.{name}={value}" for name, value in (changes or {}).items()]
    if args.model:
        words += [f"--config.model.path={args.model}"]
    return settings_of(parse_flags("", words, config=True).config)


def _without_raw(found):
    if isinstance(found, list):
        return [_without_raw(value) for value in found]
    if not isinstance(found, dict):
        return found
    return {name: _without_raw(value) for name, value in found.items() if name != "raw"}


PARTS = {
    "start": lambda args: [start(args)],
    "routes": lambda args: [routes(args)],
    "train": train,
    "speed": lambda args: [speed(args)],
    "memory": lambda args: [memory(args)],
    "products": lambda args: [products(args)],
}


if __name__ == "__main__":
    main()
