"""What a step costs under each anchor of the clip, and what the statistics by lag add: the learner alone, no sampling.

    python benchmarks/anchors.py [--shape=quickstart|17m|100m|all] [--rounds=12] [--pairs=100] [--smoke]

A step is what `learner.train` makes of a batch that lies ready: the anchor of every microbatch, then accumulate and
update for each minibatch, and their metrics on the host. The configurations take turns in one process, in alternating
order, and a figure is the median over rounds of (step / step of `behavior` in the same round), with the quartiles: a
machine that slows down slows them all. "recompute" runs one more forward than the others, so its ideal is 4/3 without
remat (forward 1, backward 2) and 5/4 with; with one minibatch its anchor is the policy itself, computed once.

What is as small as A-3PO's interpolation or the statistics is lost in a step's noise. So single calls of `accumulate`
take turns as well, --pairs times: the median of their ratios, and the 95 % interval of that median (bootstrap).

Beside the times, XLA's count of the FLOPs of `score` and of `accumulate` with each anchor, the time of
`anchors.a3po` by itself beside that of `score`, and the step with the statistics taken out of `accumulate`: all of
them but the loss, which the update divides by, and the entropy; the training is otherwise the same. On a CPU the
shape "100m" is cut to microbatches of four rows, without remat, with a third of the rounds. Results are printed and
written to benchmarks/results/anchors.{json,png}, or to --out.
"""

import argparse
import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Sequence
from unittest import mock

import jax
import matplotlib.pyplot as plt
import numpy as np
import record
import shapes

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.learner import blocks
from jaxrl_async.learner import train_step as train_steps
from jaxrl_async.learner.statistics import Statistics
from jaxrl_async.learner.train_step import TrainStep
from jaxrl_async.models import sharding, transformer
from jaxrl_async.objectives import anchors
from jaxrl_async.types import Batch

ROOT = pathlib.Path(__file__).parent.parent
VERSION = (
    12  # v_θ; the batches' tokens are 0 to 11 steps old, so that every bucket of staleness has some
)

# Shape of the model; rows of a microbatch, tokens of a row, microbatches of a minibatch, prompt, completion; steps
# of a round.
SHAPES = {
    "quickstart": (
        shapes.MODELS["quickstart"],
        dict(rows=64, row_tokens=48, microbatches=1, prompt=6, completion=4, steps=5),
    ),
    "17m": (
        shapes.MODELS["17m"],
        dict(rows=4, row_tokens=128, microbatches=4, prompt=64, completion=64, steps=1),
    ),
    "100m": (
        shapes.MODELS["100m"],
        dict(rows=16, row_tokens=512, microbatches=2, prompt=256, completion=256, steps=1),
    ),
    "smoke": (
        shapes.MODELS["smoke"],
        dict(rows=2, row_tokens=8, microbatches=1, prompt=2, completion=2, steps=1),
    ),
}  # fmt: skip
TWO_MINIBATCHES = ("behavior", "a3po", "linear", "recompute")
ONE_MINIBATCH = ("behavior", "current", "recompute")


class LossAlone(Statistics):
    """What the update needs, and the entropy, which XLA would not compute otherwise; `update` gives 0 for the rest."""

    def measure(self, tokens, entropy, parts, routing=None):
        sums, maxima = self.zeros()
        for name, value in (("loss", parts.loss), ("share", parts.share), ("entropy", entropy)):
            sums = sums.at[0, self._sums.index(name)].set(value.sum())
        return sums, maxima


