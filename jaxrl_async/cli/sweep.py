"""`sweep`: prints, runs, submits and gathers the points of a sweep."""

import contextlib
import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import ml_collections

from jaxrl_async.cli.config import (
    REFUSALS,
    UsageError,
    config_of_point,
    load_sweep,
    parse_flags,
    parted,
    refusing,
)
from jaxrl_async.names import nearest
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.sweeps import driver, page, submit

PROGRAM = (sys.executable, "-m", "jaxrl_async")
CLUSTERS = ("slurm", "jobset")
ACTIONS = ("run", "submit", "gather", "point")

USAGE = """Prints, runs, submits and gathers the points of a sweep.

    python -m jaxrl_async sweep --sweep=sweeps/seeds                            # prints one command per point
    python -m jaxrl_async sweep --sweep=sweeps/seeds --dir=runs/seeds --run --jobs=2
    python -m jaxrl_async sweep --sweep=sweeps/seeds --dir=runs/seeds --gather  # DIR/index.html, at any time
    python -m jaxrl_async sweep --sweep=sweeps/seeds --dir=runs/seeds --submit=slurm --sbatch='--partition=gpu'

The printed commands are those that run: `train`, then `evaluate`, in DIR/NAME, with the log DIR/NAME.log. A line that
begins with "# finished: " does not run again. The same command skips finished points, resumes interrupted ones and
retries failed ones. Drivers on several hosts may share a DIR. With --submit a task is one whole run, all its roles, on
one node; launch/slurm.sbatch and `pod` start a run on several nodes.

Exit codes: 0 done, 1 a point failed or the sweep was interrupted, 2 bad usage."""


def main(argv: list[str], program: tuple[str, ...] = PROGRAM) -> int:
    """Runs the verb, with the words before `train` and `evaluate`; returns the exit code."""
    try:
        with _interrupts():
            return _main(argv, program)
    except REFUSALS as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sweep: stopped; the same command resumes it", file=sys.stderr)
        return 1


def _main(argv: list[str], program: tuple[str, ...]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        sweep=("", "FILE[:ARG] with get_sweep(arg)"),
        dir=("", "directory of the sweep; default runs/NAME of the sweep's file"),
        run=(False, "run the missing points here, then gather"),
        jobs=(0, "points at a time, which share this machine's devices; default 1 with --run, all with --submit"),
        point=(-1, "run the point with this index alone"),
        submit=("", " | ".join(CLUSTERS)),
        sbatch=("", "further words for sbatch"),
        image=("", "container image, for --submit=jobset"),
        claim=("", "PersistentVolumeClaim that is mounted at --dir, for --submit=jobset"),
        gather=(False, "write DIR/index.html"),
        dry_run=(False, "print only"),
    )  # fmt: skip
    if not flags.sweep:
        raise UsageError("--sweep=FILE[:ARG] is needed")
    actions = [name for name in ACTIONS if flags[name].value != flags[name].default]
    if len(actions) > 1:
        raise UsageError(f"--{actions[0]} and --{actions[1]} are two actions: choose one")
    if flags.submit and flags.submit not in CLUSTERS:
        raise UsageError(f"unknown --submit={flags.submit}{nearest(flags.submit, CLUSTERS)}")
    if flags.jobs < 0:
        raise UsageError(f"--jobs must be ≥ 1, got {flags.jobs}")
    sweep = load_sweep(flags.sweep)
    stem = pathlib.Path(parted(flags.sweep)[0]).stem
    directory = pathlib.Path(flags.dir or f"runs/{stem}").absolute()
    configs = [config_of_point(sweep, point) for point in sweep.points]
    _check_places({point.name: c for point, c in zip(sweep.points, configs, strict=True)})
    jobs = [
        driver.Job(
            name=point.name,
            directory=directory,
            num_steps=config.learner.num_steps,
            program=program,
            words=(f"--config={sweep.config}", *point.words),
        )
        for point, config in zip(sweep.points, configs, strict=True)
    ]
    if not flags.submit and (not actions or flags.dry_run):
        for job in jobs:
            print(f"# finished: {job.shell}" if job.scored() else job.shell)
        return 0
    for job, config in zip(jobs, configs, strict=True):
        _check_workdir(job, config)
    if flags.submit:
        return _submit(flags, jobs, directory, stem)
    if flags.gather:
        print(page.write_page(sweep, jobs, directory))
        return 0
    if flags.point == -1:
        code = _run(jobs, flags.jobs or 1)
        print(page.write_page(sweep, jobs, directory))
        return code
    if not 0 <= flags.point < len(jobs):
        raise UsageError(f"--point must be in [0, {len(jobs)}), got {flags.point}")
    return _run(jobs[flags.point : flags.point + 1], 1)


