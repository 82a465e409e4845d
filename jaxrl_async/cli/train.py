"""`train`: every role on this machine, or one --role of a run that spans hosts."""

import logging
import os
import pathlib
import signal
import sys
import threading
import time

from jaxrl_async import roles, supervisor
from jaxrl_async.cli.config import UsageError, parse_flags, settings_of
from jaxrl_async.settings import Settings, nearest

ROLES = ("all", "queue", "learner", "rollout", "server")
PARENT_POLL_SECS = 1.0

USAGE = """Trains a policy. With --role=all (the default) starts queue, servers, rollout workers and learner on this
machine and supervises them; with another role runs that role alone, as one host of a pod would."""


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        config=True,
        workdir=("", "directory of the run; default runs/CONFIG-TIME"),
        role=("all", " | ".join(ROLES)),
        index=(0, "which server, rollout worker or learner process of this run"),
        coordinator=("", "HOST:PORT of learner process 0, where learner.num_processes > 1"),
        resume=(False, "go on from the last checkpoint of --workdir"),
    )
    if flags.role not in ROLES:
        raise UsageError(f"unknown role {flags.role!r}{nearest(flags.role, ROLES)}")
    settings = settings_of(flags.config)
    roles.check_access(settings, flags.role, flags.index)  # Before any role starts.
    name = f"{settings.task.name.split(':')[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
    workdir = pathlib.Path(flags.workdir or f"runs/{name}").absolute()
    supervised = "JAXRL_PARENT" in os.environ
    if flags.role in ("all", "learner") and not supervised:
        _check_workdir(workdir, resume=flags.resume)
        workdir.mkdir(parents=True, exist_ok=True)
        if flags.index == 0:
            (workdir / "config.json").write_text(flags.config.to_json(indent=2), encoding="utf-8")
    if flags.role == "all":
        return _all(settings, workdir, resume=flags.resume)
    _check_addresses(settings, flags.role, flags.index)
    workdir.mkdir(parents=True, exist_ok=True)
    return _one(
        settings,
        flags.role,
        flags.index,
        workdir,
        resume=flags.resume,
        coordinator=flags.coordinator,
    )


def _all(settings: Settings, workdir: pathlib.Path, *, resume: bool) -> int:
    try:
        roles.prepare(settings, workdir)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"task {settings.task.name!r}: {error}") from None
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        supervisor.run(settings, workdir=workdir, resume=resume)
    except KeyboardInterrupt:
        print(f"stopped; go on with --resume --workdir={workdir}", file=sys.stderr)
        return 1
    except (supervisor.RoleDiedError, supervisor.StalledError, ValueError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    print(f"done: {workdir}")
    return 0


def _one(
    settings: Settings,
    role: str,
    index: int,
    workdir: pathlib.Path,
    *,
    resume: bool,
    coordinator: str,
) -> int:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for chatty in ("absl", "jax", "tensorboardX"):  # Every file touched, every backend lacked …
        logging.getLogger(chatty).setLevel(logging.WARNING)
    cpus = getattr(settings.cpus, role)
    if cpus:  # Before JAX counts the cores for its threads.
        os.sched_setaffinity(0, cpus)
    signal.signal(signal.SIGTERM, _interrupt)
    if "JAXRL_PARENT" in os.environ:
        parent = int(os.environ["JAXRL_PARENT"])
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    try:
        roles.run(
            role, settings, index=index, workdir=workdir, resume=resume, coordinator=coordinator
        )
    except KeyboardInterrupt:
        return 1
    except Exception:
        logging.exception("role %s failed", role)
        return 1
    return 0


def _check_workdir(workdir: pathlib.Path, *, resume: bool) -> None:
    checkpoints = workdir / "checkpoints"
    started = checkpoints.is_dir() and any(checkpoints.iterdir())
    if started and not resume:
        raise UsageError(f"{workdir} holds a run: go on with --resume, or name another --workdir")
    if resume and not started:
        raise UsageError(f"{workdir} has no checkpoint to resume from")


def _check_addresses(settings: Settings, role: str, index: int) -> None:
    """A role that runs alone must be told where the others are."""
    if not settings.queue.address and role != "server":
        raise UsageError(f"--role={role} needs --config.queue.address=HOST:PORT")
    if len(settings.server.addresses) < {"server": index + 1, "learner": 1}.get(role, 0):
        raise UsageError(
            f"--role={role} --index={index} needs its entry of config.server.addresses, which has "
            f"{len(settings.server.addresses)}"
        )
    if role == "learner" and not 0 <= index < settings.learner.num_processes:
        raise UsageError(
            f"--role=learner --index={index} must be in [0, config.learner.num_processes = "
            f"{settings.learner.num_processes})"
        )


def _interrupt(signum, frame):
    raise KeyboardInterrupt


def _end_with(parent: int) -> None:
    """Ends this process when its supervisor is gone, so that none is left behind."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECS)
    logging.error("the supervisor (pid %d) is gone", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(supervisor.STOP_SECS)
    os._exit(1)
