"""Memory and time of the vocabulary's head in the backward pass: all logits at once beside chunks of them.

    python benchmarks/head.py [--rounds=3] [--memory-only] [--smoke] [--out=DIR]

Loss and gradient of the summed log-probs by hidden states and kernel, float32, at the shape of a 1.5B model of
Qwen2.5: V = 151,936, D = 1536, one row of 4096 tokens. Memory is XLA's count of a compiled program's temporary bytes,
as a share of the kernel's gradient (4·V·D bytes, 933 MB), which is an output, like the gradient by the hidden states,
and is not in it; nor are the inputs. Dense and chunked take turns in one process, and a ratio is the median over
rounds of (chunked / dense in the same round). Chunks compute the logits once more: 4 matmuls for dense's 3.

Dense takes 12 GiB here. Results are printed and written to benchmarks/results/head.json, or to --out.
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import record
import shapes
from flax import nnx

from jaxrl_async.models import logprobs, transformer

ROOT = pathlib.Path(__file__).parent.parent
SHAPE = dict(vocab_size=151_936, model_dim=1536, tokens=4096, chunks=(None, 256, 64))
SMOKE = dict(vocab_size=512, model_dim=16, tokens=64, chunks=(None, 4))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-only", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    shape = SMOKE if args.smoke else SHAPE
    result = {
        "device": jax.devices()[0].device_kind,
        "shape": {k: v for k, v in shape.items() if k != "chunks"},
        "heads": {},
    }
    for tied in (True, False):
        programs = {chunk: compile_gradient(shape, tied, chunk) for chunk in shape["chunks"]}
        rows = {chunk: memory(shape, program) for chunk, program in programs.items()}
        if not args.memory_only:
            for chunk, times in interleaved(shape, tied, programs, args.rounds).items():
                rows[chunk] |= times
        name = "tied" if tied else "untied"
        result["heads"][name] = {str(chunk or "dense"): row for chunk, row in rows.items()}
        for chunk, row in result["heads"][name].items():
            numbers = {k: round(v, 3) for k, v in row.items() if k != "raw"}
            print(f"{name:8}{chunk:8}", numbers)
    record.write(args.out / "head.json", result, seeds=[0], raw=["heads"])


def compile_gradient(shape: dict, tied: bool, chunk_tokens: int | None) -> jax.stages.Compiled:
    """Of (kernel, hidden, tokens, weights): the loss, and its gradients by kernel and hidden states."""

    def loss(kernel, hidden, tokens, weights):
        found, entropy = logprobs.token_logprobs(
            make_model(shape, tied, kernel),
            hidden,
            tokens,
            jnp.arange(tokens.shape[1])[None],
            temperature=0.7,
            chunk_tokens=chunk_tokens,
        )
        return jnp.sum(found * weights), jnp.sum(entropy)

    arguments = jax.eval_shape(lambda: make_arguments(shape, tied))
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(*arguments).compile()


def make_model(shape: dict, tied: bool, kernel: jax.Array) -> transformer.Transformer:
    """A model of which nothing but the head exists."""
    config = shapes.model_config(
        dict(
            vocab_size=shape["vocab_size"],
            num_layers=1,
            model_dim=shape["model_dim"],
            num_heads=2,
            num_kv_heads=2,
            head_dim=8,
            mlp_dim=8,
            qk_norm=False,
            tied_embeddings=tied,
            dtype="float32",
        )
    )
    params = transformer.abstract_params(config)
    holder, name = (params, "embedding") if tied else (params["head"], "kernel")
    holder[name] = holder[name].replace(kernel)
    return nnx.merge(transformer.graphdef(config), params)


def make_arguments(shape: dict, tied: bool) -> tuple[jax.Array, ...]:
    """Kernel [V, D] if tied else [D, V]; hidden [1, T, D]; tokens and weights [1, T]."""
    V, D, T = shape["vocab_size"], shape["model_dim"], shape["tokens"]
    keys = jax.random.split(jax.random.key(0), 4)
    return (
        D**-0.5 * jax.random.normal(keys[0], (V, D) if tied else (D, V)),
        jax.random.normal(keys[1], (1, T, D)),
        jax.random.randint(keys[2], (1, T), 0, V),
        jax.random.normal(keys[3], (1, T)),
    )


def memory(shape: dict, program: jax.stages.Compiled) -> dict[str, float]:
    """Temporary bytes, and over the bytes of the kernel's gradient."""
    temporary = program.memory_analysis().temp_size_in_bytes
    kernel_bytes = 4 * shape["vocab_size"] * shape["model_dim"]
    return {"temporary_bytes": temporary, "over_kernel_gradient": temporary / kernel_bytes}


def interleaved(shape: dict, tied: bool, programs: dict, rounds: int) -> dict[int | None, dict]:
    """Median seconds of each program, and of its ratio to dense in the same round."""
    arguments = jax.block_until_ready(jax.jit(lambda: make_arguments(shape, tied))())
    secs = {chunk: [] for chunk in programs}
    for i in range(rounds + 1):  # The first touches the memory.
        for chunk in list(programs)[:: 1 - 2 * (i % 2)]:
            start = time.perf_counter()
            jax.block_until_ready(programs[chunk](*arguments))
            secs[chunk].append(time.perf_counter() - start)
    over_dense = {chunk: np.divide(s[1:], secs[None][1:]) for chunk, s in secs.items()}
    return {
        chunk: {
            "secs": float(np.median(s[1:])),
            "over_dense": float(np.median(over_dense[chunk])),
            "raw": s[1:],
        }
        for chunk, s in secs.items()
    }


if __name__ == "__main__":
    main()
