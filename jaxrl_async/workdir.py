"""The directory of a run: whether it holds one, and the config it starts with."""

import pathlib

import ml_collections

from jaxrl_async.rewards import importable
from jaxrl_async.tasks import TASKS


def checkpoint_steps(workdir: pathlib.Path) -> list[int]:
    """The steps whose checkpoints are there, ascending; one that was not written to its end has another name."""
    return sorted(int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdigit())


def check(workdir: pathlib.Path, *, resume: bool) -> None:
    """Raises ValueError where a run can neither begin nor, with resume, go on."""
    started = bool(checkpoint_steps(workdir))
    if started and not resume:
        raise ValueError(f"{workdir} holds a run: go on with --resume, or name another --workdir")
    if resume and not started:
        raise ValueError(f"{workdir} has no checkpoint to resume from")


def write_config(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Writes config.json, from which every role starts, into a directory that is made for it.

    A task that was registered by name is written as "module:attribute", which other processes can import.
    """
    config = config.copy_and_resolve_references()
    config.task.name = importable(config.task.name, TASKS)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(config.to_json(indent=2), encoding="utf-8")
