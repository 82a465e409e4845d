"""Versions that servers hand on: in a chain or a tree, while they arrive, and around servers that fail."""

import asyncio
import contextlib
import hashlib
import json
import types

import aiohttp
import jax
import pytest
from aiohttp import web
from fixtures.served_engine import CONFIG, DEADLINE_SECS, SHAPE, serving, weights

from jaxrl_async import listener
from jaxrl_async.inference import engine as engine_lib
from jaxrl_async.inference import programs
from jaxrl_async.intake import relay
from jaxrl_async.models import hf
from jaxrl_async.publishing import fanout
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.servers.client import NO_HEADERS, InferenceClient, no_answer
from jaxrl_async.servers.port import ServerError, ServerTimeoutError
from jaxrl_async.versions import protocol
from jaxrl_async.versions.store import StoredVersion, WeightStore, read_manifest

BYTES = bytes(range(256)) * 40
PIECE = protocol.Piece(len(BYTES), hashlib.sha256(BYTES).hexdigest())
NAME = "model.safetensors"
ANY_ENGINE = types.SimpleNamespace(config=CONFIG, name="any", max_total_tokens=64)


# The tree.


@pytest.mark.parametrize(
    ("width", "sources"),
    [
        (1, [None, "0", "1", "2", "3", "4", "5"]),
        (2, [None, None, "0", "0", "1", "1", "2"]),
        (3, [None, None, None, "0", "0", "0", "1"]),
    ],
)
def test_each_server_has_so_many_below_it(width, sources):
    tree = fanout.Tree(width)
    assert [tree.source(str(place)) for place in range(7)] == sources
    assert [tree.source(str(place)) for place in range(7)] == sources  # Asked again.


def test_a_server_that_failed_is_gone_around_up_to_the_learner():
    tree = fanout.Tree(1)
    for place in range(4):
        tree.source(str(place))
    tree.fail("2")
    assert (tree.source("3"), tree.source("2")) == ("1", "1")
    tree.fail("1"), tree.fail("0")
    assert tree.source("3") is None


# Pieces.


@pytest.fixture
def make_relay(tmp_path):
    def make(name, **options):
        root = tmp_path / name
        root.mkdir()
        return relay.Relay(root, **{"max_bytes": 1 << 20} | options)

    return make


async def chunks_of(content, *, until=None):
    """Two halves; the second, in two chunks, when `until` is set."""
    half = len(content) // 2
    yield content[:half]
    if until is not None:
        await until.wait()
    yield content[half:-1]
    if until is not None:
        until.clear()
        await until.wait()
    yield content[-1:]


async def all_of(reading):
    return b"".join([chunk async for chunk in reading.chunks])


async def test_a_piece_is_read_while_it_arrives_and_afterwards(make_relay):
    here, rest = make_relay("here"), asyncio.Event()
    early = asyncio.create_task(here.read("7", NAME))  # before its first byte
    await asyncio.sleep(0)
    arriving = asyncio.create_task(here.receive("7", NAME, chunks_of(BYTES, until=rest), PIECE))
    reading = await early
    assert reading.num_bytes == len(BYTES)
    assert await anext(reading.chunks) == BYTES[: len(BYTES) // 2]
    assert here.directory("7") and not (here.directory("7") / NAME).exists()
    rest.set()
    assert await anext(reading.chunks) == BYTES[len(BYTES) // 2 : -1]
    rest.set()
    assert await all_of(reading) == BYTES[-1:]
    await arriving
    assert (here.directory("7") / NAME).read_bytes() == BYTES
    assert await all_of(await here.read("7", NAME)) == BYTES


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BYTES[:-1] + b"x", "SHA-256 .* learner's"),
        (BYTES[:-1], f"ended after {len(BYTES) - 1} of its {len(BYTES)} bytes"),
        (BYTES + b"x", f"more than its {len(BYTES)} bytes"),
    ],
)
async def test_another_piece_than_the_learner_s_does_not_count(make_relay, content, message):
    here = make_relay("here")
    with pytest.raises(relay.PieceError, match=message):
        await here.receive("7", NAME, chunks_of(content), PIECE)
    assert list(here.directory("7").iterdir()) == []


