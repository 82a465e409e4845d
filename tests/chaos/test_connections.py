"""Connections that break and stall between the queue and everyone else: nothing is lost, nothing comes twice."""

import asyncio
import contextlib
import random

import pytest
from fixtures.queues import SOUND_AUDIT, group, learner_of, served, worker_of

from jaxrl_async.queue.journal import Journal, JournalReader

TIMEOUTS = dict(connect_timeout_secs=30.0, call_timeout_secs=30.0, outage_secs=30.0)
HANG_SECS = 240.0


class Proxy:
    """Passes TCP connections on; breaks all of them, or holds their bytes back, at random moments."""

    def __init__(self, target: str, rng: random.Random, *, every_secs: float):
        host, _, port = target.rpartition(":")
        self._target, self._rng, self._every_secs = (host, int(port)), rng, every_secs
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.num_broken = self.num_stalled = 0

    @contextlib.asynccontextmanager
    async def served(self):
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        trouble = asyncio.create_task(self._make_trouble())
        try:
            yield "{}:{}".format(*server.sockets[0].getsockname())
        finally:
            trouble.cancel()
            self._open.set()
            self._break()
            server.close()

    async def _make_trouble(self):
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._every_secs))
            if self._rng.random() < 0.5:
                self._break()
            else:
                self.num_stalled += 1
                self._open.clear()
                await asyncio.sleep(self._rng.random() * self._every_secs)
                self._open.set()

    def _break(self):
        self.num_broken += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()

    async def _pass(self, reader, writer):
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        except (ConnectionError, OSError):
            pass
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()

    async def _copy(self, reader, writer):
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


async def work(address: str, name: str, rng: random.Random):
    """A worker without a server: every permit becomes a group, or goes back one time in ten."""
    running = set()

    async def one(queue, permit):
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.1:
            await queue.return_permit(permit, "equal_rewards")
        else:
            await queue.submit(group(permit, num_tokens=60))
        running.discard(permit)

    async with worker_of(address) as queue, asyncio.TaskGroup() as tasks:
        while True:
            permits = await queue.admit(6, 0.5, worker=name, working_on=running)
            for permit in permits:
                running.add(permit)
                tasks.create_task(one(queue, permit))


def learn(address: str, num_steps: int) -> list[int]:
    """Leases, commits and publishes every step; the indexes in the order of training."""
    trained = []
    with learner_of(address) as queue:
        queue.publish_version(0, ())
        for step in range(1, num_steps + 1):
            for chunk in queue.lease(step, HANG_SECS, lambda: None):
                for one in chunk.groups:
                    assert one.trajectories[0].tokens[0] == one.prompt_index % 50
                    trained.append(one.prompt_index)
            queue.commit(step)
            queue.publish_version(step, ())
        assert set(queue.status().returned) == {"equal_rewards"}  # No permit had to time out.
    return trained


@pytest.mark.parametrize("num_steps", [150, pytest.param(5000, marks=pytest.mark.long)])
async def test_nothing_is_lost_when_connections_break(num_steps, tmp_path):
    rng, path = random.Random(0), tmp_path / "journal"
    journal = Journal(path, batch_groups=4)
    limit_secs = HANG_SECS + 0.2 * num_steps
    values = dict(max_staleness=2, permit_timeout_secs=60.0)
    async with served(journal=journal, hang_secs=limit_secs, **values) as target:
        proxy = Proxy(target, rng, every_secs=0.15)
        async with proxy.served() as address:
            workers = [
                asyncio.create_task(work(address, f"w{i}", random.Random(i))) for i in range(3)
            ]
            learner = asyncio.create_task(asyncio.to_thread(learn, address, num_steps))
            await asyncio.wait([*workers, learner], return_when=asyncio.FIRST_COMPLETED)
            trained = await learner
            for worker in workers:
                assert not worker.done() or worker.result()
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    assert proxy.num_broken >= 3 and proxy.num_stalled >= 3
    assert len(set(trained)) == len(trained) == num_steps * 4
    reader = JournalReader(path)
    assert reader.audit() == SOUND_AUDIT
    assert [reader[i].prompt_index for i in range(len(reader))] == trained
