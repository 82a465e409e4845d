"""Servers on a bad network: slow, cut up and lossy, or with a peer that vanishes and ends no connection.

Between a worker, the publisher and servers, and between a sidecar and its server. What the queue makes of it is in
test_connections.py.
"""

import asyncio
import contextlib
import functools
import random
import socket
import time
import types

import numpy as np
import pytest
from fixtures.fake_sglang import started, token
from fixtures.network import Proxy

from jaxrl_async.extras.relay import sidecar
from jaxrl_async.intake import relay
from jaxrl_async.publishing import health
from jaxrl_async.publishing.publisher import Publisher
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.records import SERVER_FAULT, Permit, ServerRecord
from jaxrl_async.rollout.context import RolloutError
from jaxrl_async.rollout.sampler import Sampler, request_seed
from jaxrl_async.servers import client as clients
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.servers.port import ServerError
from jaxrl_async.versions.store import WeightStore

WAIT_SECS = 20.0  # deadline of every wait of these tests
BAD = {"every_secs": 0.1, "delay_secs": 0.003, "cuts": True, "drop_share": 0.2}
MILDER = BAD | {"every_secs": 0.5, "drop_share": 0.1}
PROMPT = [11, 12, 13]


@contextlib.asynccontextmanager
async def behind(*servers, rng=None, **network):
    """Proxies before servers, and the addresses."""
    rng = rng or random.Random(0)
    async with contextlib.AsyncExitStack() as stack:
        proxies = [Proxy(server.address, rng, **network) for server in servers]
        addresses = [await stack.enter_async_context(proxy.served()) for proxy in proxies]
        yield proxies, addresses


async def until(condition, what):
    deadline = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def sampler_of(client, addresses, *, suspect_secs=0.05, **changes):
    fleet = Fleet(suspect_secs=suspect_secs, clock=time.monotonic, speeds={}, rng=random.Random(0))
    fleet.update([ServerRecord(address, "HEALTHY", 3) for address in addresses])
    arguments = {
        "controls": {},
        "sampling": {"max_new_tokens": 5, "temperature": 1.0},
        "run_seed": 1,
        "request_timeout_secs": WAIT_SECS,
        "max_retries": 20,
    }
    return Sampler(client=client, fleet=fleet, **arguments | changes)


async def sample(sampler, index):
    """The tokens of a prompt, or why there are none."""
    permit = Permit(index, 0)
    try:
        completion = await sampler.bind(permit, 0)(PROMPT)
    except RolloutError as error:
        return error
    finally:
        sampler.release(permit)
    seed = request_seed(1, permit, 0)
    assert completion.tokens.tolist() == [token(seed, len(PROMPT) + i) for i in range(5)]
    return completion


@contextlib.contextmanager
def publishing(store, addresses, announce, **options):
    publisher = Publisher(
        {address: [address] for address in addresses},
        client=InferenceClient(),
        transport=options.pop("transport", Transport("disk", mode="retract")),
        pin=store.pin,
        announce=announce,
        poll_secs=0.02,
        start_timeout_secs=WAIT_SECS,
        **options,
    )
    try:
        yield publisher
    finally:
        publisher.close()


class Announced:
    """Stands for LearnerQueue.publish_version."""

    def __init__(self):
        self.states = {}  # address → (state, version)

    def __call__(self, version, records, resume_point, run_epoch):
        self.states = {r.address: (r.state, r.version) for r in records}


def write(store, version):
    def write():
        store.write(version, [("weight", np.arange(2000, dtype=np.int32) + version)], {})
        return store.get(version)

    return write


async def test_on_a_slow_and_lossy_network_every_version_arrives_and_every_token_is_right(tmp_path):
    store, queue = WeightStore(tmp_path, keep=9), Announced()
    with started(2) as servers:
        for server in servers:
            server.version = "3"
        async with behind(*servers, **BAD) as (proxies, addresses), InferenceClient() as client:
            sampler = sampler_of(client, addresses)
            done = [asyncio.create_task(sample(sampler, i)) for i in range(100)]
            with publishing(store, addresses, queue, push_timeout_secs=WAIT_SECS) as publisher:
                for version in (4, 5, 6):
                    await asyncio.to_thread(
                        functools.partial(publisher.publish, timeout_secs=WAIT_SECS),
                        version,
                        write(store, version),
                    )
                    held = {address: ("HEALTHY", version) for address in addresses}
                    await until(lambda held=held: queue.states == held, f"{held}, {queue.states}")
            found = await asyncio.gather(*done)
    assert not [one for one in found if isinstance(one, RolloutError)]
    assert min(p.num_broken + p.num_stalled + p.num_dropped for p in proxies) >= 1


