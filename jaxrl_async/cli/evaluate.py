"""`evaluate`: greedy accuracy and pass@k of a run's checkpoints on held-out prompts."""

import json
import pathlib
import sys

from jaxrl_async import parts, sealed
from jaxrl_async.cli.config import (
    UsageError,
    check_out,
    failing,
    load_config,
    parse_flags,
    refusing,
    settings_of,
)
from jaxrl_async.evaluation.evaluator import best_version, say_lost_best
from jaxrl_async.evaluation.score import EvaluationError
from jaxrl_async.metrics import coverage_of, failed_of, score_names, score_text
from jaxrl_async.preflight import machine
from jaxrl_async.rewards.pool import RewardError
from jaxrl_async.runtime import keys
from jaxrl_async.runtime.workdir import checkpoint_steps

USAGE = """Scores checkpoints on the task's test prompts: greedy accuracy, and pass@k at the run's temperature. The best
checkpoint was chosen during training, on the validation prompts (evaluate.num_validation). Prints a table and writes
evaluation.json into the workdir."""
CELL = len("0.500 (0.215–0.785)")  # columns of a score
TAKES = "config.task.changed"  # the one setting that is not the run's own


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        workdir=("", "directory of the run"),
        steps=("", "numbers, `last`, `best` by validation; default 0,best,last, those that exist"),
        **{TAKES: (False, "take the task as it is now, where it is not the run's")},
    )
    if not flags.workdir:
        raise UsageError("--workdir=DIR is needed")
    workdir = pathlib.Path(flags.workdir).absolute()
    say_lost_best(workdir)
    best, known = best_version(workdir), checkpoint_steps(workdir)
    names = ["0"] if 0 in known or not known else []  # A replay's workdir has the last alone.
    names += ["best"] if best in known and best not in (0, max(known)) else []
    default = ",".join([*names, "last"])
    if best is not None and best not in known and not flags.steps:
        print(f"the best version, {best}, has no checkpoint, and is left out", file=sys.stderr)
    steps = [_step(step, workdir) for step in (flags.steps or default).split(",")]
    config = load_config(str(workdir / "config.json"))
    check_out(workdir / "evaluation.json", "evaluation.json")
    config.task.changed |= flags[TAKES].value
    settings = keys.found(settings_of(config), workdir)
    with refusing(OSError, TypeError, ValueError, what=f"task {settings.task.name!r}: "):
        task = parts.task_of(settings)
        splits = parts.splits_of(settings, task)
    if missing := [step for step in steps if step is not None and step not in known]:
        raise UsageError(
            f"--steps={missing[0]}: no checkpoint of that step; {workdir} holds {', '.join(map(str, known)) or 'none'}"
        )
    with refusing(OSError, TypeError, ValueError):
        parts.check_task(settings, workdir, task, splits, keep=False)
        tasks = parts.evaluation_tasks(settings)
        parts.check_sets(settings, workdir, tasks, keep=False)
        tokenizer = parts.tokenizer_of(settings, workdir)
        sets = parts.evaluation_sets(settings, tokenizer, task, "test", tasks)
    # After the flags are known to be good: these load JAX.
    from jaxrl_async.learner.checkpoint import CheckpointError
    from jaxrl_async.tools import evaluate as evaluation

    with machine.errors_of("model.path: "):
        parts.check_context(settings)
    named = ", ".join("last" if step is None else str(step) for step in steps)
    on = [f"{found.name or 'the test split'}: {coverage_of(found.coverage)}" for found in sets]
    print(f"scoring {named} on {'; '.join(on)}", file=sys.stderr, flush=True)
    with failing(CheckpointError, EvaluationError, RewardError):
        rows = evaluation.evaluate(settings, workdir, steps, sets)
    text = json.dumps([sealed.sealed(row) for row in rows], indent=2)
    (workdir / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    last = max(row["step"] for row in rows)
    chosen = (
        f"best on the {'validation' if settings.evaluate.num_validation > 0 else 'test'} prompts"
    )
    for prefix, names in score_names(rows[0]).items():
        print(f"{prefix.removesuffix('/') or 'test split'}: {coverage_of(rows[0], prefix)}")
        columns = (f"{name.removeprefix(prefix):>{CELL}}" for name in names)
        print("  ".join([f"{'step':>10}", *columns]))
        for row in rows:
            cells = [f"{row['step']:>10}", *(f"{score_text(row, name):>{CELL}}" for name in names)]
            is_best = row["step"] == best and best != last and not prefix
            notes = (chosen if is_best else "", failed_of(row, prefix))
            print("  ".join([*cells, *filter(None, notes)]))
    return 0


def _step(word: str, workdir: pathlib.Path) -> int | None:
    if word == "last":
        return None
    if word == "best" and (best := best_version(workdir)) is not None:
        return best
    if not word.isdecimal():
        raise UsageError(
            f"--steps must be numbers, `last`, or `best` where evaluate.every_steps found one; got {word!r}"
        )
    return int(word)
