"""Which loss at which age: nine losses, each at its own rate, by weights that are up to 16 steps old.

    python benchmarks/which_loss.py [--tasks=…] [--losses=…] [--ages=…] [--runs=30] [--seconds=inf] [--cache=DIR]

The tasks, versions 0, prompts, seeds of samples and settings are those of staleness.py. One compiled program does many
runs at once: a whole run is a `lax.scan` over its steps, and runs of several seeds, rates and ages are rows of a batch.

A program has all losses, and runs one of them. Of the package it takes the model with its cache, the sampler, losses,
advantages and optimizer; the loop around them is its own, and tests hold it against `TrainStep` and `in_process.py`.

For each task and loss: of RATES the best mean over seeds 100 to 102 at each age, then ten other seeds at it. Then DG,
PPO and the plain policy gradient on token reversal of three lengths ("complexity": the settings of delight_reversal.py,
no warm start).

Inputs are made once (--prepare makes them and ends) and kept in --cache, as are the rows of finished runs, a line each
in which_loss.jsonl; those of the result are not run again. After --seconds nothing more is begun. Results:
which_loss.json in --out. A run of some tasks, losses or ages is a part of it, with a proof of its own.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import delight_reversal
import grid
import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
import staleness
from flax import nnx
from in_process import Laboratory

from jaxrl_async import parts
from jaxrl_async.config.loss import PRESETS
from jaxrl_async.config.settings import Settings
from jaxrl_async.inference import sampling
from jaxrl_async.learner.optimizer import make_optimizer
from jaxrl_async.learner.train_step import policy_logprobs, tokens_of
from jaxrl_async.models import transformer
from jaxrl_async.objectives import ratios
from jaxrl_async.objectives.advantages import ADVANTAGES
from jaxrl_async.objectives.objective import objective
from jaxrl_async.records import Permit
from jaxrl_async.rollout.sampler import request_seed
from jaxrl_async.tasks.prompts import held_out_prompts, prompt_stream
from jaxrl_async.tasks.tokenizer import CharTokenizer
from jaxrl_async.types import NOT_SAMPLED, Batch

AGES, MORE_AGES = (1, 4, 16), (0, 1, 4, 8, 16)  # η, in steps; of the losses of staleness.py
OLDEST = 16
RATES, CHOOSING_SEEDS, SEEDS = staleness.RATES, staleness.CHOOSING_SEEDS, staleness.REPORTED_SEEDS


def _parts(preset: str) -> dict[str, Any]:
    return {f"loss.{name}": value for name, value in PRESETS[preset].items()}


METHODS = staleness.METHODS | {
    "tis_sequence": staleness.METHODS["tis"] | {"loss.behavior_weight": "sequence_tis"},
    "cispo": _parts("cispo"),
    "topr": _parts("topr"),
    "asymre": _parts("asymre"),
}
NAMES = staleness.NAMES | {
    "tis": "REINFORCE with TIS, by token",
    "tis_sequence": "REINFORCE with TIS, by sequence",
    "cispo": "CISPO",
    "topr": "TOPR",
    "asymre": "AsymRE",
    "pg": "policy gradient",
}
# Of "complexity": tokens to reverse → held-out prompts.
LENGTHS = {3: 32, 4: 64, 5: 64}
COMPLEX_METHODS = {name: delight_reversal.METHODS[name] for name in ("pg", "ppo", "dg")}
COMPLEX_AGES = (0, 8)
COMPLEX_SEEDS = tuple(range(5))


@dataclasses.dataclass(frozen=True)
class Study:
    """Runs that differ in seed, loss, rate and age alone."""

    name: str
    overrides: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]

    def settings(self, method: str, seed: int = 0, **more: Any) -> Settings:
        overrides = {**self.overrides, **self.methods[method], "seed": seed, "task.seed": seed}
        return grid.settings_with(overrides | more)


def studies() -> dict[str, Study]:
    found = [
        Study(name, staleness.BASE | task, METHODS, (*SEEDS, *CHOOSING_SEEDS))
        for name, task in staleness.TASKS.items()
    ]
    for num_tokens, num_test in LENGTHS.items():
        task = delight_reversal.BASE | {
            "task.args": {"num_tokens": num_tokens, "num_symbols": 4, "num_test": num_test, "seed": 0},
            "server.decode_chunk": num_tokens,
            "server.max_total_tokens": 2 * num_tokens + 1,
            "rollout.max_prompt_tokens": num_tokens + 1,
            "rollout.max_new_tokens": num_tokens,
            "learner.row_tokens": 2 * num_tokens + 1,
            "evaluate.num_prompts": num_test,
        }  # fmt: skip
        found.append(Study(f"reversal_{num_tokens}", task, COMPLEX_METHODS, COMPLEX_SEEDS))
    return {study.name: study for study in found}


class Data(NamedTuple):
    """What the seeds of a study bring: S seeds, N groups of G samples a step, prompts of P and answers of A tokens."""

    params: Any  # version 0, a leaf [S, …]
    prompts: Any  # uint8 [S, steps, N, P]
    answers: Any  # uint8 [S, steps, N, A], padded with 0
    noise: Any  # uint32 [S, steps, N · G]: the samples' seeds


class HeldOut(NamedTuple):
    prompts: Any  # uint8 [M, P]
    answers: Any  # uint8 [M, A]


class Row(NamedTuple):
    """What a run comes to."""

    curve: Any  # float32 [1 + steps / checkpoint.every_steps]: held-out accuracy of greedy answers
    rewards: Any  # float32 [steps], mean of the samples'
    max_ratio: Any  # float32 [], the largest π_θ/π_b
    entropy: Any  # float32 [], nats a token, of the last update
    stopped: Any  # int32 [], the first step with a number that is not finite; 0 where none had


def prepare(study: Study, cache: pathlib.Path) -> tuple[Data, HeldOut]:
    """The inputs of a study, from their file where there is one."""
    path = cache / f"{study.name}.npz"
    abstract = transformer.abstract_params(_config(study.settings(next(iter(study.methods)))))
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        arrays = _arrays(study, cache)
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)
    with np.load(path) as arrays:
        found = dict(arrays)
    leaves = [found.pop(f"params_{i}") for i in range(len(jax.tree.leaves(abstract)))]
    held_out = HeldOut(found.pop("held_out_prompts"), found.pop("held_out_answers"))
    return Data(jax.tree.unflatten(jax.tree.structure(abstract), leaves), **found), held_out


def _arrays(study: Study, cache: pathlib.Path) -> dict[str, np.ndarray]:
    rows, firsts = [], []
    with Laboratory(cache / "versions") as laboratory:
        for seed in study.seeds:
            settings = study.settings(next(iter(study.methods)), seed)
            firsts.append(jax.tree.leaves(laboratory.first_params(settings)))
            rows.append(_of_seed(settings))
    arrays = {f"params_{i}": np.stack(leaves) for i, leaves in enumerate(zip(*firsts, strict=True))}
    arrays |= {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    task, tokenizer = parts.task_of(settings), _tokenizer(settings)
    prompts = held_out_prompts(
        task, tokenizer, max_prompt_tokens=settings.rollout.max_prompt_tokens
    )
    prompts = prompts[: settings.evaluate.num_prompts]
    num_new = settings.rollout.max_new_tokens
    asked, answers = _tokens_of(prompts, tokenizer, num_new)
    return arrays | {"held_out_prompts": asked, "held_out_answers": answers}


def _of_seed(settings: Settings) -> dict[str, np.ndarray]:
    """What `in_process.py` asks of the engine, of all steps."""
    learner, rollout, tokenizer = settings.learner, settings.rollout, _tokenizer(settings)
    stream = prompt_stream(
        parts.task_of(settings),
        tokenizer,
        split="train",
        seed=settings.task.seed,
        max_prompt_tokens=rollout.max_prompt_tokens,
    )
    indexes = range(learner.num_steps * learner.groups_per_step)
    prompts, answers = _tokens_of([stream[i] for i in indexes], tokenizer, rollout.max_new_tokens)
    seeds = [
        request_seed(settings.seed, Permit(i, 0), j)
        for i in indexes
        for j in range(rollout.group_size)
    ]
    by_step = (learner.num_steps, learner.groups_per_step)
    return {
        "prompts": prompts.reshape(*by_step, -1),
        "answers": answers.reshape(*by_step, -1),
        "noise": np.array(seeds, np.uint32).reshape(learner.num_steps, -1),
    }


def _tokens_of(prompts, tokenizer, num_new: int) -> tuple[np.ndarray, np.ndarray]:
    answers = np.zeros((len(prompts), num_new), np.uint8)
    for row, prompt in zip(answers, prompts, strict=True):
        ids = tokenizer.encode(prompt.answer)
        row[: len(ids)] = ids
    # Prompts of one length: a batch needs no padding.
    return np.stack([prompt.tokens for prompt in prompts]).astype(np.uint8), answers


def _tokenizer(settings: Settings) -> CharTokenizer:
    return CharTokenizer(settings.tokenizer.alphabet)


def _config(settings: Settings) -> transformer.ModelConfig:
    return parts.model_config_of(settings, _tokenizer(settings))


class Program:
    """The runs of a study, R at a time, as one compiled program."""

    def __init__(self, study: Study, data: Data, held_out: HeldOut, num_runs: int):
        """Compiles nothing yet."""
        self.study, self.num_runs = study, num_runs
        self._data, self._held_out = data, held_out
        self._settings = settings = study.settings(next(iter(study.methods)))
        self._config, self._tokenizer = _config(settings), _tokenizer(settings)
        self._losses = [study.settings(method).loss for method in study.methods]
        assert not any(c.needs_reference or c.kl != "none" for c in self._losses)
        self._reward = parts.task_of(settings).reward
        assert self._reward in ("positions", "exact"), self._reward
        self._compiled: Any = None

    def compile(self) -> "Program":
        runs = jax.vmap(self.run, in_axes=(None, 0, 0, 0, None, None))
        lanes = np.zeros(self.num_runs, np.int32)
        shapes = (np.int32(0), lanes, lanes.astype(np.float32), lanes, self._data, self._held_out)
        self._data, self._held_out = jax.device_put((self._data, self._held_out))
        self._compiled = jax.jit(runs).lower(*shapes).compile()
        return self

    def __call__(self, method: str, runs: Sequence[tuple[int, float, int]]) -> list[dict[str, Any]]:
        """The rows of (seed, rate, age), in their order; fewer than R are filled up."""
        found = []
        for first in range(0, len(runs), self.num_runs):
            some = runs[first : first + self.num_runs]
            filled = [*some, *[some[-1]] * (self.num_runs - len(some))]
            seeds, rates, ages = zip(*filled, strict=True)
            rows = self._compiled(
                np.int32(list(self.study.methods).index(method)),
                np.array([self.study.seeds.index(seed) for seed in seeds], np.int32),
                np.array(rates, np.float32),
                np.array(ages, np.int32),
                self._data,
                self._held_out,
            )
            rows = jax.device_get(rows)
            for i, run in enumerate(some):
                found.append(dict(zip(("seed", "rate", "staleness"), run, strict=True)))
                found[-1] |= self._summary(jax.tree.map(lambda leaf: leaf[i], rows))  # noqa: B023
        return found

    def _summary(self, row: Row) -> dict[str, Any]:
        every = self._settings.checkpoint.every_steps
        said = f"step {row.stopped}: a loss or gradient is not finite"
        return ({"stopped": said} if row.stopped else {}) | {
            "curve": [[i * every, round(float(x), 6)] for i, x in enumerate(row.curve)],
            "max_ratio": float(row.max_ratio),
            "entropy_last": float(row.entropy),
            "rewards": [round(float(x), 4) for x in row.rewards.reshape(-1, every).mean(axis=1)],
        }

    def run(self, loss, seed, rate, age, data: Data, held_out: HeldOut) -> Row:
        """One run: of a loss by its place in `methods`, a seed by its place in `seeds`."""
        settings, every = self._settings, self._settings.checkpoint.every_steps
        data = jax.tree.map(lambda leaf: leaf[seed], data)
        optimizer = make_optimizer(dataclasses.replace(settings.learner, learning_rate=rate))
        kept = jax.tree.map(lambda x: jnp.stack([x] * (OLDEST + 1)), data.params)
        zero = jnp.float32(0)
        carry = (data.params, optimizer.init(data.params), kept, zero, zero, jnp.int32(0))

        def step(carry, own):
            params, opt_state, kept, max_ratio, _, stopped = carry
            number, prompts, answers, noise = own
            version = jnp.maximum(number - 1 - age, 0)
            behind = jax.tree.map(lambda x: x[version % (OLDEST + 1)], kept)
            tokens, logprobs, mask = self.sample(behind, prompts, noise)
            rewards = self.rewards(tokens, mask, answers)
            batch = self.batch(
                prompts,
                tokens,
                logprobs,
                mask,
                self.advantages(loss, rewards),
                number - 1 - version,
            )
            params, opt_state, finite, ratio, entropy = self.update(
                loss, optimizer, params, opt_state, batch
            )
            kept = jax.tree.map(lambda x, new: x.at[number % (OLDEST + 1)].set(new), kept, params)
            stopped = jnp.where((stopped == 0) & ~finite, number, stopped)
            carry = (params, opt_state, kept, jnp.maximum(max_ratio, ratio), entropy, stopped)
            return carry, rewards.mean()

        def chunk(carry, own):
            carry, rewards = jax.lax.scan(step, carry, own)
            return carry, (self.accuracy(carry[0], held_out), rewards)

        numbers = jnp.arange(1, settings.learner.num_steps + 1)
        steps = (numbers, data.prompts, data.answers, data.noise)
        chunks = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), steps)
        first = self.accuracy(data.params, held_out)
        carry, (curve, rewards) = jax.lax.scan(chunk, carry, chunks)
        return Row(jnp.append(first, curve), rewards.reshape(-1), *carry[3:])

    def sample(self, params, prompts, noise):
        """Answers to prompts [N, P], a seed each: noise [B], as many as there are prompts, or groups of them.

        Returns:
          tokens int32 [B, A], log-probs float32 [B, A] and bool [B, A], False after the end of an answer.
        """
        temperature = self._settings.rollout.temperature
        return self._answers(params, prompts, noise, temperature)

    def _answers(self, params, prompts, noise, temperature):
        (N, P), B, A = prompts.shape, len(noise), self._settings.rollout.max_new_tokens
        model = nnx.merge(transformer.graphdef(self._config), params)
        prompts, positions = prompts.astype(jnp.int32), jnp.broadcast_to(jnp.arange(P), (N, P))
        hidden, cache = model.prefill(prompts, positions, (jnp.ones_like(prompts),))

        def in_place(keys):  # [L, N, heads, P, C] → [L, B, heads, P + A − 1, C]
            keys = jnp.repeat(keys, B // N, axis=1)
            return jnp.pad(keys, ((0, 0), (0, 0), (0, 0), (0, A - 1), (0, 0)))

        cache = transformer.KVCache(in_place(cache.k), in_place(cache.v))
        draw = sampling.Draw(
            key=jnp.stack([jnp.zeros_like(noise), noise], axis=1),
            temperature=jnp.full(B, temperature, jnp.float32),
            top_p=jnp.ones(B, jnp.float32),
            top_k=jnp.full(B, -1, jnp.int32),
            never=jnp.full((B, sampling.MAX_NEVER_TOKENS), -1, jnp.int32),
        )
        logits = jnp.repeat(model.logits(hidden[:, -1]), B // N, axis=0)
        first = sampling.sample(logits, jnp.full(B, P, jnp.int32), draw)

        def one(carry, position):
            token, cache = carry
            at = jnp.full(B, position, jnp.int32)
            hidden, cache = model.decode(token, at, cache)
            token, logprob = sampling.sample(model.logits(hidden), at + 1, draw)
            return (token, cache), (token, logprob)

        _, others = jax.lax.scan(one, (first[0], cache), jnp.arange(P, P + A - 1))
        tokens, logprobs = (
            jnp.concatenate([x[:, None], xs.T], axis=1) for x, xs in zip(first, others, strict=True)
        )
        ended = jnp.cumsum(tokens == self._tokenizer.eos_id, axis=1)
        mask = jnp.pad(ended[:, :-1], ((0, 0), (1, 0))) == 0
        return tokens, logprobs, mask

    def right(self, tokens, mask, answers):
        """Characters of an answer, those of the right one, and those that are equal in their place; int32 [B] each.

        Special tokens have no character.
        """
        has = mask & (tokens > self._tokenizer.eos_id)
        length, wanted = has.sum(axis=1), (answers > 0).sum(axis=1)
        place = jnp.cumsum(has, axis=1) - 1
        answers = jnp.repeat(answers.astype(jnp.int32), len(tokens) // len(answers), axis=0)
        wanted = jnp.repeat(wanted, len(tokens) // len(wanted), axis=0)
        same = jnp.take_along_axis(answers, jnp.maximum(place, 0), axis=1) == tokens
        return length, wanted, (has & same & (place < wanted[:, None])).sum(axis=1)

    def rewards(self, tokens, mask, answers):
        """float32 [N, G], of the samples of N prompts; `rewards.positions` or `rewards.math.exact`."""
        length, wanted, right = self.right(tokens, mask, answers)
        if self._reward == "positions":
            rewards = right / jnp.maximum(length, wanted)
        else:
            rewards = (length == wanted) & (right == wanted)
        return rewards.astype(jnp.float32).reshape(len(answers), -1)

    def accuracy(self, params, held_out: HeldOut):
        """Share of greedy answers that are exact."""
        noise = jnp.zeros(len(held_out.prompts), jnp.uint32)
        tokens, _, mask = self._answers(params, held_out.prompts, noise, 0.0)
        length, wanted, right = self.right(tokens, mask, held_out.answers)
        return ((length == wanted) & (right == wanted)).mean()

    def advantages(self, loss, rewards):
        """float32 [N, G]"""

        def of(config, rewards):
            return ADVANTAGES[config.advantage](rewards) - config.baseline_shift

        return jax.lax.switch(loss, [functools.partial(of, c) for c in self._losses], rewards)

    def batch(self, prompts, tokens, logprobs, mask, advantages, age) -> Batch:
        """A row for each group, its prompt once, [minibatches, rows, P + G · A].

        The weights that sampled are `age` steps behind OLDEST.
        """
        (N, P), (B, A) = prompts.shape, tokens.shape
        before, place = jnp.arange(P), jnp.arange(B // N * A)

        def row(values):  # [B, A] → [N, P + G · A]
            return jnp.pad(values.reshape(N, -1), ((0, 0), (P, 0)))

        def joined(of_prompt, of_answers):  # int32 [N, P + G · A]
            return jnp.tile(jnp.append(of_prompt, of_answers).astype(jnp.int32), (N, 1))

        mask, answered = row(mask), joined(before * 0, place * 0 + 1)
        prompts = jnp.pad(prompts.astype(jnp.int32), ((0, 0), (0, len(place))))
        # A first token's is the prompt's last.
        previous = jnp.where(place % A, P + place - 1, P - 1)
        whole = Batch(
            tokens=jnp.where(mask, row(tokens), prompts),
            positions=joined(before, P + place % A),
            segment_ids=jnp.where(answered > mask, 0, joined(before * 0 + 1, 2 + place // A)),
            prefix_ids=mask.astype(jnp.int32),
            predictor_index=joined(jnp.maximum(before - 1, 0), previous),
            mask=mask,
            behavior_logprobs=jnp.where(mask, row(logprobs), 0),
            token_versions=jnp.where(mask, OLDEST - age, NOT_SAMPLED),
            advantages=mask * row(jnp.repeat(advantages.reshape(-1), A)),
            sample_share=mask.astype(jnp.float32),
        )
        num = self._settings.learner.num_minibatches
        return jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), whole)

    def update(self, loss, optimizer, params, opt_state, batch: Batch):
        """A step: an optimizer update for each minibatch, at anchors of the weights that it starts from.

        Returns:
          parameters, optimizer state, whether all was finite, the largest π_θ/π_b and the last entropy.
        """
        needs = jnp.array([c.needs_recompute for c in self._losses])[loss]
        score = jax.vmap(lambda part: self.logprobs(params, part)[0])
        shape = batch.behavior_logprobs
        anchors = jax.lax.cond(needs, score, lambda _: jnp.zeros_like(shape), batch)
        max_norm = self._settings.learner.max_grad_norm

        def minibatch(carry, own):
            params, opt_state, finite, max_ratio, _ = carry
            grads, (total, share, ratio, entropy) = jax.grad(self.summed_loss, has_aux=True)(
                params, loss, *own
            )
            grads = jax.tree.map(lambda g: g / share, grads)
            norm = optax.tree.norm(grads)
            own_finite = jnp.isfinite(total / share) & jnp.isfinite(norm)
            scale = jnp.minimum(1.0, max_norm / norm)
            updates, moved = optimizer.update(
                jax.tree.map(lambda g: g * scale, grads), opt_state, params
            )
            new = optax.apply_updates(params, updates), moved
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(own_finite, new, old), new, (params, opt_state)
            )
            max_ratio = jnp.maximum(max_ratio, ratio)
            return (params, opt_state, finite & own_finite, max_ratio, entropy), None

        start = (params, opt_state, jnp.bool(True), jnp.float32(0), jnp.float32(0))
        return jax.lax.scan(minibatch, start, (batch, anchors))[0]

    def logprobs(self, params, batch: Batch):
        return policy_logprobs(
            self._config,
            params,
            batch,
            temperature=self._settings.rollout.temperature,
            head_chunk_tokens=None,
            shared_prompts=True,
        )

    def summed_loss(self, params, loss, batch: Batch, anchors):
        """The sum, and its divisor, the largest π_θ/π_b and the mean entropy."""
        logprobs, entropy = self.logprobs(params, batch)
        tokens = tokens_of(batch, OLDEST, logprobs, anchors)

        def of(config, tokens):
            found = objective(tokens, config)
            return found.loss.sum(), found.share.sum()

        total, share = jax.lax.switch(
            loss, [functools.partial(of, c) for c in self._losses], tokens
        )
        ratio = ratios.token(logprobs, batch.behavior_logprobs, batch.mask)
        ratio = jnp.where(batch.mask, ratio, 0).max()
        entropy = jnp.where(batch.mask, entropy, 0).sum() / batch.mask.sum()
        return total, jax.lax.stop_gradient((total, share, ratio, entropy))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", default="", help=f"of {', '.join(studies())}; all")
    parser.add_argument("--losses", default="", help=f"of {', '.join(METHODS)}; all")
    parser.add_argument("--ages", default="", help="of 0, 1, 4, 8 and 16; all")
    parser.add_argument("--runs", type=int, default=30, help="at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    cache = pathlib.Path("/tmp/jaxrl-which_loss")
    parser.add_argument("--cache", type=pathlib.Path, default=cache, help="inputs and rows")
    parser.add_argument("--out", type=pathlib.Path, default=grid.ROOT / "benchmarks" / "results")
    parser.add_argument("--prepare", action="store_true", help="make the inputs and end")
    args = parser.parse_args(argv)
    jax.config.update("jax_default_matmul_precision", "float32")  # GPUs would take TF32.
    names = args.tasks.split(",") if args.tasks else list(studies())
    chosen = {name: studies()[name] for name in names}
    inputs = {name: prepare(study, args.cache) for name, study in chosen.items()}
    if args.prepare:
        return
    bench = Bench(args, chosen, inputs)
    bench.run()
    path = args.out / "which_loss.json"
    before = record.read(path)
    result = {"proof": before.get("proof", {})} | result_of(bench.rows)
    report(result)
    if len(bench.rows) > len(before.get("runs", [])):
        words = [args.tasks, args.ages and f"η = {args.ages}", args.losses]
        part = ", ".join(filter(None, words)) or "all"
        seeds = sorted({row["seed"] for row in bench.rows})
        record.write(path, result, seeds=seeds, part=part)


class Bench:
    """The programs of the studies, which compile at the same time, and the rows of all runs that have ended."""

    def __init__(self, args: argparse.Namespace, chosen: Mapping[str, Study], inputs):
        """Begins to compile."""
        self._start, self._last = time.monotonic(), {}
        self._end = self._start + args.seconds
        self._losses = args.losses.split(",") if args.losses else list(METHODS | COMPLEX_METHODS)
        self._ages = [int(age) for age in args.ages.split(",")] if args.ages else [0, 1, 4, 8, 16]
        self._path = args.cache / "which_loss.jsonl"
        lines = self._path.read_text("utf-8").splitlines() if self._path.exists() else []
        self.rows = record.read(args.out / "which_loss.json").get("runs", [])
        known = set(map(_key, self.rows))
        self.rows += [row for row in map(json.loads, lines) if _key(row) not in known]
        self._chosen = chosen
        pool = concurrent.futures.ThreadPoolExecutor(max(len(chosen), 1))
        self._programs = {
            name: pool.submit(Program(study, *inputs[name], args.runs).compile)
            for name, study in chosen.items()
        }

    def run(self) -> None:
        """What the flags chose: the study, the check of it, and DG's complexity, as far as there is time."""
        tasks = [name for name in staleness.TASKS if name in self._chosen]
        methods = [name for name in METHODS if name in self._losses]
        for method, task in itertools.product(methods, tasks):
            ages = MORE_AGES if method in staleness.METHODS else AGES
            cells = itertools.product(CHOOSING_SEEDS, RATES, ages)
            choosing = self.rows_of(task, method, list(cells))
            best = staleness.best_rates(choosing) if choosing else {}
            reported = [(seed, rate, cell[2]) for seed in SEEDS for cell, rate in best.items()]
            self.rows_of(task, method, reported)
        rate = delight_reversal.BASE["learner.learning_rate"]
        runs = [(seed, rate, age) for seed in COMPLEX_SEEDS for age in COMPLEX_AGES]
        for name, method in itertools.product(self._chosen, COMPLEX_METHODS):
            if name not in tasks and method in self._losses:
                self.rows_of(name, method, runs)

    def rows_of(
        self, task: str, method: str, runs: Sequence[tuple[int, float, int]]
    ) -> list[dict[str, Any]]:
        """The rows of (seed, rate, age), those that have ended: no more are begun where time is over."""
        labels = {"task": task, "method": method, "device": jax.devices()[0].device_kind}
        known = {_key(row) for row in self.rows}
        runs = [run for run in runs if run[2] in self._ages]
        waiting = [run for run in runs if (task, method, *run) not in known]
        program = self._programs[task].result()
        took = self._last.get(task, 0.0)  # of the call before
        if waiting and time.monotonic() + took < self._end:
            start = time.monotonic()
            found = [labels | row for row in program(method, waiting)]
            self._last[task] = time.monotonic() - start
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in found))
            self.rows += found
            since = start - self._start
            text = f"{since:6.1f} s: {task} {method}, {len(found)} runs in {self._last[task]:.1f} s"
            print(text, flush=True)
        asked = {(task, method, *run) for run in runs}
        return [row for row in self.rows if _key(row) in asked]


