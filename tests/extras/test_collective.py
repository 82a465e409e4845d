"""The transport "distributed" against fake servers that are real ranks of gloo, and a real rank 0."""

import asyncio
import functools
import os
import pathlib
import re
from importlib.util import find_spec

import pytest
from fixtures.fake_sglang import started
from fixtures.tensors import tensors

from jaxrl_async.extras import collective
from jaxrl_async.extras.collective import LINGER_SECS
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds import sglang
from jaxrl_async.servers.port import ObsoleteVersionError, ServerError
from jaxrl_async.versions.store import StoredVersion, WeightStore

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
TIMEOUT_SECS = 300.0  # Rank 0 imports PyTorch, which takes a busy machine its time.


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
    """Servers that a test pushes to together gather until all are there; those of a broken round for GATHER_SECS."""
    gather = collective.Collective._gather

    def of_a_test(self, *args):
        round_ = gather(self, *args)
        if self._gathering is round_ and len(round_.pushes) == self.num_together:
            self._close(round_, args[-1])
        return round_

    monkeypatch.setattr(collective.Collective, "_gather", of_a_test)
    monkeypatch.setattr(collective, "GATHER_SECS", 2.0)
    monkeypatch.setattr(sglang, "BROADCAST_BYTES", 1000)
    transport = Transport("distributed", mode="retract")
    yield transport
    transport.close()


@pytest.fixture
def version(tmp_path):
    store = WeightStore(tmp_path / "weights", keep=100)

    @functools.cache
    def of(number):
        return StoredVersion(store.write(number, tensors(number).items(), {"a": 1}))

    return of


async def push(
    transport, client, servers, stored, *, timeout_secs=TIMEOUT_SECS, num_together=None, **options
):
    """What each server's push returned or raised; one task for each, as the publisher's."""
    transport.collective.num_together = num_together or len(servers)
    return await asyncio.gather(
        *(
            transport(
                client,
                server.address,
                files=stored,
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


async def test_a_server_that_refuses_is_named_and_the_others_get_the_version(
    client, servers, transport, version
):
    """One of the others connects after the refusal: rank 0 still listens, and by its end that one is freed."""
    import torch.distributed  # noqa: F401, as in a server; it takes a second

    refusing, late, other = servers
    late.join_delay_secs = LINGER_SECS / 4
    others = [late, other]
    refusing.fail["/init_weights_update_group"] = (400, "no such backend")
    error, *rest = await push(transport, client, servers, version(7))
    assert isinstance(error, ServerError) and rest == [None] * 2
    assert error.address == refusing.address and "no such backend" in str(error)
    assert all(holds(server, 7) for server in others)
    assert not any(server.paused or server.session_open for server in servers)
    refusing.fail.clear()
    assert await push(transport, client, servers, version(8)) == [None] * 3
    assert await push(transport, client, servers, version(9)) == [None] * 3
    assert len({groups_of(server)[-1] for server in servers}) == 1, "it is in their group again"


@pytest.mark.long  # A round ends by its deadline, in which a busy machine starts rank 0 anew.
@pytest.mark.parametrize("way", ["hang", "drop"])
async def test_a_server_lost_in_a_broadcast_frees_the_others(
    client, servers, transport, version, monkeypatch, way
):
    """Its connections stay open: only the end of rank 0 frees a server behind it."""
    monkeypatch.setattr(collective, "SHARED_SHARE", 0.06)
    assert await push(transport, client, servers, version(7)) == [None] * 3
    lost, *others = servers
    getattr(lost, way).add("/update_weights_from_distributed")
    error, *rest = await push(transport, client, servers, version(8))
    assert isinstance(error, ServerError) and rest == [None] * 2
    assert error.address == lost.address and lost.address in str(error)
    assert all(holds(server, 8) and not server.session_open for server in others)
    assert lost.version == "8-unverified"
    getattr(lost, way).clear()
    assert await push(transport, client, [lost], version(8)) == [None]
    assert holds(lost, 8)


async def test_a_silent_rank_zero_ends_with_the_push(client, servers, transport, version):
    server = servers[0]
    assert await push(transport, client, [server], version(7)) == [None]
    ask = transport.collective._rank.ask

    async def silent(do, **values):
        return await (asyncio.sleep(3600) if do == "send" else ask(do, **values))

    transport.collective._rank.ask = silent
    (error,) = await push(transport, client, [server], version(8), timeout_secs=3.0)
    assert isinstance(error, ServerError) and server.address in str(error)
    assert not (server.paused or server.session_open)
    transport.collective._rank.ask = ask
    assert await push(transport, client, [server], version(9)) == [None]
    assert holds(server, 9)


async def test_a_session_left_open_blocks_no_later_broadcast(client, servers, transport, version):
    server = servers[0]
    server.session_open = True  # by a learner that was killed
    assert await push(transport, client, [server], version(7)) == [None]
    assert holds(server, 7) and not server.session_open


async def test_a_push_that_is_cancelled_leaves_the_version_to_the_others(
    client, servers, transport, version
):
    first, second, _ = servers
    assert await push(transport, client, [first, second], version(7)) == [None] * 2
    first.hang.add("/pause_generation")
    pushes = [
        asyncio.create_task(push(transport, client, [server], version(8), num_together=2))
        for server in (first, second)
    ]
    while "/pause_generation" not in first.routes()[-1:]:
        await asyncio.sleep(0.01)
    pushes[0].cancel()  # It has left the run.
    assert await pushes[1] == [None]
    assert holds(second, 8)


async def test_an_obsolete_version_is_dropped_by_all(client, servers, transport, version):
    results = await push(transport, client, servers, version(7), is_wanted=lambda: False)
    assert [type(result) for result in results] == [ObsoleteVersionError] * 3
    assert not any(server.paused for server in servers)
    assert await push(transport, client, servers, version(8)) == [None] * 3
    assert len({groups_of(server)[-1] for server in servers}) == 1, "none of them is at fault"


async def test_rank_zero_listens_on_its_host_alone_and_ends_with_its_owner(
    client, servers, transport, version
):
    assert await push(transport, client, servers, version(7)) == [None] * 3
    process = transport.collective._rank._process
    inodes = set()
    for fd in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]
    ]
    listening = [columns[1] for columns in lines if columns[3] == "0A" and columns[9] in inodes]
    assert listening and all(address.startswith("0100007F:") for address in listening)
    transport.collective._rank.kill()
    assert process.poll() is not None


def test_without_pytorch_the_learner_is_told(monkeypatch, tmp_path):
    """Rank 0 has the interpreter of the learner, here with a package that hides PyTorch."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(ImportError, match="needs PyTorch.*no torch here"):
        asyncio.run(collective._Rank().start())
