"""The planner: a run by discrete events under a virtual clock. No JAX, sockets or weights.

Admission is the run's own object, `queue.admission.Admission`. Time is a model, in six sentences:

- A server with n requests running gives each of them  1 / (1/request_rate + n/server_rate)  tokens a second: a decode
  step reads the weights once, and pays for each request.
- A group's G samples are on one server, the one with the fewest requests; with its slots full, groups wait in turn.
- A group is one event, the end of its longest sample. Until then it takes Σ lengths / longest slots, its own mean, so
  that slots and tokens are conserved.
- Where a sample has several turns, each is a request of its own, of an equal part of the tokens; between two of them
  its tool runs for log-normal seconds, in which the group keeps its permit, and the sample takes no slot of a server.
- A step takes the learner step_secs, and token_secs for each completion token of a chunk as soon as that is leased.
- A push takes push_secs, and pauses generation for its last pause_secs; then all servers hold the version.

Not modelled: failures other than a permit's timeout, rewards, prompts, the network, checkpoints, evaluation; that a
server reads the row again before a turn, or has it cached.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import numpy as np

from jaxrl_async.config.checks import check_mode
from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.records import OVERTAKEN, Permit

MAX_LOST = 300

# (rng, num_groups, group_size) → completion lengths, float64 [num_groups, group_size], tokens ≥ 1; or numbers of turns.
Lengths = Callable[[np.random.Generator, int, int], np.ndarray]


class StallError(RuntimeError):
    """The learner would wait forever; the message names the wait."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run to simulate. Rates are in tokens a second, times in seconds."""

    mode: str  # one of config.settings.MODES
    num_steps: int
    warm_steps: int  # at the start, excluded from every figure
    groups_per_step: int  # B
    group_size: int  # G
    max_staleness: int  # η, steps
    push_every_steps: int  # N
    chunk_groups: int  # periodic mode: groups a chunk; 0 in the others
    max_running_groups: int
    permit_timeout_secs: float
    max_attempts: int  # issues of one prompt_index before it is retired
    num_servers: int
    num_slots: int  # requests that run at once on a server; others wait
    request_rate: float  # of a request alone on a server
    server_rate: float  # that a server approaches as it fills
    step_secs: float  # of the learner, whatever is in the step
    token_secs: float  # of the learner, for each completion token
    push_secs: float
    pause_secs: float  # of push_secs: generation stands still
    drop_share: float  # of generated groups: retired for equal rewards, whatever their length
    seed: int
    turns: str = "1"  # of a sample: their mean, or their distribution; as of `turns_of`
    max_turns: int = 0  # an episode of more loses the turns beyond, tokens too; 0: no bound
    tool_secs: float = 0.0  # median of log-normal seconds between two turns
    tool_sigma: float = 0.0  # of their logarithm
    order: str = "prompt"  # queue.order

    def __post_init__(self):
        """
        Raises:
          ValueError: a value outside its bound, or settings that contradict one another.
        """
        for name in _AT_LEAST_ONE:
            _check(name, getattr(self, name), "≥ 1", getattr(self, name) >= 1)
        for name in _AT_LEAST_ZERO:
            _check(name, getattr(self, name), "≥ 0 and finite", 0 <= getattr(self, name) < math.inf)
        for name in ("request_rate", "server_rate", "permit_timeout_secs"):
            _check(name, getattr(self, name), "> 0", getattr(self, name) > 0)
        _check("drop_share", self.drop_share, "in [0, 1)", 0 <= self.drop_share < 1)
        in_push = f"≤ push_secs = {self.push_secs:g}"
        _check("pause_secs", self.pause_secs, in_push, self.pause_secs <= self.push_secs)
        in_run = f"in [0, num_steps = {self.num_steps})"
        _check("warm_steps", self.warm_steps, in_run, 0 <= self.warm_steps < self.num_steps)
        a_group = f"≥ group_size = {self.group_size}"
        _check("num_slots", self.num_slots, a_group, self.num_slots >= self.group_size)
        orders = ("prompt", "completion") if self.mode == "async" else ("prompt",)
        _check("order", self.order, f"one of {orders} in mode {self.mode}", self.order in orders)
        turns_of(self.turns)
        check_mode(
            self.mode,
            max_staleness=self.max_staleness,
            push_every_steps=self.push_every_steps,
            chunk_groups=self.chunk_groups,
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of a simulated run, after its warm steps."""

    steps_per_sec: float
    trained_tokens_per_sec: float
    wait_data_share: float  # of the learner's time
    wait_push_share: float
    servers_idle_share: float  # of the servers' time: no request runs
    servers_paused_share: float  # generation stands still for a push
    slots_used_share: float  # of all slots' time
    tools_running: float  # samples between two turns, on average
    staleness_mean: float  # steps, over trained tokens
    staleness_max: int
    staleness: dict[int, float]  # steps → share of trained tokens
    dropped: dict[str, int]  # groups that were generated and not trained on, by reason
    drop_share: float  # of the groups generated
    mean_generated: float  # tokens, of the completions of every group generated
    mean_trained: float  # of those trained on
    length_bias: float  # mean_trained / mean_generated


def simulate(
    plan: Plan, lengths: Lengths, watch: Callable[[Admission], None] | None = None
) -> Outcome:
    """Runs the plan. The same plan and lengths give the same outcome; a prompt has the same lengths, and the same turns
    where they have one distribution, in every plan of the same seed and group_size.

    Args:
      watch: called with the admission object after every event.

    Raises:
      ValueError: settings that would deadlock: max_staleness < push_every_steps − 1.
      StallError: more than MAX_LOST times the groups of a step were lost without a step in between.
    """
    return _Run(plan, lengths, watch or (lambda admission: None)).outcome()


@dataclasses.dataclass(frozen=True)
class Limit:
    """The limit on the steps of a plan: relaxed by two, alone, it makes the largest difference."""

    by: str  # a key of RELAXED; "" where nothing alone makes MIN_GAIN
    secs: float  # of a step
    relaxed_secs: dict[str, float]  # of a step, by what is relaxed


RELAXED: dict[str, Callable[[Plan], dict[str, float]]] = {
    "the slots of the servers": lambda p: {"num_slots": 2 * p.num_slots},
    "the rate of a full server": lambda p: {"server_rate": 2 * p.server_rate},
    "the rate of a request": lambda p: {"request_rate": 2 * p.request_rate},
    "the tools": lambda p: {"tool_secs": p.tool_secs / 2},
    "the learner": lambda p: {"step_secs": p.step_secs / 2, "token_secs": p.token_secs / 2},
    "the pushes": lambda p: {"push_secs": p.push_secs / 2, "pause_secs": p.pause_secs / 2},
    "the bound on staleness": lambda p: (
        {"max_staleness": 2 * max(p.max_staleness, 1)} if p.mode == "async" else {}
    ),
    "the groups generated at once": lambda p: {"max_running_groups": 2 * p.max_running_groups},
}
MIN_GAIN = 0.03  # of the seconds of a step
_LIMIT_STEPS = 100  # of each of these simulations, at most


def limit_of(plan: Plan, lengths: Lengths) -> Limit:
    """Relaxes one bound after the other, twofold, and simulates the first steps of each.

    Raises:
      ValueError, StallError: as of `simulate`.
    """
    num_steps = min(plan.num_steps, _LIMIT_STEPS)
    warm_steps = min(plan.warm_steps, num_steps // 2)
    plan = dataclasses.replace(plan, num_steps=num_steps, warm_steps=warm_steps)

    def secs_of(some: Plan) -> float:
        return _share(1.0, simulate(some, lengths).steps_per_sec)

    secs = secs_of(plan)
    plans = {name: dataclasses.replace(plan, **relax(plan)) for name, relax in RELAXED.items()}
    relaxed = {name: secs_of(other) for name, other in plans.items() if other != plan}
    by = min(relaxed, key=lambda name: relaxed[name])
    return Limit(by if relaxed[by] < (1 - MIN_GAIN) * secs else "", secs, relaxed)


def split(
    plan: Plan,
    lengths: Lengths,
    *,
    devices: int,
    devices_per_server: int = 1,
    learner_devices: int = 1,
    max_splits: int = 31,
) -> list[tuple[int, Outcome]]:
    """Every way to divide devices between learner and servers, or max_splits evenly spaced ones.

    The assumption: the learner's time for a token falls as 1/devices, its time for a step stays; a server takes
    devices_per_server devices, has the plan's rates on them, and servers do not slow one another.

    Args:
      plan: its num_servers is not read; its token_secs is that of learner_devices devices.
      devices: of learner and servers together.
      devices_per_server: ≥ 1.
      learner_devices: ≥ 1.
      max_splits: bound on the number of simulations.

    Returns:
      (number of servers, outcome), ascending. The remaining devices are the learner's.

    Raises:
      ValueError: the devices are too few for a server and a learner.
    """
    _check("devices_per_server", devices_per_server, "≥ 1", devices_per_server >= 1)
    _check("learner_devices", learner_devices, "≥ 1", learner_devices >= 1)
    enough = f"≥ devices_per_server + 1 = {devices_per_server + 1}"
    _check("devices", devices, enough, devices > devices_per_server)
    most = (devices - 1) // devices_per_server
    counts = np.unique(np.linspace(1, most, min(most, max_splits)).round().astype(int))
    outcomes = []
    for servers in counts.tolist():
        share = learner_devices / (devices - servers * devices_per_server)
        changes = dict(num_servers=servers, token_secs=plan.token_secs * share)
        outcomes.append((servers, simulate(dataclasses.replace(plan, **changes), lengths)))
    return outcomes


# Lengths.

KINDS = ("constant:L", "uniform:LOW:HIGH", "lognormal:MEAN:SIGMA", "pareto:MEAN:ALPHA")


def lengths_of(spec: str, max_new_tokens: int = 0) -> Lengths:
    """Lengths by their description.

    Args:
      spec: one of KINDS (SIGMA is of the underlying normal, ALPHA of a tail P(length > x) ∝ x^−α), or "journal:FILE".
      max_new_tokens: longer ones are cut; 0 for no bound. MEAN is that before the cut.

    Raises:
      ValueError: an unknown kind, or a number outside its bound; both named.
      JournalError: the journal cannot be read.
    """
    kind, _, rest = spec.partition(":")
    _check("max_new_tokens", max_new_tokens, "≥ 0", max_new_tokens >= 0)
    if kind == "journal":
        draw = measured(journal_lengths(rest))
    else:
        draw = _distribution("lengths", spec, ("journal",))
    most = max_new_tokens or math.inf
    return lambda rng, num_groups, group_size: np.clip(draw(rng, num_groups, group_size), 1, most)


def turns_of(spec: str) -> Lengths:
    """Numbers of turns by their description.

    Args:
      spec: their mean, ≥ 1, which the two whole numbers around it give; or a distribution as of `lengths_of`, whose
        values are rounded up or down at random, so that it keeps its mean. A value below 1 counts as 1.

    Raises:
      ValueError: an unknown kind, or a number outside its bound; both named.
    """
    draw = _distribution("turns", spec if ":" in spec else f"constant:{spec}")

    def whole(rng: np.random.Generator, num_groups: int, group_size: int) -> np.ndarray:
        drawn = np.maximum(draw(rng, num_groups, group_size), 1)
        return np.floor(drawn) + (rng.random(drawn.shape) < drawn % 1)

    return whole


def _distribution(name: str, spec: str, others: Sequence[str] = ()) -> Lengths:
    """One of _DISTRIBUTIONS; an error lists `others` beside them."""
    kind, _, rest = spec.partition(":")
    if kind not in _DISTRIBUTIONS:
        kinds = ", ".join((*_DISTRIBUTIONS, *others))
        raise ValueError(f"{name} {spec!r}: the kind {kind!r} is none of {kinds}")
    num, make = _DISTRIBUTIONS[kind]
    try:
        numbers = [float(word) for word in rest.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) != num or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} {spec!r}: {kind} takes {num} numbers, {kind}{':X' * num}")
    try:
        return make(*numbers)
    except ValueError as error:
        raise ValueError(f"{name} {spec!r}: {error}") from None


def measured(rows: Sequence[Sequence[float]]) -> Lengths:
    """Draws measured groups whole, with replacement.

    Raises:
      ValueError (when drawn from): the groups have another size.
    """
    table = np.asarray(rows, np.float64)

    def draw(rng: np.random.Generator, num_groups: int, group_size: int) -> np.ndarray:
        same = f"{table.shape[1]}, that of the groups measured"
        _check("group_size", group_size, same, group_size == table.shape[1])
        return table[rng.integers(len(table), size=num_groups)]

    return draw


def journal_lengths(path: str | pathlib.Path) -> list[list[int]]:
    """The completion lengths of every group of a journal, in the order of training.

    Raises:
      JournalError: no journal, a queue that has it open, or forgotten groups.
      ValueError: no group was trained on.
    """
    reader = JournalReader(path)
    try:
        groups = (reader[i] for i in range(len(reader)))
        rows = [[sum(len(t.completion) for t in rows) for rows in g.samples] for g in groups]
    finally:
        reader.close()
    if not rows:
        raise ValueError(f"journal {path} has no group that was trained on")
    return rows


def _constant(length: float) -> Lengths:
    _check("constant", length, "≥ 1", length >= 1)
    return lambda rng, *shape: np.full(shape, length)


def _uniform(low: float, high: float) -> Lengths:
    _check("uniform LOW", low, f"in [1, HIGH = {high:g}]", 1 <= low <= high)
    return lambda rng, *shape: rng.uniform(low, high, shape)


def _lognormal(mean: float, sigma: float) -> Lengths:
    """exp(N(μ, σ²)) has the mean exp(μ + σ²/2)."""
    _check("lognormal MEAN", mean, "≥ 1", mean >= 1)
    _check("lognormal SIGMA", sigma, "≥ 0", sigma >= 0)
    return lambda rng, *shape: rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, shape)


def _pareto(mean: float, alpha: float) -> Lengths:
    """The smallest length x₀ gives the mean x₀·α/(α − 1)."""
    _check("pareto MEAN", mean, "≥ 1", mean >= 1)
    _check("pareto ALPHA", alpha, "> 1", alpha > 1)
    return lambda rng, *shape: mean * (alpha - 1) / alpha * (1 + rng.pareto(alpha, shape))


_DISTRIBUTIONS: dict[str, tuple[int, Callable[..., Lengths]]] = {
    "constant": (1, _constant),
    "uniform": (2, _uniform),
    "lognormal": (2, _lognormal),
    "pareto": (2, _pareto),
}


# The run.


@dataclasses.dataclass(eq=False, slots=True)
class _Group:
    permit: Permit
    tokens: float
    dropped: bool  # for equal rewards, when it is there
    requests: int  # that have not ended for good
    by_version: dict[int, float] = dataclasses.field(default_factory=dict)  # tokens


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    """A group of one turn; or a sample, which runs once for each of its turns."""

    group: _Group
    lengths: np.ndarray  # float64 [G], or [1] of a turn
    longest: float
    tokens: float
    slots: float  # that it takes, on average
    tools: list[float] = dataclasses.field(default_factory=list)  # seconds before each turn to come
    server: int = -1
    start: float = 0.0  # the server's progress


class _Run:
    """One simulation: the learner is a generator, the requests are the fleet's events, the rest are timers."""

    def __init__(self, plan: Plan, lengths: Lengths, watch: Callable[[Admission], None]):
        self._plan, self._lengths, self._watch = plan, lengths, watch
        self._turns = turns_of(plan.turns)
        self._whole = plan.groups_per_step if plan.order == "completion" else None
        self._admission = Admission(
            batch_groups=plan.groups_per_step,
            max_staleness=plan.max_staleness,
            push_every_steps=plan.push_every_steps,
            max_running_groups=plan.max_running_groups,
            max_attempts=plan.max_attempts,
            permit_timeout_secs=plan.permit_timeout_secs,
            max_bytes=1,  # Groups are given no bytes: the queue's memory is no bound here.
            chunk_groups=plan.chunk_groups or self._whole,
            weight_delay=0,
        )
        self._fleet = _Fleet(
            plan.num_servers, plan.num_slots, 1 / plan.request_rate, 1 / plan.server_rate
        )
        self._now = 0.0
        self._paused_since: float | None = None
        self._paused_secs = 0.0  # in all, without the pause that is on
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ages: collections.deque[tuple[float, Permit]] = collections.deque()  # ascending
        self._out: dict[int, _Group] = {}  # by prompt_index: permits that are out
        self._here: dict[int, _Group] = {}  # submitted, not trained on
        self._late: set[int] = set()  # permits that the lease waits for; see _lease
        self._pushing = False
        self._tools_running = 0
        self._tools_at = self._tools_secs = 0.0  # sample-seconds of tools until then
        self._lost = 0  # groups since the last step
        self._tally = _Tally()
        self._block = functools.lru_cache(maxsize=16)(self._draw)

    def outcome(self) -> Outcome:
        self._hold(0)
        self._admit()
        learner = self._learn()
        wakes = next(learner)  # end of its activity; None: it checks again after every event
        while wakes is not _OVER:
            at, event = self._next_event()
            if wakes is not None and wakes <= at:
                self._now = wakes
                wakes = next(learner, _OVER)
            else:
                self._now = at
                event()
                self._admit()  # Only these change the capacity: a commit moves groups within `accepted`.
                wakes = next(learner, _OVER) if wakes is None else wakes
            self._watch(self._admission)
        return self._summary()

    # The learner, as learner.train.

    def _learn(self) -> Iterator[float | None]:
        plan, admission, tally = self._plan, self._admission, self._tally
        for step in range(1, plan.num_steps + 1):
            if step == plan.warm_steps + 1:
                self._tally = tally = _Tally()
                tally.since, tally.used = self._now, self._used()
            if plan.mode != "async":
                yield from self._until(lambda: not self._pushing, "wait_push")
            trained, index, last = [], 0, False
            while not last:
                since = self._now
                while (chunk := self._lease(step, index)) is None:
                    yield None
                tally.waited["wait_data"] += self._now - since
                groups = [self._here[i] for i in chunk.indexes]
                yield self._now + plan.token_secs * sum(g.tokens for g in groups)
                trained += groups
                index, last = index + 1, chunk.last
            yield self._now + plan.step_secs
            for i in admission.commit(step):
                del self._here[i]
            self._lost = 0
            tally.train(step, trained)
            if step % plan.push_every_steps == 0 and step < plan.num_steps:
                yield from self._until(lambda: not self._pushing, "wait_push")
                self._push(step)

    def _until(self, condition: Callable[[], bool], name: str) -> Iterator[None]:
        since = self._now
        while not condition():
            yield None
        self._tally.waited[name] += self._now - since

    def _lease(self, step: int, index: int):
        """Admission's lease, called only when its answer may have changed."""
        admission, plan = self._admission, self._plan
        if plan.chunk_groups:
            wanted = min(plan.chunk_groups, admission.leases.missing_groups)
        else:
            wanted = plan.groups_per_step
        if admission.held < wanted or self._late:
            return None
        chunk = admission.lease(step, index)
        if overtaken := admission.overtaken():
            for permit in overtaken:
                admission.take_back(permit)
                del self._here[permit.prompt_index]
            self._lost += len(overtaken)
            self._tally.lose(OVERTAKEN, len(overtaken))
            self._admit()
        if chunk is None:  # The batch in prompt order: some of the lowest B are still out.
            lowest = heapq.nsmallest(wanted, itertools.chain(self._out, self._here))
            self._late = self._out.keys() & lowest
        return chunk

    # Pushes.

    def _push(self, version: int) -> None:
        plan = self._plan
        self._pushing = True
        self._after(plan.push_secs - plan.pause_secs, self._pause)
        self._after(plan.push_secs, lambda: self._hold(version))

    def _pause(self) -> None:
        self._paused_since = self._now

    def _hold(self, version: int) -> None:
        """All servers hold a version, and generate."""
        if self._paused_since is not None:
            self._paused_secs += self._now - self._paused_since
            self._paused_since = None
        self._fleet.hold(version, self._generation_time())
        self._admission.publish(version)
        self._pushing = False

    # Groups.

    def _admit(self) -> None:
        plan, timeout_secs = self._plan, self._plan.permit_timeout_secs
        for permit in self._admission.admit(plan.max_running_groups, self._now):
            block, row = divmod(permit.prompt_index, _BLOCK)
            drawn = self._block(block, permit.attempt)
            requests = self._requests(permit, *(values[row] for values in drawn))
            self._out[permit.prompt_index] = requests[0].group
            if timeout_secs < math.inf:
                self._ages.append((math.nextafter(self._now + timeout_secs, math.inf), permit))
            for request in requests:
                self._fleet.add(request, self._generation_time())

    def _requests(self, permit, lengths, longest, tokens, dropped, turns) -> list[_Request]:
        """Of a new group: one, or one for each sample where a sample has several turns."""
        if turns.max() == 1:
            group = _Group(permit, tokens, dropped, 1)
            return [_Request(group, lengths, longest, tokens, tokens / longest)]
        group = _Group(permit, tokens, dropped, len(lengths))
        rng = np.random.default_rng([self._plan.seed, permit.prompt_index, permit.attempt, 1])
        median, sigma, requests = self._plan.tool_secs, self._plan.tool_sigma, []
        for part, num in zip((lengths / turns)[:, None], turns.astype(int), strict=True):
            tools = (median * rng.lognormal(0.0, sigma, num - 1)).tolist()
            requests.append(_Request(group, part, part.item(), part.item(), 1.0, tools))
        return requests

    def _draw(self, block: int, attempt: int) -> tuple:
        """Of _BLOCK groups: lengths [_BLOCK, G], the longest, their sum, whether they are dropped; turns as lengths."""
        plan = self._plan
        rng = np.random.default_rng([plan.seed, block, attempt])
        lengths = self._lengths(rng, _BLOCK, plan.group_size)
        dropped = rng.random(_BLOCK) < plan.drop_share
        turns = self._turns(rng, _BLOCK, plan.group_size)
        if plan.max_turns:
            lengths = lengths * np.minimum(1, plan.max_turns / turns)
            turns = np.minimum(turns, plan.max_turns)
        sums = lengths.max(axis=1), lengths.sum(axis=1), dropped
        return lengths, *(values.tolist() for values in sums), turns

    def _end(self) -> None:
        """A request has ended: a tool runs, or the sample or group is there."""
        request = self._fleet.end(self._generation_time())
        if request.tools:
            self._count_tools(1)
            self._after(request.tools.pop(), lambda: self._continue(request))
            return
        request.group.requests -= 1
        if not request.group.requests:
            self._submit(request.group)

    def _continue(self, request: _Request) -> None:
        self._count_tools(-1)
        self._fleet.add(request, self._generation_time())

    def _submit(self, group: _Group) -> None:
        permit = group.permit
        if self._out.get(permit.prompt_index) is not group:
            outcome = self._admission.submit(permit, 0)  # Its permit has timed out.
        elif group.dropped:
            outcome = "equal_rewards"
            self._admission.return_permit(permit, outcome)
            self._left(permit)
        else:
            ages = min(group.by_version), max(group.by_version)
            outcome = self._admission.check_versions(permit, *ages)
            if outcome:
                self._admission.return_permit(permit, outcome)
            else:
                outcome = self._admission.submit(permit, 0, ages[0])
                self._here[permit.prompt_index] = group
            self._left(permit)
        self._tally.generate(group, outcome)
        self._lost += outcome != "held"
        if self._lost > MAX_LOST * self._plan.groups_per_step:
            self._stall(f"{self._lost} groups in a row were dropped ({dict(self._tally.lost)}); ")

    def _expire(self) -> None:
        self._ages.popleft()
        for permit, reason in self._admission.expired(self._now).items():
            self._admission.return_permit(permit, reason)
            self._left(permit)

    def _left(self, permit: Permit) -> None:
        del self._out[permit.prompt_index]
        self._late.discard(permit.prompt_index)

    # Time.

    def _after(self, secs: float, call: Callable[[], None]) -> None:
        def event() -> None:
            heapq.heappop(self._timers)
            call()

        heapq.heappush(self._timers, (self._now + secs, next(self._order), event))

    def _generation_time(self) -> float:
        """A clock that stands still while generation does."""
        now = self._now if self._paused_since is None else self._paused_since
        return now - self._paused_secs

    def _used(self) -> tuple[float, float, float, float]:
        self._count_tools(0)
        used = self._fleet.used(self._generation_time())
        return (*used, self._generation_time(), self._tools_secs)

    def _count_tools(self, change: int) -> None:
        self._tools_secs += (self._now - self._tools_at) * self._tools_running
        self._tools_at = self._now
        self._tools_running += change

    def _next_event(self) -> tuple[float, Callable[[], None]]:
        """(when, what): a timer before the end of a request, and that before a timeout, of the same time."""
        at, event = math.inf, self._stall
        if self._ages:
            at, event = self._next_age(), self._expire
        if self._paused_since is None:
            end = self._fleet.next_end() + self._paused_secs
            if end <= at and end < math.inf:
                at, event = max(self._now, end), self._end
        if self._timers and self._timers[0][0] <= at:
            at, _, event = self._timers[0]
        return at, event

    def _next_age(self) -> float:
        """The time at which the oldest permit expires."""
        while self._ages:
            at, permit = self._ages[0]
            group = self._out.get(permit.prompt_index)
            if group is not None and group.permit == permit:
                return at
            self._ages.popleft()
        return math.inf

    def _stall(self, why: str = "") -> NoReturn:
        step = self._admission.leases.committed_step + 1
        raise StallError(why + self._admission.waiting_for(step, self._now))

    def _summary(self) -> Outcome:
        plan, tally = self._plan, self._tally
        secs = self._now - tally.since
        steps = plan.num_steps - plan.warm_steps
        used = (b - a for a, b in zip(tally.used, self._used(), strict=True))
        busy, slots, generating, tools = used
        tokens = sum(tally.staleness.values())
        generated = tally.lost.total() + tally.groups
        mean_generated = tally.generated_tokens / (max(generated, 1) * plan.group_size)
        mean_trained = tokens / (steps * plan.groups_per_step * plan.group_size)
        return Outcome(
            steps_per_sec=_share(steps, secs),
            trained_tokens_per_sec=_share(tokens, secs),
            wait_data_share=_share(tally.waited["wait_data"], secs),
            wait_push_share=_share(tally.waited["wait_push"], secs),
            servers_idle_share=max(0.0, _share(generating - busy / plan.num_servers, secs)),
            servers_paused_share=_share(secs - generating, secs),
            slots_used_share=_share(slots, secs * plan.num_servers * plan.num_slots),
            tools_running=_share(tools, secs),
            staleness_mean=sum(k * n for k, n in tally.staleness.items()) / tokens,
            staleness_max=max(tally.staleness),
            staleness={k: tally.staleness[k] / tokens for k in sorted(tally.staleness)},
            dropped=dict(tally.lost),
            drop_share=_share(tally.lost.total(), generated),
            mean_generated=mean_generated,
            mean_trained=mean_trained,
            length_bias=mean_trained / mean_generated if generated else math.nan,
        )


class _Tally:
    """Counts since the warm steps."""

    def __init__(self):
        self.since = 0.0
        self.used = (0.0, 0.0, 0.0, 0.0)
        self.waited: collections.Counter[str] = collections.Counter()  # seconds
        self.staleness: collections.Counter[int] = collections.Counter()  # tokens
        self.groups = 0  # generated and submitted in time
        self.lost: collections.Counter[str] = collections.Counter()
        self.generated_tokens = 0.0

    def generate(self, group: _Group, outcome: str) -> None:
        self.generated_tokens += group.tokens
        if outcome == "held":
            self.groups += 1
        else:
            self.lost["timeout" if outcome == "stale" else outcome] += 1

    def lose(self, reason: str, num_groups: int) -> None:
        """Groups that were submitted in time are not trained on."""
        self.groups -= num_groups
        self.lost[reason] += num_groups

    def train(self, step: int, groups: Sequence[_Group]) -> None:
        for group in groups:
            for version, tokens in group.by_version.items():
                self.staleness[step - 1 - version] += tokens


class _Fleet:
    """Servers that share their rate among their requests. Its clock is generation time.

    A server's progress is the number of tokens that each request there has got so far, so a request ends when the
    progress has grown by its longest sample, however the load changed in between.
    """

    def __init__(self, num_servers: int, num_slots: int, step_secs: float, request_secs: float):
        self._num_slots, self._step_secs, self._request_secs = num_slots, step_secs, request_secs
        self._progress = [0.0] * num_servers
        self._since = [0.0] * num_servers  # The progress is that of this time.
        self._load = np.zeros(num_servers)  # slots taken
        self._running: list[list[tuple[float, int, _Request]]] = [[] for _ in range(num_servers)]
        self._waiting: collections.deque[_Request] = collections.deque()
        self._ends: list[tuple[float, int, int]] = []  # (time, server, stamp): each one's next
        self._stamps = [0] * num_servers  # An older end was overtaken by a change of the load.
        self._held: list[tuple[int, list[float]]] = []  # (version, every server's progress then)
        self._order = itertools.count()
        self._used_at = self._busy_secs = self._slot_secs = 0.0
        self._num_busy, self._slots = 0, 0.0

    def add(self, request: _Request, now: float) -> None:
        """Starts a request, or lets it wait."""
        self._waiting.append(request)
        if len(self._waiting) == 1:
            self._start_waiting(now)

    def next_end(self) -> float:
        """The time at which the next request ends if nothing changes before; inf when nothing runs."""
        while self._ends and self._ends[0][2] != self._stamps[self._ends[0][1]]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def end(self, now: float) -> _Request:
        """The request of `next_end`; its tokens are counted by version."""
        server = self._ends[0][1]
        self._count(now)
        self._progress[server], _, request = heapq.heappop(self._running[server])
        self._since[server] = now
        self._take(server, -request.slots)
        by_version = request.group.by_version
        for version, tokens in self._by_version(request).items():
            by_version[version] = by_version.get(version, 0.0) + tokens
        self._plan_end(server)
        self._start_waiting(now)
        return request

    def hold(self, version: int, now: float) -> None:
        """Sets the version of the tokens generated from now on."""
        for server in range(len(self._progress)):
            self._advance(server, now)
        self._held.append((version, self._progress.copy()))

    def used(self, now: float) -> tuple[float, float]:
        """(busy seconds of servers, seconds of slots taken), so far."""
        self._count(now)
        return self._busy_secs, self._slot_secs

    def _start_waiting(self, now: float) -> None:
        while self._waiting:
            server, request = int(self._load.argmin()), self._waiting[0]
            if self._load.item(server) + request.slots > self._num_slots + _ROUNDING:
                return
            self._waiting.popleft()
            self._count(now)
            self._advance(server, now)
            request.server, request.start = server, self._progress[server]
            end = request.start + request.longest
            heapq.heappush(self._running[server], (end, next(self._order), request))
            self._take(server, request.slots)
            self._plan_end(server)

    def _take(self, server: int, slots: float) -> None:
        """Counts slots as taken, or as free again."""
        before = self._load.item(server)
        # Of an empty server exactly 0, which sums of fractions do not come back to.
        load = before + slots if self._running[server] else 0.0
        self._slots += load - before
        self._load[server] = load
        self._num_busy += (load > 0) - (before > 0)

    def _plan_end(self, server: int) -> None:
        self._stamps[server] += 1
        if self._running[server]:
            left = self._running[server][0][0] - self._progress[server]
            end = self._since[server] + left * self._secs_per_token(server)
            heapq.heappush(self._ends, (end, server, self._stamps[server]))

    def _advance(self, server: int, now: float) -> None:
        if self._running[server]:
            self._progress[server] += (now - self._since[server]) / self._secs_per_token(server)
        self._since[server] = now

    def _secs_per_token(self, server: int) -> float:
        return self._step_secs + self._load.item(server) * self._request_secs

    def _by_version(self, request: _Request) -> dict[int, float]:
        """A sample of ℓ tokens has max(ℓ − d, 0) from versions held since d tokens after its start."""
        counted, by_version = 0.0, {}
        for version, progress in reversed(self._held):
            done = progress[request.server] - request.start
            if done <= 0:
                by_version[version] = request.tokens - counted
                return by_version
            since = float(np.maximum(request.lengths - done, 0).sum())
            if since > counted:
                by_version[version] = since - counted
            counted = since
        raise AssertionError("a request started before there was a version")

    def _count(self, now: float) -> None:
        self._busy_secs += (now - self._used_at) * self._num_busy
        self._slot_secs += (now - self._used_at) * self._slots
        self._used_at = now


def _check(name: str, value, bound: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} must be {bound}, got {value!r}")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_AT_LEAST_ONE = (
    "num_steps", "groups_per_step", "group_size", "push_every_steps", "max_running_groups", "max_attempts",
    "num_servers", "num_slots",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "step_secs", "token_secs", "push_secs", "pause_secs", "max_staleness", "max_turns", "tool_secs", "tool_sigma",
)  # fmt: skip
_OVER = -math.inf  # The learner has done its last step.
_BLOCK = 1024  # groups whose lengths are drawn at once
_ROUNDING = 1e-6  # slots
