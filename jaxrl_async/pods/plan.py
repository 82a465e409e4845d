"""The plan of a run on several hosts: which hosts and chips learn and sample, where the other roles are.

Pure functions of texts and numbers, tested by values. Opens no file and no socket, imports no JAX.

    hosts 0 … n-1    a learner process each; the first has the queue; rollout workers in turns
    the next K       servers
    the last K       the queue and rollout workers, instead of learner hosts; the last hosts reward services

The TPU's variables are those of docs.jax.dev and libtpu for several processes on one VM; workers of a slice are
numbered along x first (docs.cloud.google.com/tpu/docs). MEGASCALE_* join slices, as JAX reads and Ray sets them. Never
run on a TPU.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_async.runtime.cluster import (
    COORDINATOR_PORT,
    QUEUE_PORT,
    REWARD_PORT,
    SERVER_PORT,
    ClusterError,
)
from jaxrl_async.runtime.cluster import hosts_of as names_of

TPU_PORT = 8471
MEGASCALE_PORT = 8081
LOST_SECS = 60.0  # until ssh gives up a host that is silent
RETRY_SECS = 10.0  # until a lost host is tried again
TPU = re.compile(r"v\d+[a-z]*")  # a kind of TPU
# Chips of a process → their box; other numbers are no box of a host.
BOXES = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
_KINDS = {"v5litepod": "v5e", "v5lite": "v5e"}  # gcloud's name → that of `fit`
_CORES = ("v2", "v3", "v4", "v5p")  # kinds whose number counts cores, of which a chip has two


class PlanError(ValueError):
    """Hosts that cannot be read, or a split that fits nothing; the message names value and bound."""


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine of the run."""

    name: str  # as people and ssh say it
    address: str  # at which the other hosts reach it
    kind: str = ""  # of its chips: "v5e", "h100"; "" for a CPU
    chips: int = 0
    node: str = ""  # a TPU's resource, of which it is a worker
    worker: int = 0
    place: str = ""  # "project/zone" of the node
    grid: tuple[int, ...] = ()  # hosts of its slice along x, y, z; () where it is none

    def __post_init__(self):
        object.__setattr__(self, "grid", tuple(self.grid))  # JSON has lists.

    @property
    def is_tpu(self) -> bool:
        return bool(TPU.fullmatch(self.kind))


@dataclasses.dataclass(frozen=True)
class Role:
    """A process of the run: `train --role=…` on a host."""

    name: str  # "queue", "server-0", …
    host: Host
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Roles in order of start, the learner's last, and where they find one another."""

    hosts: tuple[Host, ...]  # the learner's first
    roles: tuple[Role, ...]
    num_learners: int
    num_devices: int  # of the learner; 0 on CPUs
    target: str  # of `fit`; "" on CPUs
    queue: str  # "host:port"
    servers: tuple[str, ...]  # "host:port"
    rewards: tuple[str, ...]
    coordinator: str  # "" with one learner process

    @property
    def queue_host(self) -> Host:
        """The host that has the journal."""
        return next(role.host for role in self.roles if role.name == "queue")


def read_hosts(text: str, chips: str = "") -> list[Host]:
    """The hosts of a text: gcloud's JSON of TPU VMs, a line "NAME [ADDRESS]" for each, or Slurm's "node[1-4],login".

    Args:
      text: `gcloud compute tpus tpu-vm describe NODE --format=json`, or `list`; lines, of which # begins a comment.
      chips: "v5e:4", "h100:8": of each host, where the text does not say; "" for CPUs. With "v5e:4:4x4" the hosts are,
        in their order, those of one TPU slice of 4 × 4 chips after the other.

    Raises:
      PlanError: none of these, no host, or a host twice.
    """
    found = re.fullmatch(r"([a-z]\d+[a-z]*):([1-9]\d*)(?::(\d+(?:x\d+)+))?", chips)
    if chips and not found:
        raise PlanError(
            f"--chips must be KIND:NUMBER, as v5e:4 or h100:8, or v5e:4:4x4 with a slice's shape, got {chips!r}"
        )
    text = text.strip()
    if text.startswith(("{", "[{")):
        try:
            nodes = json.loads(text)
            nodes = nodes if isinstance(nodes, list) else [nodes]
            hosts = [host for node in nodes for host in _of_node(node)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"not gcloud's JSON of TPU VMs: {error!r}") from None
    else:
        lines = [line.partition("#")[0].split() for line in text.splitlines()]
        lines = [line for line in lines if line]
        if long := [line for line in lines if len(line) > 2]:
            raise PlanError(f"a line has a name and an address, got {' '.join(long[0])!r}")
        try:
            expanded = [(name, line) for line in lines for name in names_of(line[0])]
        except ClusterError as error:
            raise PlanError(str(error)) from None
        hosts = [Host(name, line[-1] if len(line) == 2 else name) for name, line in expanded]
    if found:
        kind, count, shape = found.groups()
        grid = _grid(shape or "", int(count))
        if shape and not grid:
            raise PlanError(f"--chips={chips}: hosts with {count} chips make no slice of {shape}")
        size = math.prod(grid)
        for i, host in enumerate(hosts):
            of = {"node": f"slice-{i // size}", "worker": i % size, "grid": grid} if shape else {}
            if not host.chips:
                hosts[i] = dataclasses.replace(host, kind=kind, chips=int(count), **of)
    if not hosts:
        raise PlanError("no host is named")
    check_unique(hosts)
    return hosts