def _run(jobs: list[driver.Job], at_once: int) -> int:
    ends = driver.run(jobs, at_once=at_once, say=lambda line: print(line, flush=True))
    failed = [name for name, how in ends.items() if how.startswith("failed: ")]
    for name in failed:
        print(f"sweep: {name} {ends[name]}", file=sys.stderr)
    return 1 if failed else 0


def _submit(flags, jobs: list[driver.Job], directory: pathlib.Path, stem: str) -> int:
    name, verb = f"sweep-{stem}", ("sweep", f"--sweep={flags.sweep}", f"--dir={directory}")
    if flags.submit == "jobset":
        for flag in ("image", "claim"):
            if not flags[flag].value:
                raise UsageError(f"--submit=jobset needs --{flag}")
        # Paths as they were given: the image has its own.
        text = submit.jobset_yaml(
            ("python", "-m", "jaxrl_async", *verb),
            name=name,
            directory=str(directory),
            num_points=len(jobs),
            at_once=flags.jobs,
            image=flags.image,
            claim=flags.claim,
        )
        path, then = directory / "jobset.yaml", None
    else:
        with refusing(ValueError):
            text = submit.slurm_script(
                (*PROGRAM, *verb),
                name=name,
                directory=str(directory),
                cwd=str(pathlib.Path.cwd()),
                indexes=[i for i, job in enumerate(jobs) if not job.scored()],
                at_once=flags.jobs,
            )
        path = directory / "sweep.sbatch"
        with refusing(ValueError, what="--sbatch: "):
            then = ["sbatch", *shlex.split(flags.sbatch), str(path)]
    if flags.dry_run:
        print(text, end="")
        if then:
            if done := [job.name for job in jobs if job.scored()]:
                print(f"# finished, not in the array: {', '.join(done)}")
            print(shlex.join(then))
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(shlex.join(then or ["kubectl", "apply", f"--filename={path}"]), flush=True)
    if then is None:
        return 0
    try:
        return subprocess.run(then, timeout=60).returncode
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 1


def _check_places(configs: dict[str, ml_collections.ConfigDict]) -> None:
    """Raises UsageError where two points, by their names, would write to one place beside their workdirs."""
    first: dict[tuple[str, str], str] = {}
    for name, config in configs.items():
        places = {
            "checkpoint.directory": config.checkpoint.directory,
            "journal.path": config.journal.path,
        }
        for key, place in places.items():
            if place and (other := first.setdefault((key, place), name)) != name:
                raise UsageError(
                    f"points {other!r} and {name!r} have the same config.{key}, {place!r}: give each its own"
                )


def _check_workdir(job: driver.Job, config: ml_collections.ConfigDict) -> None:
    """Raises UsageError where DIR/NAME holds a run of another config, as of a sweep that was changed since."""
    try:
        found = workdirs.differences(job.workdir, config)
    except ValueError as error:
        raise UsageError(f"{error}; or name another --dir") from None
    if found:
        key, (theirs, ours) = next(iter(found.items()))
        more = f" (and {len(found) - 1} more keys differ)" if len(found) > 1 else ""
        raise UsageError(
            f"{job.workdir} holds another run: its config.{key} is {theirs!r}, this point's is {ours!r}{more}. "
            "Name another --dir"
        )


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt; a shell's background job would ignore SIGINT."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
