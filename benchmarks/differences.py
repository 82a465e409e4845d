"""Differences of versions: their bytes over the full version's, on a pretrained model, by learning rate and dtype.

    python benchmarks/differences.py --checkpoint=DIR [--steps=10] [--learning_rates=1e-6,1e-5] [--blocks=2]

DIR: of `python launch/smollm2_checkpoint.py DIR`. A step is the learner's own optimizer without a warm-up, on a policy
gradient: A · ∇ log π of rows of text (the README of this project), with advantages of both signs. The parameters are
float32, and a version is their cast to its dtype, as the learner casts it. With --blocks each step trains one block of
the layers, as with `learner.blocks`. Each difference is applied to a server's
copy of the version before; the last copy's digests are compared with the last version's. The seconds are of this
machine: their ratio to a copy of the same files, timed beside the last of them, is what carries over.
"""

import argparse
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
import tokenizers
import weights
from flax import nnx

from jaxrl_async.config.settings import Learner
from jaxrl_async.intake.copy import Copy
from jaxrl_async.learner import blocks
from jaxrl_async.learner.optimizer import make_optimizer
from jaxrl_async.models import hf, transformer
from jaxrl_async.versions import difference
from jaxrl_async.versions.store import StoredVersion, WeightStore, read_manifest

ROOT = pathlib.Path(__file__).parent.parent
DTYPES = ("bfloat16", "float32")


def rows_of(checkpoint: pathlib.Path, num_rows: int, num_tokens: int) -> Iterator[np.ndarray]:
    """Batches of text: int32 [num_rows, num_tokens], other text in each."""
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = np.array(tokenizer.encode((ROOT / "README.md").read_text("utf-8")).ids, np.int32)
    size = num_rows * num_tokens
    for step in range(1 << 30):
        yield np.take(ids, np.arange(step * size, (step + 1) * size), mode="wrap").reshape(
            num_rows, num_tokens
        )


def make_step(
    config: transformer.ModelConfig, optimizer: optax.GradientTransformation, num_blocks: int
):
    """A jitted (params, state, updates made, block, tokens [B, T], advantages [B]) → (params, state)."""
    turns = blocks.Blocks(num_blocks, config.num_layers, num_minibatches=1)

    def loss(params, tokens_BT, advantages_B):
        model = nnx.merge(transformer.graphdef(config), params)
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        hidden_BTD = model(tokens_BT, positions, (jnp.ones_like(tokens_BT),))
        logprobs = jax.nn.log_softmax(model.logits(hidden_BTD[:, :-1]))
        taken = jnp.take_along_axis(logprobs, tokens_BT[:, 1:, None], -1)[..., 0]
        return -jnp.mean(advantages_B[:, None] * taken)

    def step(params, state, number, block, tokens_BT, advantages_B):
        cuts = turns.cuts(params, block)
        moments = blocks.cuts_of_state(optimizer, state, cuts)
        grads = blocks.own(jax.grad(loss)(params, tokens_BT, advantages_B), cuts)
        own, own_state = blocks.own(params, cuts), blocks.own(state, moments)
        if num_blocks > 1:
            own_state = blocks.with_adam_count(own_state, turns.num_own(number))
        updates, own_state = optimizer.update(grads, own_state, own)
        own = optax.apply_updates(own, updates)
        return blocks.put(params, own, cuts), blocks.put(state, own_state, moments)

    return jax.jit(step, static_argnums=3, donate_argnums=(0, 1))


