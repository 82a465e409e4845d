"""Delightful policy gradient against exact importance weights on stale actions: digit images as a contextual bandit.

    python benchmarks/delight_digits.py [--seeds=10] [--steps=10000] [--delays=0,1000] [--mnist=DIR] [--smoke]

An image x is the context, one of ten labels a the action, 1{a = y} the reward, Σ_a π(a|x)² of the learner the
baseline. An MLP d → 100 → 100 → 10 learns with Adam at a constant rate from batches of 100 actions that were sampled
D learner steps ago: step t trains on actions of π_{max(0, t − D)}. "Delightful Policy Gradient" and its distributed
sequel, Osband, arXiv 2603.14608, 2603.20521. Losses are the product's own: a method is a LossConfig, and
`objective` composes it.

Every method is run at every learning rate in --learning-rates; the tables give all of them at 1e-3, the rate of the
source, and each at the rate that suits it best. Test error is of argmax π on images held out, one split per seed; the
mean over the last tenth of the steps, ± half of a 95 % interval over seeds (Student's t).

Images are scikit-learn's digits (1,797 of 8×8; `pip install -e .[benchmarks]`), or MNIST's IDX files, gzipped or not,
in --mnist. Results are printed and written to benchmarks/results/delight_digits.{json,png}, or to --out.
"""

import argparse
import dataclasses
import functools
import gzip
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import record

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives.objective import objective
from jaxrl_async.objectives.tokens import Tokens

ROOT = pathlib.Path(__file__).parent.parent
HIDDEN = (100, 100)
NUM_ACTIONS = 10
BATCH_SIZE = 100
LEARNING_RATE = 1e-3  # the source's
NUM_EVALUATIONS = 100  # points of a curve

_PLAIN = LossConfig(
    advantage="dr_grpo",
    anchor="behavior",
    surrogate="reinforce",
    behavior_weight="none",
    behavior_cap=None,
)
# Name → loss. An anchor at the learner itself makes the behavior weight the whole π_θ/π_b.
METHODS = {
    "policy gradient": _PLAIN,
    "importance weights": dataclasses.replace(_PLAIN, anchor="current", behavior_weight="uncapped"),
    "truncated weights": dataclasses.replace(
        _PLAIN, anchor="current", behavior_weight="tis", behavior_cap=2.0
    ),
    "PPO": dataclasses.replace(_PLAIN, surrogate="clipped"),
    "A-3PO": dataclasses.replace(LossConfig(), advantage="dr_grpo"),
    "delightful": dataclasses.replace(_PLAIN, surrogate="dg"),
}
ON_POLICY = (
    "policy gradient",
    "delightful",
)  # With fresh actions the ratios are 1, and the rest is the first.
COLORS = dict(
    zip(METHODS, ("#999999", "#d95f02", "#e6ab02", "#7570b3", "#66a61e", "#1b9e77"), strict=True)
)


@dataclasses.dataclass(frozen=True)
class Images:
    """Contexts and their labels, with a split for each seed."""

    pixels: np.ndarray  # float32 [N, d] in [0, 1]
    labels: np.ndarray  # int32 [N]
    train: np.ndarray  # int32 [S, N_train], indexes of images
    test: np.ndarray  # int32 [S, N_test]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--delays", type=_numbers(int), default=(0, 1000))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument(
        "--learning-rates", type=_numbers(float), default=(1e-4, 3e-4, LEARNING_RATE, 3e-3)
    )
    parser.add_argument("--mnist", type=pathlib.Path, help="directory of MNIST's IDX files")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="2 seeds, 200 steps, one rate")
    args = parser.parse_args(argv)
    if args.smoke:
        args.seeds, args.steps, args.delays, args.learning_rates = 2, 200, (0, 50), (LEARNING_RATE,)
    images = load_mnist(args.mnist, args.seeds) if args.mnist else load_digits(args.seeds)
    start, runs = time.perf_counter(), []
    for delay in args.delays:
        for method in args.methods if delay else [m for m in args.methods if m in ON_POLICY]:
            errors = run(images, METHODS[method], delay, args.learning_rates, args.steps)
            for rate, curves in zip(args.learning_rates, errors, strict=True):
                runs.append(dict(method=method, delay=delay, rate=rate) | summary(curves))
                print(
                    "{delay:5d}  {method:20}{rate:8.0e}  {error:.4f} ± {half:.4f}".format(
                        **runs[-1]
                    ),
                    flush=True,
                )
    tables = [dict(delay=delay) | compare(runs, delay) for delay in args.delays]
    for table in tables:
        report(table)
    result = {
        "images": str(args.mnist.name if args.mnist else "scikit-learn digits"),
        "num_train": images.train.shape[1],
        "num_test": images.test.shape[1],
        "seeds": args.seeds,
        "steps": args.steps,
        "secs": time.perf_counter() - start,
        "tables": tables,
        "runs": runs,
    }
    record.write(args.out / "delight_digits.json", result, seeds=list(range(args.seeds)))
    plot(tables, runs, args.steps, args.out / "delight_digits.png")


