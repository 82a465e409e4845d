"""The stall explainer: who waits for whom in a run, since when, and who is at the end of the chain.

Pure functions of the queue's status, to which all roles report, and of the supervisor's table of processes. Opens no
socket, imports no JAX.
"""

import collections
import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_async import sealed
from jaxrl_async.records import (
    EXHAUSTED,
    READS,
    REISSUE_REASONS,
    SILENT_SECS,
    QueueStatus,
    ServerRecord,
    Wait,
)

ROLES_FILE = "roles.json"
CONFIG_FILE = "config.json"
MAX_GROUPS = 3  # groups in the chain
MAX_SERVERS = 16  # servers in it

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Process:
    """A role's process on this machine."""

    role: str  # "queue", "server-0", …
    pid: int
    state: str  # "runs" | "is stopped" | "is dead"


def processes_of(workdir: str | pathlib.Path) -> tuple[Process, ...]:
    """The processes that the supervisor of a run started on this machine; () without a supervisor."""
    roles = _read(workdir, ROLES_FILE, "roles") or {}
    return tuple(Process(name, pid, _state_of(pid)) for name, pid in roles.items())


def address_of(workdir: str | pathlib.Path) -> str | None:
    """ "host:port" of a run's queue, from its roles.json or else its config.json; None where neither has it."""
    address = _read(workdir, ROLES_FILE, "queue_address")
    return address or _read(workdir, CONFIG_FILE, "queue", "address") or None


def end_of(workdir: str | pathlib.Path) -> str | None:
    """How a supervised run ended: "done", "left" (stopped early) or "failed"; None while it runs or without one."""
    return _read(workdir, ROLES_FILE, "ended")


def _read(workdir: str | pathlib.Path, name: str, *keys: str) -> Any:
    """The value under the keys in a JSON file of the workdir; None where it is missing or, which is said, damaged."""
    path = pathlib.Path(workdir) / name
    remedy = (
        sealed.CONFIG_REMEDY
        if name == CONFIG_FILE
        else "delete it; a run that goes on is found by --queue"
    )
    try:
        found = sealed.read(path, remedy=remedy) if path.exists() else {}
        for key in keys:
            found = found[key]
    except sealed.DamagedError as error:
        log.warning("%s", error)
        return None
    except (KeyError, TypeError):
        return None
    return found


def write_roles(workdir: pathlib.Path, queue_address: str, pids: Mapping[str, int]) -> None:
    """Writes the file of `processes_of` and `address_of`."""
    values = {"queue_address": queue_address, "roles": dict(pids)}
    sealed.write(workdir / ROLES_FILE, values)


def write_end(workdir: pathlib.Path, how: str) -> None:
    """Writes the file of `end_of`, once every process has ended."""
    sealed.write(workdir / ROLES_FILE, {"ended": how})


def explain(status: QueueStatus | None, processes: Sequence[Process], step: int | None) -> str:
    """The chain of waits, one link a line, its end last.

    Args:
      status: of the queue; None where it does not answer.
      processes: the known ones of this machine.
      step: the last step done; None before the first.
    """
    lines = [f"last step done: {'none' if step is None else step}"]
    if status is None:
        own = (f": its process {p.pid} {p.state}" for p in processes if p.role == "queue")
        lines.append(f"the queue does not answer{next(own, '')}")
        return "\n".join([*lines, *_other(processes, "queue"), "end of the chain: the queue"])
    learner = [r for r in status.roles if r.role.startswith("learner")]
    workers = [r for r in status.roles if r.role.startswith("rollout")]
    for role in learner:
        late = role.silent_secs > SILENT_SECS
        silence = f" (reported {role.silent_secs:.0f} s ago)" if late else ""
        lines += [_wait(wait) + silence for wait in role.waits[:1]]
    lines += [f"  ← {wait}" for wait in status.waits if wait.startswith("lease")]
    groups = sorted((w for role in workers for w in role.waits), key=lambda w: -w.secs)
    lines += [f"    ← {_wait(wait)}" for wait in groups[:MAX_GROUPS]]
    lines += _losses(status)
    lines += _servers(status.servers)
    lines += _other(processes)
    silent = [role for role in status.roles if role.silent_secs > SILENT_SECS]
    lines += [f"{r.role} has been silent for {r.silent_secs:.0f} s" for r in silent]
    end = _end_of_chain(status, processes, learner, workers, groups)
    return "\n".join([*lines, f"end of the chain: {end}"])


