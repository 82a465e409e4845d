"""The same GRPO step here and in google-tunix, taking turns on one machine: training, generation, the whole step.

    python benchmarks/peers.py [--shape=small] [--rounds=12] [--step-rounds=3] [--smoke]

Tunix (its synchronous GRPO, with its own "vanilla" sampler) runs in an environment of its own, made at the first run,
as a process that waits while we work, and we wait while it works. A round is one turn of each side, forwards in one
round and backwards in the next; a turn's figure is the median of its repetitions, and the ratio is tunix's seconds
over ours of the same round, given as the median over rounds with quartiles.

    training     one update from a batch that lies ready, metrics on the host; here: accumulate and update
    generation   16 × 8 completions of prompts that neither side has seen; here: the embedded engine in this process
    step         all of a step (time/step_secs); here: `python -m jaxrl_async train` in mode sync and in mode async,
                 in one process (sync 1, async 1) and in several, with their wire

Equal: Qwen3 of 4 layers, d 128, 4 heads of 32, MLP 384, vocabulary 256, tied embeddings; random weights, float32;
16 prompts × 8 samples of 16 + 16 tokens at temperature 1, nothing but its length ends a completion; one update of
Adam, clipped at norm 1, a step; the clipped surrogate without KL; the version of JAX; the cores.
`--shape=17m` is the model of 17M parameters of the learner's benchmarks, with the same rows. Compiling and the
first steps count nowhere. Tunix is set to the least that its GRPO does: beta 0 and one iteration, so no reference, no
second forward; trainer and sampler share one copy of the weights; a step is one batch, as it is by default.

Not equal: we lay a group in two rows, of a prompt and the four completions behind it, which have the loss and the
gradients of a row for each (`learner.shared_prompts`, tests/learner/test_shared_prompts.py), and take a step's 32
rows in two microbatches; tunix has 128 rows of a prompt and a completion, all at once. Our engine returns log-probs,
tunix's sampler is not asked for them. Our engine computes a prompt once for its 8 samples, tunix 8 times. Tunix
computes each step in one process, without HTTP, gRPC or files; in several, our `train` sends every sample, reward and
weight between them, and writes weights to disk; in one it still keeps a journal of samples, and rewards have a
process of their own. In mode async our updates are of samples up to 2 steps old, with the anchor and the weights for
that: another algorithm, the same work.

Runs on a CPU (JAX_PLATFORMS=cpu where there is more). `--only=step` measures nothing else. `--smoke`: our side alone,
tiny. Results are printed and written to benchmarks/results/peers.json, peers_17m.json of that shape, or to --out;
measures that were not asked for stay as they are there.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import record
import shapes

from jaxrl_async import parts
from jaxrl_async.cli.config import parse_flags, settings_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.inference.requests import Request
from jaxrl_async.inference.sampling import SamplingParams
from jaxrl_async.learner.packing import Packer
from jaxrl_async.metrics import read_metrics
from jaxrl_async.models import sharding
from jaxrl_async.types import NOT_SAMPLED, Group, Trajectory

BENCHMARKS = pathlib.Path(__file__).parent
ROOT = BENCHMARKS.parent
ENVIRONMENT = ROOT / ".venv-peers" / "tunix"
# What pip finds for tunix alone takes it minutes, for the sake of transformers; the same JAX is a condition.
PINS = ("google-tunix==0.1.7", "transformers==5.12.1", f"jax=={jax.__version__}")
TIMEOUT_SECS = 600.0  # of a turn
INSTALL_SECS = 1800.0  # of a command that makes tunix's environment
WARM_STEPS = 5  # in no figure
TAIL = 3000  # characters of a failed process's output in an error

PROCESSES = ("one", "many")
UNITS = {"training": "samples/s", "generation": "tokens/s", "step": "samples/s"}


def alphabet(size: int) -> str:
    """The characters of a vocabulary: padding and end, the task's, and others that only chance samples."""
    return "0123456789>" + "".join(map(chr, range(0x4E00, 0x4E00 + size - 13)))