async def test_pieces_have_a_bound_together_and_one_version_is_kept(make_relay):
    here = make_relay("here", max_bytes=2 * len(BYTES))
    for name in ("a.json", "b.json", "a.json"):
        await here.receive("7", name, chunks_of(BYTES), PIECE)
    with pytest.raises(relay.PieceError, match=f"at most {2 * len(BYTES)} bytes together: c.json"):
        await here.receive("7", "c.json", chunks_of(BYTES), PIECE)
    await here.receive("8", "c.json", chunks_of(BYTES), PIECE)
    assert here.directory("7") is None


async def test_readers_of_a_piece_that_breaks_off_or_stalls_are_told(make_relay, monkeypatch):
    monkeypatch.setattr(relay, "STALL_SECS", 0.05)
    here, never = make_relay("here"), asyncio.Event()
    with pytest.raises(relay.PieceError, match=r"no byte of .* for 0\.05 s"):
        await here.read("7", NAME)
    arriving = asyncio.create_task(here.receive("7", NAME, chunks_of(BYTES, until=never), PIECE))
    await asyncio.sleep(0)
    with pytest.raises(relay.PieceError, match=r"no byte of .* for 0\.05 s"):
        await all_of(await here.read("7", NAME))
    monkeypatch.setattr(relay, "STALL_SECS", 30.0)
    reading = await here.read("7", NAME)
    await anext(reading.chunks)
    arriving.cancel()
    with pytest.raises(relay.PieceError, match="did not arrive whole"):
        await all_of(reading)


async def test_who_waits_for_a_piece_that_breaks_off_at_once_is_told(make_relay):
    here = make_relay("here")
    early = asyncio.create_task(here.read("7", NAME))
    await asyncio.sleep(0)
    with pytest.raises(relay.PieceError, match="more than"):
        await here.receive("7", NAME, chunks_of(BYTES + b"x"), PIECE)
    with pytest.raises(relay.PieceError, match="did not arrive whole here"):
        await early


# Between servers.