def _servers(servers: Sequence[ServerRecord]) -> list[str]:
    """A line for each server; of many, for those that are not HEALTHY first, and the rest counted."""
    late_first = sorted(servers, key=lambda s: s.state == "HEALTHY")
    shown = servers if len(servers) <= MAX_SERVERS else late_first[:MAX_SERVERS]
    lines = [
        f"      ← server {s.address}: {s.state}, version {'none' if s.version is None else s.version}"
        for s in shown
    ]
    rest = collections.Counter(s.state for s in late_first[len(shown) :])
    counts = ", ".join(f"{count} {state}" for state, count in sorted(rest.items()))
    return lines + ([f"      ← and {len(servers) - len(shown)} more: {counts}"] if counts else [])


def _end_of_chain(status, processes, learner, workers, groups) -> str:
    """The role that waits for nobody. A reported failure comes first, then a process that does not run."""
    if status.failure:
        return f"the run's own code: {status.failure}"
    for process in sorted(processes, key=lambda p: _RANK.get(p.role.partition("-")[0], 9)):
        if process.state != "runs":
            return f"{process.role} (pid {process.pid}) {process.state}"
    for role in (*learner, *workers):
        if role.silent_secs > SILENT_SECS:
            return f"{role.role}, silent for {role.silent_secs:.0f} s"
    if not learner:
        return "the learner, which has not reported yet"
    at = learner[0].waits[0] if learner[0].waits else Wait("learner", "itself", 0.0)
    if "wait_push" in at.what or "publish" in at.what:
        late = [s.address for s in status.servers if s.state != "HEALTHY"]
        more = f" and {len(late) - MAX_SERVERS} more" if len(late) > MAX_SERVERS else ""
        names = ", ".join(late[:MAX_SERVERS]) + more
        return f"the push of weights, to {names}" if late else f"the publisher: {at.on}"
    if "wait_data" not in at.what:
        return f"{learner[0].role}, at work ({at.what}) for {at.secs:.0f} s"
    if not status.running_groups:
        if not workers:
            return "the rollout workers: none has reported"
        if groups and groups[0].on.startswith(READS):
            return f"{groups[0].what} and {groups[0].on}, since {groups[0].secs:.0f} s"
        if status.v_pub is None:
            return "the learner, which has published no version yet"
        if status.capacity:
            return "the rollout workers, which ask for no permits"
        retired = ", ".join(f"{n} {reason}" for reason, n in status.retired.items())
        more = f" (retired: {retired})" if retired else ""
        return f"the bound on staleness: nothing may be admitted{more}"
    waits = [w for w in groups if w.what.startswith("group ")]
    if not waits:
        return f"{status.running_groups} permits are out to workers that do not report"
    longest, lost = waits[0], status.returned | status.retired
    pushed = status.last_push_age_secs
    if lost and longest.secs < SILENT_SECS and (pushed is None or pushed > SILENT_SECS):
        counts = ", ".join(f"{count} {reason}" for reason, count in lost.items())
        return f"the groups: they come back instead of being submitted ({counts})"
    same = sum(w.on == longest.on for w in waits)
    return f"{longest.on}: {longest.what} waits for it since {longest.secs:.0f} s, as do {same - 1} others"


def _losses(status: QueueStatus) -> list[str]:
    """The prompts that were retired and the groups that came back, with their reasons."""
    returned = [f"{reason} {count:,}" for reason, count in _descending(status.returned)]
    lines = []
    for reason, count in _descending(status.retired):
        failed = [r for r, _ in _descending(status.returned) if r in REISSUE_REASONS]
        why = f": {', '.join(failed)}" if reason == EXHAUSTED and failed else ""
        lines.append(f"    {count:,} prompts retired as {reason}{why}")
    return lines + ([f"    groups returned: {', '.join(returned)}"] if returned else [])


def _descending(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _wait(wait: Wait) -> str:
    if wait.on == "itself":
        return f"{wait.what} is at work for {wait.secs:.0f} s"
    return f"{wait.what} waits for {wait.on} since {wait.secs:.0f} s"


def _other(processes: Sequence[Process], named: str = "") -> list[str]:
    found = (p for p in processes if p.state != "runs" and p.role != named)
    return [f"{p.role} (pid {p.pid}) {p.state}" for p in found]


def _state_of(pid: int) -> str:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "is dead"
    state = stat.rpartition(")")[2].split()[0]
    return "is stopped" if state in "Tt" else "is dead" if state in "ZX" else "runs"


_RANK = {"queue": 0, "learner": 1, "server": 2, "rollout": 3}
