"""`train`: every role on this machine, or one --role of a run that spans hosts."""

import contextlib
import errno
import logging
import os
import pathlib
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from jaxrl_async import security
from jaxrl_async.cli.config import UsageError, overrides, parse_flags, refusing, settings_of
from jaxrl_async.config.checks import in_the_clear
from jaxrl_async.config.fields import StartError
from jaxrl_async.config.settings import Settings, SettingsError
from jaxrl_async.metrics import read_metrics
from jaxrl_async.names import nearest
from jaxrl_async.preflight import machine
from jaxrl_async.records import SupersededError
from jaxrl_async.roles import start
from jaxrl_async.runtime import cluster, keys, out_of_memory, supervisor
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.runtime.preemption import PREEMPTED, StopRequest, outputs_may_close
from jaxrl_async.runtime.progress import score_of
from jaxrl_async.runtime.workdir import GoneError
from jaxrl_async.sealed import DamagedError

ROLES = ("all", "queue", "learner", "rollout", "server", "rewards", "auto", "one")
PARENT_POLL_SECS = 1.0  # poll interval
# They log every file and every missing backend.
CHATTY = ("absl", "jax", "tensorboardX", "fsspec", "gcsfs")
# Exit code of a learner that another one has superseded: that of bad usage, after which no scheduler starts it again.
SUPERSEDED = 2

log = logging.getLogger(__name__)

USAGE = """Trains a policy. --role=all (the default) starts queue, servers, rollout workers and learner on this machine
and supervises them; another role runs alone, as on one host of a pod. --role=auto takes the role and the addresses of
the others from the environment (Slurm, a Kubernetes JobSet, a TPU slice; none of them: all), and resumes a workdir
that holds a run. SIGTERM, SIGHUP and a closed terminal or pipe finish the step, checkpoint and exit with code 75. A
learner that a later one of the run has superseded exits with code 2. `train --resume --workdir=DIR` resumes with the
config of DIR; changes by --config or --config.a.b=value are printed, and kept in DIR."""


