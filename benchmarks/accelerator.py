"""One TPU or GPU in ten minutes, without a network: the learner, the engine, their agreement, a run, the tests.

    launch/accelerator.sh run wheels --out=DIR          # what this machine lacks is taken from the folder `wheels`
    python benchmarks/accelerator.py [--parts=NAME,…] [--minutes=10] [--out=DIR] [--smoke]

device      The rate of a bfloat16 product, 8192³, and of a copy of 1 GiB, counting bytes read and written.
learner     Whole updates (accumulate, update with Adam) of Qwen3-0.6B's and Qwen2.5-1.5B's shapes, random weights,
            bfloat16, remat, rows of one sequence of 16,384 or 65,536 tokens, and of 16 sequences of 1,024, by each
            attention kernel, once without remat, and two layers of Qwen3-30B-A3B: tokens/s, model FLOPs (no credit
            for what remat computes again) beside the device's published peak and beside the product above, the most
            memory in use, and the kernels that the device ran longest.
engine      The embedded engine's programs, 64 slots of 2,048 tokens, half full: a step of decode beside the time in
            which this device reads weights and filled keys and values once, at the rate of its copy and at the data
            sheet's; prefill of rows of 2,048, in the engine's blocks.
tests       `pytest -m accelerator`: kernels against the reference, offloaded moments, determinism.
quickstart  configs/quickstart.py in one process: its scores, seconds a step.
mismatch    The same task by a model of 4 layers of 512 in bfloat16, periodic: |learner's − engine's log-prob| of every
            token of a step, at the same weights, over 200 pushes.
smollm2     Only when named: configs/smollm2.py in bfloat16, a process a seed, all seeds at once on the one device, and
            `evaluate` of each. --checkpoint is what launch/smollm2_checkpoint.py writes.

A part is a process of its own, and so is a shape with a kernel; each has a deadline. What is measured is written at
once to DIR/accelerator.jsonl, a row a line; all rows, with their origin, to DIR/accelerator.json at the end. A row
with "error" says what failed. --smoke takes tiny shapes and few steps, on any device.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from typing import Any

import record

ROOT = pathlib.Path(__file__).parent.parent
# Part → its most seconds. What a part leaves is left to those after it.
PARTS = {
    "device": 60,
    "learner": 280,
    "engine": 120,
    "tests": 150,
    "quickstart": 150,
    "mismatch": 120,
    "smollm2": 240,
}
BY_NAME = ("smollm2",)  # a part that runs only where it is named
SEEDS = range(8)  # of smollm2
NEXT_SECS = 5.0  # Less is not worth a process.
_QWEN3_0_6B = dict(
    vocab_size=151936, num_layers=28, model_dim=1024, num_heads=16, num_kv_heads=8, head_dim=128, mlp_dim=3072,
    qk_norm=True, tied_embeddings=True, dtype="bfloat16", remat=True,
)  # fmt: skip
_QWEN2_5_1_5B = dict(
    vocab_size=151936, num_layers=28, model_dim=1536, num_heads=12, num_kv_heads=2, head_dim=128, mlp_dim=8960,
    attention_bias=True, qk_norm=False, tied_embeddings=True, dtype="bfloat16", remat=True,
)  # fmt: skip
# Two of Qwen3-30B-A3B's layers: 1.5B parameters, .55B of them in use by a token.
_EXPERTS = dict(
    vocab_size=151936, family="qwen3_moe", num_layers=2, model_dim=2048, num_heads=32, num_kv_heads=4, head_dim=128,
    mlp_dim=6144, num_experts=128, experts_per_token=8, expert_mlp_dim=768, qk_norm=True, tied_embeddings=True,
    dtype="bfloat16", remat=True,
)  # fmt: skip
_TINY = dict(
    vocab_size=512, num_layers=2, model_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=256,
    qk_norm=True, tied_embeddings=True, dtype="bfloat16", remat=True,
)  # fmt: skip
SHAPES = {"0.6b": _QWEN3_0_6B, "1.5b": _QWEN2_5_1_5B, "experts": _EXPERTS, "tiny": _TINY}
# Rows of a microbatch; the first half of a sequence is its prompt.
ROWS = {
    "16k": dict(rows=1, row_tokens=16384, sequence=16384),
    "65k": dict(rows=1, row_tokens=65536, sequence=65536),
    "16k-packed": dict(rows=1, row_tokens=16384, sequence=1024),
    "tiny": dict(rows=2, row_tokens=256, sequence=64),
}
KERNELS = {"gpu": ("auto", "cudnn", "xla"), "tpu": ("auto", "xla"), "cpu": ("xla",)}
# Part of JAX's name of a device → its row of jaxrl_async.fit.targets.
CHIPS = {
    "H100": "h100",
    "H200": "h200",
    "A100": "a100",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
}
ACCELERATOR_TESTS = ("tests/models", "tests/test_accelerator.py")
_MODEL = [
    "model.num_layers=12",
    "model.model_dim=768",
    "model.num_heads=12",
    "model.num_kv_heads=12",
]
_MODEL += ["model.head_dim=64"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = ",".join(part for part in PARTS if part not in BY_NAME)
    parser.add_argument("--parts", default=default, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all parts together")
    parser.add_argument("--kernels", default="", help="attention kernels instead of the device's")
    parser.add_argument(
        "--only",
        default="",
        help="the learner's cases whose 'shape tokens kernel remat' match this",
    )
    parser.add_argument("--checkpoint", type=pathlib.Path, help="of smollm2: its directory")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/accelerator")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # of this process: JSON
    args = parser.parse_args(argv)
    parts = [part for part in args.parts.split(",") if part]
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}: one of {', '.join(PARTS)}")
    if args.minutes <= 0:
        parser.error(f"--minutes must be > 0, got {args.minutes}")
    if "smollm2" in parts and not (args.smoke or args.checkpoint):
        parser.error("the part smollm2 needs --checkpoint=DIR, of launch/smollm2_checkpoint.py")
    args.out.mkdir(parents=True, exist_ok=True)
    rows = args.out / "accelerator.jsonl"
    if args.case:
        return measure(json.loads(args.case), rows, args.smoke)
    rows.write_text("")
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="accelerator-") as scratch:
        for part in parts:
            run_part(part, min(end, time.monotonic() + PARTS[part]), scratch, args)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    record.write(args.out / "accelerator.json", {"rows": found}, seeds=[0])


def run_part(part: str, deadline: float, scratch: str, args: argparse.Namespace) -> None:
    """Runs the cases of a part, each in a process of its own, until a deadline of time.monotonic()."""
    rows, platform = args.out / "accelerator.jsonl", None
    for line in rows.read_text().splitlines():
        platform = json.loads(line).get("platform", platform)
    kernels = args.kernels.split(",") if args.kernels else KERNELS.get(platform or "gpu")
    for case in cases_of(part, kernels, args.smoke):
        if part == "learner" and not re.search(args.only, " ".join(map(str, case.values()))):
            continue
        left = deadline - time.monotonic()
        if left < NEXT_SECS:
            write(rows, case | {"error": "not begun: the part's time was over"})
            continue
        command = [
            sys.executable,
            __file__,
            f"--case={json.dumps(case | _paths(args, scratch))}",
        ]
        command += [f"--out={args.out}", *(["--smoke"] if args.smoke else [])]
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR")
            or f"{scratch}/cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        start = time.monotonic()
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            write(rows, case | {"error": f"cut after {left:.0f} s"})
        else:
            if code:
                write(rows, case | {"error": f"ended with {code}"})
        print(f"{case}: {time.monotonic() - start:.0f} s", flush=True)


def _paths(args: argparse.Namespace, scratch: str) -> dict[str, str]:
    found = {"scratch": scratch, "out": str(args.out.resolve())}
    return found | ({"checkpoint": str(args.checkpoint.resolve())} if args.checkpoint else {})


def cases_of(part: str, kernels: tuple[str, ...] | list[str], smoke: bool) -> list[dict[str, Any]]:
    """What is measured of a part, the most telling first."""
    if part == "learner":
        shapes, rows = (["tiny"], ["tiny"]) if smoke else (["0.6b", "1.5b"], list(ROWS)[:-1])
        first, rest = (shapes[0], rows[0]), list(itertools.product(shapes, rows))[1:]
        works = [(*first, kernels[0], True), (*first, kernels[0], False)]
        works += [(*work, kernels[0], True) for work in rest]
        works += [(*first, kernel, True) for kernel in kernels[1:]]
        works += [] if smoke else [("experts", "16k-packed", kernels[0], True)]
        names = "shape", "tokens", "kernel", "remat"
        return [dict(zip(names, work, strict=True), part=part) for work in works]
    if part == "engine":
        return [dict(part=part, shape=shape) for shape in (["tiny"] if smoke else ["1.5b", "0.6b"])]
    return [dict(part=part)]


def write(path: pathlib.Path, row: dict[str, Any]) -> None:
    row = {
        name: value for name, value in row.items() if name not in ("scratch", "out", "checkpoint")
    }
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def measure(case: dict[str, Any], path: pathlib.Path, smoke: bool) -> None:
    """Measures a case in this process, and writes its rows."""
    measures = {
        "device": device,
        "learner": learner,
        "engine": engine,
        "tests": accelerator_tests,
        "quickstart": quickstart,
        "mismatch": mismatch,
        "smollm2": smollm2,
    }
    start = time.monotonic()
    try:
        found = measures[case["part"]](case, smoke)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"[:1000]}
    write(path, case | found | {"secs": time.monotonic() - start})


def device(case: dict[str, Any], smoke: bool) -> dict[str, Any]:
    import jax
    import jaxlib

    found = jax.devices()[0]
    return {
        "platform": found.platform,
        "kind": found.device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "memory_bytes": (found.memory_stats() or {}).get("bytes_limit"),
        "published_flops": published(found.device_kind).peak_flops,
        "published_bytes_per_sec": published(found.device_kind).bandwidth,
        "product_flops": product_flops(512 if smoke else 8192),
        "copy_bytes_per_sec": copy_rate(1 << 20 if smoke else 1 << 30),
    }


def published(kind: str):
    """The data sheet's figures of a device by JAX's name for it, a `targets.Chip`; None each of an unknown one."""
    from jaxrl_async.fit import targets

    names = (chip for name, chip in CHIPS.items() if name in kind)
    unknown = types.SimpleNamespace(peak_flops=None, bandwidth=None)
    return targets.CHIPS.get(next(names, ""), unknown)


def product_flops(size: int) -> float:
    """FLOP/s of a square bfloat16 product of random numbers."""
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    return 2 * size**3 / median_secs(jax.jit(jnp.matmul), a, b)


def copy_rate(num_bytes: int) -> float:
    """Bytes a second, read and written, of x → x + 1."""
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (num_bytes // 4,), jnp.float32)
    return 2 * num_bytes / median_secs(jax.jit(lambda x: x + 1), x)


def median_secs(function, *arguments, tries: int = 10) -> float:
    """Of calls in a row, after two that are not counted."""
    import jax

    secs = []
    for _ in range(tries + 2):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        secs.append(time.perf_counter() - start)
    return statistics.median(secs[2:])


def learner(case: dict[str, Any], smoke: bool) -> dict[str, Any]:
    import jax
    import learner

    rows = ROWS[case["tokens"]]
    half = rows["sequence"] // 2
    work = rows | dict(microbatches=1, prompt=half, completion=half)
    work["head_chunk"] = min(512, rows["row_tokens"])
    learner.MATMUL_SIZE = 256 if smoke else 4096
    shape = SHAPES[case["shape"]] | {"remat": case["remat"]}
    trace = f"{case['scratch']}/{time.monotonic_ns()}"
    found = learner.rate(shape, work, 1 if smoke else 3, case["kernel"], trace)
    device = jax.devices()[0]
    peak = published(device.device_kind).peak_flops
    return found | {
        "of_peak": found["flops_per_sec"] / peak if peak else None,
        "memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "kernels": kernels(trace),
    }


def kernels(trace: str, most: int = 40) -> list[tuple[str, float, int]]:
    """What the device ran in a profile: name, seconds and calls, the longest first; [] where it tells none."""
    import jax

    found: dict[str, list[float]] = {}
    for path in pathlib.Path(trace).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            lines = [line for line in plane.lines if line.name.startswith(("Stream", "XLA Ops"))]
            for event in (event for line in lines for event in line.events):
                found.setdefault(event.name[:80], []).append(event.duration_ns / 1e9)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))[:most]
    return [(name, sum(secs), len(secs)) for name, secs in ordered]


def engine(case: dict[str, Any], smoke: bool) -> dict[str, Any]:
    """Decode and prefill of the engine's own programs, beside their bounds on this device."""
    import jax
    import numpy as np
    import shapes

    from jaxrl_async.fit import flops
    from jaxrl_async.inference import programs
    from jaxrl_async.models import sharding

    config = shapes.model_config(SHAPES[case["shape"]])
    slots, total, steps = (4, 64, 4) if smoke else (64, 2048, 64)
    shapes_ = programs.Shapes(config, num_slots=slots, max_total_tokens=total, decode_chunk=steps)
    params = sharding.init_sharded(config, shapes.one_device(), seed=0)
    params = jax.tree.map(lambda x, like: x.astype(like.dtype), params, shapes_.params)
    start = time.perf_counter()
    block = shapes_.block
    prefills = [shapes_.trace_prefill(block).lower().compile()]
    if block < total:
        prefills.append(shapes_.trace_prefill(block, True).lower().compile())
    decode = shapes_.trace_decode().lower().compile()
    apart = shapes_.layers and shapes_.trace_apart().lower().compile()
    compile_secs = time.perf_counter() - start
    cache = jax.tree.map(
        lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes_.cache, is_leaf=lambda x: hasattr(x, "dtype")
    )  # fmt: skip
    rng, num_rows = np.random.default_rng(0), shapes_.max_rows(block)
    prefill_secs, decode_secs = [], []
    # Every slot has numbers of its own; the first rows are not counted.
    for first in (*range(0, slots, num_rows), 0):
        prompts = shapes_.empty_prompts(block)
        prompts.lengths[:], prompts.num_rows[...] = block, num_rows
        prompts.slots[:] = np.arange(first, first + num_rows) % slots
        start = time.perf_counter()
        for begin in range(0, total, block):
            prompts.tokens[:] = rng.integers(0, config.vocab_size, prompts.tokens.shape)
            prompts.starts[:] = begin
            cache = prefills[begin > 0](params, cache, prompts)
        jax.block_until_ready(cache)
        prefill_secs.append(time.perf_counter() - start)
    filled, for_decode = total // 2, (params, apart and apart(params["blocks"]))
    for _ in range(4):
        state = programs.empty_slots(slots)
        state.tokens[:] = rng.integers(0, config.vocab_size, slots)
        state.positions[:], state.limits[:], state.active[:] = filled - 1, total, True
        state.draw.key[:] = rng.integers(0, 1 << 31, (slots, 2))
        start = time.perf_counter()
        cache, decoded = decode(for_decode, cache, state)
        counts = np.asarray(decoded.counts)
        decode_secs.append(time.perf_counter() - start)
        assert (counts == steps).all(), counts
    a_step = statistics.median(decode_secs[1:]) / steps
    bandwidth, product = (
        copy_rate(1 << 20 if smoke else 1 << 30),
        product_flops(512 if smoke else 8192),
    )
    published_bandwidth = published(jax.devices()[0].device_kind).bandwidth
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    kept = sum(x.nbytes for x in jax.tree.leaves(cache)) * (filled + steps / 2) / total
    row = statistics.median(prefill_secs[1:]) / num_rows
    needed = flops.of_model(config, 1, total, backward=False, logits=False)
    return {
        "compile_secs": compile_secs,
        "decode_step_secs": a_step,
        "decode_tokens_per_sec": slots / a_step,
        "decode_bytes_once": weights + kept,
        "decode_of_bound": (weights + kept) / bandwidth / a_step,
        "decode_of_published": published_bandwidth
        and (weights + kept) / published_bandwidth / a_step,
        "prefill_tokens_per_sec": total / row,
        "prefill_of_product": needed / product / row,
        "raw_decode_secs": decode_secs,
        "raw_prefill_secs": prefill_secs,
        "memory_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def accelerator_tests(case: dict[str, Any], smoke: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-m", "accelerator", "-p", "no:cacheprovider", "-n8"]
    command += ["-q", "-rfEs", "-W", "default", "--tb=short", "--durations=10", *ACCELERATOR_TESTS]
    # JAX takes the device that is there; a server's test of it would find its memory taken.
    environment = os.environ | {"JAX_PLATFORMS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-20000:], done.stderr[-4000:], flush=True)
    summary = [
        line for line in done.stdout.splitlines() if re.match("(FAILED|ERROR|SKIPPED) ", line)
    ]
    last = done.stdout.strip().splitlines()[-1:]
    return {"code": done.returncode, "summary": last, "lines": summary[:60]}


def quickstart(case: dict[str, Any], smoke: bool) -> dict[str, Any]:
    rows, said = trained(case, f"configs/quickstart.py:{'smoke' if smoke else 'seed=0'}", [])
    evaluated = [{"step": r["step"]} | _named(r, "eval/") for r in rows if "eval/version" in r]
    return _pace(rows) | {
        "said": said,
        "evaluations": evaluated,
        "reward": [row["reward/mean"] for row in rows],
    }


def mismatch(case: dict[str, Any], smoke: bool) -> dict[str, Any]:
    flags = ["model.dtype=bfloat16", "evaluate.every_steps=0", "evaluate.num_validation=0"]
    flags += [] if smoke else [*_MODEL, "warm_start.num_steps=100", "learner.num_steps=200"]
    config = f"configs/quickstart.py:{'smoke,' if smoke else ''}mode=periodic"
    rows, _ = trained(case, config, flags)
    mean, worst, kl = ([r[f"mismatch/{n}"] for r in rows] for n in ("mean_abs", "max_abs", "kl"))
    tokens = [r["mismatch/tokens"] for r in rows]
    return _pace(rows) | {
        "pushes": len(rows),
        "tokens": sum(tokens),
        "mean_abs": sum(m * t for m, t in zip(mean, tokens, strict=True)) / sum(tokens),
        "max_abs": max(worst),
        "raw": {"mean_abs": mean, "max_abs": worst, "kl": kl, "tokens": tokens},
    }


def smollm2(case: dict[str, Any], smoke: bool) -> dict[str, Any]:
    flags = ["model.dtype=bfloat16"]
    flags += [f"{name}.path={case['checkpoint']}" for name in ("model", "tokenizer") if not smoke]

    def of_seed(seed: int) -> float:
        name, start = f"smollm2-{seed}", time.monotonic()
        config = f"configs/smollm2.py:{'smoke,' if smoke else ''}seed={seed}"
        rows, _ = trained(case, config, flags, name)
        secs, workdir = time.monotonic() - start, pathlib.Path(case["scratch"]) / name
        command = [sys.executable, "-m", "jaxrl_async", "evaluate", f"--workdir={workdir}"]
        done = subprocess.run(
            [*command, "--steps=0,last"], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"evaluate ended with {done.returncode}: {done.stderr[-500:]}")
        found = {"seed": seed, "train_secs": secs, "reward": [row["reward/mean"] for row in rows]}
        found["scores"] = json.loads((workdir / "evaluation.json").read_text())
        write(pathlib.Path(case["out"]) / "accelerator.jsonl", case | found | _pace(rows))
        return found["scores"][-1]["pass@1"]

    # Each process takes what it needs of the memory, not three quarters at its start.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    with concurrent.futures.ThreadPoolExecutor(len(SEEDS)) as pool:
        return {"pass@1": list(pool.map(of_seed, SEEDS[: 2 if smoke else None]))}


def trained(
    case: dict[str, Any], config: str, flags: list[str], name: str = ""
) -> tuple[list[dict[str, Any]], list[str]]:
    """Trains in one process: the rows of metrics.jsonl, and the last lines that the run printed."""
    name = name or case["part"]
    workdir = pathlib.Path(case["scratch"]) / name
    command = [sys.executable, "-m", "jaxrl_async", "train"]
    command += [f"--config={config}", f"--workdir={workdir}", "--config.supervisor.processes=one"]
    command += [f"--config.{flag}" for flag in flags]
    log = pathlib.Path(case["out"]) / f"{name}.log"
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    said = log.read_text().splitlines()[-6:]
    if done.returncode:
        raise RuntimeError(f"train ended with {done.returncode}: {said}")
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], said


def _pace(rows: list[dict[str, Any]]) -> dict[str, float]:
    secs = [row["time/step_secs"] for row in rows]
    return {"steps": len(rows), "median_step_secs": statistics.median(secs), "raw_step_secs": secs}


def _named(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith(prefix)}


if __name__ == "__main__":
    main()