async def test_through_a_sidecar_on_such_a_network_its_server_loads_what_was_sent(tmp_path):
    store = WeightStore(tmp_path / "weights", keep=9)
    rng, transport = random.Random(1), Transport("stream", mode="retract")
    with started(1) as (server,):
        server.sglang = True
        async with contextlib.AsyncExitStack() as stack:
            _, (near,) = await stack.enter_async_context(behind(server, rng=rng, **MILDER))
            port = await stack.enter_async_context(sidecar.serve(near, host="127.0.0.1", port=0))
            address = types.SimpleNamespace(address=f"http://127.0.0.1:{port}")
            _, (far,) = await stack.enter_async_context(behind(address, rng=rng, **MILDER))
            client, queue = await stack.enter_async_context(InferenceClient()), Announced()
            options = {"push_timeout_secs": WAIT_SECS, "transport": transport}
            publisher = stack.enter_context(publishing(store, [far], queue, **options))
            for version in (4, 5):
                await asyncio.to_thread(
                    publisher.publish, version, write(store, version), timeout_secs=WAIT_SECS
                )
                await until(lambda v=version: queue.states == {far: ("HEALTHY", v)}, "a push")
                assert server.version == str(version)
                found = await asyncio.gather(
                    *(sample(sampler_of(client, [far]), i) for i in range(8))
                )
                assert {one.versions[0] for one in found} == {version}


# A peer that vanishes: bytes go nowhere, and no connection ends.


async def test_a_worker_whose_way_to_a_server_is_lost_goes_on_with_the_others_and_comes_back():
    with started(2) as servers:
        for server in servers:
            server.version = "3"
        async with behind(servers[0]) as ((proxy,), (far,)), InferenceClient() as client:
            short = {"suspect_secs": 0.2, "request_timeout_secs": 1.0}
            sampler = sampler_of(client, [far, servers[1].address], **short)
            assert not [e for e in await waves(sampler, 0) if isinstance(e, RolloutError)]
            assert servers[0].calls and servers[1].calls
            proxy.lose(for_good=True)
            errors = [e for e in await waves(sampler, 40) if isinstance(e, RolloutError)]
            # Those that were under way, and then one at a time. Only the first may be its prompt's fault.
            assert 1 <= len(errors) <= 9
            assert sorted(e.reason for e in errors) == [SERVER_FAULT] * (len(errors) - 1) + [
                "timeout"
            ]
            assert f"{far}/generate: no answer within" in str(errors[0])
            assert sampler.fleet.state(far) == "SUSPECT"
            proxy.find()
            num_calls = len(servers[0].calls)
            await until_answered(sampler, lambda: len(servers[0].calls) > num_calls + 4)


async def waves(sampler, first):
    """What became of 6 waves of 4 prompts."""
    found = []
    for i in range(first, first + 24, 4):
        found += await asyncio.gather(*(sample(sampler, index) for index in range(i, i + 4)))
    return found


async def until_answered(sampler, condition):
    deadline, index = time.monotonic() + WAIT_SECS, 1000
    while not condition():
        assert time.monotonic() < deadline
        assert not isinstance(await sample(sampler, index), RolloutError)
        index += 1
        await asyncio.sleep(0.01)


async def test_a_server_that_is_the_only_one_is_no_more_silent_than_slow():
    """Where no server answers, nothing says whose fault it is: the prompts' attempts count."""
    with started(1) as (server,):
        server.version = "3"
        async with behind(server) as ((proxy,), (far,)), InferenceClient() as client:
            sampler = sampler_of(client, [far], request_timeout_secs=0.2)
            proxy.lose(for_good=True)
            errors = await asyncio.gather(*(sample(sampler, index) for index in range(4)))
    assert [error.reason for error in errors] == ["timeout"] * 4