@outputs_may_close()
def main(argv: list[str]) -> int:
    values = parse_flags(
        USAGE,
        argv,
        config=True,
        config_of=lambda v: f"{v.workdir}/config.json" if v.resume and v.workdir else None,
        workdir=("", "directory of the run; default runs/TASK-TIME"),
        role=("all", " | ".join(ROLES)),
        index=(0, "index of the server, rollout worker, reward service or learner process"),
        coordinator=("", "HOST:PORT of learner process 0, where learner.num_processes > 1"),
        resume=(False, "continue from the last checkpoint of --workdir"),
        fallback=(
            False,
            "with --resume: from the last intact checkpoint, where later ones are damaged",
        ),
        dry_run=(False, "print the settings and the resolved command, and start nothing"),
    )
    if values.role not in ROLES:
        raise UsageError(f"unknown role {values.role!r}{nearest(values.role, ROLES)}")
    auto = values.role == "auto"
    if auto:
        _apply_place(values)
    if values.fallback and not values.resume:
        raise UsageError("--fallback goes with --resume")
    settings = settings_of(values.config)
    workdir = pathlib.Path(values.workdir or start.default_workdir(settings)).absolute()
    supervised = "JAXRL_PARENT" in os.environ
    if values.role != "all" and not supervised:
        settings = keys.found(settings, workdir)
    machine.check_access(settings, values.role, values.index)
    # These write the config.json; the other roles read it.
    begins = values.role in ("all", "learner", "one") and not supervised
    if begins:
        start.check_workdir(values.config, workdir, resume=values.resume)
    if values.role != "all":
        _check_addresses(settings, values.role, values.index)
    if values.dry_run:
        print(_resolved(values, argv, workdir))
        return 0
    is_all = values.role == "all"
    process = 0 if is_all else values.index
    with start.locked(workdir) if is_all else contextlib.nullcontext():
        how = {"resume": values.resume, "fallback": values.fallback}
        run = start.run
        if begins and not start.begin(values.config, settings, workdir, **how, process=process):
            if not is_all or not settings.checkpoint.directory:
                return 0
            run = start.finish
        if is_all:
            return run_all(settings, workdir, run, **how)
    with workdirs.written(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
    # A scheduler signals all roles at once, and the learner needs the others to finish its step.
    graceful = not supervised and (auto or values.role in ("learner", "one"))
    if begins and process == 0:
        _count_prompts(settings, workdir)
    return _run_one(settings, values, workdir, graceful=graceful)


def _count_prompts(settings: Settings, workdir: pathlib.Path) -> None:
    """As a run of all roles does; a learner's host may be without the task's files."""
    try:
        found = machine.count_prompts(settings, workdir)
    except StartError as error:
        print(f"prompts are not counted: {error}", file=sys.stderr, flush=True)
        return
    found.write(workdir)
    print("\n".join(found.lines()), file=sys.stderr, flush=True)


def _apply_place(values: flags.FlagValues) -> None:
    """Sets role, index and addresses from the environment, and --resume from the workdir."""
    if not values.workdir:
        raise UsageError("--role=auto needs --workdir, which all roles share")
    with refusing(cluster.ClusterError, what="--role=auto: "):
        place = cluster.place_of(os.environ)
    values.role, values.index = place.role, place.index
    config, wanted = values.config, values.config.learner.num_processes
    steps = workdirs.checkpoint_steps(pathlib.Path(values.workdir), config.checkpoint.directory)
    values.resume = bool(steps)
    if place.role == "all":
        return
    if place.role == "learner" and place.num_learners != wanted:
        raise UsageError(
            f"--role=auto: the environment has {place.num_learners} learner processes, and the config "
            f"learner.num_processes = {wanted}"
        )
    values.coordinator = place.coordinator
    config.queue.address = place.queue_address or config.queue.address
    if place.reward_addresses:
        config.rollout.reward_addresses = place.reward_addresses
    if place.server_addresses:
        scheme = "https" if config.server.tls_cert else "http"
        config.server.addresses = tuple(
            address.replace("http", scheme, 1) for address in place.server_addresses
        )


def _resolved(values: flags.FlagValues, argv: list[str], workdir: pathlib.Path) -> str:
    """The settings, then the command with the resolved role and addresses as flags."""
    given = [w for w in argv if w.startswith("--config=") or w == "--config"]
    config = given[0] if given else f"--config={workdir}/config.json"
    words = ["python", "-m", "jaxrl_async", "train", f"--workdir={workdir}"]
    words += [config] if "=" in config else [f"--config={argv[argv.index(config) + 1]}"]
    words += overrides(argv)
    words += [f"--role={values.role}", f"--index={values.index}"]
    words += [f"--config.queue.address={values.config.queue.address}"]
    words += [f"--config.server.addresses={values.config.server.addresses!r}"]
    rewards = values.config.rollout.reward_addresses
    words += [f"--config.rollout.reward_addresses={rewards!r}"] if rewards else []
    words += [f"--coordinator={values.coordinator}"] if values.coordinator else []
    words += ["--resume"] if values.resume else []
    words += ["--fallback"] if values.fallback else []
    return f"{values.config.to_json(indent=2)}\n{shlex.join(words)}"


def run_all(settings: Settings, workdir: pathlib.Path, run: Callable[..., bool], **how: Any) -> int:
    """Runs all roles by `run`, as `start.run` or of a pod, until its end or a signal: the exit code."""
    # The learner has its own grace period, which ends first.
    stop = StopRequest(grace_secs=supervisor.learner_stop_secs(settings) + supervisor.STOP_SECS)
    stop.listen(signal.SIGTERM, signal.SIGHUP)
    try:
        done = run(settings, workdir=workdir, **how, stop_requested=stop.received)
    except KeyboardInterrupt:
        print(f"stopped; {_resume_hint(workdir)}", file=sys.stderr)
        return 1
    except StartError:
        raise
    except (supervisor.RoleDiedError, supervisor.StalledError, GoneError, ValueError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if not (full := _full_disk(error, workdir)):
            raise
        print(f"train: {full}", file=sys.stderr)
        return 1
    if not done:
        print(f"stopped early; {_resume_hint(workdir)}", file=sys.stderr)
        return PREEMPTED
    print(ending(workdir))
    return 0


def ending(workdir: pathlib.Path) -> str:
    """The last words of a finished run: its workdir, its score before and after, and the next command."""
    score = score_of(read_metrics(workdir))
    lines = [f"done: {workdir}", *([f"score: {score}"] if score else [])]
    report = ("python", "-m", "jaxrl_async", "report", f"--workdir={workdir}")
    return "\n".join([*lines, f"next: {shlex.join(report)}"])


def _resume_hint(workdir: pathlib.Path) -> str:
    if not workdirs.checkpoint_steps(workdir):
        return "no checkpoint yet: the same command starts anew"
    return f"resume with: {workdirs.resume_command(workdir)}"


def _run_one(
    settings: Settings, values: flags.FlagValues, workdir: pathlib.Path, *, graceful: bool
) -> int:
    role = values.role
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    security.log_to_stderr("json" if settings.monitoring.logs == "json" else text)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if found := in_the_clear(settings):
        log.warning("security.insecure: without TLS to %s", ", ".join(found))
    cpus = settings.cpus.of(role)
    if cpus:  # Before JAX counts cores for its threads.
        os.sched_setaffinity(0, cpus)
    stop = StopRequest(grace_secs=settings.checkpoint.grace_secs)
    stop.listen(supervisor.STOP_SIGNAL)
    end = signal.Signals[os.environ.get("JAXRL_END", "SIGTERM")]  # the parent's, for this role
    if graceful:
        stop.listen(signal.SIGTERM, signal.SIGHUP)
        # Processes of a scheduler may start with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        if end != signal.SIGTERM:  # A host that ends sends it to all its processes.
            signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(end, signal.default_int_handler)
    if "JAXRL_PARENT" in os.environ:
        parent = (int(os.environ["JAXRL_PARENT"]), end)
        threading.Thread(target=_end_with, args=parent, name="parent", daemon=True).start()
    try:
        with out_of_memory.ends(role):
            done = start.run_role(
                role,
                settings,
                index=values.index,
                workdir=workdir,
                resume=values.resume,
                fallback=values.fallback,
                coordinator=values.coordinator,
                stop_requested=stop.received,
            )
    except KeyboardInterrupt:
        return 1
    except StartError:  # `main` prints it; no restart would help.
        raise
    except MemoryError:
        log.exception("role %s is out of memory", role)
        out_of_memory.end()
    except Exception as error:
        if superseded := _superseded(error):
            print(f"{role}: {superseded}", file=sys.stderr, flush=True)
            return SUPERSEDED
        if full := _full_disk(error, workdir):
            print(security.escaped(f"{role}: {full}"), file=sys.stderr, flush=True)
        elif _is_explained(error):
            print(security.escaped(f"{role}: {error}", keep="\n"), file=sys.stderr, flush=True)
        else:
            log.exception("role %s failed", role)
        # After a stop request, most likely because the other roles exited first.
        return PREEMPTED if stop.received() else 1
    return 0 if done else PREEMPTED


def _superseded(error: BaseException | None) -> BaseException | None:
    """The cause of an error that says that another learner has taken over; None for another error."""
    while error is not None and not isinstance(error, SupersededError):
        error = error.__cause__
    return error


def _full_disk(error: BaseException, workdir: pathlib.Path) -> str:
    """A sentence where an error, or one of its causes, says that a disk is full or read-only; else ""."""
    found: BaseException | None = error
    while found is not None:
        number = found.errno if isinstance(found, OSError) else None
        # Libraries of C++ and SQLite say it in words.
        told = re.search(r"No space left on device|disk is full|Disk quota exceeded", str(found))
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or told:
            said = security.escaped(str(found)).partition("\n")[0]
            return f"{said}: the disk of --workdir={workdir} must have space and be writable; {_resume_hint(workdir)}"
        found = found.__cause__ or found.__context__
    return ""


def _is_explained(error: BaseException) -> bool:
    """Whether a role's error names its cause in its message, so that a line suffices instead of a traceback."""
    from jaxrl_async.preflight.peers import PreflightError
    from jaxrl_async.publishing.publisher import PublisherError
    from jaxrl_async.queue.journal import JournalError
    from jaxrl_async.records import RunFailedError
    from jaxrl_async.rewards.pool import RewardError
    from jaxrl_async.rollout.failures import UserCodeError

    if isinstance(error, OSError):  # Without an errno it is ours, and names the remedy.
        return bool(error.args) and error.errno in (None, errno.EADDRINUSE)
    if isinstance(error, PublisherError):  # It also wraps the error that ended the publisher.
        return error.__cause__ is None or _is_explained(error.__cause__)
    explained = (JournalError, PreflightError, RewardError, RunFailedError, SettingsError)
    return isinstance(error, (*explained, DamagedError, GoneError, UserCodeError))


def _check_addresses(settings: Settings, role: str, index: int) -> None:
    """Refuses a role that runs alone without the addresses of the others, and an index below 0."""
    if index < 0:
        raise UsageError(f"--index must be ≥ 0, got {index}")
    if not settings.queue.address and role not in ("server", "rewards"):
        raise UsageError(f"--role={role} needs --config.queue.address=HOST:PORT")
    services = settings.rollout.reward_addresses
    if role == "rewards" and index >= len(services):
        raise UsageError(
            f"--role=rewards --index={index} needs its entry of config.rollout.reward_addresses, which has "
            f"{len(services)}"
        )
    needed = {"server": index + 1, "learner": 0 if settings.server.discover else 1}.get(role, 0)
    if len(settings.server.addresses) < needed:
        raise UsageError(
            f"--role={role} --index={index} needs its entry of config.server.addresses, which has "
            f"{len(settings.server.addresses)}"
        )
    if role == "learner" and index >= settings.learner.num_processes:
        raise UsageError(
            f"--role=learner --index={index} must be in [0, config.learner.num_processes = "
            f"{settings.learner.num_processes})"
        )


def _end_with(parent: int, end: int) -> None:
    """Ends this process when its supervisor has died."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECS)
    log.error("the supervisor (pid %d) is gone", parent)
    os.kill(os.getpid(), end)
    time.sleep(supervisor.STOP_SECS)
    os._exit(1)