class Learner:
    """A state of its own, which takes steps on fixed batches and counts its forward passes."""

    def __init__(
        self,
        config: transformer.ModelConfig,
        programs: TrainStep,
        minibatches: Sequence[Sequence[Batch]],
    ):
        self.programs = programs
        self.state = programs.init(sharding.init_sharded(config, shapes.one_device(), seed=0))
        self.accumulator = programs.zero_accumulator()
        self._minibatches = minibatches
        self._forwards_of_accumulate = 1 + config.remat
        self.forwards = 0  # of the last step

    def step(self) -> float:
        """Seconds of a step, in the order of `learner.train`."""
        start, self.forwards = time.perf_counter(), 0
        proximal = [[self._anchor(batch) for batch in rows] for rows in self._minibatches]
        outcomes = []
        for rows, scored in zip(self._minibatches, proximal, strict=True):
            for batch, logprobs in zip(rows, scored, strict=True):
                self.accumulator = self.programs.accumulate(
                    self.state.params, self.accumulator, batch, logprobs, VERSION
                )
                self.forwards += self._forwards_of_accumulate
            self.state, self.accumulator, outcome = self.programs.update(
                self.state, self.accumulator
            )
            outcomes.append(outcome)
        if not all(outcome["finite"] for outcome in jax.device_get(outcomes)):
            raise FloatingPointError("a loss or a gradient norm is not finite")
        return time.perf_counter() - start

    def _anchor(self, batch):
        logprobs = self.programs.anchor(self.state.params, batch)
        self.forwards += logprobs is not None
        return logprobs


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=100, help="turns of single accumulates")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, few configurations, two rounds"
    )
    args = parser.parse_args(argv)
    two, one, counted, remats = TWO_MINIBATCHES, ONE_MINIBATCH, TWO_MINIBATCHES, (False, True)
    if args.smoke:
        args.shape, args.rounds, args.pairs = "smoke", 2, 3
        two, one, counted = ("behavior", "a3po", "recompute"), ("behavior",), ("behavior",)
        remats = (False,)
    device = jax.devices()[0]
    names = ["quickstart", "17m", "100m"]
    result = {
        "device": jax.devices()[0].device_kind,
        "rounds": args.rounds,
        "shapes": {},
    }
    start = time.perf_counter()
    for name in names if args.shape == "all" else [args.shape]:
        shape, work = SHAPES[name]
        rounds, pairs = args.rounds, args.pairs
        if name == "100m" and device.platform == "cpu":
            work = work | dict(rows=4, microbatches=1)
            one, remats, rounds = (), (False,), max(2, rounds // 3)
            pairs = max(2, args.pairs // 10)
        table = result["shapes"][name] = {"costs": costs(shape, work, counted)}
        report_costs(name, table["costs"])
        table["accumulate"] = single_calls(shapes.model_config(shape), work, pairs)
        report_calls(name, table["accumulate"])
        for remat in remats:
            measured = measure(
                shapes.model_config(shape, remat=remat), work, rounds, two=two, one=one
            )
            table["remat" if remat else "no remat"] = measured
            report_steps(name, remat, measured)
    result["secs"] = time.perf_counter() - start
    print(f"{result['secs']:.0f} s in all")
    record.write(args.out / "anchors.json", result, seeds=[0])
    plot(result, args.out / "anchors.png")


def measure(
    config: transformer.ModelConfig,
    work: dict,
    rounds: int,
    *,
    two: Sequence[str],
    one: Sequence[str],
) -> dict:
    """Steps of every configuration in turn: with two minibatches, with one, and without statistics."""
    batches = make_batches(config, work, num_microbatches=2 * work["microbatches"])
    half = len(batches) // 2
    halves, whole = [batches[:half], batches[half:]], [batches]
    learners = {name: Learner(config, make_programs(config, name, 2), halves) for name in two}
    with mock.patch.object(train_steps, "Statistics", LossAlone):
        alone = make_programs(config, "a3po", 2)
    learners["a3po, no statistics"] = Learner(config, alone, halves)
    for name in one:
        learners[f"{name}, 1 minibatch"] = Learner(config, make_programs(config, name, 1), whole)
    secs = interleaved(learners, rounds, work["steps"])
    steps = {}
    for name, learner in learners.items():
        base = "behavior, 1 minibatch" if name.endswith("1 minibatch") else "behavior"
        steps[name] = {
            "step_secs": float(np.median(secs[name])),
            "over_behavior": record.quartiles(secs[name] / secs[base]),
            "forwards": learner.forwards,
            "compilations": learner.programs.num_compilations(),
        }
    share = record.quartiles(secs["a3po"] / secs["a3po, no statistics"] - 1)
    return {"steps": steps, "statistics_share": share}


def single_calls(config: transformer.ModelConfig, work: dict, pairs: int) -> dict:
    """`accumulate` with A-3PO over that with `behavior`, and over that without statistics: calls in turn."""
    (batch,) = make_batches(config, work, num_microbatches=1)
    with mock.patch.object(train_steps, "Statistics", LossAlone):
        programs = {"no statistics": make_programs(config, "a3po", 2)}
    programs |= {name: make_programs(config, name, 2) for name in ("behavior", "a3po")}
    params = sharding.init_sharded(config, shapes.one_device(), seed=0)
    batch = programs["a3po"].place(batch)
    sums = {name: program.zero_accumulator() for name, program in programs.items()}
    order, secs = list(programs), {name: [] for name in programs}
    for _ in range(pairs + 2):
        for name in order:
            start = time.perf_counter()
            sums[name] = programs[name].accumulate(params, sums[name], batch, None, VERSION)
            jax.block_until_ready(sums[name])
            secs[name].append(time.perf_counter() - start)
        order.reverse()
    secs = {name: np.array(values[2:]) for name, values in secs.items()}  # They compile first.
    return {
        "pairs": pairs,
        "secs": float(np.median(secs["a3po"])),
        "a3po_over_behavior": median_interval(secs["a3po"] / secs["behavior"]),
        "statistics_share": median_interval(secs["a3po"] / secs["no statistics"] - 1),
    }


def median_interval(values: np.ndarray) -> dict[str, float]:
    """The median and its 95 % interval, by resampling."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    found = {"median": float(np.median(values)), "low": float(low), "high": float(high)}
    return found | {"raw": [float(value) for value in values]}


def interleaved(learners: dict[str, Learner], rounds: int, steps: int) -> dict[str, np.ndarray]:
    """Seconds per step float [rounds] of each, taking turns: forwards in one round, backwards in the next."""
    for learner in learners.values():
        learner.step(), learner.step()  # Compiles; then what the first step alone does.
    order, secs = list(learners), {name: [] for name in learners}
    for _ in range(rounds):
        for name in order:
            secs[name].append(sum(learners[name].step() for _ in range(steps)) / steps)
        order.reverse()
    return {name: np.array(of_rounds) for name, of_rounds in secs.items()}


def costs(shape: dict, work: dict, names: Sequence[str]) -> dict:
    """FLOPs of the programs of one microbatch without remat, by XLA's count, and two timings."""
    config = shapes.model_config(shape)
    (batch,) = make_batches(config, work, num_microbatches=1)
    programs, params = (
        make_programs(config, "behavior", 2),
        sharding.init_sharded(config, shapes.one_device(), seed=0),
    )
    logprobs = programs.score(params, batch)
    staleness = np.where(batch.mask, VERSION - batch.token_versions, 0)
    a3po = jax.jit(anchors.a3po)
    arguments = jax.device_put((logprobs, batch.behavior_logprobs, staleness, batch.mask))
    flops = {name: accumulate_flops(config, batch, name) for name in names}
    return {
        "flops": flops | {"score": score_flops(config, batch)},
        "score_secs": best_secs(lambda: programs.score(params, batch)),
        "a3po_secs": best_secs(lambda: a3po(*arguments)),
        "dispatch_secs": best_secs(functools.partial(jax.jit(lambda x: x), np.float32(0))),
    }


def best_secs(call, tries: int = 20) -> float:
    """The shortest of some calls."""
    jax.block_until_ready(call())
    secs = []
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(call())
        secs.append(time.perf_counter() - start)
    return min(secs)


def accumulate_flops(config: transformer.ModelConfig, batch: Batch, anchor: str) -> float:
    """FLOPs of `accumulate` with an anchor."""
    proximal = batch.behavior_logprobs if anchor == "recompute" else None

    def lowered(config):
        programs, params = make_programs(config, anchor, 2), transformer.abstract_params(config)
        accumulator = jax.eval_shape(programs.zero_accumulator)
        return programs._accumulate[0].lower(
            params, None, None, accumulator, batch, proximal, np.int32(VERSION)
        )

    return count_flops(config, lowered)


def score_flops(config: transformer.ModelConfig, batch: Batch) -> float:
    """FLOPs of `score`."""

    def lowered(config):
        params = transformer.abstract_params(config)
        return make_programs(config, "behavior", 2)._score.lower(params, None, batch)

    return count_flops(config, lowered)


def count_flops(config: transformer.ModelConfig, lowered) -> float:
    """XLA's count, which takes a scan's body once, however long the scan: the layers are counted as many times."""

    def counted(num_layers):
        program = lowered(dataclasses.replace(config, num_layers=num_layers))
        return program.compile().cost_analysis()["flops"]

    with mock.patch.object(blocks, "check"):  # A run needs a layer.
        without_layers = counted(0)
    return without_layers + config.num_layers * (counted(1) - without_layers)


def make_programs(config: transformer.ModelConfig, anchor: str, num_minibatches: int) -> TrainStep:
    loss = LossConfig(anchor=anchor)
    return shapes.make_train_step(config, loss=loss, num_minibatches=num_minibatches)


def make_batches(config, work: dict, num_microbatches: int) -> list[Batch]:
    """Each trajectory sampled by one version of the last VERSION."""
    return shapes.full_rows(
        work,
        vocab_size=config.vocab_size,
        num_microbatches=num_microbatches,
        versions=range(VERSION, 0, -1),
    )


def report_costs(name: str, found: dict) -> None:
    flops = found["flops"]
    print(f"\n{name}: FLOPs of a microbatch, without remat")
    for program, count in flops.items():
        print(
            f"  {program:12}{count:12.4e}{count / flops['behavior']:9.4f}x of accumulate with behavior"
        )
    print(
        f"  a3po alone {1e6 * found['a3po_secs']:.0f} µs beside score's {1e6 * found['score_secs']:.0f} µs "
        f"(an empty program takes {1e6 * found['dispatch_secs']:.0f} µs)"
    )


def report_calls(name: str, found: dict) -> None:
    over, share = found["a3po_over_behavior"], found["statistics_share"]
    print(
        f"\n{name}: {found['pairs']} single calls of accumulate in turn, median (its 95 % interval)\n"
        f"  a3po over behavior {over['median']:.4f} ({over['low']:.4f} to {over['high']:.4f})\n"
        f"  statistics {share['median']:+.2%} ({share['low']:+.2%} to {share['high']:+.2%})",
        flush=True,
    )


def report_steps(name: str, remat: bool, measured: dict) -> None:
    print(
        f"\n{name}, {'with' if remat else 'without'} remat"
        + " " * 6
        + "step     of behavior  (quartiles)   forwards"
    )
    for learner, row in measured["steps"].items():
        over = row["over_behavior"]
        print(
            f"  {learner:24}{row['step_secs']:9.4f} s  {over['median']:8.3f}x  ({over['low']:.3f}–{over['high']:.3f})"
            f"{row['forwards']:8d}   {row['compilations']} compilations"
        )
    share = measured["statistics_share"]
    print(
        f"  statistics: {share['median']:+.1%} ({share['low']:+.1%} to {share['high']:+.1%}) of a step"
    )


def plot(result: dict, path: pathlib.Path) -> None:
    """Step over `behavior`'s, with quartiles; a panel to a shape."""
    tables = result["shapes"]
    figure, axes = plt.subplots(1, len(tables), figsize=(5.5 * len(tables), 4), squeeze=False)
    for axis, (name, table) in zip(axes[0], tables.items(), strict=True):
        for i, kind in enumerate(kind for kind in table if kind.endswith("remat")):
            rows = table[kind]["steps"]
            over = [row["over_behavior"] for row in rows.values()]
            median = np.array([o["median"] for o in over])
            spread = [median - [o["low"] for o in over], [o["high"] for o in over] - median]
            where = np.arange(len(rows)) + (i - 0.5) * 0.4
            axis.bar(where, median, 0.4, yerr=spread, label=kind, color=("#1b9e77", "#7570b3")[i])
        axis.set_xticks(np.arange(len(rows)), list(rows), rotation=30, ha="right", fontsize=8)
        axis.axhline(1, color="black", linewidth=0.5)
        axis.set(
            ylim=(0.8, 1.45), ylabel="step over behavior's", title=f"{name}, {result['device']}"
        )
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    # The learners share most of their programs: compile each once.
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        main()