@contextlib.asynccontextmanager
async def relays(count, **options):
    """Clients of so many servers, of whose engines nothing is asked."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(serving(ANY_ENGINE, **options)) for _ in range(count)
        ]


def address_of(client):
    return f"http://127.0.0.1:{client.port}"


def fetch_of(source, piece=PIECE, name=NAME, **changes):
    files = {name: {"num_bytes": piece.num_bytes, "sha256": piece.sha256}}
    body = {"weight_version": "7", "source": source, "files": files, "timeout_secs": 20.0}
    return body | changes


async def put(client, content=BYTES, name=NAME, **options):
    url = f"{address_of(client)}/weights/7/{name}"
    async with client.session.put(url, data=content, **options) as answer:
        return answer.status, await answer.json()


async def test_a_chain_hands_a_piece_on_before_it_is_whole():
    rest = asyncio.Event()
    headers = {"Content-Length": str(len(BYTES))}
    async with relays(3) as (first, second, third):
        calls = [
            asyncio.create_task(call)
            for call in (
                put(first, chunks_of(BYTES, until=rest), headers=headers),
                second("/weights/fetch", fetch_of(address_of(first))),
                third("/weights/fetch", fetch_of(address_of(second))),
            )
        ]
        url = f"{address_of(third)}/weights/7/{NAME}"
        async with third.session.get(url) as answer:
            half = await answer.content.readexactly(len(BYTES) // 2)
            assert half == BYTES[: len(BYTES) // 2] and not any(call.done() for call in calls)
            rest.set()
            end = await answer.content.readexactly(len(BYTES) // 2 - 1)
            rest.set()
            assert half + end + await answer.content.read() == BYTES
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 3


async def test_a_source_without_the_piece_or_with_another_one_is_named():
    altered = BYTES[:-1] + b"x"
    async with relays(2) as (first, second):
        assert (await put(first, altered))[0] == 200  # Its digest was not told.
        status, answer = await second("/weights/fetch", fetch_of(address_of(first)))
        assert status == protocol.NO_SOURCE
        assert address_of(first) in str(answer) and "SHA-256" in str(answer)
        status, answer = await second("/weights/fetch", fetch_of("http://127.0.0.1:1"))
        assert status == protocol.NO_SOURCE and "127.0.0.1:1" in str(answer)
        status, answer = await put(first, altered, headers={"X-Sha256": PIECE.sha256})
        assert status == 400 and "the learner's has" in str(answer)


async def test_a_piece_that_is_here_is_not_asked_for_again():
    async with relays(1) as (client,):
        await put(client, headers={"X-Sha256": PIECE.sha256})
        status, _ = await client("/weights/fetch", fetch_of("http://127.0.0.1:1"))
        assert status == 200


async def test_a_source_whose_own_piece_breaks_off_says_so_at_once():
    async def breaks_off():
        yield BYTES[:100]
        await begun.wait()
        raise RuntimeError("the learner is gone")

    begun = asyncio.Event()
    async with relays(2) as (first, second):
        putting = asyncio.create_task(
            put(first, breaks_off(), headers={"Content-Length": str(len(BYTES))})
        )
        fetching = asyncio.create_task(second("/weights/fetch", fetch_of(address_of(first))))
        async with second.session.get(f"{address_of(second)}/weights/7/{NAME}") as answer:
            await answer.content.readexactly(100)
            begun.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        status, answer = await fetching
        assert status == protocol.NO_SOURCE and "sent nothing" not in str(answer)
        await asyncio.gather(putting, return_exceptions=True)


async def test_a_source_that_is_silent_is_given_up():
    async with relays(1) as (client,):
        writers = []
        silent = await asyncio.start_server(lambda _, w: writers.append(w), "127.0.0.1", 0)
        source = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        status, answer = await client("/weights/fetch", fetch_of(source))
        assert status == protocol.NO_SOURCE and "nothing for 5 s" in str(answer)
        for writer in writers:
            writer.close()
        await listener.stop(silent)


async def test_the_bound_on_a_fetch_is_one_of_all_its_pieces(make_relay):
    async def send_slowly(request):
        await asyncio.sleep(0.4)
        return web.Response(body=BYTES)

    app = web.Application()
    app.router.add_get("/{path:.*}", send_slowly)
    pieces = {f"{number}.safetensors": PIECE for number in range(6)}
    async with listener.listening(app, "127.0.0.1", 0) as port:
        with pytest.raises(relay.SourceError, match="or was not done after 1 s"):
            source = f"http://127.0.0.1:{port}"
            await make_relay("here").fetch("7", source, pieces, timeout_secs=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {}}, "files must be 1 to"),
        ({"files": {"../x.json": {"num_bytes": 1, "sha256": "a"}}}, "a file"),
        ({"files": {NAME: {"num_bytes": -1, "sha256": "a"}}}, "num_bytes ≥ 0"),
        ({"files": {NAME: {"num_bytes": 1 << 60, "sha256": "a"}}}, "at most .* bytes together"),
        ({"timeout_secs": float("inf")}, r"timeout_secs must be in \(0, 86400\], got inf"),
        ({"weight_version": "../7"}, "a version must be a name"),
    ],
)
async def test_a_fetch_that_cannot_be_is_refused(changes, message):
    async with relays(1) as (client,):
        status, answer = await client("/weights/fetch", fetch_of("http://127.0.0.1:1", **changes))
    assert status == 400
    assert pytest.RaisesExc(ValueError, match=message).matches(ValueError(str(answer)))


async def test_a_piece_is_handed_on_for_the_control_key_alone():
    async with relays(1, api_key="a" * 32, admin_api_key="b" * 32) as (client,):
        for key, status in ((None, 401), ("a" * 32, 401), ("b" * 32, 404)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            url = f"{address_of(client)}/weights/7/{NAME}"
            relay_secs, relay.STALL_SECS = relay.STALL_SECS, 0.05
            try:
                async with client.session.get(url, headers=headers) as answer:
                    assert answer.status == status
            finally:
                relay.STALL_SECS = relay_secs


# Pushes.


@pytest.fixture(scope="module")
def compiled():
    return programs.Programs(programs.Shapes(CONFIG, **SHAPE))


@pytest.fixture
async def fleet(compiled, monkeypatch):
    """Clients of five servers with engines."""
    monkeypatch.setattr(programs, "Programs", lambda *_, **__: compiled)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(5):
            engine = engine_lib.Engine(CONFIG, **SHAPE, max_queued_requests=8, name=str(number))
            engine.start()
            stack.callback(engine.close, timeout_secs=DEADLINE_SECS)
            engine.update_weights(weights(0), "0").result(DEADLINE_SECS)
            clients.append(await stack.enter_async_context(serving(engine)))
        yield clients


class CountingClient(InferenceClient):
    def __init__(self):
        super().__init__()
        self.uploads, self.fetches, self.digests = [], [], set()

    async def call(self, method, address, route, body, *args, headers=NO_HEADERS, **call):
        if method == "PUT":
            digest = headers.get(protocol.SHA256_HEADER)
            assert digest is None or len(digest) == 64
            self.digests.add(digest)
            self.uploads.append(address)
        if route == protocol.FETCH:
            self.fetches.append((address, json.loads(body)["source"]))
        return await super().call(method, address, route, body, *args, headers=headers, **call)


def versions(store):
    def write(number):
        params = jax.tree.map(lambda leaf: leaf + number * 1e-6, weights(1))
        return store.write(
            number, hf.to_tensors(params, CONFIG, "float32"), hf.write_config(CONFIG)
        )

    return write


async def push(client, addresses, path, version, **options):
    transport = Transport("stream", mode="retract", **options)
    stored = path if isinstance(path, StoredVersion) else StoredVersion(path)
    calls = [
        transport(client, address, files=stored, version=version, timeout_secs=DEADLINE_SECS)
        for address in addresses
    ]
    return await asyncio.gather(*calls, return_exceptions=True)


async def assert_hold(clients, path, version):
    for client in clients:
        info = (await client.get("/model_info"))[1]
        held = (info["weight_version"], info["weight_digest"])
        assert held == (str(version), read_manifest(path)["digest"])


async def test_the_learner_sends_a_version_once_and_the_servers_hand_it_on(fleet, tmp_path):
    write = versions(WeightStore(tmp_path, keep=3))
    addresses = [address_of(client) for client in fleet]
    async with CountingClient() as client:
        for number in (1, 2, 3):  # The last two are differences.
            path = write(number)
            assert await push(client, addresses, path, number, fanout=1, delta=True) == [None] * 5
            await assert_hold(fleet, path, number)
            assert len(set(client.uploads)) == 1 and len(client.fetches) == 4
            assert (len(client.uploads) == 1) == (number > 1)
            client.uploads.clear(), client.fetches.clear()
        assert None not in client.digests


async def test_a_server_that_joins_later_gets_the_files_from_one_that_serves_them(fleet, tmp_path):
    stored = StoredVersion(versions(WeightStore(tmp_path, keep=3))(1))
    addresses = [address_of(client) for client in fleet]
    async with CountingClient() as client:
        assert await push(client, addresses[:1], stored, 1, fanout=1) == [None]
        client.uploads.clear()
        assert await push(client, addresses[1:2], stored, 1, fanout=1) == [None]
    assert client.uploads == [] and client.fetches == [(addresses[1], addresses[0])]
    await assert_hold(fleet[:2], stored, 1)


async def test_a_push_goes_around_a_server_that_is_lost(fleet, tmp_path):
    path = versions(WeightStore(tmp_path, keep=2))(1)
    addresses = [address_of(client) for client in fleet]
    lost = "http://127.0.0.1:1"
    tree = fanout.shared(stored := StoredVersion(path), _files(path), 1)
    order = [addresses[0], lost, *addresses[1:]]
    for address in order:
        tree.source(address)
    async with CountingClient() as client:
        ended = await push(client, order, stored, 1, fanout=1)
    assert [type(end) for end in ended] == [type(None), ServerError, *[type(None)] * 4]
    await assert_hold(fleet, path, 1)
    assert set(client.uploads) == {addresses[0]}
    assert (addresses[1], lost) in client.fetches and (addresses[1], addresses[0]) in client.fetches


async def test_the_next_attempt_goes_around_a_server_that_sends_too_slowly(fleet, tmp_path):
    stored = StoredVersion(versions(WeightStore(tmp_path, keep=2))(1))
    addresses = [address_of(client) for client in fleet[:2]]

    class Slow(CountingClient):
        async def call(self, method, address, route, *args, **call):
            if route == protocol.FETCH:
                raise no_answer(address, route, 1.0)
            return await super().call(method, address, route, *args, **call)

    async with Slow() as client:
        assert await push(client, addresses[:1], stored, 1, fanout=1) == [None]
        (error,) = await push(client, addresses[1:], stored, 1, fanout=1)
        assert isinstance(error, ServerTimeoutError)
        assert await push(client, addresses[1:], stored, 1, fanout=1) == [None]
    await assert_hold(fleet[:2], stored, 1)


def _files(path):
    return [file for file in path.iterdir() if file.suffix in (".json", ".safetensors")]


async def test_an_altered_piece_at_a_server_serves_nothing_wrong(fleet, tmp_path, monkeypatch):
    """The first server's copy is altered after it arrived; the others go around it."""
    path = versions(WeightStore(tmp_path, keep=2))(1)
    receive, altered = relay.Relay.receive, []

    async def alters(self, version, name, chunks, piece):
        await receive(self, version, name, chunks, piece)
        if name == "model.safetensors" and not altered:
            altered.append(self)
            file = self.directory(version) / name
            content = bytearray(file.read_bytes())
            content[-3] ^= 1
            file.write_bytes(content)

    monkeypatch.setattr(relay.Relay, "receive", alters)
    stored, addresses = StoredVersion(path), [address_of(client) for client in fleet]
    async with CountingClient() as client:
        (error,) = await push(client, addresses[:1], stored, 1, fanout=1)
        assert isinstance(error, ServerError) and "manifest" in str(error)
        await assert_version(fleet[0], "0")
        client.uploads.clear()
        assert await push(client, addresses[1:], stored, 1, fanout=1) == [None] * 4
    await assert_hold(fleet[1:], path, 1)
    assert (addresses[1], addresses[0]) in client.fetches and set(client.uploads) == {addresses[1]}


async def assert_version(client, version):
    assert (await client.get("/model_info"))[1]["weight_version"] == version


async def test_a_server_that_hands_nothing_on_gets_its_files_from_the_learner(fleet, tmp_path):
    path = versions(WeightStore(tmp_path, keep=2))(1)
    addresses = [address_of(client) for client in fleet[:2]]

    class Older(CountingClient):
        async def call(self, method, address, route, *args, **call):
            answer = await super().call(method, address, route, *args, **call)
            if route == protocol.MODEL_INFO:
                answer.pop("hands_on")
            return answer

    async with Older() as client:
        assert await push(client, addresses, path, 1, fanout=1) == [None] * 2
    assert set(client.uploads) == set(addresses) and client.fetches == []
