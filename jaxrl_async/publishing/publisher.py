"""The publisher: a named thread that keeps every inference server at the current version.

Each server has a keeper, the only task that talks to it. The queue gets a version when all HEALTHY servers answered
with it, and every change of a state. The queue's addresses take requests and may be routers; the
publisher talks to the servers behind them. The weights written for a version may be those of another one
(rollout.delay_steps): servers hold and stamp the latter, and the queue counts the former. A server that is reserved
for an evaluation is not touched. Requests, prompts and tensors are not the publisher's.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.publishing import health
from jaxrl_async.publishing.discovery import Discovery
from jaxrl_async.publishing.keeper import Course, Keeper, PublisherError
from jaxrl_async.records import ResumePoint
from jaxrl_async.servers.fleet import DEAD, HEALTHY, STALE
from jaxrl_async.servers.port import Servers
from jaxrl_async.versions.version import Version

log = logging.getLogger(__name__)


class Evaluation(Protocol):
    """Scores a version on a server that holds it; its failures are its own."""

    def wants(self, version: int) -> bool: ...
    async def run(self, client: Servers, address: str, version: int) -> None: ...
    def pop(self) -> dict[str, float]: ...


@dataclasses.dataclass(eq=False, repr=False)
class Publisher(Course):
    """Owns the states of all inference servers; its thread starts with it. One push is in flight at most.

    All public methods are for the learner's thread.
    """

    # "http://host:port" that takes requests → control addresses of the servers behind it (one, or more behind a
    # router); they need not be up yet.
    controls: Mapping[str, Sequence[str]]
    _: dataclasses.KW_ONLY
    client: Servers  # for this publisher alone, not opened yet
    # announce(version, records, resume_point, run_epoch), `LearnerQueue.publish_version`
    announce: Callable[..., None]
    # Deadline of the first push. Without a HEALTHY server, a DEAD one has this time to restart.
    start_timeout_secs: float
    # Share of the servers that must hold the first version, in (0, 1]: ⌈quorum · servers⌉ of them. The others join
    # later.
    quorum: float = 1.0
    # The first push waits for the quorum and one attempt at each server; without, for all servers, and after
    # start_timeout_secs for the quorum.
    is_resumed: bool = False
    # Lists servers that join and leave, besides those of `controls`.
    discovery: Discovery | None = None
    discover_secs: float = 5.0  # between two readings of the list
    evaluation: Evaluation | None = None
    run_id: str = ""

    def __post_init__(self):
        super().__post_init__()
        self._servers = [
            health.Server(c, serves) for serves, behind in self.controls.items() for c in behind
        ]
        if not self._servers and self.discovery is None:
            raise ValueError("the publisher needs at least one server address")
        self._table = health.Table()
        for server in self._servers:
            self._table.add(server)

        self._condition = threading.Condition()  # The learner waits here for these two.
        self._published = -1  # the version requested last; −1: not yet
        self._error: BaseException | None = None

        self._requested: tuple[int, int] | None = None  # (run epoch, version), the learner's
        self._phase = "a first version"
        self._metrics: dict[str, float] = {}

        # The thread's own state, with that of the course:
        self._target_pin = contextlib.ExitStack()
        self._held: int | None = None  # by HEALTHY servers, under the version announced
        # Control address → the keeper of its server, and its task.
        self._keepers: dict[str, tuple[Keeper, asyncio.Task]] = {}
        self._pushing = False
        self._evaluating: asyncio.Task | None = None
        self._healthy_at = self.active.now()
        self._changed = asyncio.Event()  # an attempt at a server ended
        self._announcing = asyncio.Lock()
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._main(), name="publisher")
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(
        self,
        version: int,
        write: Callable[[], Version],
        *,
        timeout_secs: float,
        resume_point: ResumePoint | None = None,
        run_epoch: int = 0,
    ) -> None:
        """Starts a push and returns; waits first for the push before it.

        Args:
          version: ≥ 0, above every version published before.
          write: writes the version and returns the one whose weights the servers should hold: itself or another.
            Called in a thread of the publisher.
          timeout_secs: bound on waiting for the push before.
          resume_point: where the queue starts from, at the first publication after a restore.
          run_epoch: grows where the weights of a version are not those that were published under its number; then
            the same version may be published again.

        Raises:
          PublisherError: the publisher failed, or the push before is still running.
          ValueError: the version is not above the one before.
        """
        self.check()  # The loop of a failed publisher takes no request.
        if self._requested is not None:
            self.wait(self._requested[1], timeout_secs=timeout_secs)
            if (run_epoch, version) <= self._requested or version < self._requested[1]:
                raise ValueError(f"version {version} is not above version {self._requested[1]}")
            with self._condition:
                self._published = -1
        self._requested = (run_epoch, version)
        request = _Request(version, run_epoch, write, resume_point)
        self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    def wait(
        self, version: int, *, timeout_secs: float, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits until the servers hold a version, or until `should_stop`, called every CHECK_SECS.

        Raises:
          PublisherError: the publisher failed, or the push still runs after timeout_secs; names the wait.
        """

        def over() -> bool:
            return self._error is not None or self._published >= version

        active = ActiveClock()
        deadline = active.now() + timeout_secs
        with self._condition:
            while not self._condition.wait_for(over, min(CHECK_SECS, deadline - active.now())):
                if should_stop():
                    return
                if active.now() > deadline:
                    late = f"version {version} is not published after {timeout_secs:g} s"
                    raise PublisherError(f"{late}: the publisher waits for {self.waits_for()}")
        self.check()

    def check(self) -> None:
        """Raises the publisher's failure, if it has failed."""
        if self._error is not None:
            raise PublisherError(f"the publisher failed: {self._error}") from self._error

    def metrics(self) -> dict[str, float]:
        """weights/version, weights/delay, weights/push_secs (write included) and weights/bytes of the last push.

        weights/paused_secs: of all servers together, since the push before it.
        The metrics of an evaluation that ended are added once.
        """
        return self._metrics | (self.evaluation.pop() if self.evaluation else {})

    def close(self) -> None:
        """Ends the thread. A paused server continues."""
        with contextlib.suppress(RuntimeError):  # The loop of a failed publisher is closed.
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_CLOSE_TIMEOUT_SECS)
        if self._thread.is_alive():
            what = f"the publisher's thread still runs {_CLOSE_TIMEOUT_SECS:g} s after close"
            log.warning("%s: it waits for %s", what, self.waits_for())

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass  # close()
        except BaseException as failure:
            error = failure
            # The failure that cancelled the other tasks.
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            log.error("the publisher failed: %s", error)
            with self._condition:
                self._error = error
                self._condition.notify_all()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _main(self) -> None:
        async with self.client as client, asyncio.TaskGroup() as tasks:
            self._probes = client.probes(
                interval_secs=self.poll_secs,
                timeout_secs=health.PROBE_TIMEOUT_SECS,
                is_wanted=Keeper.is_settled,
                on_answer=Keeper.probed,
            )
            for server in self._servers:
                self._start_keeping(client, tasks, server)
            tasks.create_task(self._probes.run(), name="publisher probes")
            if self.discovery is not None:
                keeping = self._discover(client, tasks, self.discovery)
                tasks.create_task(keeping, name="publisher discovery")
            tasks.create_task(self._watch_the_clock(), name="publisher clock")
            while True:
                await self._push(await self._requests.get())
                self._start_evaluation(client, tasks)

    async def _push(self, request: "_Request") -> None:
        start = time.monotonic()
        self._phase = f"version {request.version} to be written"
        files, num_bytes = await asyncio.to_thread(_write, request.write)
        lent = {s.serves for s in self._servers if s.reserved}
        is_served = any(s.state == HEALTHY and s.serves not in lent for s in self._servers)
        if self._evaluating is not None and not is_served:
            self._phase = f"the {self._evaluating.get_name()}, at the only HEALTHY address"
            await asyncio.wait({self._evaluating})

        self._pushing = True
        name = health.weight_name(files.version, request.run_epoch, self.run_id)
        target = health.Target(name, files)
        first, self.target = self.target is None, target
        self.before = self._held
        with self._target_pin:  # A server that still loads the version before has a pin of its own.
            self._target_pin = contextlib.ExitStack()
            self._target_pin.enter_context(self.pin(target.version))
        self._phase = f"version {request.version} on the servers"
        await self._deliver(target, first)
        self._pushing, self.before = False, None

        self._phase = f"the queue to take version {request.version}"
        # States first: when the queue admits for the new version, no worker routes to a late server.
        await self._publish_states()
        async with self._announcing:
            self.announced = (request.version, request.run_epoch)
            self._held = target.version
            await self._announce_records(self.announced, request.resume_point)
        self._metrics = {
            "weights/version": target.version,
            "weights/delay": request.version - target.version,
            "weights/push_secs": time.monotonic() - start,
            "weights/bytes": num_bytes,
            "weights/paused_secs": self.pauses.pop(),
        }
        with self._condition:
            self._published = request.version
            self._condition.notify_all()
        self._phase = "the next version"
        log.info("version %d: pushed; %s", request.version, self._describe())

    def _start_evaluation(self, client: Servers, tasks: asyncio.TaskGroup) -> None:
        """Reserves the last HEALTHY server when its version is due for an evaluation."""
        version, healthy = self._target.version, [s for s in self._servers if s.state == HEALTHY]
        if self.evaluation is None or not self.evaluation.wants(version) or not healthy:
            return
        if self._evaluating is not None:
            log.warning("version %d is not evaluated: one before it still is", version)
            return
        server = healthy[-1]
        server.reserved = True
        # With one behind a router its whole address would be STALE.
        is_alone = sum(s.serves == server.serves for s in self._servers) == 1
        if len(healthy) > 1 and is_alone:
            server.state, server.reason = STALE, f"evaluates version {version}"
            self._table.update(server)
        evaluate = self._evaluate(self.evaluation, client, server, version)
        self._evaluating = tasks.create_task(evaluate, name=f"evaluation of version {version}")

    async def _evaluate(
        self, evaluation: Evaluation, client: Servers, server: health.Server, version: int
    ) -> None:
        try:
            await self._publish_states()
            await evaluation.run(client, server.address, version)
        finally:
            server.reserved, self._evaluating = False, None
            server.due.set()

    async def _deliver(self, target: health.Target, first: bool) -> None:
        """Waits until every HEALTHY server tried the target; at first, until all hold it, or a quorum does."""
        expected = [s for s in self._servers if first or (s.state == HEALTHY and not s.reserved)]
        for server in self._servers:
            server.due.set()

        def is_done(server: health.Server) -> bool:
            needs_all = first and not self.is_resumed
            done = server.holds(target) if needs_all else server.tried is target
            return done or server.has_left

        def delivered() -> bool:
            while expected and is_done(expected[-1]):
                expected.pop()
            return not expected and self._num_holding() >= self._num_needed(first)

        timeout_secs = self.start_timeout_secs if first else self.push_timeout_secs
        await self._wait(delivered, timeout_secs)
        if not self._num_holding():
            # For the first one that holds it: the others had their time.
            left = self.start_timeout_secs - timeout_secs
            await self._wait(lambda: self._num_holding() > 0 or not self._may_recover(), left)
        self._end_push(first, timeout_secs)
        self._healthy_at = self.active.now()

    async def _wait(self, condition: Callable[[], bool], timeout_secs: float) -> None:
        """Waits for a condition, checked after every attempt at a server, for timeout_secs of the active clock."""
        deadline = self.active.now() + timeout_secs
        while not condition() and (left := deadline - self.active.now()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, CHECK_SECS)):
                    await self._changed.wait()

    async def _watch_the_clock(self) -> None:
        """Keeps a busy time of other tasks apart from a stop of the process."""
        while True:
            self.active.now()
            await asyncio.sleep(CHECK_SECS)

    def _num_holding(self) -> int:
        """The servers that hold the target."""
        return sum(s.holds(self._target) for s in self._servers)

    def _num_needed(self, first: bool) -> int:
        """The servers that must hold the target."""
        # Rounded: 0.7 · 10 is above 7 in floating point.
        return max(1, math.ceil(round(self.quorum * len(self._servers), 6))) if first else 1

    def _may_recover(self) -> bool:
        """Whether a server may become HEALTHY: DEAD, without weights, not tried yet or again, or one that will join."""
        return self.discovery is not None or any(
            s.state == DEAD or s.version is None or s.tried is not self.target
            for s in self._servers
        )

    def _end_push(self, first: bool, timeout_secs: float) -> None:
        """Ends a push: a server that does not hold the target is not HEALTHY."""
        version = self._target.version
        for server in self._servers:
            if server.state == HEALTHY and not server.holds(self._target):
                why = f"did not take version {version} within {timeout_secs:g} s"
                server.state, server.reason = STALE, f"{why} ({server.reason})"
                self._table.update(server)
        if first and self._num_holding() < self._num_needed(first):
            raise PublisherError(
                f"version {version} reached {self._num_holding()} of {len(self._servers)} inference servers within "
                f"{timeout_secs:g} s, and {self._num_needed(first)} must hold it (server.quorum = {self.quorum:g}): "
                + self._describe()
            )
        if not any(s.state == HEALTHY for s in self._servers):
            what = f"no HEALTHY inference server left for version {version}"
            raise PublisherError(f"{what}: {self._describe()}")

    def _start_keeping(
        self, client: Servers, tasks: asyncio.TaskGroup, server: health.Server
    ) -> None:
        keeper = Keeper(server, client, self)
        task = tasks.create_task(keeper.run(), name=f"publisher {server.address}")
        self._keepers[server.address] = keeper, task
        self._probes.add(keeper, server.address)

    async def _discover(
        self, client: Servers, tasks: asyncio.TaskGroup, discovery: Discovery
    ) -> None:
        """Keeps the servers that the discovery lists, besides the fixed ones."""
        fixed = {address for s in self._servers for address in (s.address, s.serves)}
        found: dict[str, health.Server] = {}
        while True:
            listed = await discovery.read()
            for address in found.keys() - listed.keys():
                self._leave(found.pop(address))
            for address in listed.keys() - found.keys() - fixed:
                found[address] = server = health.Server(address, address, speed=listed[address])
                log.info("%s joins the run", address)
                self._servers.append(server)
                self._table.add(server)
                self._start_keeping(client, tasks, server)
            for address, server in found.items():
                if server.speed != listed[address]:
                    server.speed, self._table.is_changed = listed[address], True
                    self._table.update(server)
            await self._publish_states()
            self._check_any_healthy()
            await asyncio.sleep(self.discover_secs)

    def _leave(self, server: health.Server) -> None:
        """Forgets a server. Workers find it gone from the table and resume its requests elsewhere."""
        log.info("%s leaves the run", server.address)
        server.has_left = True
        self._servers.remove(server)
        self._table.remove(server)
        keeper, task = self._keepers.pop(server.address)
        self._probes.remove(keeper)
        task.cancel()
        self._changed.set()

    async def changed(self, server: health.Server) -> None:
        """Publishes the new state of a server."""
        self._table.update(server)
        await self._publish_states()

    async def tried(self, server: health.Server, *, is_back: bool) -> None:
        """Publishes the new state of a server after an attempt, and wakes those who wait for it."""
        if is_back:
            self._healthy_at = self.active.now()  # It has its time to be HEALTHY.
        await self.changed(server)
        self._changed.set()
        self._check_any_healthy()

    def _check_any_healthy(self) -> None:
        """Raises when no server was HEALTHY for too long; a push has a deadline of its own."""
        now = self.active.now()
        if self._pushing or self._table.any_healthy():
            self._healthy_at = now
            return
        timeout_secs = self.push_timeout_secs
        if self._may_recover():
            timeout_secs = max(timeout_secs, self.start_timeout_secs)
        if self._published >= 0 and now - self._healthy_at > timeout_secs:
            what = f"no HEALTHY inference server for {timeout_secs:g} s"
            raise PublisherError(f"{what}: {self._describe()}")

    async def _publish_states(self) -> None:
        """Publishes changed states, under the version published last."""
        if self._table.is_changed or self._announcing.locked():
            async with self._announcing:  # Changes meanwhile go in one announcement.
                announced = self.announced
                if announced is not None and self._table.is_changed:
                    log.info("version %d: %s", announced[0], self._describe())
                    await self._announce_records(announced, None)

    async def _announce_records(
        self, announced: tuple[int, int], resume_point: ResumePoint | None
    ) -> None:
        records, (version, run_epoch) = self._table.take(), announced
        try:
            await asyncio.to_thread(self.announce, version, records, resume_point, run_epoch)
        except Exception as error:
            raise PublisherError(str(error)) from error

    @property
    def _target(self) -> health.Target:
        """The version under way or published; there is one."""
        assert self.target is not None
        return self.target

    def waits_for(self) -> str:
        """The wait of the push under way, and the state of every server, in words."""
        return f"{self._phase}; {self._describe()}"

    def _describe(self) -> str:
        listed = f" ({self.discovery.place} lists the others)" if self.discovery else ""
        return health.describe(self._servers) + listed


@dataclasses.dataclass(frozen=True)
class _Request:
    version: int
    run_epoch: int
    write: Callable[[], Version]
    resume_point: ResumePoint | None


def _write(write: Callable[[], Version]) -> tuple[Version, int]:
    written = write()
    return written, written.total_bytes


CHECK_SECS = 0.5  # between two calls of should_stop during a wait
_CLOSE_TIMEOUT_SECS = 15.0