def _key(row: Mapping[str, Any]) -> tuple[str, str, int, float, int]:
    return (row["task"], row["method"], row["seed"], row["rate"], row["staleness"])


def _cell_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return (row["task"], row["method"], row["staleness"])


def result_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all rows: the table at each method's rates, how these were chosen, the complexity.

    Where no seed chose, the rate is the one that ran.
    """
    choosing = [row for row in rows if row["seed"] in CHOOSING_SEEDS]
    best = staleness.best_rates(choosing)
    reported = [
        row
        for row in rows
        if row["task"] in staleness.TASKS
        and row["seed"] in SEEDS
        and best.get(_cell_of(row), row["rate"]) == row["rate"]
    ]
    result = {"base": staleness.BASE, "methods": METHODS}
    result |= {"tasks": staleness.TASKS, "rates": RATES, "table": tabulate(reported)}
    result |= {"choosing": staleness.tabulate_rates(choosing)}
    result |= {"complexity": complexity(rows), "runs": list(rows)}
    return result


def tabulate(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task, method and age: means over seeds with their intervals.

    gained: from version 0, of the same seeds; over: the difference to each other method.
    """
    cells = cells_of(rows)
    table = []
    for (task, method, age), seeds in cells.items():
        others = {
            n: cells[task, n, age] for n in METHODS if n != method and (task, n, age) in cells
        }
        table.append(
            {"task": task, "method": method, "staleness": age, "rate": seeds[0]["rate"]}
            | {"accuracy": grid.mean_and_interval(map(staleness.accuracy, seeds))}
            | {"gained": grid.mean_and_interval(map(_gained, seeds))}
            | {"over": {name: staleness.difference(seeds, own) for name, own in others.items()}}
            | {"stopped": sum("stopped" in row for row in seeds)}
        )
    return table


