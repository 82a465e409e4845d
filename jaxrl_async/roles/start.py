"""Starting a run or one of its roles: the one path of `jaxrl_async.run` and of the verb `train`."""

import asyncio
import contextlib
import pathlib
import time
import urllib.parse
from collections.abc import Callable, Iterator

import ml_collections

from jaxrl_async import security
from jaxrl_async.config.checks import check_waits, queue_access_of
from jaxrl_async.config.settings import Settings, SettingsError
from jaxrl_async.roles import parts
from jaxrl_async.rollout.failures import code_error
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.servers import files
from jaxrl_async.weights.discovery import check_tls, parse


class StartError(ValueError):
    """A run that cannot start: a taken workdir, a change that a resumed run refuses, or an unreadable task."""


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
    try:
        workdirs.check(workdir, resume=resume)
        return workdirs.changes(workdir, config) if resume else []
    except ValueError as error:
        raise StartError(str(error)) from None


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the workdir, before anything is written there, until the end of a run of all roles on this machine.

    Raises:
      StartError: another run has it, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(workdirs.lock(workdir))
        except (OSError, ValueError) as error:
            raise StartError(str(error)) from None
        yield


def begin(
    config: ml_collections.ConfigDict,
    settings: Settings,
    workdir: pathlib.Path,
    *,
    resume: bool,
    process: int = 0,
) -> bool:
    """Checks the workdir, prints the changes to a resumed run, and writes config.json.

    Args:
      config: written to the workdir.
      settings: the checked settings of the config.
      workdir: made where it does not exist.
      resume: continue the run in the workdir.
      process: index of the learner process; only process 0 prints and writes.

    Returns:
      Whether there is anything to do; False, with the reason printed, where the last step is done.

    Raises:
      StartError: as `check_workdir`.
      SettingsError: as `check_waits`.
    """
    changes = check_workdir(config, workdir, resume=resume)
    if not resume:
        check_waits(settings)
    if resume and (reason := workdirs.nothing_to_do(workdir, settings.learner.num_steps)):
        print(reason)
        return False
    if process == 0:
        for line in changes:
            print(line, flush=True)
        workdirs.write_config(workdir, config)
    return True


def prepare(settings: Settings, workdir: pathlib.Path) -> None:
    """Reads the task, the tokenizer and the model's size, so that errors in them are found before any role starts.

    Writes the config.json that servers started by `server.command` read, where the run has no model.path.

    Raises:
      StartError: names the file, the argument or the line.
    """
    _check_discovery(settings)
    try:
        task = parts.task_of(settings)
        validation = ("validation",) if settings.evaluate.num_validation > 0 else ()
        for split in ("train", *validation, "test"):
            _check_examples(task.examples(split), split)
        tokenizer = parts.tokenizer_of(settings, workdir)
        parts.frictions_of(settings, tokenizer)
        if settings.server.command and settings.server.num_started:
            parts.model_path(settings, workdir)
    except (OSError, TypeError, ValueError) as error:
        raise StartError(f"task {settings.task.name!r}: {error}") from error
    except Exception as error:  # of the task's own code
        raise StartError(
            f"task {settings.task.name!r} failed:\n{code_error(error).text}"
        ) from error
    try:
        parts.vocab_size_of(settings, tokenizer)
    except (OSError, ValueError) as error:
        raise StartError(f"model.path: {error}") from error


def _check_examples(examples, split: str) -> None:
    for i, example in enumerate(examples):
        if not (isinstance(example.text, str) and isinstance(example.answer, str)):
            raise TypeError(
                f"example {i} of split {split!r} must have a text and an answer of type str, got {example!r:.200}"
            )


def _check_discovery(settings: Settings) -> None:
    """Reads the list of servers, where there is one already."""
    place = settings.server.discover
    path = pathlib.Path(place.removeprefix("file:"))
    if not place.startswith("file:") or not path.exists():
        return
    try:
        servers = parse(path.read_text(encoding="utf-8"), str(path))
        if not settings.security.insecure:
            check_tls(servers, str(path))
    except (OSError, ValueError) as error:
        raise StartError(f"server.discover: {error}") from error


def check_access(settings: Settings, role: str, index: int) -> None:
    """Reads the keys and certificates that a role needs, so that errors in them are found before it starts.

    Args:
      settings: the run.
      role: as in `run_role`, or "all".
      index: of the server, rollout worker or learner process.

    Raises:
      SettingsError: names the setting, and the variable, file or address.
    """
    queue, server = settings.queue, settings.server
    try:
        if role != "queue":
            keys = parts.keys_of(settings)
        if role != "server":
            queue_access_of(settings)
        if role in ("all", "queue"):
            security.server_context(queue.tls_cert, queue.tls_key)
        if role in ("all", "learner", "rollout"):
            for ca in filter(None, (queue.tls_ca, server.tls_ca)):
                security.client_context(ca)
        if role in ("all", "server") and not server.command:
            security.server_context(server.tls_cert, server.tls_key)
        if role == "server" and not server.command and index < len(server.addresses):
            url = urllib.parse.urlparse(server.addresses[index])
            listener = f"the embedded server {index}"
            security.check_listener(listener, url.netloc, keys["api_key"], "server.api_key_env")
            if (url.scheme == "https") != bool(server.tls_cert):
                raise ValueError(
                    f"server.addresses has {server.addresses[index]}, server.tls_cert is {server.tls_cert!r}: "
                    "the embedded server speaks https with a certificate, http without one"
                )
    except ValueError as error:
        raise SettingsError(str(error)) from None


def run_role(
    role: str,
    settings: Settings,
    *,
    index: int,
    workdir: pathlib.Path,
    resume: bool,
    coordinator: str = "",
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Runs one role until it is done (the learner) or interrupted (the others).

    The soft limit of open files is raised first. A role's module is imported when the role starts, so that queue and
    rollout workers load no JAX.

    Args:
      role: "queue" | "server" | "rollout" | "learner".
      settings: the run; queue.address and server.addresses are set.
      index: of the server, rollout worker or learner process.
      workdir: directory of the run.
      resume: the learner continues from the last checkpoint.
      coordinator: "host:port" of learner process 0, where there are several.
      stop_requested: whether the learner should stop at the end of a step, with a checkpoint.

    Returns:
      Whether the run is done; False for a learner that stopped early.
    """
    files.raise_open_file_limit()
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
        case "learner":
            from jaxrl_async.roles import learner

            return learner.run(
                settings,
                workdir,
                process=index,
                coordinator=coordinator,
                resume=resume,
                stop_requested=stop_requested,
            )
    return True