def check_unique(hosts: Sequence[Host]) -> None:
    """Raises PlanError where a name or an address stands for several hosts."""
    for what in ("name", "address"):
        values = [getattr(host, what) for host in hosts]
        if twice := {value for value in values if values.count(value) > 1}:
            raise PlanError(f"the {what} {min(twice)} stands for several hosts")


def _of_node(node: Mapping[str, Any]) -> Iterable[Host]:
    """The workers of a TPU VM, as gcloud describes it."""
    _, project, _, zone, _, name = node["name"].split("/")
    if (state := node.get("state", "READY")) != "READY":
        raise PlanError(f"the TPU {name} is {state}")
    version, _, number = node["acceleratorType"].partition("-")
    kind = _KINDS.get(version) or version
    ends = node["networkEndpoints"]
    total = int(number) // (2 if kind in _CORES else 1)
    chips, rest = divmod(total, len(ends))
    if rest or chips not in BOXES:
        raise PlanError(f"the TPU {name} of {total} chips has {len(ends)} hosts")
    shape = node.get("acceleratorConfig", {}).get("topology", "")
    grid = _grid(shape, chips)
    if math.prod(grid) != len(ends):
        grid = ()
    for i, end in enumerate(ends):
        own = f"{name}-{i}" if len(ends) > 1 else name
        yield Host(own, end["ipAddress"], kind, chips, name, i, f"{project}/{zone}", grid)