class Ways:
    """The versions of one dtype, and a server's copy that only the first of them reaches in full."""

    def __init__(self, root: pathlib.Path, dtype: str):
        self.dtype = dtype
        self.store = WeightStore(root / dtype, keep=2)
        (root / f"{dtype}-own").mkdir()
        self.copy = Copy(root / f"{dtype}-own")
        self.last: pathlib.Path | None = None

    def push(self, version: int, params, config: transformer.ModelConfig) -> dict | None:
        """Writes a version and its difference, and applies it; the figures, None for the first version."""
        tensors = hf.to_tensors(params, config, self.dtype)
        path = self.store.write(version, tensors, hf.write_config(config))
        last, self.last = self.last, path
        if last is None:
            shutil.copytree(path, self.copy.path)
            self.copy.digest = read_manifest(path)["digest"]
            return None
        start = time.monotonic()
        file = difference.write(last, path)
        written = time.monotonic()
        digest = read_manifest(path)["digest"]
        self.copy.patch(file, digest)
        patched = time.monotonic()
        # Found right or wrong at the end: each copy is made of the one before.
        self.copy.digest = digest
        num_bytes = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        return {
            "share": file.stat().st_size / num_bytes,
            "bytes": num_bytes,
            "write_secs": written - start,
            "patch_secs": patched - written,
        }

    def end(self) -> float:
        """Verifies the copy; returns the seconds of a plain copy of its files."""
        StoredVersion(self.copy.path).verify()
        return weights.copy_secs(self.copy.path, self.copy.path.parent / "plain")


def run(
    checkpoint,
    learning_rate: float,
    steps: int,
    num_rows: int,
    num_tokens: int,
    num_blocks: int = 1,
) -> list[dict]:
    """One row for each step and dtype."""
    config = hf.read_config(checkpoint, dtype="float32", remat=False)
    params = hf.from_tensors(hf.read_tensors(checkpoint), config)
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
    optimizer = make_optimizer(Learner(learning_rate=learning_rate, warmup_updates=0))
    state = jax.jit(optimizer.init)(params)
    step, batches = (
        make_step(config, optimizer, num_blocks),
        rows_of(checkpoint, num_rows, num_tokens),
    )
    advantages = jnp.asarray(np.resize([1.0, -1.0], num_rows), jnp.float32)
    rows = []
    with tempfile.TemporaryDirectory(prefix="jaxrl-differences-") as directory:
        ways = [Ways(pathlib.Path(directory), dtype) for dtype in DTYPES]
        for number in range(steps + 1):
            if number:
                made, block = jnp.int32(number - 1), (number - 1) % num_blocks
                params, state = step(params, state, made, block, next(batches), advantages)
            for way in ways:
                figures = way.push(number, params, config)
                if figures is not None:
                    row = {"learning_rate": learning_rate, "dtype": way.dtype, "step": number}
                    rows.append(row | {"blocks": num_blocks} | figures)
                    print(f"{learning_rate:g} {way.dtype:8} step {number:2d} {figures}", flush=True)
        copies = {way.dtype: way.end() for way in ways}
    return [row | {"copy_secs": copies[row["dtype"]]} for row in rows]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning_rates", default="1e-6,1e-5")
    parser.add_argument("--blocks", type=int, default=1, help="as learner.blocks")
    parser.add_argument("--rows", type=int, default=2, help="of a step's batch")
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args(argv)
    difference.MAX_SHARE = 2.0  # Also those that would go in full are measured.
    rows = []
    for rate in map(float, args.learning_rates.split(",")):
        rows += run(args.checkpoint, rate, args.steps, args.rows, args.tokens, args.blocks)
        record.write(args.out / "differences.json", {"rows": rows}, seeds=[0])
    for rate, dtype in dict.fromkeys((row["learning_rate"], row["dtype"]) for row in rows):
        of = [row for row in rows if (row["learning_rate"], row["dtype"]) == (rate, dtype)]
        shares = [row["share"] for row in of]
        times = [
            float(np.median([row[name] / row["copy_secs"] for row in of]))
            for name in ("write_secs", "patch_secs")
        ]
        print(
            f"learning rate {rate:g}, {dtype}: {np.mean(shares):.4f} of the full version's bytes "
            f"({min(shares):.4f} to {max(shares):.4f}); written in {times[0]:.1f} times a copy, "
            f"applied in {times[1]:.1f}"
        )


if __name__ == "__main__":
    main()
