"""How far engine and learner are apart on the same weights and tokens, in bfloat16 beside float32, on this machine.

    python benchmarks/bfloat16.py [--config=configs/smollm2.py] [--model=DIR] [--prompts=4] [--samples=8] [--smoke]

The embedded engine answers prompts of the config's task, with few slots and with many. The learner's program computes
the log-probs of the sampled tokens again, from several packings and cuts into microbatches: nothing but arithmetic
differs. For each pair: mean and largest |learner's − engine's log-prob|, in nats, which is `mismatch/mean_abs` and
`mismatch/max_abs` of a run. `packings` is the largest difference between two log-probs of one token by the learner
alone. Results are printed and written to benchmarks/results/bfloat16.json, or to --out.
"""

import argparse
import asyncio
import dataclasses
import pathlib
import tempfile

import jax
import numpy as np
import record

from jaxrl_async import parts
from jaxrl_async.cli.config import parse_flags, settings_of
from jaxrl_async.config.settings import DTYPES, Learner, Settings
from jaxrl_async.evaluation.score import sampling_of
from jaxrl_async.learner.packing import Packer
from jaxrl_async.learner.train_step import TrainStep
from jaxrl_async.models import sharding
from jaxrl_async.tasks.prompts import held_out_prompts
from jaxrl_async.tools.evaluate import ENGINE_TIMEOUT_SECS, EngineClient
from jaxrl_async.types import NOT_SAMPLED, Choices, Group, Trajectory

ROOT = pathlib.Path(__file__).parent.parent
SLOTS = (4, 32)
# name → settings of the block learner; row_tokens 0: those of one trajectory
CUTS = {
    "a trajectory to a row": dict(packing="in_order", shared_prompts=False, row_tokens=0, microbatch_rows=8),
    "packed, 1 row of 512": dict(packing="first_fit", shared_prompts=False, row_tokens=512, microbatch_rows=1),
    "packed, 4 rows of 512": dict(packing="first_fit", shared_prompts=False, row_tokens=512, microbatch_rows=4),
    "shared prompts, 1 row of 512": dict(packing="first_fit", shared_prompts=True, row_tokens=512, microbatch_rows=1),
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "smollm2.py"))
    parser.add_argument("--model", help="directory of the checkpoint, in place of the config's")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="the config's tiny model")
    args = parser.parse_args(argv)
    if args.smoke:
        args.config, args.prompts, args.samples = f"{args.config}:smoke", 2, 3
    flags = [f"--config={args.config}"]
    if args.model:
        flags += [f"--config.model.path={args.model}", f"--config.tokenizer.path={args.model}"]
    settings = settings_of(parse_flags("", flags, config=True).config)
    result = {
        "model": pathlib.Path(settings.model.path).name or "random",
        "dtypes": {},
    }
    for dtype in DTYPES:
        of_dtype = dataclasses.replace(
            settings, model=dataclasses.replace(settings.model, dtype=dtype)
        )
        with tempfile.TemporaryDirectory() as workdir:
            measured = measure(of_dtype, pathlib.Path(workdir), args.prompts, args.samples)
        result["dtypes"][dtype] = measured
        for slots, row in measured.items():
            for cut, found in row["cuts"].items():
                line = f"{found['mean_abs']:.2e} mean {found['max_abs']:.2e} max"
                print(f"{dtype:9} {slots:>3} slots  {cut:30} {line}", flush=True)
            print(
                f"{dtype:9} {slots:>3} slots  between packings {row['packings']:.2e} max",
                flush=True,
            )
    record.write(args.out / "bfloat16.json", result, seeds=[settings.seed])


