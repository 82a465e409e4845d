"""The queue's records: permits, resume points, shares, servers, waits and status.

Plain dataclasses and names. Imports neither protobuf nor gRPC, so that every part may use them.
"""

import dataclasses
import secrets
from typing import Any

# Reasons of a return; every other list of them is made of these. After a reissue reason, no fault of the prompt's, the
# index is issued again. A retire reason is the prompt's: the index is done with.
WORKER_LOST = "worker_lost"  # Returned by the queue: no sign of life of the worker that had it.
# Of a worker: no server was HEALTHY, or servers answered nonsense to several prompts.
SERVER_FAULT = "server_fault"
# By the queue, for the versions of a group's tokens.
REFUSALS = frozenset({"over_age", "foreign_version"})
# Such a failure may last, so the index is issued again after a back-off.
FAULTS = REFUSALS | {
    SERVER_FAULT,
    *("server_error", "aborted", "rollout_error", "reward_error", "reward_timeout"),
    "teacher_error",
    *("environment_error", "environment_timeout", "agent_error", "agent_timeout", "agent_rows"),
}
FAILURES = FAULTS | {"timeout", WORKER_LOST}
# By the queue, with queue.order = "completion": others were trained until its tokens were too old for the next step.
OVERTAKEN = "overtaken"
REISSUE_REASONS = FAILURES | {OVERTAKEN}
# No fault of the prompt's: it costs none of its attempts, and those that come together count as one failure.
BLAMELESS = REFUSALS | {WORKER_LOST, SERVER_FAULT}
RETIRE_REASONS = frozenset({"equal_rewards", "overlong", "invalid", "solved"})
EXHAUSTED = "exhausted"  # Retired by the queue, after max_attempts.

SERVER_STATES = ("HEALTHY", "SUSPECT", "DEAD", "STALE")

SUPERSEDED = "superseded"  # First word of the refusal of a learner after which another one began.
RUN_ID_CHARS = 12
_RUN_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"

UP = "up"  # Key of RoleStatus.secs: the time since the role started.
SILENT_SECS = 10.0  # A role without a report for longer is suspected. Roles report every 2 s.


class RunFailedError(RuntimeError):
    """The run cannot go on; the message is a worker's report, or says why."""


class SupersededError(RuntimeError):
    """Another learner of the run began after this one; the message names both generations."""


def new_run_id() -> str:
    """A random name of a run: RUN_ID_CHARS lowercase letters and digits, 60 bits."""
    return "".join(secrets.choice(_RUN_ID_ALPHABET) for _ in range(RUN_ID_CHARS))


@dataclasses.dataclass(frozen=True)
class Identity:
    """The run of a queue, and the learner that may change it."""

    run_id: str  # RUN_ID_CHARS characters, drawn when the run's first queue started
    generation: int  # of the learner that began last, from 1; 0 before the first


NOBODY = Identity("", 0)  # A learner that never began: of tools, benchmarks and tests.