def _grid(shape: str, chips: int) -> tuple[int, ...]:
    """The hosts along each axis of a slice, "4x4", where each has `chips`; () where they make none."""
    axes = [int(axis) for axis in shape.split("x") if axis]
    grid = tuple(axis // box for axis, box in zip(axes, BOXES.get(chips, ()), strict=False))
    return grid if math.prod(grid) * chips == math.prod(axes) else ()


def num_learners(
    hosts: Sequence[Host], servers: int, server_chips: int, queue_hosts: int = 0
) -> int:
    """The hosts that learn. Raises PlanError where none would, or nothing would sample."""
    if min(servers, queue_hosts) < 0 or servers + queue_hosts >= len(hosts):
        others = f" and --queue_hosts = {queue_hosts}" if queue_hosts else ""
        raise PlanError(f"--servers = {servers}{others} of {len(hosts)} hosts leaves none to learn")
    if not servers and server_chips < 1:
        raise PlanError("nothing would sample: give --servers=HOSTS or --server_chips=CHIPS")
    return len(hosts) - servers - queue_hosts


def num_slices(hosts: Sequence[Host], num: int) -> int:
    """The TPU slices of the first `num` hosts, which learn; 1 for other hosts.

    Raises:
      PlanError: several, which are not whole or not equal.
    """
    nodes = {host.node: [o for o in hosts if o.node == host.node] for host in hosts[:num]}
    kinds = {(len(of), of[0].kind, of[0].chips, of[0].grid) for of in nodes.values()}
    if len(nodes) > 1 and (len(kinds) > 1 or sum(map(len, nodes.values())) != num):
        parts = [f"{n} has {len(of)} with {of[0].chips} × {of[0].kind}" for n, of in nodes.items()]
        need = f"{num} hosts learn, and a learner over several slices takes whole and equal ones"
        raise PlanError(f"{need}: {', '.join(parts)}")
    return len(nodes)


def make(
    hosts: Sequence[Host],
    *,
    servers: int = 0,
    server_chips: int = 0,
    servers_per_host: int = 0,
    workers: int = 1,
    rewards: int = 0,
    queue_hosts: int = 0,
    learner_devices: int = 1,
) -> Plan:
    """The plan of a run.

    Args:
      hosts: of the run; the first ones learn.
      servers: hosts after those that sample, whole.
      server_chips: of the only learner host, which sample instead; its last ones.
      servers_per_host: of a host that samples, and of such chips; 0: one for each chip, one on a CPU.
      workers: rollout workers.
      rewards: hosts with a reward service, from the end of the list on.
      queue_hosts: hosts at the end of the list with the queue and the rollout workers; their chips are idle.
      learner_devices: of the config's mesh.

    Raises:
      PlanError: the split fits nothing.
    """
    num = num_learners(hosts, servers, server_chips, queue_hosts)
    if not 0 <= rewards <= len(hosts):
        raise PlanError(f"--rewards = {rewards} must be in [0, {len(hosts)}], the hosts")
    slices = num_slices(hosts, num)
    learners, samplers = hosts[:num], hosts[num : num + servers]
    others = [dataclasses.replace(host, kind="", chips=0) for host in hosts[num + servers :]]
    hosts, workers_at = [*learners, *samplers, *others], others or learners
    if len({(host.kind, host.chips) for host in learners}) > 1:
        found = ", ".join(f"{host.name} {host.chips} × {host.kind}" for host in learners)
        raise PlanError(f"learner hosts must have the same chips: {found}")
    chips = learners[0].chips - server_chips
    if server_chips and num > 1:
        raise PlanError(f"--server_chips splits a host, and {num} learn: give --servers=HOSTS")
    if server_chips and chips < 1:
        raise PlanError(
            f"--server_chips = {server_chips} of {learners[0].chips} chips of {learners[0].name} leaves none to learn"
        )
    if learner_devices % num or (chips and chips * num != learner_devices):
        of = f"{num} hosts with {chips} chips each" if chips else f"{num} hosts"
        raise PlanError(
            f"the config's mesh has {learner_devices} devices, and {of} learn: set learner.fsdp and its like, or "
            "another --servers"
        )
    cpu = {"JAX_PLATFORMS": "cpu"}
    roles = [Role("queue", workers_at[0], cpu)]
    serving = serve(samplers, servers_per_host)
    if server_chips:
        serving += serve(hosts[:1], servers_per_host, skip=chips, first=len(serving))
    roles += serving
    services = hosts[len(hosts) - rewards :]
    roles += [Role(f"rewards-{i}", host, cpu) for i, host in enumerate(services)]
    at = [workers_at[i % len(workers_at)] for i in range(workers)]
    roles += [Role(f"rollout-{i}", host, cpu) for i, host in enumerate(at)]
    for i, host in enumerate(learners):
        environment = _learns(learners, i, chips, slices)
        if not chips and learner_devices > num:
            environment = {"JAX_NUM_CPU_DEVICES": str(learner_devices // num)}
        roles.append(Role("learner" if num == 1 else f"learner-{i}", host, environment))
    return Plan(
        tuple(hosts),
        tuple(roles),
        num,
        chips * num,
        _target(hosts[0], chips, num, slices),
        f"{workers_at[0].address}:{QUEUE_PORT}",
        addresses_of(serving),
        tuple(f"{host.address}:{REWARD_PORT}" for host in services),
        f"{hosts[0].address}:{COORDINATOR_PORT}" if num > 1 else "",
    )


def serve(
    hosts: Iterable[Host], servers_per_host: int = 0, *, skip: int = 0, first: int = 0
) -> list[Role]:
    """The servers of hosts, numbered from `first` on, without the first `skip` chips of each; see `make`."""
    roles: list[Role] = []
    for host in hosts:
        ids = range(skip, host.chips)
        count = servers_per_host or max(1, len(ids))
        each, rest = divmod(len(ids), count)
        if ids and (rest or not each):
            raise PlanError(f"{len(ids)} chips of {host.name} are not {count} equal servers'")
        for i in range(count):
            shown = _shown(host, list(ids[i * each : (i + 1) * each]))
            roles.append(Role(f"server-{first + len(roles)}", host, shown))
    return roles


def addresses_of(servers: Sequence[Role]) -> tuple[str, ...]:
    """ "host:port" of servers; those of a host have ports in their order."""
    hosts = [role.host for role in servers]
    return tuple(
        f"{host.address}:{SERVER_PORT + hosts[:i].count(host)}" for i, host in enumerate(hosts)
    )


def _learns(learners: Sequence[Host], index: int, chips: int, slices: int) -> dict[str, str]:
    """The variables of a learner process: none where it has its host, and the learner its slice."""
    host, num = learners[index], len(learners)
    if slices > 1:
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": learners[0].address,
            "MEGASCALE_PORT": str(MEGASCALE_PORT),
            "MEGASCALE_NUM_SLICES": str(slices),
            "MEGASCALE_SLICE_ID": str(index * slices // num),
        }
    whole = chips == host.chips and num == math.prod(host.grid or (1,))
    if not chips or whole or not host.is_tpu:
        return {} if chips == host.chips else _shown(host, list(range(chips)))
    if num == 1:
        return _shown(host, list(range(chips)))
    x, y, z = (*host.grid, 1, 1, 1)[:3]
    if not host.grid:
        what = f"the topology of the slice of {host.name} is not known"
        raise PlanError(f"{what}: {num} of its hosts")
    if [other.worker for other in learners] != list(range(num)):
        raise PlanError("the learner's hosts must be the first workers of their slice, in order")
    box = (num, 1, 1) if num <= x else (x, num // x, 1) if num <= x * y else (x, y, num // (x * y))
    if math.prod(box) != num:
        what = f"{num} of {x} × {y} × {z} hosts are no box of the slice"
        raise PlanError(f"{what}: give another --servers")
    return _shown(host, list(range(chips))) | {
        "TPU_PROCESS_BOUNDS": ",".join(map(str, box)),
        "TPU_PROCESS_ADDRESSES": ",".join(f"{h.address}:{TPU_PORT}" for h in learners),
        "TPU_PROCESS_PORT": str(TPU_PORT),
        "CLOUD_TPU_TASK_ID": str(index),
    }


def _shown(host: Host, ids: Sequence[int]) -> dict[str, str]:
    """The variables of a process alone with some chips of its host."""
    if not ids:
        return {}
    if not host.is_tpu:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ids))}
    if len(ids) not in BOXES:
        boxes = ", ".join(map(str, BOXES))
        raise PlanError(f"{len(ids)} chips of {host.name} are no box: {boxes} are")
    return {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": ",".join(map(str, BOXES[len(ids)])),
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_VISIBLE_CHIPS": ",".join(map(str, ids)),
        "CLOUD_TPU_TASK_ID": "0",
    }


def _target(host: Host, chips: int, num: int, slices: int) -> str:
    if not chips:
        return ""
    if host.is_tpu:
        number = chips * num // slices * (2 if host.kind in _CORES else 1)
        return f"{f'{slices}x' if slices > 1 else ''}{host.kind}-{number}"
    return f"{f'{num}x' if num > 1 else ''}{host.kind}-{chips}"


def text(plan: Plan) -> str:
    """A line for each role, by host, with its variables."""
    lines = []
    for host in plan.hosts:
        what = f"{host.chips} × {host.kind}" if host.chips else "CPU"
        lines.append(f"{host.name}  {host.address}  {what}")
        for role in (role for role in plan.roles if role.host == host):
            variables = " ".join(f"{k}={v}" for k, v in role.environment.items())
            lines.append(f"  {role.name:10} {variables}".rstrip())
    where = [f"queue {plan.queue}", f"servers {', '.join(plan.servers)}"]
    where += [f"rewards {', '.join(plan.rewards)}"] * bool(plan.rewards)
    serving = [role.host.name for role in plan.roles if role.name.startswith("server-")]
    if len(set(serving)) > 1:
        name = max(serving, key=serving.count)
        share = serving.count(name) / len(serving)
        where.append(
            f"without {name}, a server host: {1 - share:.0%} of the sampling; noticed within {LOST_SECS:g} s, "
            f"tried every {RETRY_SECS:g} s"
        )
    return "\n".join([*lines, *where])
