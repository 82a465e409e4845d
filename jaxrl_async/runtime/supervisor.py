"""Starts every role of a run on this machine as a process, watches them, and ends them.

Each role runs the command of a host of a pod: `train --role=ROLE` with the addresses of the others. Handles processes,
logs and metrics; imports no JAX.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import tqdm

from jaxrl_async import security
from jaxrl_async.config.checks import in_the_clear, queue_access_of, refusal_of_one_process
from jaxrl_async.config.settings import Settings, Supervisor
from jaxrl_async.metrics import NewSteps, last_metrics
from jaxrl_async.queue.calls import Glance
from jaxrl_async.records import QueueStatus
from jaxrl_async.runtime import disk, keys, monitoring, status
from jaxrl_async.runtime.disk import size
from jaxrl_async.runtime.preemption import CLEANUP_SECS, PREEMPTED
from jaxrl_async.runtime.progress import Progress
from jaxrl_async.runtime.workdir import GoneError, checkpoint_steps, watched
from jaxrl_async.tasks import coverage

# For a learner on a CPU: XLA allocates a step's buffers anew each time, and pages of 4 KiB cost a tenth of the step.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
STOP_SIGNAL = signal.SIGUSR1  # The learner checkpoints and exits; SIGTERM ends a role at once.
STOP_SECS = 6.0  # from SIGTERM to SIGKILL
POLL_SECS = 0.2  # poll interval of the processes
EARLY_SECS = 60.0  # A role that ends by itself before this, twice, cannot be helped by a restart.
BAD_USAGE = 2  # exit code
ROLE_PORTS = range(20_000, 32_768)  # Linux takes the ports of connections from 32,768 on
STALL_REPORT_SECS = 30.0  # interval of the printed chains while no step ends
START_REPORT_SECS = 60.0  # of those before the first step: roles load, and compile


class RoleDiedError(RuntimeError):
    """A role ended before the run did; the message names it and shows the end of its log."""


class StalledError(RuntimeError):
    """No step for too long; the message is the chain of who waits for whom."""


@dataclasses.dataclass
class Role:
    """One process of the run."""

    name: str  # "queue", "server-0", …
    process: subprocess.Popen
    log: pathlib.Path
    host: str = ""  # of several: what it ends at once counts as one restart


def run(
    settings: Settings,
    *,
    workdir: pathlib.Path,
    resume: bool,
    fallback: bool = False,
    record_bytes: int = 0,
    on_step: Callable[[int], None] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Runs all roles until the learner is done.

    A role that was killed is restarted; a rollout worker, a server and a reward service also when they end by
    themselves, unless they do so twice soon after their start. supervisor.max_restarts bounds the restarts of all roles
    within supervisor.restart_window_secs. A queue or a learner that ends by itself ends the run, and its log says why.

    Args:
      settings: the run.
      workdir: holds config.json; receives logs/ROLE.log, and roles.json: the processes, or how the run ended; and
        keys/NAME, where queue or embedded servers have no key of the user's.
      resume: continue from the last checkpoint.
      fallback: as of `learner.run`, at the first start.
      record_bytes: of the record of a token's choices, in the journal.
      on_step: called with each step after its end, in this thread.
      stop_requested: whether to stop early: the learner finishes its step and checkpoints, then all roles end.

    Returns:
      Whether the last step is done; False where the learner stopped early.

    Raises:
      RoleDiedError: a role failed, or roles were restarted more often than supervisor.max_restarts.
      StalledError: no step within supervisor.stall_secs.
      GoneError: the workdir is not there any more.
    """
    queue_address = settings.queue.address or f"127.0.0.1:{free_port()}"
    found, num_learners = visible_devices(), settings.learner.num_processes
    is_one = in_one_process(settings, found)
    starts_servers = settings.server.num_started > 0 and not is_one
    settings = keys.made(settings, workdir, servers=starts_servers)
    addresses = [f"--config.queue.address={queue_address}", *keys.flags(settings)]
    if is_one:
        names = learners = ["one"]
        servers = ("in the same process",)
        num_devices = settings.learner.num_devices + settings.server.devices
        devices = {"one": _of_learner(found, num_devices)}
    else:
        servers = settings.server.addresses or tuple(
            f"{'https' if settings.server.tls_cert else 'http'}://127.0.0.1:{free_port()}"
            for _ in range(settings.server.num_started)
        )
        addresses += [f"--config.server.addresses={servers!r}"]
        names = ["queue"]
        if not settings.server.addresses:
            names += [f"server-{i}" for i in range(len(servers))]
        names += [f"rollout-{i}" for i in range(settings.rollout.num_workers)]
        learners = _learner_names(num_learners)
        if num_learners > 1:
            addresses += [f"--coordinator=127.0.0.1:{free_port()}"]
        names += learners
        devices = divide_devices(
            found,
            num_servers=len([n for n in names if "server" in n]),
            num_learners=num_learners,
            learner_devices=settings.learner.num_devices,
        )
    about = (settings, workdir, queue_address, servers, devices, record_bytes)
    print(banner(*about), flush=True)

    def start(name: str, resume: bool, fallback: bool = False) -> Role:
        flags = ["--resume"] * resume + ["--fallback"] * fallback
        if page := settings.monitoring.address:
            flags += [f"--config.monitoring.address={monitoring.nth(page, names.index(name))}"]
        return _start(name, workdir, addresses + flags, devices)

    return supervise(
        names,
        len(learners),
        settings,
        workdir,
        queue_address,
        start,
        resume=resume,
        fallback=fallback,
        on_step=on_step,
        stop_requested=stop_requested,
    )