WORKLOAD = {
    "model.num_layers": 4,
    "model.model_dim": 128,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 32,
    "model.mlp_dim": 384,
    "tokenizer.alphabet": alphabet(256),
    "task.args.num_tokens": 15,
    "task.args.num_symbols": 10,
    "rollout.function": "peers_rollout:to_the_end",
    "rollout.group_size": 8,
    "rollout.max_prompt_tokens": 16,
    "rollout.max_new_tokens": 16,
    "server.max_total_tokens": 32,
    "server.num_slots": 128,
    "server.decode_chunk": 16,
    "loss.advantage": "grpo",
    "loss.anchor": "current",
    "learner.groups_per_step": 16,
    "learner.num_minibatches": 1,
    "learner.microbatch_rows": 16,
    "learner.row_tokens": 80,
    "learner.shared_prompts": True,
    "learner.learning_rate": 1e-6,
    "learner.adam_b2": 0.95,
    "checkpoint.every_steps": 1_000_000,
    "evaluate.every_steps": 0,
}
_17M = shapes.MODELS["17m"]
SHAPES = {
    "small": {},
    "17m": {f"model.{name}": value for name, value in _17M.items() if name != "vocab_size"}
    | {"tokenizer.alphabet": alphabet(_17M["vocab_size"])},
}
ASYNC = {"loss.anchor": "a3po", "loss.behavior_weight": "mask", "loss.behavior_cap": 5.0}
TINY = {
    "model.num_layers": 1,
    "model.model_dim": 16,
    "model.head_dim": 4,
    "model.mlp_dim": 16,
    "rollout.group_size": 2,
    "server.num_slots": 8,
    "learner.groups_per_step": 4,
    "learner.microbatch_rows": 8,
}

Turn = Callable[[], float]  # → seconds of a repetition


class PeerError(RuntimeError):
    """The other side could not be set up, or failed at its turn; the message ends with what it said."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of the model")
    parser.add_argument("--only", choices=UNITS, action="append", help="a measure; may be repeated")
    parser.add_argument("--processes", choices=PROCESSES, action="append", help="of whole steps")
    parser.add_argument("--rounds", type=int, default=12, help="of training and of generation")
    parser.add_argument("--repetitions", type=int, default=5, help="of a turn in these")
    parser.add_argument("--step-rounds", type=int, default=3, help="of whole steps")
    parser.add_argument("--steps", type=int, default=25, help="of a turn in these")
    parser.add_argument("--environment", type=pathlib.Path, default=ENVIRONMENT, help="tunix's")
    parser.add_argument("--out", type=pathlib.Path, default=BENCHMARKS / "results")
    parser.add_argument("--smoke", action="store_true", help="our side alone, a tiny model")
    args = parser.parse_args(argv)
    overrides = WORKLOAD | SHAPES[args.shape]
    if args.smoke:
        overrides = WORKLOAD | TINY
        args.rounds = args.repetitions = args.step_rounds = args.steps = 1
    settings = settings_with("sync", overrides)
    result = {"workload": workload_of(settings)}
    with contextlib.ExitStack() as stack:
        tunix = None
        if not args.smoke:
            # -I: benchmarks/ and PYTHONPATH are not its environment's.
            command = [environment(args.environment), "-I", BENCHMARKS / "peers_tunix.py"]
            command += [json.dumps(workload_of(settings))]
            tunix = stack.enter_context(Tunix(command))
            result["tunix"] = PINS[0]
        ours = stack.enter_context(Ours(settings))
        result["measures"] = measures(tunix, ours, overrides, args)
    out = args.out / ("peers.json" if args.shape == "small" else f"peers_{args.shape}.json")
    if args.only and out.exists():
        earlier = record.read(out)
        result |= {"proof": earlier["proof"], "measures": earlier["measures"] | result["measures"]}
    record.write(out, result, seeds=[0], raw=["rounds"], part=" ".join(args.only or ["all"]))


def measures(tunix: "Tunix | None", ours: "Ours", overrides: Mapping, args) -> dict[str, dict]:
    """Each measure's summary, printed as it comes; without tunix, of our side alone."""
    learner, rollout = ours.settings.learner, ours.settings.rollout
    samples, found = learner.groups_per_step * rollout.group_size, {}
    wanted = args.only or UNITS
    for name, amount in (("training", samples), ("generation", samples * rollout.max_new_tokens)):
        if name not in wanted:
            continue
        repeat = getattr(ours, name)
        repeat()  # Compiles what was not.
        sides = {"ours": functools.partial(median_secs, repeat, args.repetitions)}
        counts = dict(rounds=args.rounds, repetitions=args.repetitions)
        found[name] = compare(name, sides, tunix, amount=amount, **counts)
    if "step" not in wanted:
        return found
    modes = ("sync",) if args.smoke else ("sync", "async")
    sides = {}
    for mode, processes in itertools.product(modes, args.processes or PROCESSES):
        name = f"{mode} 1" if processes == "one" else mode
        in_processes = overrides | {"supervisor.processes": processes}
        sides[name] = functools.partial(train, mode, in_processes, args.steps)
    counts = dict(rounds=args.step_rounds, repetitions=args.steps)
    found["step"] = compare("step", sides, tunix, amount=samples, **counts)
    return found


