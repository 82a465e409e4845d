"""Connections that break and stall between the queue and everyone else: nothing is lost, nothing comes twice."""

import asyncio
import contextlib
import random

import pytest
from fixtures.network import Proxy
from fixtures.queues import SOUND_AUDIT, group, learner_of, served, worker_of

from jaxrl_async import rpc
from jaxrl_async.queue.journal import Journal, JournalReader
from jaxrl_async.records import ServerRecord

TIMEOUTS = dict(connect_timeout_secs=30.0, call_timeout_secs=30.0, outage_secs=30.0)
HANG_SECS = 240.0
SLOW = {"delay_secs": 0.01, "cuts": True, "drop_share": 0.1}


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


@pytest.mark.parametrize(
    ("num_steps", "network"),
    [(150, {}), (40, SLOW), pytest.param(5000, {}, marks=pytest.mark.long)],
)
async def test_nothing_is_lost_when_connections_break(num_steps, network, tmp_path):
    rng, path = random.Random(0), tmp_path / "journal"
    journal = Journal(path, batch_groups=4)
    limit_secs = HANG_SECS + 0.2 * num_steps
    values = dict(max_staleness=2, permit_timeout_secs=60.0)
    async with served(journal=journal, hang_secs=limit_secs, **values) as target:
        proxy = Proxy(target, rng, every_secs=0.15, **network)
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


@contextlib.asynccontextmanager
async def clients_behind_a_proxy(monkeypatch, ping_secs=0.4, **timeouts):
    """A proxy before a queue, its address, and a worker's and the learner's client."""
    monkeypatch.setattr(rpc, "PING_SECS", ping_secs)
    async with served(max_staleness=2) as target:
        proxy = Proxy(target, random.Random(0))
        async with proxy.served() as address, worker_of(address, **timeouts) as worker:
            learner = learner_of(address, **timeouts)
            await asyncio.to_thread(learner.__enter__)  # The proxy answers meanwhile.
            try:
                yield proxy, address, worker, learner
            finally:
                learner.__exit__()


@pytest.mark.parametrize("ping_secs", [0.4, pytest.param(rpc.PING_SECS, marks=pytest.mark.long)])
async def test_a_peer_that_vanishes_is_let_go_of_and_its_calls_are_made_again(
    ping_secs, monkeypatch
):
    clients = clients_behind_a_proxy(monkeypatch, ping_secs, outage_secs=60.0)
    async with clients as (proxy, _, worker, learner):
        await asyncio.to_thread(learner.publish_version, 0, ())
        (first,) = await worker.admit(1, 5.0, worker="w")
        tables = worker.watch_fleet()
        assert await anext(tables) == ()
        table = asyncio.create_task(anext(tables))
        leased = asyncio.create_task(asyncio.to_thread(lease, learner))
        await asyncio.sleep(0.1)
        proxy.lose(for_good=False)
        assert await worker.submit(group(first)) == "held"
        for permit in await worker.admit(3, 5.0, worker="w", working_on=[first]):
            assert await worker.submit(group(permit)) == "held"
        assert [one.prompt_index for one in await leased] == [0, 1, 2, 3]
        server = ServerRecord("http://a", "HEALTHY", 0)
        await asyncio.to_thread(learner.publish_version, 1, [server])
        assert await table == (server,)
        async with asyncio.timeout(HANG_SECS):
            while proxy.num_lost("near") or proxy.num_lost("far"):
                await asyncio.sleep(0.05)
        await tables.aclose()


def lease(learner):
    return [one for chunk in learner.lease(1, HANG_SECS, lambda: None) for one in chunk.groups]


async def test_a_queue_that_vanishes_for_good_is_named_by_its_clients(monkeypatch):
    short = {"call_timeout_secs": 0.5, "outage_secs": 1.0}
    async with clients_behind_a_proxy(monkeypatch, **short) as (proxy, address, worker, learner):
        proxy.lose(for_good=True)
        named = f"at the queue {address} is (not answered|unavailable) for 1 s"
        with pytest.raises((TimeoutError, ConnectionError), match=f"Admit {named}"):
            await worker.admit(1, 0.2, worker="w")
        with pytest.raises((TimeoutError, ConnectionError), match=f"Status {named}"):
            await asyncio.to_thread(learner.status)
        with pytest.raises(ConnectionError, match=f"answers at {address} within 1 s"):
            await anext(worker.watch_fleet())
        unopened = learner_of(address, connect_timeout_secs=0.5)
        with pytest.raises(ConnectionError, match=f"answers at {address} within 0.5 s"):
            await asyncio.to_thread(unopened.__enter__)