def load_digits(seeds: int) -> Images:
    """Scikit-learn's 1,797 digits of 8×8 pixels; a fifth is held out, drawn anew for each seed."""
    from sklearn import datasets  # Of the extra "benchmarks" alone.

    bunch = datasets.load_digits()
    orders = np.stack(
        [np.random.default_rng(seed).permutation(len(bunch.target)) for seed in range(seeds)]
    ).astype(np.int32)
    held_out = len(bunch.target) // 5
    return Images(
        pixels=(bunch.data / 16).astype(np.float32),
        labels=bunch.target.astype(np.int32),
        train=orders[:, held_out:],
        test=orders[:, :held_out],
    )


def load_mnist(directory: pathlib.Path, seeds: int) -> Images:
    """MNIST from its four IDX files; its own split, the same for every seed."""
    parts = {}
    for kind, name in (("images", "images-idx3-ubyte"), ("labels", "labels-idx1-ubyte")):
        for split in ("train", "t10k"):
            parts[kind, split] = read_idx(directory, f"{split}-{name}")
    sizes = [len(parts["labels", split]) for split in ("train", "t10k")]
    pixels = np.concatenate([parts["images", split] for split in ("train", "t10k")])
    labels = np.concatenate([parts["labels", split] for split in ("train", "t10k")])
    indexes = np.tile(np.arange(sum(sizes), dtype=np.int32), (seeds, 1))
    return Images(
        pixels=(pixels.reshape(len(pixels), -1) / 255).astype(np.float32),
        labels=labels.astype(np.int32),
        train=indexes[:, : sizes[0]],
        test=indexes[:, sizes[0] :],
    )