@dataclasses.dataclass(frozen=True, order=True)
class Permit:
    """The right to generate one group, once."""

    prompt_index: int
    attempt: int  # 0 for the first issue of the prompt_index, + 1 for each reissue


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The state that a new queue starts from, when a learner is restored at `step`."""

    step: int  # committed, with all steps before it
    frontier: int  # the next fresh prompt_index
    outstanding: tuple[Permit, ...]  # issued, neither committed by `step` nor retired; ascending
    retired: dict[str, int]  # indexes by reason
    returned: dict[str, int]  # returns by reason

    def to_json(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        return dataclasses.asdict(self) | {
            "outstanding": [[p.prompt_index, p.attempt] for p in self.outstanding]
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ResumePoint":
        """The inverse of `to_json`."""
        outstanding = tuple(Permit(*p) for p in values["outstanding"])
        return cls(**{**values, "outstanding": outstanding})


@dataclasses.dataclass(frozen=True)
class Share:
    """The groups that one of several learner processes trains on: a consecutive part of every minibatch."""

    process: int = 0  # in [0, num_processes)
    num_processes: int = 1
    num_minibatches: int = 1  # per chunk

    def __post_init__(self):
        if not 0 <= self.process < self.num_processes:
            raise ValueError(
                f"process must be in [0, num_processes = {self.num_processes}), got {self.process}"
            )
        if self.num_minibatches < 1:
            raise ValueError(f"num_minibatches must be ≥ 1, got {self.num_minibatches}")

    def of_minibatch(self, num_groups: int) -> range:
        """Positions in a minibatch: [i·k/n, (i+1)·k/n) of k groups, for process i of n."""
        i, n = self.process, self.num_processes
        return range(i * num_groups // n, (i + 1) * num_groups // n)

    def of_chunk(self, num_groups: int) -> list[int]:
        """Positions in a chunk, ascending. Raises ValueError: num_minibatches does not divide the number of groups."""
        size, rest = divmod(num_groups, self.num_minibatches)
        if rest:
            raise ValueError(
                f"num_minibatches {self.num_minibatches} does not divide {num_groups} groups"
            )
        own = self.of_minibatch(size)
        return [start + position for start in range(0, num_groups, size) for position in own]


WHOLE = Share()  # The share of a learner of one process: all groups.


@dataclasses.dataclass(frozen=True)
class ServerRecord:
    """One inference server, as the publisher saw it last."""

    address: str
    state: str  # one of SERVER_STATES; only HEALTHY servers get requests
    version: int | None  # of its weights; None before the first push to it
    speed: float = 1.0  # relative, > 0: a fast server gets more requests
    load: int = 0  # outstanding tokens of all workers, as they reported last; the publisher's records have 0


# The waits of a worker at its start.
READS = (READS_TASK, READS_REWARD) = ("its task", "the processes of its reward")


@dataclasses.dataclass(frozen=True)
class Wait:
    """A wait of one thing for another."""

    what: str  # "group 512.0"
    on: str  # "server http://127.0.0.1:30000"
    secs: float  # so far


@dataclasses.dataclass(frozen=True)
class RoleStatus:
    """The last report of a role."""

    role: str
    silent_secs: float  # since that report
    waits: tuple[Wait, ...]
    secs: dict[str, float]  # since it started, summed over its samples, by stage; UP is the time


@dataclasses.dataclass(frozen=True)
class QueueStatus:
    """The contents of the queue, its counts, and the waits of every role."""

    depth_groups: int  # held, not leased
    depth_bytes: int  # of the groups in memory, held and leased
    leased_groups: int  # leased, not committed
    running_groups: int  # permits out
    reissue_groups: int  # indexes to be issued again
    capacity: int  # groups that may be admitted
    v_pub: int | None  # published last: servers hold it, or one delay_steps older
    committed_step: int
    leased_step: int  # last step leased in full
    frontier: int  # next fresh prompt_index
    returned: dict[str, int]  # returns by reason
    retired: dict[str, int]  # indexes by reason
    stale_events: int  # submissions and returns whose permit was no longer valid
    completion_tokens: int  # submitted so far
    # since a group was submitted; None where none was to this process
    last_push_age_secs: float | None
    waits: tuple[str, ...]  # one sentence per waiting call
    run_epoch: int  # of v_pub: how often a resumed run came to other weights under a version
    roles: tuple[RoleStatus, ...]  # that report, by name
    servers: tuple[ServerRecord, ...]
    lengths: dict[str, float]  # mean tokens so far, by "prompt/trained", "completion/dropped", …
    run_id: str  # `Identity.run_id`
    failure: str  # that a worker reported, and that ends the run; "" without one
    generation: int  # of the learner that began last; 0 before the first
    # What the last return said, by reason; since this process of the queue started.
    details: dict[str, str] = dataclasses.field(default_factory=dict)


_NONE: dict[str, Any] = dict.fromkeys([field.name for field in dataclasses.fields(QueueStatus)], 0)
_NONE |= {"v_pub": None, "last_push_age_secs": None}
_NONE |= {"returned": {}, "retired": {}, "lengths": {}, "details": {}}
_NONE |= {"waits": (), "roles": (), "servers": (), "run_id": "", "failure": ""}
NO_STATUS = QueueStatus(**_NONE)  # of a queue without groups or reports
