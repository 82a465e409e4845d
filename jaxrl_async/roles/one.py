"""All roles of a run in this process: the queue and the rollout workers in a thread with an event loop, each engine in
its own, the learner in the caller's. Rewards stay in processes that can be killed.

Their calls are direct. The queue also listens at queue.address, for those who ask for its status.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import pathlib
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import grain  # noqa: F401  Its import makes those of other threads lazy meanwhile, which breaks JAX: before they start.
import jax

from jaxrl_async import parts
from jaxrl_async.config.settings import Settings
from jaxrl_async.inference.direct import WAY, DirectClient
from jaxrl_async.inference.engine import Engine
from jaxrl_async.learner.versions import Delay, MemoryVersions
from jaxrl_async.metrics import MetricsWriter
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.queue.client import LearnerQueue, QueueClient
from jaxrl_async.queue.direct import BlockingDirectCalls, DirectCalls
from jaxrl_async.queue.service import QueueService
from jaxrl_async.records import Identity, Share
from jaxrl_async.roles import learner, rollout
from jaxrl_async.roles import queue as queue_role
from jaxrl_async.roles.device_lock import DeviceLock
from jaxrl_async.roles.server import ENGINE_STOP_SECS
from jaxrl_async.rollout.failures import flattened
from jaxrl_async.servers.port import Expected
from jaxrl_async.versions.memory import MemoryStore

# The sides of a shared device, by the metrics of their waits.
LEARNER, ENGINES = "time/device_wait_secs", "rollout/device_wait_secs"
START_SECS = 60.0  # bound on the start of the queue, its journal included
STOP_SECS = 5.0  # bound on the end of queue and workers


def run(settings: Settings, workdir: pathlib.Path, **how: Any) -> bool:
    """Runs every role until the learner is done; arguments and result as of `learner.run`.

    Raises:
      Exception: the first failure of a role, whichever it was.
    """
    learner.set_flags(settings)
    names = tuple(f"engine-{i}" for i in range(settings.server.num_started))
    server = dataclasses.replace(settings.server, addresses=names)
    settings = dataclasses.replace(settings, server=server)
    of_learner, of_engines = _division(settings)
    # On a CPU the cores run programs of learner and engines at once.
    waits = not settings.server.devices and jax.devices()[0].platform != "cpu"
    lock = DeviceLock() if waits else None
    sharing = {"device_lock": functools.partial(lock.held_by, ENGINES)} if lock else {}
    engines = {
        name: parts.engine_of(settings, workdir, name=name, device=device, **sharing)
        for name, device in zip(names, of_engines, strict=True)
    }
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            engine.start()
            stack.callback(engine.close, timeout_secs=ENGINE_STOP_SECS)
        others = stack.enter_context(_Others(settings, workdir, engines))
        links = _DirectLinks(settings, others, engines, lock, of_learner)
        return learner.run(settings, workdir, process=0, coordinator="", links=links, **how)


def _division(settings: Settings) -> tuple[list[jax.Device], list[jax.Device]]:
    """Devices of the learner, and one for each engine. Raises ValueError: this process has fewer or more devices."""
    devices, count = jax.devices(), settings.server.devices
    if not count:
        return devices, [devices[0]] * len(settings.server.addresses)
    wanted = settings.learner.num_devices
    if len(devices) != wanted + count:
        raise ValueError(
            f"this process has {len(devices)} devices, and server.devices = {count} leaves {len(devices) - count} of "
            f"them to the learner, whose mesh has {wanted}: learner.data, fsdp, expert, context and tensor"
        )
    return devices[:-count], devices[-count:]


class _Others:
    """The queue and the rollout workers, in a thread; a context manager."""

    def __init__(self, settings: Settings, workdir: pathlib.Path, engines: Mapping[str, Engine]):
        self._settings, self._workdir, self._engines = settings, workdir, engines
        self._begun: concurrent.futures.Future[QueueService] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="queue and rollout", daemon=True)

    def __enter__(self) -> "_Others":
        """Starts them; raises what ends them meanwhile."""
        self._thread.start()
        self.queue = self._first_of(self._begun, "the queue's start", START_SECS)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(STOP_SECS)

    def run(self, call: Coroutine, timeout_secs: float) -> Any:
        """Runs another thread's call in the queue's loop; raises its error, TimeoutError, or what ended the queue."""
        if self._ended.done():
            call.close()
            return self._first_of(self._ended, "", 0.0)
        try:
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError:  # The loop was closed a moment ago.
            call.close()
            future = self._ended
        return self._first_of(future, "the queue in this process", timeout_secs)

    def _first_of(self, future: concurrent.futures.Future, name: str, timeout_secs: float) -> Any:
        futures = {future, self._ended}
        concurrent.futures.wait(futures, timeout_secs, concurrent.futures.FIRST_COMPLETED)
        if future.cancelled():  # With the loop, which ends: why it does is known a moment later.
            concurrent.futures.wait({self._ended}, timeout_secs)
        elif future.done() and future is not self._ended:
            return future.result()
        future.cancel()
        if not self._ended.done():
            raise TimeoutError(f"{name} does not answer for {timeout_secs:g} s")
        self._ended.result()
        raise RuntimeError("the queue and the rollout workers have ended")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(next(iter(flattened(error)), error))
        else:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        settings, workdir = self._settings, self._workdir
        queue = queue_role.service_of(settings, workdir)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(queue_role.serve(settings, queue), name="queue")
            for name, engine in self._engines.items():
                tasks.create_task(_watch(engine), name=name)
            for index in range(settings.rollout.num_workers):
                client, own = DirectClient(self._engines), QueueClient(DirectCalls(queue))
                work = rollout.work(settings, workdir, index, client=client, queue=own)
                tasks.create_task(work, name=f"rollout-{index}")
            self._begun.set_result(queue)


class _DirectLinks(learner.Links):
    """The learner's ways to a queue and engines in this process."""

    def __init__(
        self,
        settings: Settings,
        others: _Others,
        engines: Mapping[str, Engine],
        lock: DeviceLock | None,
        devices: Sequence[jax.Device],
    ):
        super().__init__(settings)
        self._others, self._engines, self._lock = others, engines, lock
        self.devices = devices

    def sharing(self) -> dict[str, Any]:
        lock = functools.partial(self._lock.held_by, LEARNER) if self._lock else None
        return {"keeps_params": True, "device_lock": lock}

    def freeze(self, base: Any) -> None:
        if base is not None:
            for engine in self._engines.values():
                engine.freeze(base)

    def metrics(self, workdir: pathlib.Path) -> MetricsWriter:
        if not self._lock:
            return super().metrics(workdir)
        return _WithWaits(workdir, parts.tracker_of(self._settings, workdir), self._lock)

    def check(self, expected: Expected) -> bool:
        """Engine and learner are made of the same settings, and the weights are the learner's own."""
        return False

    def queue(self, share: Share) -> LearnerQueue:
        return LearnerQueue(BlockingDirectCalls(self._others.queue, self._others.run), share)

    def store(self, workdir: pathlib.Path, delay: Delay, writer: Identity) -> MemoryStore:
        return MemoryStore(keep=delay.max_steps + 1)

    def versions(self, publisher: Any, store: MemoryStore, **values: Any) -> MemoryVersions:
        return MemoryVersions(publisher, store, **values)

    def servers(self, writer: Identity, expected: Expected) -> dict[str, Any]:
        client = DirectClient(self._engines, run_id=writer.run_id)
        transport = Transport(WAY, mode=self._settings.weights.pause_mode)
        return {"client": client, "transport": transport}


class _WithWaits(MetricsWriter):
    """Adds the waits for a shared device to each row."""

    def __init__(self, workdir: pathlib.Path, tracker: Any, lock: DeviceLock):
        super().__init__(workdir, tracker)
        self._lock = lock

    def write(self, step: int, row: Mapping[str, float]) -> None:
        waits = {name: 0.0 for name in (LEARNER, ENGINES)} | self._lock.pop_waits()
        super().write(step, row | waits)


async def _watch(engine: Engine) -> None:
    """Raises what ends an engine."""
    await asyncio.wrap_future(engine.stopped)