def compare(
    name: str,
    sides: Mapping[str, Turn],
    tunix: "Tunix | None",
    *,
    rounds: int,
    repetitions: int,
    amount: int,
) -> dict[str, dict]:
    """The summary of one measure, of which a repetition does `amount`."""
    if tunix:
        tunix.turn(name, WARM_STEPS)
        sides = sides | {"tunix": functools.partial(tunix.turn, name, repetitions)}
    found = summary(in_turn(sides, rounds), amount) | {"unit": UNITS[name]}
    report(name, found)
    return found


def in_turn(sides: Mapping[str, Turn], rounds: int) -> dict[str, np.ndarray]:
    """Seconds [rounds] of each side: forwards in one round, backwards in the next, never two at a time."""
    order, secs = list(sides), {name: [] for name in sides}
    for _ in range(rounds):
        for name in order:
            secs[name].append(sides[name]())
        order.reverse()
    return {name: np.array(values) for name, values in secs.items()}


def summary(secs: Mapping[str, np.ndarray], amount: int) -> dict[str, dict]:
    """Quartiles of seconds and of amount/s of each side, and of the ratios to tunix of the same round."""
    sides = {}
    for name, values in secs.items():
        sides[name] = {"secs": record.quartiles(values), "rate": record.quartiles(amount / values)}
        if name != "tunix" and "tunix" in secs:
            sides[name]["times_tunix"] = record.quartiles(secs["tunix"] / values)
    return {"amount": amount, "rounds": {k: v.tolist() for k, v in secs.items()}, "sides": sides}


def report(name: str, found: Mapping) -> None:
    for side, values in found["sides"].items():
        rate, secs = values["rate"], values["secs"]["median"]
        line = f"{name:11}{side:7}{secs:8.3f} s {rate['median']:10,.0f} {found['unit']}"
        line += f" [{rate['low']:,.0f} {rate['high']:,.0f}]"
        if ratio := values.get("times_tunix"):
            line += f"   {ratio['median']:.2f} × tunix [{ratio['low']:.2f} {ratio['high']:.2f}]"
        print(line, flush=True)


# Ours.


