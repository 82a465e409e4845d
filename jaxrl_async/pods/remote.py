"""The hosts of a pod over ssh: look at them, copy to them, run the roles there, bring the workdir home.

A role's process here is its ssh: its output is the role's log, a line of its stdin a signal for the role, its end the
role's end (pods/host.py). The supervisor's rules hold for them as for roles of one machine. Imports no JAX.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import pathlib
import secrets
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tqdm

from jaxrl_async import sealed, security
from jaxrl_async.config.settings import Settings
from jaxrl_async.pods import plan as plans
from jaxrl_async.pods import survey
from jaxrl_async.pods.plan import LOST_SECS, RETRY_SECS, TPU, Host, Plan, Role
from jaxrl_async.queue.journal import settle
from jaxrl_async.runtime import supervisor
from jaxrl_async.runtime.preemption import PREEMPTED

_SSH = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=4")
SSH = " ".join(["ssh", *(f"-o {option}" for option in _SSH), "{host}"])
GCLOUD = (
    "gcloud compute tpus tpu-vm ssh {node} --project={project} --zone={zone} --worker={worker} --quiet "
    + " ".join(f"--ssh-flag=-o{option}" for option in _SSH)
    + " --command={command}"
)
TEMPLATES = {
    "gcloud": GCLOUD,
    "slurm": "srun --overlap --nodes=1 --ntasks=1 --nodelist={host} sh -c {command}",
}
GONE = 4  # exit code of a learner process that has waited for another's host
LOST = 255  # ssh's exit code where there is no connection
NOTHING_TO_DO = 3  # exit code of a prepared run that is done
COLLECT_SECS = 60.0  # interval at which metrics and samples come home
LONG_SECS = 3600.0  # deadline of a copy of the whole workdir, and of an installation
CLOCK_SECS = 60.0  # bound on the difference of two clocks
# Of the workdir of the first host, what never comes home, and what comes at the end.
_JOURNAL = "journal.sqlite*"
_STAYS = ("weights", "keys", "logs", "roles.json", "scrape", "pod", "servers")
_LAST = ("checkpoints", "damaged-checkpoint-*", "base", "profile", _JOURNAL)

_ADDRESSES = "--config.server.addresses="

_T = TypeVar("_T")


class PodError(RuntimeError):
    """Hosts that cannot take part, a line for each."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code  # of the command that failed