def cells_of(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    cells = collections.defaultdict(list)
    for row in rows:
        cells[row["task"], row["method"], row["staleness"]].append(row)
    return cells


def _gained(row: dict[str, Any]) -> float:
    return staleness.accuracy(row) - row["curve"][0][1]


def complexity(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sequence error by tokens to reverse, age and method; dg_less: DG's error less that of the method."""
    cells, found = cells_of([row for row in rows if row["task"].startswith("reversal_")]), []
    for (task, method, age), seeds in cells.items():
        found.append({"num_tokens": int(task.removeprefix("reversal_")), "method": method})
        found[-1] |= {"staleness": age}
        found[-1]["error"] = grid.mean_and_interval(1 - staleness.accuracy(row) for row in seeds)
        if dg := cells.get((task, "dg", age)):
            found[-1]["dg_less"] = staleness.difference(seeds, dg)
    return found


def report(result: dict[str, Any]) -> None:
    for task in result["tasks"]:
        print(
            f"\n{task}: accuracy (rate)\n"
            + " " * 32
            + "".join(f"{f'η = {a}':>22}" for a in MORE_AGES)
        )
        for method in METHODS:
            cells = {
                row["staleness"]: row
                for row in result["table"]
                if (row["task"], row["method"]) == (task, method)
            }
            texts = [
                f"{_text(cells[a]['accuracy'])} ({cells[a]['rate']:g})" if a in cells else ""
                for a in MORE_AGES
            ]
            print(NAMES[method].ljust(32) + "".join(f"{text:>22}" for text in texts))
    for row in result["complexity"]:
        print(row["num_tokens"], row["method"], row["staleness"], _text(row["error"]))


def _text(cell: dict[str, float]) -> str:
    return f"{cell['mean']:.3f} ± {cell['half_width']:.3f}"


if __name__ == "__main__":
    main()
