"""The place of a process in a cluster, from its environment: its role, its index, and the addresses of the others.

Three environments are supported, each with one layout:

    Slurm         a heterogeneous job of three or four components: learner hosts; servers; the queue, then rollout
                  workers; reward services, where there are any
    JobSet        replicated jobs named as roles: learner, queue and rollout are jobs of n pods, servers n jobs of a
                  pod; a learner over JOBSET_SLICES slices is a job for each; reward services, where there are any, a
                  job of JOBSET_REWARDS pods
    TPU slices    learner hosts, of one slice or several; the config has the addresses of the others

A pure function from a mapping to a `Place`. Reads no flags, settings, files or sockets.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

QUEUE_PORT = 7000
SERVER_PORT = 30000  # and the next ones, where a host has several servers
COORDINATOR_PORT = 8476
REWARD_PORT = 7100  # and the next ones, where a host has several reward services
SLURM_COMPONENTS = ("learner", "server", "queue", "rewards")
ROLES = ("learner", "server", "queue", "rollout", "rewards")


class ClusterError(ValueError):
    """An environment without this process's place; the message names the variable."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's role and index in a run, and the addresses of the other roles."""

    role: str  # one of ROLES; "all" outside a cluster
    index: int  # of the server, rollout worker, reward service or learner process
    num_learners: int  # processes of the learner
    queue_address: str  # "host:port"; "" where the config has it
    server_addresses: tuple[str, ...]  # "http://host:port"; () where the config has them
    coordinator: str  # "host:port" of learner process 0; "" with one learner process
    # "host:port"; () where the config has them, or there are none
    reward_addresses: tuple[str, ...] = ()


ALONE = Place("all", 0, 1, "", (), "")


def place_of(environ: Mapping[str, str]) -> Place:
    """The place that an environment gives this process; `ALONE` outside a cluster.

    Raises:
      ClusterError: a cluster's variable is missing, or fits no layout above.
    """
    if "SLURM_HET_SIZE" in environ:
        return _slurm(environ)
    if "JOBSET_NAME" in environ:
        return _jobset(environ)
    slices = _number(environ, "MEGASCALE_NUM_SLICES", "1")
    if environ.get("TPU_WORKER_HOSTNAMES", "").count(",") or slices > 1:
        return _tpu(environ)
    if _number(environ, "SLURM_NTASKS", "1") > 1:
        raise ClusterError(
            f"SLURM_NTASKS = {environ['SLURM_NTASKS']} and SLURM_HET_SIZE is missing: a Slurm job of several tasks "
            "must be heterogeneous, as launch/slurm.sbatch is"
        )
    return ALONE


def hosts_of(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list: "gpu[1-2,07],login" → gpu1, gpu2, gpu07, login.

    Raises:
      ClusterError: not such a list.
    """
    words = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist)
    if not words or ",".join(words) != nodelist:
        raise ClusterError(f"not a list of Slurm nodes: {nodelist!r}")
    return [host for word in words for host in _expand(word)]


def _expand(word: str) -> list[str]:
    head, bracket, rest = word.partition("[")
    if not bracket:
        return [head]
    ranges, _, tail = rest.partition("]")
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ClusterError(f"not a range of Slurm nodes: {part!r} in {word!r}")
        numbers += [f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1)]
    return [head + number + end for number in numbers for end in _expand(tail)]


def _slurm(environ: Mapping[str, str]) -> Place:
    num = _number(environ, "SLURM_HET_SIZE")
    if num not in (3, 4):
        raise ClusterError(
            f"SLURM_HET_SIZE = {num}: the components must be 3 or 4, in this order: learner hosts, servers, the queue "
            "with the rollout workers, reward services"
        )
    given = ("SLURM_JOB_NODELIST_HET_GROUP_", "SLURM_TASKS_PER_NODE_HET_GROUP_")
    groups = [f"{variable}{k}" for variable in given for k in range(num)]
    _require(
        environ,
        (*groups, "SLURM_JOB_NODELIST", "SLURM_PROCID"),
        "`srun --het-group=K` in a heterogeneous job sets them: follow launch/slurm.sbatch",
    )
    lists = [_value(environ, f"SLURM_JOB_NODELIST_HET_GROUP_{k}") for k in range(num)]
    # `srun --het-group=k` sets it for its tasks; in the batch shell it is that of component 0.
    own = _value(environ, "SLURM_JOB_NODELIST")
    if lists.count(own) != 1:
        known = ", ".join(lists)
        raise ClusterError(
            f"SLURM_JOB_NODELIST = {own} must be the nodes of one component: {known}"
        )
    role, index = SLURM_COMPONENTS[lists.index(own)], _number(environ, "SLURM_PROCID")
    if role == "queue" and index > 0:
        role, index = "rollout", index - 1
    tasks = [_slurm_tasks(environ, k, nodes) for k, nodes in enumerate(lists)]
    learners, servers, queue, *more = tasks
    return Place(
        role,
        index,
        len(learners),
        f"{queue[0][0]}:{QUEUE_PORT}",
        tuple(f"http://{host}:{SERVER_PORT + local}" for host, local in servers),
        _coordinator([host for host, _ in learners]),
        tuple(f"{host}:{REWARD_PORT + local}" for services in more for host, local in services),
    )