def supervise(
    names: list[str],
    num_learners: int,
    settings: Settings,
    workdir: pathlib.Path,
    queue_address: str,
    start: Callable[..., Role],
    *,
    resume: bool = False,
    fallback: bool = False,
    on_step: Callable[[int], None] | None = None,
    change: Callable[[list[Role]], None] = lambda roles: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Starts the roles of names, the learner's last, by start(name, resume, fallback); see `run`.

    `change` may add roles before the learner's, and stop and remove others, at each poll.
    """
    roles: list[Role] = []
    end = "failed"
    try:
        for name in names:
            roles.append(start(name, resume, fallback))
        done = _watch(
            roles,
            num_learners,
            settings,
            workdir,
            queue_address,
            start,
            on_step,
            stop_requested,
            change,
        )
        end = "done" if done else "left"
        return done
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, or a second SIGTERM.
        end = "left"
        raise
    except GoneError:
        end = ""
        raise
    finally:
        stop(roles)
        if end:
            status.write_end(workdir, end)


def stop(roles: list[Role]) -> None:
    """Ends every role in reverse order of start: SIGTERM, then SIGKILL after STOP_SECS.

    Other processes in a role's process group are killed too.
    """
    for role in reversed(roles):
        if role.process.poll() is None:
            role.process.terminate()
    deadline = time.monotonic() + STOP_SECS
    for role in reversed(roles):
        kill(role.process, deadline)


def kill(process: subprocess.Popen, deadline: float) -> None:
    """Waits for a process until the deadline, a monotonic time, then kills its process group.

    The process leads the group, whose number stays taken while a child lives.
    """
    _wait(process, deadline)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(process: subprocess.Popen, deadline: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now.

    It is taken some seconds later. Until then the system gives it to nobody: where it can, it lies outside the range of
    outgoing connections.
    """
    for port in random.SystemRandom().sample(ROLE_PORTS, 64):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def visible_devices() -> tuple[str, int]:
    """("tpu" | "gpu" | "cpu", number of chips) of this machine, without importing JAX."""
    platform = os.environ.get("JAX_PLATFORMS", "")
    chips = len(list(pathlib.Path("/dev").glob("accel[0-9]*")))
    chips = chips or len(list(pathlib.Path("/dev/vfio").glob("[0-9]*")))
    if chips and platform in ("", "tpu"):
        return "tpu", chips
    if platform in ("", "cuda", "gpu"):
        gpus = len(list(pathlib.Path("/proc/driver/nvidia/gpus").glob("*")))
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            gpus = len([d for d in visible.split(",") if d])
        if gpus:
            return "gpu", gpus
    return "cpu", 0


def in_one_process(settings: Settings, devices: tuple[str, int]) -> bool:
    """Whether all roles share a process: a TPU chip admits one, and a GPU's memory is then not divided in fractions."""
    if settings.supervisor.processes != "auto":
        return settings.supervisor.processes == "one"
    if settings.server.devices:
        return True
    platform, count = devices
    return platform != "cpu" and count == 1 and not refusal_of_one_process(settings)


def divide_devices(
    devices: tuple[str, int], *, num_servers: int, num_learners: int = 1, learner_devices: int = 1
) -> dict[str, dict[str, str]]:
    """Divides the machine's devices: one for each local server, the rest for the learner.

    Args:
      devices: platform and number of chips.
      num_servers: embedded servers on this machine.
      num_learners: processes of the learner, which share its devices evenly.
      learner_devices: of the learner's mesh; on a CPU, the number of virtual devices.

    Returns:
      Role name → environment variables. Roles on a single GPU get fractions of its memory; a learner on a CPU gets
      HUGE_PAGES, unless GLIBC_TUNABLES is set.

    Raises:
      ValueError: fewer chips than the roles need, or chips that learner processes cannot share.
    """
    platform, count = devices
    learners = _learner_names(num_learners)
    if platform == "cpu":
        shown = _of_learner(devices, learner_devices // num_learners)
        return dict.fromkeys(learners, shown) if shown else {}
    each, rest = divmod(count - num_servers, num_learners)
    if num_learners > 1 and (platform == "tpu" or each < 1 or rest):
        raise ValueError(
            f"{num_learners} learner processes cannot share the {count} {platform.upper()} chips of this machine "
            f"beside {num_servers} servers: lower learner.num_processes, or start one --role=learner on each host"
        )
    if num_servers == 0 and num_learners == 1:
        return {}
    if platform == "gpu" and count == 1:
        share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / (num_servers + 1):.2f}"}
        return {name: share for name in ("learner", *(f"server-{i}" for i in range(num_servers)))}
    if count <= num_servers:
        raise ValueError(
            f"{num_servers} servers and a learner need {num_servers + 1} {platform.upper()} chips, "
            f"this machine has {count}: lower server.num_local or give server.addresses"
        )
    variable = "TPU_VISIBLE_CHIPS" if platform == "tpu" else "CUDA_VISIBLE_DEVICES"
    ids = [str(i) for i in range(count)]
    if platform == "gpu" and os.environ.get("CUDA_VISIBLE_DEVICES"):
        ids = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    first = count - num_servers
    division = {f"server-{i}": {variable: ids[first + i]} for i in range(num_servers)}
    for i, name in enumerate(learners):
        division[name] = {variable: ",".join(ids[i * each : (i + 1) * each])}
    return division


def _of_learner(devices: tuple[str, int], num_devices: int) -> dict[str, str]:
    """The environment of a process of the learner that has all devices it sees; on a CPU num_devices virtual ones."""
    if devices[0] != "cpu":
        return {}
    virtual = {"JAX_NUM_CPU_DEVICES": str(num_devices)} if num_devices > 1 else {}
    return ({} if "GLIBC_TUNABLES" in os.environ else HUGE_PAGES) | virtual


def _learner_names(count: int) -> list[str]:
    return ["learner"] if count == 1 else [f"learner-{i}" for i in range(count)]


def banner(
    settings: Settings, workdir, queue_address, servers, devices, record_bytes: int = 0
) -> str:
    """The banner of a run: its settings, its addresses, its prompts, and the devices of each role."""
    learner = settings.learner
    lines = [
        f"jaxrl_async · {settings.task.name} · mode {settings.mode} · η = {settings.queue.max_staleness} · "
        f"push every {settings.weights.push_every_steps} · {learner.num_steps} steps of "
        f"{learner.groups_per_step} × {settings.rollout.group_size}",
        f"  workdir  {workdir}",
        f"  queue    {queue_address}",
        f"  servers  {', '.join(filter(None, (*servers, settings.server.discover)))}"
        + _kind(settings.server),
    ]
    if rewards := settings.rollout.reward_addresses:
        lines.append(f"  rewards  {', '.join(rewards)}")
    if settings.journal.keep != "none":
        lines.append(f"  journal  {_journal(settings, pathlib.Path(workdir), record_bytes)}")
    if page := settings.monitoring.address:
        lines.append(f"  metrics  from {page} on, {workdir}/{monitoring.SCRAPE}/*.json")
    if found := coverage.read(pathlib.Path(workdir)):
        lines += [f"  prompts  {line}" for line in found.lines()]
    if found := in_the_clear(settings):
        lines.append(f"  INSECURE security.insecure: without TLS to {', '.join(found)}")
    for name, environment in devices.items():
        lines.append(f"  {name:8} {' '.join(f'{k}={v}' for k, v in environment.items())}")
    return "\n".join(lines)


def _journal(settings: Settings, workdir: pathlib.Path, record_bytes: int) -> str:
    """The groups that the journal keeps, and their size."""
    journal, step = settings.journal, size(disk.step_bytes(settings, record_bytes))
    bound = f" up to {size(journal.max_bytes)}" if journal.max_bytes else ""
    free = ""
    with contextlib.suppress(OSError):
        path = pathlib.Path(journal.path or workdir / "journal.sqlite")
        free = f", {size(shutil.disk_usage(path.parent).free)} are free"
    return f"keeps {journal.keep}{bound}: at most {step} a step{free}"


def _kind(server) -> str:
    if not server.num_started:
        return ""
    return f" ({shlex.split(server.command)[0]})" if server.command else " (embedded)"


def _start(name: str, workdir, flags, devices) -> Role:
    role, _, index = name.partition("-")
    command = [sys.executable, "-m", "jaxrl_async", "train", f"--config={workdir}/config.json"]
    command += [f"--workdir={workdir}", f"--role={role}", f"--index={index or 0}", *flags]
    log = workdir / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    environment = os.environ | devices.get(name, {}) | {"JAXRL_PARENT": str(os.getpid())}
    with open(log, "a") as out:
        # A group of its own: Ctrl-C reaches the supervisor, which ends the roles in order. No session of its own: Linux
        # may share the processors out by session, and beside a vLLM of another one roles waited for seconds.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            process_group=0,
        )
    return Role(name, process, log)