async def test_a_host_that_takes_no_connection_is_left_for_another_soon(monkeypatch):
    monkeypatch.setattr(clients, "CONNECT_SECS", 0.2)
    with started(1) as (server,), socket.socket() as full, contextlib.ExitStack() as stack:
        server.version = "3"
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # What is beyond its backlog gets no answer, as of a host that is gone.
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        gone = "http://{}:{}".format(*full.getsockname())
        async with InferenceClient() as client:
            with pytest.raises(ServerError, match=f"{gone}/generate: no connection within 0.2 s"):
                call = {"rid": "r", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}}
                await client.generate(gone, **call, timeout_secs=WAIT_SECS)
            start, sampler = time.monotonic(), sampler_of(client, [gone, server.address])
            for index in range(8):
                assert not isinstance(await sample(sampler, index), RolloutError)
            assert time.monotonic() - start < WAIT_SECS / 2


async def test_a_server_that_vanishes_for_the_publisher_makes_no_other_late(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "PROBE_TIMEOUT_SECS", 0.2)
    store, queue = WeightStore(tmp_path, keep=9), Announced()
    with started(2) as servers:
        async with behind(servers[0]) as ((proxy,), (far,)):
            near = servers[1].address
            options = {"push_timeout_secs": 0.5}
            with publishing(store, [far, near], queue, **options) as publisher:

                async def publish(version, **states):
                    await asyncio.to_thread(
                        publisher.publish, version, write(store, version), timeout_secs=WAIT_SECS
                    )
                    await until(lambda: queue.states == states_of(states), f"{queue.states}")

                def states_of(states):
                    return {far: states["there"], near: states["here"]}

                await publish(4, there=("HEALTHY", 4), here=("HEALTHY", 4))
                proxy.lose(for_good=True)
                await until(lambda: queue.states[far] == ("DEAD", 4), f"{queue.states}")
                await publish(5, there=("DEAD", 4), here=("HEALTHY", 5))
                assert f"{far} is DEAD (" in publisher._describe()
                assert "no answer within 0.2 s" in publisher._describe()
                proxy.find()
                both = {far: ("HEALTHY", 5), near: ("HEALTHY", 5)}
                await until(lambda: queue.states == both, f"{queue.states}")


async def test_a_server_that_vanishes_behind_a_sidecar_ends_no_wait_of_its_callers(tmp_path):
    with started(1) as (server,):
        server.sglang, server.version = True, "3"
        async with contextlib.AsyncExitStack() as stack:
            (proxy,), (near,) = await stack.enter_async_context(behind(server))
            port = await stack.enter_async_context(sidecar.serve(near, host="127.0.0.1", port=0))
            client = await stack.enter_async_context(InferenceClient())
            address = f"http://127.0.0.1:{port}"
            assert not isinstance(await sample(sampler_of(client, [address]), 0), RolloutError)
            proxy.lose(for_good=True)
            sampler = sampler_of(client, [address], request_timeout_secs=0.3)
            error = await sample(sampler, 1)
            assert error.reason == "timeout" and f"{address}/generate" in str(error)
            with pytest.raises(ServerError, match="no answer within 0.3 s"):
                await client.recognise(address, timeout_secs=0.3)
            proxy.find()
            assert not isinstance(await sample(sampler_of(client, [address]), 2), RolloutError)
            # It has hung up on the vanished one as its callers did.
            await until(lambda: not proxy.num_lost("near"), "the sidecar's connections")


async def test_a_sender_that_vanishes_in_the_midst_of_a_file_leaves_nothing(monkeypatch, caplog):
    monkeypatch.setattr(relay, "SENDER_SECS", 0.2)
    with started(1) as (server,):
        async with sidecar.serve(server.address, host="127.0.0.1", port=0) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"PUT /weights/9/a.safetensors HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf"
            )
            async with asyncio.timeout(WAIT_SECS):
                answer = await reader.read(1000)
            writer.close()
            await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"no byte of a.safetensors came for 0.2 s" in answer
