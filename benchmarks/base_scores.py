"""What a pretrained model scores on tasks before any training: which of them leave reinforcement learning something.

    python benchmarks/base_scores.py [--config=configs/smollm2.py] [--gsm8k=DIR] [--prompts=64] [--samples=8]

For each candidate of TASKS: greedy accuracy, and pass@1 and pass@n at temperature 1, on held-out prompts, each with
its interval. The embedded engine answers, as in a run. A task suits where pass@n is far above pass@1: right answers
are there, and are rare. Results are printed and written to benchmarks/results/base_scores.json, or to --out; --smoke
is the config's tiny model on few prompts.
"""

import argparse
import dataclasses
import pathlib
import tempfile
import time
from typing import Any

import jax
import record

from jaxrl_async import parts
from jaxrl_async.cli.config import parse_flags, settings_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.models import sharding
from jaxrl_async.tasks import gsm8k
from jaxrl_async.tools.evaluate import ENGINE_TIMEOUT_SECS, score_engine

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "base_scores.json"
SUMS = dict(num_test=256, seed=0)
# name → the settings task.name and task.args, and the completion's bound in tokens
TASKS = {
    "sums to 9, as signs": ("word_sums", dict(SUMS, max_number=9, num_test=64, signs=True), 24),
    "sums to 9": ("word_sums", dict(SUMS, max_number=9, num_test=64), 24),
    "sums to 20, as signs": ("word_sums", dict(SUMS, max_number=20, signs=True), 24),
    "sums to 20": ("word_sums", dict(SUMS, max_number=20), 24),
    "sums to 20, nothing but the number": ("word_sums", dict(SUMS, max_number=20, reward="exact"), 24),
    "sums to 99": ("word_sums", dict(SUMS, max_number=99), 24),
    "GSM8K": ("gsm8k", dict(template=gsm8k.TEMPLATE), 192),
}  # fmt: skip
MAX_PROMPT_TOKENS = 192


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "smollm2.py"))
    parser.add_argument("--model", help="directory of the checkpoint, in place of the config's")
    parser.add_argument(
        "--gsm8k", help="directory of train.jsonl and test.jsonl; without it no GSM8K"
    )
    parser.add_argument("--only", default="", help="tasks whose names contain this")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    if args.smoke:
        args.config, args.prompts, args.samples = f"{args.config}:smoke", 2, 2
    flags = [f"--config={args.config}"]
    if args.model:
        flags += [f"--config.model.path={args.model}", f"--config.tokenizer.path={args.model}"]
    base = settings_of(parse_flags("", flags, config=True).config)
    found = {}
    with tempfile.TemporaryDirectory() as workdir:
        for name, (task, task_args, max_new_tokens) in TASKS.items():
            if args.only not in name:
                continue
            if task == "gsm8k":
                if not args.gsm8k:
                    continue
                task_args = dict(task_args, directory=args.gsm8k)
            settings = _settings(base, task, task_args, max_new_tokens, args)
            found[name] = _scores(settings, pathlib.Path(workdir))
            print(f"{name:36} {_line(found[name])}", flush=True)
    result = {
        "model": base.model.path or "random",
        "prompts": args.prompts,
        "tasks": found,
    }
    record.write(args.out, result, seeds=[base.seed], raw=["tasks"])


def _settings(
    base: Settings, task: str, task_args: dict[str, Any], max_new_tokens: int, args
) -> Settings:
    replace = dataclasses.replace
    return replace(
        base,
        task=replace(base.task, name=task, args=task_args),
        rollout=replace(
            base.rollout, max_prompt_tokens=MAX_PROMPT_TOKENS, max_new_tokens=max_new_tokens
        ),
        server=replace(base.server, max_total_tokens=MAX_PROMPT_TOKENS + max_new_tokens),
        evaluate=replace(base.evaluate, num_prompts=args.prompts, num_samples=args.samples),
    )


def _scores(settings: Settings, workdir: pathlib.Path) -> dict[str, float]:
    """`scores.row` of the config's first weights, with seconds and the prompts' mean length."""
    tokenizer = parts.tokenizer_of(settings, workdir)
    task, tasks = parts.task_of(settings), parts.evaluation_tasks(settings)
    sets = parts.evaluation_sets(settings, tokenizer, task, "test", tasks)
    config = parts.model_config_of(settings, tokenizer)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    engine = parts.engine_of(settings, workdir, name="base_scores")
    engine.start()
    try:
        params = parts.first_params_of(settings, config, mesh, tokenizer)
        engine.update_weights(params, "0").result(ENGINE_TIMEOUT_SECS)
        started = time.perf_counter()
        temperature = settings.rollout.temperature
        row = score_engine(engine, sets, settings=settings.evaluate, temperature=temperature)
        secs = time.perf_counter() - started
    finally:
        engine.close(timeout_secs=ENGINE_TIMEOUT_SECS)
    lengths = [len(prompt.tokens) for prompt in sets[0].prompts]
    return row | {"secs": secs, "prompt_tokens": sum(lengths) / len(lengths)}


def _line(row: dict[str, float]) -> str:
    kinds = [name for name in row if f"{name}_low" in row]
    scores = (f"{k} {row[k]:.3f} ({row[f'{k}_low']:.3f}-{row[f'{k}_high']:.3f})" for k in kinds)
    return f"{'  '.join(scores)}  {row['prompt_tokens']:.0f} prompt tokens, {row['secs']:.0f} s"


if __name__ == "__main__":
    main()