@dataclasses.dataclass(frozen=True)
class Shell:
    """Commands on hosts, in the pod's directory."""

    # With {host}, {node}, {worker}, {project}, {zone}, {command}; without the last the command comes last.
    template: str
    directory: str  # in the login's, or absolute
    python: str  # of the hosts

    def words(self, host: Host, command: str) -> list[str]:
        """The local command that runs a shell's command in the directory of a host."""
        project, _, zone = host.place.partition("/")
        there = shlex.quote(self.directory)
        command = f"mkdir -p {there}/run && cd {there} && {command}"
        known = {"host": host.address if host.place else host.name, "node": host.node}
        known |= {"worker": host.worker, "project": project, "zone": zone, "command": command}
        words = [word.format(**known) for word in shlex.split(self.template)]
        return words if "{command}" in self.template else [*words, command]

    def module(self, *words: str, environment: Mapping[str, str]) -> str:
        """A shell's command: `python -m MODULE …`."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        start = ["exec", *(["env", *variables] if variables else []), self.python]
        return shlex.join([*start, "-m", *words])

    def run(self, host: Host, command: str, *, secs: float, data: bytes = b"") -> str:
        """The output of a command.

        Raises:
          PodError: it failed, or had not ended after `secs`.
        """
        try:
            done = subprocess.run(
                self.words(host, command), input=data, capture_output=True, timeout=secs
            )
        except subprocess.TimeoutExpired:
            raise PodError(f"{host.name} did not answer within {secs:g} s") from None
        except OSError as error:
            raise PodError(f"{host.name}: {error}") from None
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-8:]
            said = security.escaped("\n  ".join(said), keep="\n")
            if done.returncode == LOST:
                raise PodError(f"{host.name} is not reached: {said}")
            raise PodError(f"{host.name}: exit code {done.returncode}: {said}", done.returncode)
        return done.stdout.decode(errors="replace")


def each(hosts: Iterable[Host], call: Callable[[Host], _T]) -> dict[Host, _T]:
    """The results of all hosts, side by side. Raises PodError with the lines of all that fail."""
    hosts = list(hosts)
    with concurrent.futures.ThreadPoolExecutor(max(1, len(hosts)), "host") as pool:
        futures = {host: pool.submit(call, host) for host in hosts}
    errors = [e for f in futures.values() if isinstance(e := f.exception(), PodError)]
    if errors:
        raise PodError("\n  ".join(map(str, errors)))
    return {host: future.result() for host, future in futures.items()}


def owners(plan: Plan, shell: Shell, *, bucket: str, secs: float) -> list[Host]:
    """Makes the directory on all hosts; one host for each directory, in order.

    Raises:
      PodError: a host does not answer; or learner hosts do not share the directory, and checkpoints go to no bucket.
    """
    token = secrets.token_hex(8)
    each(plan.hosts, lambda host: shell.run(host, _mark(host, token), secs=secs))
    seen = each(plan.hosts, lambda host: shell.run(host, f"grep -l {token} .host-*", secs=secs))
    names = {host: {line.removeprefix(".host-") for line in seen[host].split()} for host in seen}
    learners = {host.name for host in plan.hosts[: plan.num_learners]}
    if not bucket and (lost := sorted(learners - names[plan.hosts[0]])):
        raise PodError(
            f"{', '.join(lost)} and {plan.hosts[0].name} learn and do not share {shell.directory}: each writes its "
            "part of a checkpoint. Set checkpoint.directory to a bucket, name a shared disk by --directory, or let one "
            "host learn"
        )
    first = {h: next((o for o in plan.hosts if o.name in names[h]), h) for h in plan.hosts}
    return list(dict.fromkeys(first.values()))


def left(plan: Plan, shell: Shell, slices: int, *, secs: float) -> list[Host]:
    """The hosts without the learner's slices of which one does not answer."""
    size, hosts = plan.num_learners // slices, list(plan.hosts)
    for i in reversed(range(0, plan.num_learners, size)):
        try:
            each(hosts[i : i + size], lambda host: shell.run(host, "true", secs=secs))
        except PodError:
            del hosts[i : i + size]
    return hosts


def _survey(shell: Shell) -> str:
    return f"{shlex.quote(shell.python)} jaxrl_async/pods/survey.py"


def _mark(host: Host, token: str) -> str:
    """The command that leaves a mark, by which hosts that share the directory are told."""
    return f"echo {token} >{shlex.quote(f'.host-{host.name}')}"


def refusals(plan: Plan, found: Mapping[Host, Mapping[str, Any]], digest: str) -> list[str]:
    """Why hosts cannot take part in a run.

    Args:
      plan: of the run.
      found: of each host the result of `survey.survey`, with "late": seconds that its clock is behind.
      digest: of this package.
    """
    said, first = [], plan.hosts[0]
    for host, one in found.items():
        versions, wanted = one["versions"], found[first]["versions"]
        name, python = host.name, versions["python"]
        if missing := [of for of, version in versions.items() if not version]:
            said.append(f"{name} lacks {', '.join(missing)} for its {python}: --setup installs")
        elif tuple(map(int, python.split("."))) < (3, 11):
            said.append(f"{name} has Python {python}, 3.11 is needed: --python=PATH")
        elif differ := [of for of in versions if versions[of] != wanted[of]]:
            pairs = ", ".join(f"{of} {versions[of]} and not {wanted[of]}" for of in differ)
            said.append(f"{name} has {pairs} as {first.name}")
        if one["digest"] != digest:
            found_digest = f"of digest {one['digest']} and not {digest}"
            said.append(f"{name} has another jaxrl_async, {found_digest}: leave --nocopy away")
        if abs(late := one["late"]) > CLOCK_SECS:
            off = f"{late:+.0f} s off this one's, at most {CLOCK_SECS:g} s may be"
            said.append(f"the clock of {name} is {off}")
        if one["chips"] < host.chips:
            said.append(f"{name} has {one['chips']} chips, the plan needs {host.chips}")
    return said


