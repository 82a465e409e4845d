"""`replay`: runs a learner again from its workdir, on the same groups in the same order."""

import os
import pathlib
import sys

from jaxrl_async.cli.config import (
    UsageError,
    failing,
    load_config,
    overrides,
    parse_flags,
    refusing,
    settings_of,
)
from jaxrl_async.runtime.workdir import counts_updates

USAGE = """Trains again on a run's groups, from its config.json, a checkpoint and its journal, without servers.
Compares every checkpoint with the run's, bit for bit. With --config.loss.… (or another learner setting) it trains
another objective on the identical data, and compares nothing. Exit code 1 if bits differ."""


def main(argv: list[str]) -> int:
    workdirs = [word.partition("=")[2] for word in argv if word.startswith("--workdir=")]
    if not workdirs and not {"--help", "-h"} & set(argv):
        raise UsageError("--workdir=DIR is needed")
    free = ("config.task.changed", "noconfig.task.changed")
    changed = [word for word in overrides(argv) if not word.lstrip("-").startswith(free)]
    config = [f"--config={workdirs[-1]}/config.json"] if workdirs else []
    flags = parse_flags(
        USAGE,
        [*config, *argv],
        config=bool(config),
        workdir=("", "directory of the run"),
        first=(0, "checkpoint to start from"),
        until=(-1, "last step; default the last one that was committed"),
        out=("", "directory for metrics and the last checkpoint; default WORKDIR/replay"),
    )
    if flags.first < 0 or flags.until < -1:
        bounds = "--first must be ≥ 0, and --until too, or -1 for the last step"
        raise UsageError(f"{bounds}, got {flags.first} and {flags.until}")
    workdir = pathlib.Path(flags.workdir).absolute()
    out = pathlib.Path(flags.out).absolute() if flags.out else workdir / "replay"
    settings = settings_of(flags.config)
    if changed:
        own = load_config(f"{workdir}/config.json")
        own.task.changed = flags.config.task.changed
        if settings == settings_of(own):  # The words have the run's own values.
            changed = []
    if settings.learner.num_processes > 1:
        raise UsageError("replay runs one process: --config.learner.num_processes=1")
    turns = ("config.learner.blocks", "config.learner.num_minibatches")
    is_counted = counts_updates(flags.config.learner)
    if flags.first and is_counted and any(w.lstrip("-").startswith(turns) for w in changed):
        raise UsageError(
            f"another learner.blocks or learner.num_minibatches starts from checkpoint 0, got --first={flags.first}: "
            "whose turn it is, Adam's count, and a learner.schedule follow from all updates made"
        )
    with refusing(OSError, what="--out: "):
        is_full = out.exists() and any(out.iterdir())
    if is_full:
        raise UsageError(f"{out} is not empty: name another --out")
    learner = settings.learner
    if (devices := learner.num_devices) > 1:  # Of a CPU, as in the run.
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(devices))
    # These load JAX, so the flags are checked first.
    from jaxrl_async.learner.checkpoint import CheckpointError
    from jaxrl_async.queue.journal import JournalError
    from jaxrl_async.tools.replay import ReplayError, replay

    until = None if flags.until < 0 else flags.until
    print(f"replaying {workdir}; rows of steps go to {out / 'metrics.jsonl'}", file=sys.stderr)
    with failing(ReplayError, JournalError, CheckpointError):
        comparisons = replay(
            settings, workdir, out=out, first=flags.first, until=until, changed=bool(changed)
        )
    flags.config.checkpoint.directory = ""  # The replay's own are in its directory.
    (out / "config.json").write_text(flags.config.to_json(indent=2), encoding="utf-8")
    print(f"replayed into {out}")
    if changed:
        print(f"not compared: {' '.join(changed)} differs from the run")
        return 0
    for found in comparisons:
        different = f"DIFFERENT: {found.where} by up to {found.max_difference:.3g}"
        print(f"step {found.step}: {'equal, bit for bit' if found.equal else different}")
    return 0 if all(found.equal for found in comparisons) else 1