class Ours:
    """Learner and engine in this process, each with the weights of version 0."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._rng = np.random.default_rng(0)
        self._rids = itertools.count()

    def __enter__(self) -> "Ours":
        with tempfile.TemporaryDirectory() as workdir:
            tokenizer = parts.tokenizer_of(self.settings, pathlib.Path(workdir))
            self._engine = parts.engine_of(self.settings, pathlib.Path(workdir), name="engine")
        config = self._engine.config
        mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
        self._train_step = parts.train_step_of(self.settings, config, mesh)
        params = parts.first_params_of(self.settings, config, mesh, tokenizer)
        self._engine.start()
        self._engine.update_weights(params, "0").result(TIMEOUT_SECS)
        self.state = self._train_step.init(params)
        self._accumulator = self._train_step.zero_accumulator()
        self.batches = self._make_batches()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close(timeout_secs=TIMEOUT_SECS)

    def training(self) -> None:
        """A step of `learner.train` from packed batches, as far as the metrics on the host."""
        for batch in self.batches:
            self._accumulator = self._train_step.accumulate(
                self.state.params, self._accumulator, batch, None, policy_version=0
            )
        self.state, self._accumulator, outcome = self._train_step.update(
            self.state, self._accumulator
        )
        if not jax.device_get(outcome)["finite"]:
            raise FloatingPointError("a loss or a gradient norm is not finite")

    def generation(self) -> None:
        """The completions of a step's prompts, each prompt as often as its group is large."""
        settings, prompts = self.settings, self._random_tokens(self._prompt_shape())
        num = len(prompts) * settings.rollout.group_size
        done, completions = threading.Event(), []

        def on_done(ended) -> None:
            completions.extend(ended)
            if len(completions) == num:
                done.set()

        for prompt in np.repeat(prompts, settings.rollout.group_size, axis=0):
            rid = next(self._rids)
            sampling = SamplingParams(
                max_new_tokens=settings.rollout.max_new_tokens,
                temperature=settings.rollout.temperature,
                top_p=1.0,
                top_k=-1,
                stop_token_ids=(),
                seed=rid,
            )
            self._engine.submit(Request(str(rid), prompt, sampling), on_done)
        if not done.wait(TIMEOUT_SECS):
            raise TimeoutError(f"{len(completions)} of {num} completions in {TIMEOUT_SECS} s")
        for _, completion in completions:
            if isinstance(completion, Exception):
                raise completion
            assert len(completion.output_ids) == settings.rollout.max_new_tokens

    def _make_batches(self):
        """Made-up trajectories of full length, packed."""
        num_prompts, prompt_tokens = self._prompt_shape()
        shape = (num_prompts, self.settings.rollout.group_size)
        length = prompt_tokens + self.settings.rollout.max_new_tokens
        mask = np.arange(length) >= prompt_tokens
        groups = [
            Group(
                prompt_index,
                0,
                tuple(
                    Trajectory(
                        tokens=tokens,
                        logprobs=np.where(mask, -5, 0).astype(np.float32),
                        versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
                        mask=mask,
                        prompt_length=prompt_tokens,
                    )
                    for tokens in self._random_group(prompt_tokens, length)
                ),
            )
            for prompt_index in range(num_prompts)
        ]
        advantages = self._rng.normal(size=shape).astype(np.float32)
        return Packer(self.settings.learner)(groups, advantages, last=True)

    def _random_group(self, prompt_tokens: int, length: int) -> np.ndarray:
        """int32 [G, length], of one prompt."""
        tokens = self._random_tokens((self.settings.rollout.group_size, length))
        tokens[:, :prompt_tokens] = tokens[0, :prompt_tokens]
        return tokens

    def _prompt_shape(self) -> tuple[int, int]:
        return self.settings.learner.groups_per_step, self.settings.rollout.max_prompt_tokens

    def _random_tokens(self, shape: tuple[int, int]) -> np.ndarray:
        return self._rng.integers(2, self._engine.config.vocab_size, shape).astype(np.int32)


def median_secs(repeat: Callable[[], None], count: int) -> float:
    secs = []
    for _ in range(count):
        start = time.perf_counter()
        repeat()
        secs.append(time.perf_counter() - start)
    return float(np.median(secs))


