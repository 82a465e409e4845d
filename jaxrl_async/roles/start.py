"""Starting a run or one of its roles: the one path of `jaxrl_async.run` and of the verb `train`."""

import asyncio
import pathlib
import time
from typing import Any

import ml_collections
from etils import epath

from jaxrl_async import parts
from jaxrl_async.config.checks import check_new, warnings
from jaxrl_async.config.settings import Settings
from jaxrl_async.preflight import machine
from jaxrl_async.queue import journal
from jaxrl_async.runtime import libraries, monitoring, supervisor
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.runtime.workdir import SHAPE
from jaxrl_async.servers.descriptors import raise_open_file_limit

locked = workdirs.lock  # until the end of a run of all roles on this machine


def default_workdir(settings: Settings) -> pathlib.Path:
    """runs/TASK-TIME, where TASK is the task's name or, for "module:attribute", its module."""
    task = settings.task.name.partition(":")[0]
    return pathlib.Path(f"runs/{task}-{time.strftime('%Y%m%d-%H%M%S')}")


def check_workdir(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, *, resume: bool
) -> list[str]:
    """The changes of a config to the run in a workdir, a sentence for each key; writes nothing.

    Raises:
      StartError: the workdir holds a run; with resume, it holds none, or the run cannot take a change.
    """
    workdirs.check(workdir, resume=resume, directory=config.checkpoint.directory)
    return workdirs.changes(workdir, config) if resume else []


def begin(
    config: ml_collections.ConfigDict,
    settings: Settings,
    workdir: pathlib.Path,
    *,
    resume: bool,
    fallback: bool = False,
    process: int = 0,
) -> bool:
    """Checks the workdir, prints the changes to a resumed run, and writes config.json and the libraries' versions.

    Args:
      config: written to the workdir and the bucket, with the shape of the model at model.path.
      settings: the checked settings of the config.
      workdir: made where it does not exist.
      resume: continue the run in the workdir.
      fallback: as of `learner.run`; the last checkpoint may be damaged, and is not the end.
      process: index of the learner process; only process 0 prints and writes.

    Returns:
      Whether there is anything to do; False, with the reason printed, where the last step is done.

    Raises:
      StartError: as `check_workdir`; or the workdir cannot be written, or model.path not be read, or its context
        length is exceeded; or another run goes on in checkpoint.directory.
      SettingsError: as `check_new`.
    """
    changes = check_workdir(config, workdir, resume=resume)
    if not resume:
        check_new(settings)
        with machine.errors_of("model.path: "):
            parts.check_context(settings)
    last, directory = settings.learner.num_steps, settings.checkpoint.directory
    reason = workdirs.nothing_to_do(workdir, last, directory) if resume else ""
    if reason and not fallback:
        print(reason)
        return False
    if process == 0:
        changed = filter(None, (*warnings(settings), libraries.changes(workdir)))
        for line in [*changes, *(f"warning: {text}" for text in changed)]:
            print(line, flush=True)
        if directory:
            with workdirs.reached(directory):
                from jaxrl_async.learner.lease import Lease

                Lease(directory, workdir).take()
        workdirs.write_config(workdir, _with_shape(config, settings))
        if directory:
            with workdirs.reached(directory):
                written = (workdir / "config.json").read_text()
                (epath.Path(directory) / "config.json").write_text(written)
        libraries.record(workdir, max(workdirs.checkpoint_steps(workdir), default=0))
    return True


def _with_shape(config: ml_collections.ConfigDict, settings: Settings) -> ml_collections.ConfigDict:
    """A config with the shape that the files at model.path have, whatever it states; without a path, the config."""
    if not settings.model.path:
        return config
    with machine.errors_of("model.path: "):
        shape = vars(parts.model_config_of(settings, None))
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.model.update({name: shape[name] for name in SHAPE})
    return config


def run(settings: Settings, *, workdir: pathlib.Path, resume: bool, **how: Any) -> bool:
    """Runs every role on this machine, each a supervised process, until the run is done. `begin` comes first.

    A config that a resumed run began with is taken back where it fails before it trains a step.

    Arguments and result as of `supervisor.run`.

    Raises:
      StartError: the task, the tokenizer or the model cannot be used; nothing was started.
      RoleDiedError, StalledError: the run failed.
      ValueError: the machine has fewer devices than the roles need; or the workdir is not copied to its bucket.
    """
    with workdirs.refusable(workdir):
        machine.prepare(settings, workdir, resume=resume)
        how["record_bytes"] = parts.record_of(settings).token_bytes
        try:
            done = supervisor.run(settings, workdir=workdir, resume=resume, **how)
        finally:
            journal.settle(settings.journal.path or workdir / "journal.sqlite")
        return done and finish(settings, workdir=workdir, step=settings.learner.num_steps)


def finish(settings: Settings, *, workdir: pathlib.Path, step: int | None = None, **_: Any) -> bool:
    """Brings the workdir of a finished run to its bucket, or from there; `step` None: of its last checkpoint. True."""
    if directory := settings.checkpoint.directory:
        from jaxrl_async.runtime import archive

        step = step or workdirs.checkpoint_steps(workdir, directory)[-1]
        if said := archive.sync(workdir, directory, step):
            print(said, flush=True)
    return True


def run_role(
    role: str,
    settings: Settings,
    *,
    index: int,
    workdir: pathlib.Path,
    coordinator: str = "",
    **how: Any,
) -> bool:
    """Runs one role until it is done (the learner) or interrupted (the others).

    The soft limit of open files is raised first. A role's module is imported when the role starts, so that queue and
    rollout workers load no JAX.

    Args:
      role: "queue" | "server" | "rollout" | "rewards" | "learner", or "one" for all but "rewards" in this process.
      index: of the server, rollout worker, reward service or learner process.
      settings, workdir, coordinator, **how: as of `learner.run`.

    Returns:
      Whether the run is done; False for a learner that stopped early.
    """
    raise_open_file_limit()
    monitoring.serve(settings, workdir, role, index)
    match role:
        case "queue":
            from jaxrl_async.roles import queue

            asyncio.run(queue.run(settings, workdir))
        case "server":
            from jaxrl_async.roles import server

            server.run(settings, workdir, index)
        case "rollout":
            from jaxrl_async.roles import rollout

            asyncio.run(rollout.run(settings, workdir, index))
        case "rewards":
            from jaxrl_async.roles import rewards

            asyncio.run(rewards.run(settings, index))
        case "one":
            from jaxrl_async.roles import one

            return one.run(settings, workdir, **how)
        case "learner":
            from jaxrl_async.roles import learner

            return learner.run(settings, workdir, process=index, coordinator=coordinator, **how)
    return True