def survey_all(plan: Plan, shell: Shell, *, digest: str = "", secs: float) -> None:
    """Raises PodError with all reasons of all hosts against the run; digest: of its package, or the first host's."""

    def look(host: Host) -> dict[str, Any]:
        began = time.time()
        found = json.loads(shell.run(host, _survey(shell), secs=secs).splitlines()[-1])
        now = time.time()
        # Its clock was read between the two.
        late = min(0.0, now - found["time"]) + max(0.0, began - found["time"])
        return found | {"late": late}

    found = each(plan.hosts, look)
    if said := refusals(plan, found, digest or found[plan.hosts[0]]["digest"]):
        raise PodError("\n  ".join(said))


def package(
    include: Sequence[pathlib.Path],
    asked: pathlib.Path,
    keys: pathlib.Path,
    *,
    whole: bool,
    kind: str,
) -> dict[str, pathlib.Path]:
    """What hosts get, by its name there: this package, where it is to come `whole`, other files, asked.json, the keys.

    With it comes a requirements.txt of the libraries, and JAX's for chips of a kind.
    """
    wanted = importlib.metadata.requires("jaxrl_async") or []
    chips = {"": "jax"}.get(kind, "jax[tpu]" if TPU.fullmatch(kind) else "jax[cuda13]")
    lines = [line for line in wanted if "extra ==" not in line]
    (asked.parent / "requirements.txt").write_text("\n".join([*lines, chips, ""]))
    paths = {path.name: path for path in include}
    root = pathlib.Path(survey.ROOT)
    paths |= {root.name: root} if whole else {}
    paths["requirements.txt"] = asked.parent / "requirements.txt"
    return {**paths, "asked.json": asked, "run/keys": keys}


