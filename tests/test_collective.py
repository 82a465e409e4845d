"""The transport "distributed" against fake servers that are real ranks of gloo, and a real rank 0."""

import asyncio
import functools

import numpy as np
import pytest
from fixtures.fake_sglang import started

from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.weights import collective, transports
from jaxrl_async.weights.store import StoredVersion, WeightStore

pytest.importorskip("torch")
TIMEOUT_SECS = 60.0


@pytest.fixture
def servers():
    with started(3) as servers:
        for server in servers:
            server.sglang = True
        yield servers


@pytest.fixture
async def client():
    async with InferenceClient() as client:
        yield client


@pytest.fixture
def transport(monkeypatch):
    monkeypatch.setattr(collective, "GATHER_SECS", 0.3)
    monkeypatch.setattr(transports, "BROADCAST_BYTES", 1000)
    return transports.FileTransport("distributed", mode="retract")


def tensors(seed):
    rng = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (70, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.norm.weight": (8,),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def version(tmp_path):
    store = WeightStore(tmp_path / "weights", keep=100)

    @functools.cache
    def of(number):
        return StoredVersion(store.write(number, tensors(number).items(), {"a": 1}))

    return of


async def push(transport, client, servers, stored, *, timeout_secs=TIMEOUT_SECS, **options):
    """What each server's push returned or raised; one task for each, as the publisher's."""
    return await asyncio.gather(
        *(
            transport(
                client,
                server.address,
                path=stored,
                version=stored.version,
                timeout_secs=timeout_secs,
                **options,
            )
            for server in servers
        ),
        return_exceptions=True,
    )


def holds(server, number):
    return server.version == str(number) and all(
        (server.received[name] == array).all() for name, array in tensors(number).items()
    )


def groups_of(server):
    return [p["group_name"] for p in server.payloads("/init_weights_update_group")]


async def test_one_broadcast_gives_all_servers_a_version(client, servers, transport, version):
    servers[1].tp_size = 2
    for number in (7, 8):
        assert await push(transport, client, servers, version(number)) == [None] * 3
        assert all(holds(server, number) and not server.paused for server in servers)
    joined = [server.payloads("/init_weights_update_group") for server in servers]
    assert all(len(payloads) == 1 for payloads in joined), "the group stays"
    assert {p["world_size"] for (p,) in joined} == {5}
    offsets = [p["rank_offset"] for (p,) in joined]
    sizes = [server.tp_size for server in servers]
    assert sorted(r for o, n in zip(offsets, sizes, strict=True) for r in range(o, o + n)) == [
        1,
        2,
        3,
        4,
    ]
    assert {p["backend"] for (p,) in joined} == {"cpu:gloo"}


async def test_a_server_pauses_only_once_its_group_is_made(client, servers, transport, version):
    server = servers[0]
    assert await push(transport, client, [server], version(7)) == [None]
    routes = server.routes()
    updates = routes.count("/update_weights_from_distributed")
    assert updates > 1
    assert routes[routes.index("/init_weights_update_group") :] == [
        "/init_weights_update_group",
        "/pause_generation",
        "/update_weight_version",
        "/end_weight_update",
        "/begin_weight_update",
        *["/update_weights_from_distributed"] * updates,
        "/end_weight_update",
        "/weights_checker",
        "/update_weight_version",
        "/model_info",
        "/continue_generation",
    ]
    payloads = server.payloads("/update_weights_from_distributed")
    assert {p["weight_version"] for p in payloads} == {"7-unverified"}
    assert [p["flush_cache"] for p in payloads] == [False] * (updates - 1) + [True]


async def test_the_group_is_made_anew_when_a_server_joins_leaves_or_restarts(
    client, servers, transport, version
):
    first, second, third = servers
    assert await push(transport, client, [first, second], version(7)) == [None] * 2
    assert await push(transport, client, [third], version(7)) == [None]  # joins
    assert await push(transport, client, servers, version(8)) == [None] * 3
    assert len(groups_of(first)) == len(groups_of(third)) == 2
    assert groups_of(first)[-1] == groups_of(third)[-1]
    third.reset()
    third.sglang = True
    assert await push(transport, client, servers, version(9)) == [None] * 3
    assert groups_of(first)[-1] == groups_of(third)[-1] and len(groups_of(first)) == 3
    assert await push(transport, client, [first, second], version(10)) == [None] * 2  # left
    assert len(groups_of(first)) == 4
    assert set(groups_of(first)[:-1]) == {
        p["group_name"] for p in first.payloads("/destroy_weights_update_group")
    }
    assert holds(first, 10) and holds(third, 9)