def _watch(
    roles: list[Role],
    num_learners: int,
    settings: Settings,
    workdir,
    queue_address: str,
    start: Callable[[str, bool], Role],
    on_step: Callable[[int], None] | None,
    stop_requested: Callable[[], bool],
    change: Callable[[list[Role]], None],
) -> bool:
    """Watches the roles, learner processes last. Returns whether the learner is done; False where it stopped early."""
    restarts = _Restarts(settings.supervisor, workdir, start)
    glance = Glance(queue_address, **queue_access_of(settings))
    stalls = _Stalls(glance, workdir, settings.supervisor.stall_secs)
    pids: dict[str, int] = {}
    num_steps, row = settings.learner.num_steps, last_metrics(workdir)
    shown = Progress(num_steps, row=row, stream=sys.stderr, is_terminal=sys.stderr.isatty())
    with contextlib.closing(glance), contextlib.closing(shown), watched(workdir) as check_workdir:
        progress = _progress(shown, workdir, roles[-num_learners].log, glance, on_step)
        while not all(role.process.poll() == 0 for role in roles[-num_learners:]):
            check_workdir()
            change(roles)
            for i, role in enumerate(roles[:-num_learners]):
                if role.process.poll() is not None:
                    roles[i] = restarts.of(role)
            learners = roles[-num_learners:]
            if stop_requested():
                next(progress)
                return _stop_learners(learners, learner_stop_secs(settings))
            if any(role.process.poll() for role in learners):
                roles[-num_learners:] = restarts.of_learners(learners)
            if pids != (now := {role.name: role.process.pid for role in roles}):
                status.write_roles(workdir, queue_address, pids := now)
            next(progress)
            stalls.check(shown.step, shown.stage)
            time.sleep(POLL_SECS)
        next(progress)
        return True