def tar(paths: Mapping[str, pathlib.Path]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", dereference=True, compresslevel=1) as tar:
        for name, path in paths.items():
            tar.add(path, name, filter=lambda m: None if "__pycache__" in m.name else m)
    return packed.getvalue()


ADD = "tar xzf -"
UNPACK = f"rm -rf jaxrl_async && {ADD}"


def copy(shell: Shell, hosts: Iterable[Host], data: bytes, unpack: str, setup: str) -> None:
    """Gives hosts a tar, and sets them up."""
    hosts = list(hosts)
    each(hosts, lambda host: shell.run(host, unpack, secs=LONG_SECS, data=data))
    if setup:
        each(hosts, lambda host: shell.run(host, setup, secs=LONG_SECS))


def commands(
    plan: Plan, shell: Shell, setup: str, copy: bool, prepare: str, flags: Sequence[str]
) -> Iterator[tuple[Host, str]]:
    """All commands on hosts that a run gives, in order; what they read is not shown."""
    for host in plan.hosts:
        yield host, _mark(host, "TOKEN")
    for command in (UNPACK if copy else ADD, setup, _survey(shell)):
        yield from ((host, command) for host in plan.hosts if command)
    yield plan.hosts[0], prepare
    for role in plan.roles:
        yield role.host, command_of(role, shell, flags)


def begin(
    plan: Plan,
    shell: Shell,
    workdir: pathlib.Path,
    at: Sequence[Host],
    prepare: str,
    *,
    secs: float,
) -> dict[str, pathlib.Path]:
    """Begins the run on the first host, with the checkpoints from here where it has fewer; the others get its files.

    Returns:
      These files, by their names there; none where there is nothing to do.

    Raises:
      PodError: the host refuses the run.
    """
    first, queue = plan.hosts[0], plan.queue_host
    there = shell.run(first, "ls run/checkpoints 2>/dev/null || true", secs=secs).split()
    here = [path.name for path in workdir.glob("checkpoints/*")]
    if newer := _last(here) > _last(there):
        print(f"{first.name}: the run of {workdir}, up to step {_last(here)}", flush=True)
        kept = {p.name: p for p in workdir.iterdir() if p.name not in _STAYS}
        shell.run(first, "tar xzf - -C run", secs=LONG_SECS, data=tar(kept))
    journal = {path.name: path for path in workdir.glob(_JOURNAL)}
    if queue != first and journal:
        known = f"rm -f run/{_JOURNAL};" if newer else "[ -e run/journal.sqlite ] ||"
        shell.run(queue, f"{known} tar xzf - -C run", secs=LONG_SECS, data=tar(journal))
    try:
        print(shell.run(first, prepare, secs=LONG_SECS), end="", flush=True)
    except PodError as error:
        if error.code != NOTHING_TO_DO:
            raise
        print(error)
        return {}
    pull(shell, first, workdir, [*_STAYS, *_LAST], secs=secs)
    found = [*workdir.glob("*.json"), *workdir.glob("tokenizer")]
    files = {f"run/{path.name}": path for path in found if path.name not in _STAYS}
    data = tar(files)
    each(at[1:], lambda host: shell.run(host, ADD, secs=secs, data=data))
    return files


def _last(names: Iterable[str]) -> int:
    return max((int(name) for name in names if name.isdigit()), default=-1)


def pull(
    shell: Shell, host: Host, workdir: pathlib.Path, without: Sequence[str], *, secs: float
) -> None:
    """Brings the run of a host home, without some names.

    Raises:
      PodError: it did not come within `secs`, or not whole.
    """
    flags = shlex.join([f"--exclude=./{name}" for name in without])
    command = f"tar czf - {flags} -C run . || [ $? = 1 ]"  # 1: a file grew meanwhile.
    try:
        process = subprocess.Popen(
            shell.words(host, command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
    except OSError as error:
        raise PodError(f"{host.name}: {error}") from None
    timer = threading.Timer(secs, process.kill)
    timer.start()
    try:
        with tarfile.open(fileobj=process.stdout, mode="r|gz") as tar:
            tar.extractall(workdir, filter="data")
        process.wait()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise PodError(f"{host.name}: the workdir came not home: {error}") from None
    finally:
        timer.cancel()
        with process:  # and its pipe
            process.kill()


class _Process(subprocess.Popen):
    """The ssh of a role. Its code is the role's: negative for a signal, or a connection that was lost."""

    _code: int | None = None

    @property
    def returncode(self) -> int | None:
        code = self._code
        if code == LOST:
            return -signal.SIGKILL
        return 128 - code if code and 128 < code < 192 else code

    @returncode.setter
    def returncode(self, code: int | None) -> None:
        self._code = code

    def send_signal(self, sig: int) -> None:
        """To the role."""
        assert self.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.stdin.write(f"{signal.Signals(sig).name}\n".encode())
            self.stdin.flush()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def command_of(role: Role, shell: Shell, flags: Sequence[str]) -> str:
    """The command of a role on its host."""
    return shell.module("jaxrl_async.pods.host", role.name, *flags, environment=role.environment)


def run(
    plan: Plan,
    shell: Shell,
    flags: Sequence[str],
    setup: str,
    slice_secs: int,
    servers_per_host: int,
    settings: Settings,
    *,
    workdir: pathlib.Path,
    stop_requested: Callable[[], bool],
) -> bool:
    """Runs all roles until the learner is done; result and errors as of `supervisor.run`. The workdir comes home."""
    fleet = _Fleet(plan, shell, servers_per_host, list(settings.server.addresses))
    started: set[str] = set()
    threads: list[threading.Thread] = []
    processes: dict[str, _Process] = {}

    def start(name: str, resume: bool, fallback: bool = False) -> supervisor.Role:
        role, log = fleet.roles[name], workdir / "logs" / f"{name}.log"
        own = [fleet.flag() if flag.startswith(_ADDRESSES) else flag for flag in flags]
        words = shell.words(role.host, command_of(role, shell, own))
        if name in started:  # Its host may be gone for a while, and come back with an empty disk.
            # The learner's processes wait for one another, and not for ever.
            learners = plan.hosts[: plan.num_learners]
            awaited = learners if name.startswith("learner") else [role.host]
            there = " && ".join(_reached(shell, host, workdir / AGAIN, setup) for host in awaited)
            lives = f"kill -0 {os.getpid()} || exit"
            before = after = ""
            if name.startswith("learner-") and settings.learner.slices > 1:
                before = f"sleep {slice_secs} & bound=$!; "  # No clock is read.
                after = "; kill $bound 2> /dev/null"
                lives += f"; kill -0 $bound 2> /dev/null || exit {GONE}"
            again = f"{before}until {there}; do sleep {RETRY_SECS}; {lives}; done{after}"
            again += f"; exec {shlex.join(words)}"
            words = ["sh", "-c", again]
        started.add(name)
        log.parent.mkdir(exist_ok=True)
        log.touch()  # The supervisor reads it at once.
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        process = _Process(words, **pipes, start_new_session=True)
        follow = threading.Thread(
            target=_follow, args=(process.stdout, log, f"{role.host.name} {name}: "), daemon=True
        )
        follow.start()
        threads.append(follow)
        processes[name] = process
        return supervisor.Role(name, process, log, role.host.name)

    def is_over() -> bool:  # Slurm preempts all nodes of its job.
        codes = (p.returncode for name, p in processes.items() if name.startswith("learner"))
        return stop_requested() or (shell.template == TEMPLATES["slurm"] and PREEMPTED in codes)

    def change(live: list[supervisor.Role]) -> None:
        if (request := workdir / REQUEST).exists():
            asked = json.loads(request.read_text())
            request.unlink()
            try:
                for name in fleet.join([Host(**values) for values in asked["add"]]):
                    live.insert(len(live) - plan.num_learners, start(name, False))
                gone = fleet.leave(asked["remove"])
                supervisor.stop([role for role in live if role.name in gone])
                live[:] = [role for role in live if role.name not in gone]
                answer = ""
            except (plans.PlanError, PodError) as error:
                answer = str(error)
            sealed.replace(workdir / ANSWER, answer)

    with _coming_home(shell, plan, workdir):
        try:
            return supervisor.supervise(
                list(fleet.roles), plan.num_learners, settings, workdir, plan.queue, start,
                change=change, stop_requested=is_over,
            )  # fmt: skip
        finally:
            for thread in threads:
                thread.join(timeout=1.0)


def _reached(shell: Shell, host: Host, again: pathlib.Path, setup: str) -> str:
    """A local command that fails while a host is gone; one whose disk is new gets its files again."""
    mark = shlex.quote(f".host-{host.name}")
    command = f"[ -e {mark} ] || {{ {ADD} && {{ {setup or ':'}; }} && touch {mark}; }}"
    return f"{shlex.join(shell.words(host, command))} <{shlex.quote(str(again))} >/dev/null 2>&1"


@dataclasses.dataclass(eq=False)
class _Fleet:
    """The roles of a run, of which servers join and leave; the learner polls a list of those that joined."""

    plan: Plan
    shell: Shell
    servers_per_host: int
    urls: list[str]  # of all servers so far, by their numbers

    def __post_init__(self):
        self.roles = {role.name: role for role in self.plan.roles}
        self._joined: dict[str, str] = {}  # role → its address

    def flag(self) -> str:
        return f"{_ADDRESSES}{tuple(self.urls)!r}"

    def join(self, hosts: Sequence[Host]) -> list[str]:
        """The new roles of hosts. Raises PlanError where one is in the run already."""
        plans.check_unique([*{role.host: None for role in self.roles.values()}, *hosts])
        new = plans.serve(hosts, self.servers_per_host, first=len(self.urls))
        scheme = self.urls[0].partition("://")[0]
        urls = [f"{scheme}://{address}" for address in plans.addresses_of(new)]
        names = [role.name for role in new]
        self._list(self._joined | dict(zip(names, urls, strict=True)))
        self.urls += urls
        self.roles |= dict(zip(names, new, strict=True))
        return names

    def leave(self, names: Sequence[str]) -> list[str]:
        """The roles of hosts that leave. Raises PlanError where one does more than sample, or nothing else samples."""
        found = {
            name: [r.name for r in self.roles.values() if r.host.name == name] for name in names
        }
        for name, roles in found.items():
            if not roles:
                raise plans.PlanError(f"no host {name} is in the run")
            if other := [role for role in roles if not role.startswith("server-")]:
                others = ", ".join(other)
                raise plans.PlanError(f"{name} has {others}: only hosts that sample leave")
        gone = [role for roles in found.values() for role in roles]
        if gone and not any(r.startswith("server-") for r in self.roles.keys() - set(gone)):
            raise plans.PlanError(f"nothing would sample without {', '.join(names)}")
        self._list({name: url for name, url in self._joined.items() if name not in gone})
        self.roles = {name: role for name, role in self.roles.items() if name not in gone}
        return gone

    def _list(self, joined: dict[str, str]) -> None:
        if joined != self._joined:
            text = "".join(f"{url}\n" for url in joined.values())
            command = "cat >run/servers.new && mv run/servers.new run/servers"
            self.shell.run(self.plan.hosts[0], command, secs=LOST_SECS, data=text.encode())
            self._joined = joined


# In a workdir here: what a host with an empty disk gets, the run's plan, and what other processes ask of it.
AGAIN, PLAN, REQUEST, ANSWER = "pod/again.tgz", "pod/plan.json", "pod/request", "pod/answer"
DISCOVER = "file:run/servers"  # of the learner's first host
LISTED = ": >run/servers"


def ask(
    workdir: pathlib.Path, *, add: Sequence[Host] = (), remove: Sequence[str] = (), secs: float
) -> None:
    """Has the `pod` that runs in a workdir take hosts in, or let some go.

    Raises:
      PodError: none answers within `secs`, or it refuses.
    """
    (answer := workdir / ANSWER).unlink(missing_ok=True)
    asked = {"add": [dataclasses.asdict(host) for host in add], "remove": list(remove)}
    sealed.replace(workdir / REQUEST, json.dumps(asked))
    deadline = time.monotonic() + secs
    while not answer.exists():
        if time.monotonic() > deadline:
            (workdir / REQUEST).unlink(missing_ok=True)
            late = f"no pod of {workdir} answers within {secs:g} s"
            raise PodError(f"{late}: is it running, and here?")
        time.sleep(0.2)
    if said := answer.read_text():
        raise PodError(said)


def _follow(stream, log: pathlib.Path, prefix: str) -> None:
    """Copies a role's output to its log, and to stdout with the host's name."""
    with open(log, "ab", buffering=0) as file:
        for line in stream:
            # On a full disk, too: the role would wait for its reader.
            with contextlib.suppress(OSError):
                file.write(line)
            text = security.escaped(line.decode(errors="replace").rstrip("\n"), keep="\t")
            tqdm.tqdm.write(prefix + text)


@contextlib.contextmanager
def _coming_home(shell: Shell, plan: Plan, workdir: pathlib.Path) -> Iterator[None]:
    """Brings metrics and samples now and then, and all of the run at the end, however it ends."""
    over, host = threading.Event(), plan.hosts[0]
    elsewhere = plan.queue_host != host

    def often() -> None:
        while not over.wait(COLLECT_SECS):
            with contextlib.suppress(PodError):  # At the end it is said.
                pull(shell, host, workdir, [*_STAYS, *_LAST], secs=COLLECT_SECS)

    thread = threading.Thread(target=often, name="collect", daemon=True)
    thread.start()
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        over.set()
        thread.join(2 * COLLECT_SECS)
        try:
            pull(shell, host, workdir, [*_STAYS, *[_JOURNAL] * elsewhere], secs=LONG_SECS)
            if elsewhere:
                pull(shell, plan.queue_host, workdir, ["[!j]*"], secs=LONG_SECS)
        except PodError as error:
            if not has_failed:
                raise
            tqdm.tqdm.write(f"pod: {error}", file=sys.stderr)  # What ended the run is the error.
        settle(workdir / "journal.sqlite")
