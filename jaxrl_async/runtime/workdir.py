"""The directory of a run: whether it holds one, its config.json, and the settings that a resumed run may change."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_collections
from etils import epath

from jaxrl_async import sealed
from jaxrl_async.config.build import complete, from_json
from jaxrl_async.config.fields import SettingsError, StartError
from jaxrl_async.config.settings import Model
from jaxrl_async.environments import ENVIRONMENTS
from jaxrl_async.names import importable
from jaxrl_async.rewards.weighted import with_paths
from jaxrl_async.tasks import TASKS

# Keys and blocks that a resumed run cannot change, and why. A change of another key holds from the resumed step on.
_PROMPTS = "the journal and the checkpoint count prompts of the old stream"
_MODEL = "the checkpoint holds the old model"
_MOMENTS = "the checkpoint holds the old optimizer's state"
_TURNS = (
    "turns of blocks, their optimizer's counts and a learner.schedule follow from the updates made"
)
FIXED = {
    "mode": "its outstanding prompts were admitted under the old mode's bound on staleness",
    "seed": "samples and delays are drawn from it",
    "task.rewards": "the journal holds groups that the old ones judged",
    "task": _PROMPTS,
    "tokenizer": _PROMPTS,
    "evaluate.num_validation": _PROMPTS,  # Its questions are in no other split.
    "rollout.max_prompt_tokens": _PROMPTS,  # Longer prompts are left out before they are counted.
    "rollout.group_size": "the journal holds groups of the old size",
    "learner.groups_per_step": "the journal holds steps of the old size",
    "learner.blocks": _TURNS,
    "learner.num_minibatches": _TURNS,  # of several blocks, or with a schedule
    "learner.optimizer": _MOMENTS,
    "model": _MODEL,
}
# Settings of the model that say its shape; with a model.path they are the shape of its files.
SHAPE = tuple(
    f.name
    for f in dataclasses.fields(Model)
    if f.name not in ("path", "dtype", "remat", "remat_policy", "lora")
)
# Keys within FIXED that a resumed run may change all the same.
FREE = ("model.remat", "model.remat_policy", "task.changed")
BEFORE = ".config.before.json"  # of a resumed run, while a start with another config may be refused
COMMITTED = "commit_success.txt"  # which orbax writes last into a checkpoint in a bucket
MISSING = object()  # the value of a key that a config does not have


class GoneError(RuntimeError):
    """The directory of a run that goes on was deleted, renamed or replaced; the message names it."""


def checkpoint_steps(workdir: pathlib.Path, directory: str | None = None) -> list[int]:
    """The steps with a complete checkpoint, ascending.

    Args:
      workdir: of the run. An incomplete checkpoint in it has a name that is no number.
      directory: checkpoint.directory, where an incomplete one has no COMMITTED; None for that of config.json.

    Raises:
      StartError: the bucket cannot be read.
    """
    directory = _bucket_of(workdir) if directory is None else directory
    if not directory:
        names = workdir.glob("checkpoints/*")
        return sorted(int(path.name) for path in names if path.name.isdigit())
    with reached(directory):
        if not (bucket := epath.Path(directory)).exists():
            return []
        found = [path for path in bucket.iterdir() if path.name.isdigit()]
        return sorted(int(path.name) for path in found if (path / COMMITTED).exists())


def _bucket_of(workdir: pathlib.Path) -> str:
    """checkpoint.directory of the config.json; "" where it is missing, of an earlier version or damaged."""
    try:
        return json.loads((workdir / "config.json").read_text("utf-8"))["checkpoint"]["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextlib.contextmanager
def reached(directory: str) -> Iterator[None]:
    """Raises StartError where a bucket cannot be read or written: the libraries of stores have errors of their own."""
    extra = "s3" if directory.startswith("s3://") else "gcs"
    try:
        yield
    except StartError:
        raise
    except ImportError as error:
        needs = f"`pip install jaxrl_async[{extra}]`"
        raise StartError(f"checkpoint.directory needs {needs}: {error}") from None
    except Exception as error:
        raise StartError(f"checkpoint.directory = {directory} is not reached: {error}") from error


def check(workdir: pathlib.Path, *, resume: bool, directory: str | None = None) -> None:
    """Refuses a directory in which a run cannot start or, with resume, cannot continue.

    Args:
      directory: as of `checkpoint_steps`.

    Raises:
      StartError: it holds a run already; or, with resume, no checkpoint; or the bucket cannot be read.
    """
    started, place = bool(checkpoint_steps(workdir, directory)), directory or workdir
    if started and not resume:
        _refuse_if_held(workdir)
        key = "checkpoint.directory" if directory else "--workdir"
        raise StartError(f"{place} holds a run: continue it with --resume, or name another {key}")
    if resume and not started:
        raise StartError(f"{place} has no checkpoint to resume from")


@contextlib.contextmanager
def lock(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the directory, which is made where it does not exist, for a run of all roles on this machine.

    It comes before anything is written there. The system ends the hold with the process. Where the file system has no
    locks, nothing is held.

    Raises:
      StartError: a run of another process has it, or it cannot be made or written.
    """
    with written(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            _flock(workdir, descriptor, fcntl.LOCK_EX)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def watched(workdir: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Yields a function that raises GoneError once the directory, or its config.json, is not there any more."""
    # The first file to go: a directory where roles still write is not removed.
    config = workdir / "config.json"
    descriptor, had_config = os.open(workdir, os.O_RDONLY), config.exists()

    def check() -> None:
        try:
            is_there = os.path.samestat(os.stat(workdir), os.fstat(descriptor))
            if had_config:
                config.stat()
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        except OSError:  # A network file system does not answer for a while.
            return
        if not is_there:
            raise GoneError(
                f"--workdir={workdir} was deleted, renamed or replaced while its run went on. One that was renamed "
                "resumes under its new name"
            )

    try:
        yield check
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written(workdir: pathlib.Path) -> Iterator[None]:
    """Raises StartError where the directory cannot be made or written."""
    try:
        yield
    except OSError as error:
        raise StartError(f"--workdir={workdir} cannot be written: {error}") from None


def is_held(workdir: pathlib.Path) -> bool:
    """Whether a run of another process has the directory."""
    try:
        _refuse_if_held(workdir)
    except StartError:
        return True
    return False


def _refuse_if_held(workdir: pathlib.Path) -> None:
    """Raises StartError where a run of another process has the directory; writes nothing."""
    with contextlib.suppress(OSError):
        descriptor = os.open(workdir / ".lock", os.O_RDONLY)
        try:
            _flock(workdir, descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)


def _flock(workdir: pathlib.Path, descriptor: int, how: int) -> None:
    """Takes the lock of a file; raises StartError where another run has it, and OSError where there are no locks."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace")
        raise StartError(
            f"{workdir} belongs to a run that goes on (process {holder or 'unknown'}): end it, or name another "
            "--workdir"
        ) from None


def nothing_to_do(workdir: pathlib.Path, num_steps: int, directory: str | None = None) -> str:
    """A sentence if a resumed run has reached its last step already, else ""; `directory` as of `checkpoint_steps`."""
    last = max(checkpoint_steps(workdir, directory), default=-1)
    if last < num_steps:
        return ""
    return f"nothing to do: the last checkpoint is of step {last} (learner.num_steps = {num_steps})"


def differences(
    workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> dict[str, tuple[Any, Any]]:
    """Key → (value in the workdir's config.json, value in a config) where they differ, by key; {} without config.json.

    A workdir without one has that in checkpoint.directory, of a run on another machine. With a model.path nobody reads
    the shape that a config states, and it is left out.
    Old workdirs are read as `config.build.from_json` reads them; MISSING stands for a key that one of them lacks.

    Raises:
      StartError: the workdir's config.json cannot be read.
    """
    if not (path := _config_of(workdir, config)).is_file():
        return {}
    old, new = dict(_flat(_read(path))), dict(_flat(_values(config)))
    keys = old.keys() | new.keys()
    keys -= {f"model.{name}" for name in SHAPE} if config.model.path else set()
    pairs = {key: (old.get(key, MISSING), new.get(key, MISSING)) for key in keys}
    return {key: pairs[key] for key in sorted(pairs) if pairs[key][0] != pairs[key][1]}


def _config_of(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> pathlib.Path:
    path, directory = workdir / "config.json", config.checkpoint.get("directory", "")
    return path if path.is_file() or not directory else epath.Path(directory) / "config.json"


def changes(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> list[str]:
    """A sentence for each setting of the workdir's run that a config changes.

    Raises:
      StartError: a key of FIXED, with the reason; or the workdir's config.json cannot be read.
    """
    said, path = [], _config_of(workdir, config)
    free = FREE if counts_updates(config.learner) else (*FREE, "learner.num_minibatches")
    for key, values in differences(workdir, config).items():
        words = " → ".join("nothing" if v is MISSING else repr(v) for v in values)
        said.append(f"config differs from {path}: {key} {words}")
        if key not in free and (reason := _reason(key)) and not _splits_alike(key, *values):
            raise StartError(
                f"{said[-1]}: a resumed run cannot change it, {reason}; leave --config away, or name another --workdir"
            )
    return said


def counts_updates(learner: ml_collections.ConfigDict) -> bool:
    """Whether an update depends on the number of those before it: with several blocks, or a learner.schedule."""
    return learner.get("blocks", 1) > 1 or learner.get("schedule", "constant") != "constant"


def write_config(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Writes config.json, from which every role starts; makes the directory.

    A task that was registered by name is written as "module:attribute", which other processes can import. A
    different config.json with which the run reached its last checkpoint is kept as config.until-step-N.json; see also
    `refusable`.

    Raises:
      StartError: the directory cannot be written, or the config.json that is there cannot be read.
    """
    path, values = workdir / "config.json", _values(config)
    directory = config.checkpoint.get("directory", "")
    steps = checkpoint_steps(workdir, directory) if path.exists() else []
    with written(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / BEFORE).unlink(missing_ok=True)
        if steps and differences(workdir, config):
            shutil.copy(path, workdir / BEFORE)
            kept = workdir / f"config.until-step-{steps[-1]}.json"
            if not kept.exists():  # Else no checkpoint was made with the config.json that is there.
                shutil.copy(path, kept)
        sealed.write(path, values)


@contextlib.contextmanager
def refusable(workdir: pathlib.Path) -> Iterator[None]:
    """After `write_config`: where a start fails before it trains a step, the config.json from before comes back."""
    before, rows = workdir / BEFORE, workdir / "metrics.jsonl"
    size = rows.stat().st_size if rows.exists() else 0
    try:
        yield
    except Exception:
        if before.exists() and size == (rows.stat().st_size if rows.exists() else 0):
            before.replace(workdir / "config.json")
        raise
    finally:
        before.unlink(missing_ok=True)


def resume_command(workdir: pathlib.Path) -> str:
    """The shell command that resumes a run."""
    return f"python -m jaxrl_async train --resume {shlex.quote(f'--workdir={workdir}')}"


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return from_json(sealed.read(path, remedy=sealed.CONFIG_REMEDY), str(path))[0]
    except (sealed.DamagedError, SettingsError) as error:
        raise StartError(str(error)) from None


def _values(config: ml_collections.ConfigDict) -> dict[str, Any]:
    config = config.copy_and_resolve_references()
    complete(config)
    with config.unlocked():
        config.task.name = importable(config.task.name, TASKS)
        config.task.rewards = with_paths(config.task.rewards.to_dict())
        config.environment.name = importable(config.environment.name, ENVIRONMENTS)
    return json.loads(config.to_json())


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _splits_alike(key: str, old: Any, new: Any) -> bool:
    """Whether both values of evaluate.num_validation take no question from another split."""
    numbers = [0 if value is MISSING else value for value in (old, new)]
    return key == "evaluate.num_validation" and max(numbers) <= 0


def _reason(key: str) -> str:
    reasons = (why for name, why in FIXED.items() if f"{key}.".startswith(f"{name}."))
    return next(reasons, "")