def _slurm_tasks(environ: Mapping[str, str], component: int, nodes: str) -> list[tuple[str, int]]:
    """(host, index on it) of every task, in order of rank for a block distribution."""
    variable = f"SLURM_TASKS_PER_NODE_HET_GROUP_{component}"
    counts = []
    for word in _value(environ, variable).split(","):  # "2(x3),1"
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if not match:
            raise ClusterError(f"{variable} must be counts such as 2(x3),1; got {word!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    hosts = hosts_of(nodes)
    if len(counts) != len(hosts):
        raise ClusterError(f"{variable} counts {len(counts)} nodes, the node list has {len(hosts)}")
    return [(host, i) for host, count in zip(hosts, counts, strict=True) for i in range(count)]


def _jobset(environ: Mapping[str, str]) -> Place:
    name, role = _value(environ, "JOBSET_NAME"), environ.get("JOBSET_REPLICATED_JOB", "")
    index = "JOBSET_JOB_INDEX" if role == "server" else "JOB_COMPLETION_INDEX"
    own = ("JOBSET_REWARDS",) if role == "rewards" else ()
    _require(
        environ,
        ("JOBSET_REPLICATED_JOB", index, "JOBSET_LEARNERS", "JOBSET_SERVERS", *own),
        "a JobSet sets them in its pods: `pod --manifest=jobset` writes one",
    )
    if role not in ROLES:
        raise ClusterError(f"JOBSET_REPLICATED_JOB must be one of {', '.join(ROLES)}; got {role!r}")
    learners = range(_number(environ, "JOBSET_LEARNERS"))
    servers = range(_number(environ, "JOBSET_SERVERS"))
    rewards = range(_number(environ, "JOBSET_REWARDS", "0"))

    def host(role: str, job: int, pod: int) -> str:
        return f"{name}-{role}-{job}-{pod}.{name}"

    slices, own_index = _number(environ, "JOBSET_SLICES", "1"), _number(environ, index)
    pods = len(learners) // (slices or 1)
    if role == "learner" and slices > 1:
        own_index += pods * _number(environ, "JOBSET_JOB_INDEX")
    return Place(
        role,
        own_index,
        len(learners),
        f"{host('queue', 0, 0)}:{QUEUE_PORT}",
        tuple(f"http://{host('server', i, 0)}:{SERVER_PORT}" for i in servers),
        _coordinator([host("learner", i // pods, i % pods) for i in learners]),
        tuple(f"{host('rewards', 0, i)}:{REWARD_PORT}" for i in rewards),
    )


def _tpu(environ: Mapping[str, str]) -> Place:
    # Of several slices each names its own hosts.
    hosts = _value(environ, "TPU_WORKER_HOSTNAMES").split(",")
    slices = _number(environ, "MEGASCALE_NUM_SLICES", "1")
    index, all_hosts = _number(environ, "TPU_WORKER_ID"), hosts * slices
    if slices > 1:
        index += len(hosts) * _number(environ, "MEGASCALE_SLICE_ID")
        first = _value(environ, "MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
        all_hosts = [first, *all_hosts[1:]]
    return Place("learner", index, len(all_hosts), "", (), _coordinator(all_hosts))


def _coordinator(hosts: Sequence[str]) -> str:
    return f"{hosts[0]}:{COORDINATOR_PORT}" if len(hosts) > 1 else ""


def _require(environ: Mapping[str, str], variables: Sequence[str], remedy: str = "") -> None:
    """Raises a ClusterError that names every missing variable."""
    missing = [variable for variable in variables if not environ.get(variable)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        text = f"{', '.join(missing)} {verb} missing from the environment"
        raise ClusterError(f"{text}; {remedy}" if remedy else text)


def _value(environ: Mapping[str, str], variable: str) -> str:
    _require(environ, [variable])
    return environ[variable]


def _number(environ: Mapping[str, str], variable: str, default: str = "") -> int:
    text = environ.get(variable, default) or _value(environ, variable)
    if not text.isdigit():
        raise ClusterError(f"{variable} must be a whole number ≥ 0, got {text!r}")
    return int(text)