def learner_stop_secs(settings: Settings) -> float:
    """From STOP_SIGNAL to the learner's exit, at most."""
    return settings.checkpoint.grace_secs + CLEANUP_SECS


def _stop_learners(learners: list[Role], stop_secs: float) -> bool:
    """Stops the learner; returns whether the last step was done by then. Raises RoleDiedError: it failed instead."""
    for role in learners:
        role.process.send_signal(STOP_SIGNAL)
    deadline = time.monotonic() + stop_secs
    for role in learners:
        _wait(role.process, deadline)
    stopped = (0, PREEMPTED, -STOP_SIGNAL, None)
    if failed := [role for role in learners if role.process.returncode not in stopped]:
        raise RoleDiedError("\n".join(map(_exit_report, failed)))
    return all(role.process.returncode == 0 for role in learners)


class _Stalls:
    """Prints the chain of waits while no step ends; after supervisor.stall_secs, stops the run."""

    def __init__(
        self, glance: Callable[[], QueueStatus | None], workdir: pathlib.Path, stall_secs: float
    ):
        self._glance, self._workdir, self._stall_secs = glance, workdir, stall_secs
        self._step, self._stage, self._since = -1, "", time.monotonic()
        self._next_secs = START_REPORT_SECS

    def check(self, step: int, stage: str) -> None:
        """Takes the last step; raises StalledError when no later one ended within stall_secs.

        Before the first step a `stage` that goes on, as a warm start, puts the chain off.
        """
        now, wait = time.monotonic(), START_REPORT_SECS if stage else STALL_REPORT_SECS
        if step != self._step:
            self._step, self._since, self._next_secs = step, now, wait
        secs = now - self._since
        if stage != self._stage:
            self._stage, self._next_secs = stage, secs + wait
        if secs < min(self._next_secs, self._stall_secs):
            return
        found = self._glance()
        chain = status.explain(found, status.processes_of(self._workdir), step or None)
        if secs >= self._stall_secs:
            raise StalledError(
                f"no step for {secs:.0f} s (supervisor.stall_secs = {self._stall_secs:g}):\n{chain}"
            )
        self._next_secs += wait
        tqdm.tqdm.write(f"no step for {secs:.0f} s:\n{chain}")