def train(mode: str, overrides: Mapping, steps: int) -> float:
    """Median seconds of a step of a run, after the first ones."""
    overrides = overrides | {"learner.num_steps": WARM_STEPS + steps}
    paths = filter(None, (str(BENCHMARKS), str(ROOT), os.environ.get("PYTHONPATH")))
    with tempfile.TemporaryDirectory(prefix="jaxrl-peers-") as directory:
        command = [sys.executable, "-m", "jaxrl_async", "train", f"--workdir={directory}/run"]
        run = subprocess.run(
            command + config_words(mode, overrides),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECS,
        )
        if run.returncode:
            raise RuntimeError(f"train failed in mode {mode}:\n{run.stdout[-TAIL:]}")
        rows = read_metrics(f"{directory}/run")
    assert all(row["tokens/truncated_share"] == 1 for row in rows), "a completion ended early"
    return float(np.median([row["time/step_secs"] for row in rows[WARM_STEPS:]]))


def settings_with(mode: str, overrides: Mapping) -> Settings:
    return settings_of(parse_flags("", config_words(mode, overrides), config=True).config)


def config_words(mode: str, overrides: Mapping) -> list[str]:
    """What follows `train` on its command line."""
    overrides = overrides | (ASYNC if mode == "async" else {})
    words = [f"--config={ROOT}/configs/token_reversal.py:loss=ppo,mode={mode}"]
    return words + [f"--config.{name}={value}" for name, value in overrides.items()]


# Theirs.


def workload_of(settings: Settings) -> dict:
    """What peers_tunix.py needs to know, as JSON."""
    model, learner, rollout = settings.model, settings.learner, settings.rollout
    return {
        "model": dataclasses.asdict(model),
        "alphabet": settings.tokenizer.alphabet,
        "prompts": learner.groups_per_step,
        "group_size": rollout.group_size,
        "prompt_tokens": rollout.max_prompt_tokens,
        "completion_tokens": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "clip": settings.loss.clip_high,
        "learning_rate": learner.learning_rate,
        "adam_b1": learner.adam_b1,
        "adam_b2": learner.adam_b2,
        "adam_eps": learner.adam_eps,
        "max_grad_norm": learner.max_grad_norm,
    }


class Tunix:
    """The process of peers_tunix.py."""

    def __init__(self, command: Sequence[str | os.PathLike]):
        self._command = command

    def __enter__(self) -> "Tunix":
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def turn(self, measure: str, count: int) -> float:
        """Median seconds of `count` repetitions.

        Raises:
          PeerError: the process has ended, or was ended because it took more than TIMEOUT_SECS.
        """
        timer = threading.Timer(TIMEOUT_SECS, self._process.kill)
        timer.start()
        try:
            print(
                json.dumps({"measure": measure, "count": count}),
                file=self._process.stdin,
                flush=True,
            )
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self._log.seek(0)
            raise PeerError(f"tunix failed at {measure}:\n{self._log.read()[-TAIL:]}")
        return float(np.median(json.loads(answer)["secs"]))


def environment(directory: pathlib.Path) -> pathlib.Path:
    """The Python of tunix's environment, which is made where it is not there.

    Raises:
      PeerError: pip could not install it, or took more than INSTALL_SECS.
    """
    stamp, python = directory / "stamp", directory / "bin" / "python"
    if stamp.exists() and stamp.read_text() == " ".join(PINS):
        return python
    print(f"installing {PINS[0]} under {directory}", flush=True)
    for command in (
        [sys.executable, "-m", "venv", directory],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINS],
    ):
        words = shlex.join(map(str, command))
        try:
            run = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=INSTALL_SECS
            )
        except subprocess.TimeoutExpired as error:
            raise PeerError(
                f"no environment of tunix: {words} took more than {INSTALL_SECS:g} s:\n"
                + tail(error.stdout)
            ) from None
        if run.returncode:
            raise PeerError(f"no environment of tunix: {words} failed:\n{tail(run.stdout)}")
    stamp.write_text(" ".join(PINS))
    return python


def tail(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")[-TAIL:]


if __name__ == "__main__":
    main()
