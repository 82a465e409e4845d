"""How wrong log-probs are that stale keys and values give, between neighbouring versions of a run.

    python benchmarks/in_place.py [--model=DIR] [--steps=4] [--learning_rate=1e-5] [--smoke]

Each step samples 8 × 8 answers of the config's task with the embedded engine, takes one update of the config's loss on
them, and gives the engine the new weights while other answers are being sampled: paused `in_place`, which keeps their
keys and values, and `retract`, which computes them again. Of the tokens after the push: |the engine's log-prob − that
of a full forward by the new weights|, in nats, and, for scale, |new − old weights' log-prob| of the same tokens. The
learning rate has no warm-up here: every update is a whole one. Results: benchmarks/results/in_place.json.
"""

import argparse
import pathlib
import queue
import tempfile

import jax
import numpy as np
import record
from bfloat16 import sample

from jaxrl_async import parts
from jaxrl_async.cli.config import parse_flags, settings_of
from jaxrl_async.inference.fields import parse_sampling
from jaxrl_async.inference.requests import Request
from jaxrl_async.learner.packing import Packer
from jaxrl_async.models import sharding
from jaxrl_async.objectives import advantages
from jaxrl_async.rewards import reward_function
from jaxrl_async.tasks.prompts import held_out_prompts
from jaxrl_async.tools.evaluate import ENGINE_TIMEOUT_SECS

MODES = ("in_place", "retract")
PROMPTS, SAMPLES = 8, 8


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=str(record.ROOT / "configs" / "smollm2.py"))
    parser.add_argument("--model", help="directory of the checkpoint, in place of the config's")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS)
    parser.add_argument("--smoke", action="store_true", help="the config's tiny model, two steps")
    args = parser.parse_args(argv)
    if args.smoke:
        args.config, args.steps = f"{args.config}:smoke", 2
    flags = [f"--config={args.config}", f"--config.learner.learning_rate={args.learning_rate}"]
    flags += ["--config.learner.warmup_updates=0", "--config.server.decode_chunk=4"]
    if args.model:
        flags += [f"--config.model.path={args.model}", f"--config.tokenizer.path={args.model}"]
    settings = settings_of(parse_flags("", flags, config=True).config)
    with tempfile.TemporaryDirectory() as workdir:
        rows = measure(settings, pathlib.Path(workdir), args.steps)
    result = {"learning_rate": args.learning_rate, "table": table(rows), "rows": rows}
    record.write(args.out / "in_place.json", result, seeds=[settings.seed])


def measure(settings, workdir: pathlib.Path, steps: int) -> list[dict]:
    """A row for each update and mode, with the errors of all tokens after the push."""
    tokenizer, task = parts.tokenizer_of(settings, workdir), parts.task_of(settings)
    config = parts.model_config_of(settings, tokenizer)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    train_step = parts.train_step_of(settings, config, mesh)
    state = train_step.init(parts.first_params_of(settings, config, mesh, tokenizer))
    prompts = held_out_prompts(
        task, tokenizer, max_prompt_tokens=settings.rollout.max_prompt_tokens
    )
    rows = []
    for step in range(1, steps + 1):
        groups = sample(settings, workdir, state.params, PROMPTS, SAMPLES)
        rewards = np.array([_rewards(group, prompts, tokenizer, task) for group in groups])
        batches = Packer(settings.learner)(groups, advantages.grpo(rewards), last=True)
        old, accumulator = jax.device_get(state.params), train_step.zero_accumulator()
        for batch in batches:
            accumulator = train_step.accumulate(state.params, accumulator, batch, None, 0)
        state, _, _ = train_step.update(state, accumulator)
        for mode in MODES:
            found = pushed(settings, workdir, prompts[PROMPTS:], (old, state.params), mode)
            rows.append({"step": step, "mode": mode, "reward": float(rewards.mean())} | found)
            errors = np.array(rows[-1]["errors"])
            print(f"step {step} {mode}: {len(errors)} tokens, {errors.mean():.2e} mean", flush=True)
    return rows


def pushed(settings, workdir, prompts, versions, mode: str) -> dict[str, list[float]]:
    """Errors of the tokens that the engine samples after a push, and the distance of the two versions on them."""
    longest = settings.rollout.max_new_tokens
    sampling = parse_sampling({"max_new_tokens": longest, "ignore_eos": True})
    engine, done = parts.engine_of(settings, workdir, name="in_place"), queue.Queue()
    engine.start()

    def call(future):
        return future.result(ENGINE_TIMEOUT_SECS)

    def score(version):
        call(engine.update_weights(versions[version], str(version)))
        return [call(engine.score(row, temperature=1.0))[1].logprobs for row in rows]

    try:
        call(engine.update_weights(versions[0], "0"))
        num = min(2 * PROMPTS, len(prompts))
        for i in range(num):
            request = Request(str(i), prompts[i].tokens, sampling, reports=True)
            engine.submit(request, done.put)
        seen = 0
        while seen < 2 * num:  # two chunks of each, so that most tokens are still to come
            seen += len(done.get(timeout=ENGINE_TIMEOUT_SECS))
        call(engine.pause(mode))
        call(engine.update_weights(versions[1], "1"))
        call(engine.resume())
        ended = {}
        while len(ended) < num:
            for rid, outcome in done.get(timeout=ENGINE_TIMEOUT_SECS):
                if outcome.finish_reason is not None:
                    ended[rid] = outcome
        rows = [np.append(prompts[int(rid)].tokens, c.output_ids) for rid, c in ended.items()]
        new, old = score(1), score(0)
    finally:
        engine.close(timeout_secs=ENGINE_TIMEOUT_SECS)
    errors, apart = [], []
    for (rid, c), by_new, by_old in zip(ended.items(), new, old, strict=True):
        start, first = len(prompts[int(rid)].tokens) - 1, c.spans[-1].start
        assert [span.version for span in c.spans] == ["0", "1"], "the push was not in the middle"
        errors += np.abs(c.logprobs[first:] - by_new[start + first :]).tolist()
        apart += np.abs(by_new[start + first :] - by_old[start + first :]).tolist()
    return {"errors": errors, "apart": apart}


def table(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Mode → mean and largest error over all updates, and the versions' mean distance on the same tokens."""
    found = {}
    for mode in MODES:
        errors, apart = (
            np.concatenate([row[name] for row in rows if row["mode"] == mode])
            for name in ("errors", "apart")
        )
        found[mode] = {"tokens": len(errors), "mean": errors.mean(), "max": errors.max()}
        found[mode] |= {"p99": np.quantile(errors, 0.99), "versions_apart": apart.mean()}
    return {mode: {k: float(v) for k, v in row.items()} for mode, row in found.items()}


def _rewards(group, prompts, tokenizer, task) -> list[float]:
    reward, answer = reward_function(task.reward), prompts[group.prompt_index].answer
    texts = (tokenizer.decode(t.tokens[t.mask].tolist()) for t in group.trajectories)
    return [reward(text, answer) for text in texts]


if __name__ == "__main__":
    main()