class _Restarts:
    """Restarts roles, at most max_restarts times within restart_window_secs."""

    def __init__(
        self,
        settings: Supervisor,
        workdir: pathlib.Path,
        start: Callable[[str, bool], Role],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._settings, self._workdir, self._start, self._clock = settings, workdir, start, clock
        self._began = clock()
        self._times: list[float] = []  # of the restarts in the window, ascending
        self._since: dict[str, float] = {}  # role → its last start here
        self._lost: dict[str, float] = {}  # host → the last restart there that counted
        self._early: set[str] = set()  # roles that ended by themselves soon after their last start

    def of(self, role: Role) -> Role:
        """Restarts a role other than a learner. Raises RoleDiedError: a queue, bad settings, or a second early end."""
        code, now = role.process.returncode, self._clock()
        if code >= 0:
            if code == BAD_USAGE or not role.name.startswith(("server-", "rollout-", "rewards-")):
                raise RoleDiedError(_exit_report(role))
            is_early = now - self._since.get(role.name, self._began) < EARLY_SECS
            if is_early and role.name in self._early:
                raise RoleDiedError(_exit_report(role))
            (self._early.add if is_early else self._early.discard)(role.name)
        self._count(role)
        self._since[role.name] = now
        return self._start(role.name, False)

    def of_learners(self, learners: list[Role]) -> list[Role]:
        """The restart of all processes of the learner after one was killed, or preempted: they are one program."""
        ended = [role for role in learners if role.process.returncode]
        killed = [r for r in ended if r.process.returncode < 0 or r.process.returncode == PREEMPTED]
        if not killed:
            raise RoleDiedError("\n".join(map(_exit_report, ended)))
        self._count(killed[0])
        stop(learners)
        started = bool(checkpoint_steps(self._workdir))
        return [self._start(role.name, started) for role in learners]

    def _count(self, role: Role) -> None:
        bound, window = self._settings.max_restarts, self._settings.restart_window_secs
        now = self._clock()
        self._times = [since for since in self._times if now - since < window]
        is_same = role.host and now - self._lost.get(role.host, -EARLY_SECS) < EARLY_SECS
        if len(self._times) == bound and not is_same:
            raise RoleDiedError(
                f"after {bound} restarts within {window:g} s (supervisor.max_restarts = {bound}): {_exit_report(role)}"
            )
        if not is_same:
            self._times.append(now)
            self._lost[role.host] = now
        kill(role.process, time.monotonic())  # A child may hold its port or its device.
        line = (
            f"role {role.name!r} ended {how_it_ended(role.process.returncode)}; "
            f"restart {len(self._times)} of at most {bound} within {window:g} s"
        )
        with open(role.log, "a") as log:
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} WARNING supervisor: {line}", file=log)
        tqdm.tqdm.write(line)


def how_it_ended(code: int) -> str:
    """A return code of `subprocess` in words: "by signal SIGKILL", "with exit code 1"."""
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _progress(
    shown: Progress,
    workdir,
    log: pathlib.Path,
    glance: Callable[[], QueueStatus | None],
    on_step: Callable[[int], None] | None,
) -> Iterator[None]:
    """Shows the last step's metrics and who waits, at every `next`."""
    new_steps, start, told = NewSteps(workdir), log.stat().st_size, False
    while True:
        found = glance() if sys.stderr.isatty() or not shown.is_warm else None
        shown.show(last_metrics(workdir), found, last_lines(log, 1))
        if not (told or shown.is_warm) and (said := disk.said(log, start)):
            told = True
            tqdm.tqdm.write(said, file=sys.stderr)
        for step in new_steps() if on_step else ():
            on_step(step)
        yield


def _exit_report(role: Role) -> str:
    how = how_it_ended(role.process.returncode)
    return f"role {role.name!r} ended {how}; the end of {role.log}:\n{last_lines(role.log, 20)}"


def last_lines(path: pathlib.Path, count: int) -> str:
    """The last lines of a text file; "" where it does not exist."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        lines = file.read().decode("utf-8", "replace").strip().split("\n")[-count:]
    return security.escaped("\n".join(lines), keep="\n\t")  # A reward may print what a model wrote.