def read_idx(directory: pathlib.Path, name: str) -> np.ndarray:
    """An IDX file of bytes: two zeros, the type 8, the rank, its sizes in 4 bytes each, the values."""
    plain = directory / name
    data = plain.read_bytes() if plain.exists() else gzip.open(directory / f"{name}.gz").read()
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{name} is no IDX file of bytes: it starts with {data[:3]!r}")
    sizes = np.frombuffer(data, ">u4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes)


def run(
    images: Images, loss: LossConfig, delay: int, learning_rates: Sequence[float], steps: int
) -> np.ndarray:
    """Test errors float32 [rates, S, evaluations] of a training run for each rate and seed, all under one jit."""
    one = functools.partial(_run_one, loss=loss, delay=delay, steps=steps)
    every_seed = jax.vmap(one, in_axes=(0, 0, 0, None, None, None))
    every = jax.jit(jax.vmap(every_seed, in_axes=(None, None, None, None, None, 0)))
    seeds, rates = jnp.arange(len(images.train)), jnp.asarray(learning_rates)
    return np.asarray(every(seeds, images.train, images.test, images.pixels, images.labels, rates))


def _run_one(seed, train, test, pixels, labels, learning_rate, *, loss, delay, steps):
    """The actors' side runs ahead: at step t the weights θ_t sample the batch that step t + D trains on."""
    init_key, batch_key, action_key = jax.random.split(jax.random.key(seed), 3)
    adam = optax.adam(learning_rate)

    def sample(params, step):
        """Of the batch of a step: images int [B], actions int [B] and their log-probs, float32 [B]."""
        chosen = jax.random.choice(jax.random.fold_in(batch_key, step), train, (BATCH_SIZE,))
        logprobs = action_logprobs(params, pixels[chosen])
        actions = jax.random.categorical(jax.random.fold_in(action_key, step), logprobs)
        return chosen, actions, _taken(logprobs, actions)

    def train_step(carry, step):
        params, opt_state, ring = carry
        ahead = sample(params, step + delay)
        ring = jax.tree.map(lambda r, new: r.at[(step + delay) % (delay + 1)].set(new), ring, ahead)
        chosen, actions, behavior = jax.tree.map(lambda r: r[step % (delay + 1)], ring)
        grads = jax.grad(bandit_loss)(
            params, pixels[chosen], labels[chosen], actions, behavior, delay, loss
        )
        updates, opt_state = adam.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, ring), None

    def stretch(carry, steps_of_it):
        carry, _ = jax.lax.scan(train_step, carry, steps_of_it)
        wrong = jnp.argmax(action_logprobs(carry[0], pixels[test]), axis=-1) != labels[test]
        return carry, wrong.mean()

    params = init_params(init_key, pixels.shape[1])
    ring = jax.vmap(functools.partial(sample, params))(jnp.arange(delay + 1))
    evaluations = min(NUM_EVALUATIONS, steps)
    all_steps = jnp.arange(steps).reshape(evaluations, steps // evaluations)
    return jax.lax.scan(stretch, (params, adam.init(params), ring), all_steps)[1]


def init_params(key: jax.Array, num_pixels: int) -> list[tuple[jax.Array, jax.Array]]:
    """Weights and biases of each layer: LeCun's normal, and zeros."""
    sizes = (num_pixels, *HIDDEN, NUM_ACTIONS)
    keys = jax.random.split(key, len(sizes) - 1)
    init = jax.nn.initializers.lecun_normal()
    return [
        (init(k, shape), jnp.zeros(shape[1]))
        for k, *shape in zip(keys, sizes, sizes[1:], strict=False)
    ]


def action_logprobs(params, pixels: jax.Array) -> jax.Array:
    """log π(·|x), float32 [B, actions]."""
    x = pixels
    for weight, bias in params[:-1]:
        x = jax.nn.relu(x @ weight + bias[None])
    weight, bias = params[-1]
    return jax.nn.log_softmax(x @ weight + bias[None])


def bandit_loss(
    params,
    pixels: jax.Array,
    labels: jax.Array,
    actions: jax.Array,
    behavior_logprobs: jax.Array,
    staleness: int,
    loss: LossConfig,
) -> jax.Array:
    """Mean of the loss over a batch: each action is a trajectory of one token."""
    logprobs = action_logprobs(params, pixels)
    baseline = jnp.square(jnp.exp(jax.lax.stop_gradient(logprobs))).sum(axis=-1)
    ones = jnp.ones((len(actions), 1), jnp.int32)
    tokens = Tokens(
        logprobs=_taken(logprobs, actions)[:, None],
        behavior_logprobs=behavior_logprobs[:, None],
        proximal_logprobs=None,
        reference_logprobs=None,
        advantages=((actions == labels) - baseline)[:, None],
        staleness=staleness * ones,
        segment_ids=ones,
        mask=ones == 1,
    )
    parts = objective(tokens, loss)
    return parts.loss.sum() / parts.share.sum()


def _taken(logprobs, actions):
    return jnp.take_along_axis(logprobs, actions[:, None], axis=-1)[:, 0]


def summary(curves: np.ndarray) -> dict:
    """Mean error over the last tenth of the steps with half of its 95 % interval, and the curve with its own."""
    last = curves[:, -max(1, curves.shape[1] // 10) :].mean(axis=1)
    error, half = interval(last[:, None])
    mean, halves = interval(curves)
    return {
        "error": float(error[0]),
        "half": float(half[0]),
        "by_seed": last.round(4).tolist(),
        "curve": mean.round(4).tolist(),
        "curve_half": halves.round(4).tolist(),
    }


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds (axis 0) and half of its 95 % interval by Student's t."""
    seeds = len(values)
    if seeds == 1:
        return values[0], np.zeros_like(values[0])
    from scipy import stats  # A dependency of scikit-learn's, and of jax's.

    spread = values.std(axis=0, ddof=1) / np.sqrt(seeds)
    return values.mean(axis=0), stats.t.ppf(0.975, seeds - 1) * spread


def compare(runs: list[dict], delay: int) -> dict:
    """Of a delay: each method at the source's rate and at its own best, with errors as multiples of delightful's."""
    rows = {}
    runs = [run for run in runs if run["delay"] == delay]
    for method in dict.fromkeys(run["method"] for run in runs):
        mine = [run for run in runs if run["method"] == method]
        best = min(mine, key=lambda run: run["error"])
        at = {run["rate"]: run for run in mine}.get(LEARNING_RATE, best)
        rows[method] = {
            "error": at["error"],
            "half": at["half"],
            "best_rate": best["rate"],
            "best_error": best["error"],
            "best_half": best["half"],
        }
    if "delightful" in rows:
        for row in rows.values():
            row["over_delightful"] = row["error"] / max(rows["delightful"]["error"], 1e-9)
            row["best_over_delightful"] = row["best_error"] / max(
                rows["delightful"]["best_error"], 1e-9
            )
    return {"methods": rows}


def report(table: dict) -> None:
    print(
        f"\ndelay {table['delay']}             error at {LEARNING_RATE:g}          error at its best rate"
    )
    for method, row in table["methods"].items():
        print(
            f"{method:20}{row['error']:9.3f} ± {row['half']:.3f}  {row.get('over_delightful', 1):5.1f}x"
            f"{row['best_error']:9.3f} ± {row['best_half']:.3f}  {row.get('best_over_delightful', 1):5.1f}x"
            f"  at {row['best_rate']:g}"
        )


def plot(tables: list[dict], runs: list[dict], steps: int, path: pathlib.Path) -> None:
    """Curves at the source's rate, one panel to a delay, and the final errors as bars."""
    figure, axes = plt.subplots(1, len(tables) + 1, figsize=(4.6 * (len(tables) + 1), 4))
    rates = {run["rate"] for run in runs}
    rate = LEARNING_RATE if LEARNING_RATE in rates else min(rates)
    for axis, table in zip(axes, tables, strict=False):
        for run_ in (r for r in runs if (r["delay"], r["rate"]) == (table["delay"], rate)):
            at = np.linspace(0, steps, len(run_["curve"]) + 1)[1:]
            mean, half = np.array(run_["curve"]), np.array(run_["curve_half"])
            color = COLORS[run_["method"]]
            axis.plot(at, mean, label=run_["method"], color=color)
            axis.fill_between(at, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
        axis.set(yscale="log", ylim=(0.005, 1), xlabel="learner steps", ylabel="test error")
        axis.set_title(f"actors {table['delay']} steps old, Adam {rate:g}")
    axes[0].legend(fontsize=8, frameon=False)
    width, names = 0.8 / len(tables), list(dict.fromkeys(run["method"] for run in runs))
    for i, table in enumerate(tables):
        rows = table["methods"]
        where = np.array([names.index(name) for name in rows])
        axes[-1].bar(
            where + (i - (len(tables) - 1) / 2) * width,
            [row["error"] for row in rows.values()],
            width,
            yerr=[row["half"] for row in rows.values()],
            color=[COLORS[name] for name in rows],
            alpha=1 if i == len(tables) - 1 else 0.45,
        )
        axes[-1].set_xticks(np.arange(len(names)), names, rotation=25, ha="right", fontsize=8)
    axes[-1].set(yscale="log", ylim=(0.005, 1), ylabel="test error")
    delays = " then ".join(str(table["delay"]) for table in tables)
    axes[-1].set_title(f"last tenth of the steps, delay {delays}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _numbers(kind):
    return lambda text: tuple(kind(number) for number in text.split(","))


if __name__ == "__main__":
    main()