def measure(settings: Settings, workdir: pathlib.Path, num_prompts: int, num_samples: int) -> dict:
    """Slots → the differences of each cut, and those between cuts, of the config's first weights."""
    tokenizer = parts.tokenizer_of(settings, workdir)
    config = parts.model_config_of(settings, tokenizer)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    params = parts.first_params_of(settings, config, mesh, tokenizer)
    longest = settings.rollout.max_prompt_tokens + settings.rollout.max_new_tokens
    programs = {name: program(settings, config, mesh, cut, longest) for name, cut in CUTS.items()}
    found = {}
    for slots in SLOTS:
        server = dataclasses.replace(settings.server, num_slots=slots)
        here = dataclasses.replace(settings, server=server)
        groups = sample(here, workdir, params, num_prompts, num_samples)
        logprobs, sampled = {}, None
        for name in CUTS:
            logprobs[name], sampled = score(programs[name], params, groups)
        apart = {name: np.abs(values - sampled) for name, values in logprobs.items()}
        every = np.stack(list(logprobs.values()))
        found[str(slots)] = {
            "tokens": len(sampled),
            "cuts": {
                name: {"mean_abs": float(d.mean()), "max_abs": float(d.max()), "raw": d.tolist()}
                for name, d in apart.items()
            },
            "packings": float(np.ptp(every, axis=0).max()),
        }
    return found


def sample(settings, workdir, params, num_prompts: int, num_samples: int) -> list[Group]:
    """Groups that the embedded engine samples, all requests at once."""
    tokenizer, task = parts.tokenizer_of(settings, workdir), parts.task_of(settings)
    runner = parts.runner_of(settings, tokenizer, task)
    prompts = held_out_prompts(
        task, tokenizer, max_prompt_tokens=settings.rollout.max_prompt_tokens
    )
    engine = parts.engine_of(settings, workdir, name="bfloat16")
    engine.start()

    async def completions():
        client = EngineClient(engine)

        def one(i, sample):
            seed = i * num_samples + sample
            sampling = sampling_of(
                runner, temperature=settings.rollout.temperature, seed=seed, sample=1
            )
            return client.generate(sampling, prompts[i].tokens)

        return await asyncio.gather(
            *(one(i, j) for i in range(num_prompts) for j in range(num_samples))
        )

    try:
        engine.update_weights(params, "0").result(ENGINE_TIMEOUT_SECS)
        answers = asyncio.run(completions())
    finally:
        engine.close(timeout_secs=ENGINE_TIMEOUT_SECS)
    return [
        Group(i, 0, tuple(_trajectory(prompts[i].tokens, a) for a in answers[start : start + num_samples]))
        for i, start in enumerate(range(0, len(answers), num_samples))
    ]  # fmt: skip


def program(settings: Settings, config, mesh, cut: dict, longest: int) -> tuple[Learner, TrainStep]:
    """The learner's programs for one of CUTS."""
    cut = cut | {"row_tokens": cut["row_tokens"] or longest}
    learner = dataclasses.replace(settings.learner, **cut)
    settings = dataclasses.replace(settings, learner=learner)
    return learner, parts.train_step_of(settings, config, mesh)


def score(programs: tuple[Learner, TrainStep], params, groups) -> tuple[np.ndarray, np.ndarray]:
    """The learner's and the engine's log-probs of the sampled tokens, in an order that no cut changes."""
    learner, train_step = programs
    # Nothing is trained: the advantages number the trajectories.
    numbers = np.arange(sum(len(group.trajectories) for group in groups), dtype=np.float32)
    batches = Packer(learner)(groups, numbers.reshape(len(groups), -1), last=True)
    found = []
    for batch in batches:
        values = np.asarray(train_step.score(params, batch))
        columns = (batch.advantages, batch.positions, values, batch.behavior_logprobs)
        found.append(np.stack([array[batch.mask].astype(np.float64) for array in columns]))
    trajectories, positions, ours, theirs = np.concatenate(found, axis=1)
    order = np.lexsort((positions, trajectories))
    return ours[order], theirs[order]


def _trajectory(prompt: np.ndarray, completion) -> Trajectory:
    sampled = np.arange(len(prompt) + len(completion.tokens)) >= len(prompt)
    logprobs = np.zeros(len(sampled), np.float32)
    logprobs[sampled] = completion.logprobs
    return Trajectory(
        tokens=np.concatenate([prompt, completion.tokens]).astype(np.int32),
        logprobs=logprobs,
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        mask=sampled,
        prompt_length=len(prompt),
        reward=0.0,
        choices=Choices(completion.routes),
    )


if __name__ == "__main__":
    main()
