"""The relay beside a server that has none: pushes by "stream" to a fake SGLang, and what it must not do."""

import asyncio
import contextlib
import json
import pathlib
import re

import aiohttp
import numpy as np
import pytest
import yarl
from aiohttp import web
from fixtures import fake_vllm
from fixtures.fake_sglang import FakeServer

from jaxrl_async import listener
from jaxrl_async.cli import main
from jaxrl_async.extras.relay import sidecar
from jaxrl_async.intake import pause_lease, relay
from jaxrl_async.preflight.server import check as preflight
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.records import Identity
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import Expected, ServerError, UnfitServerError
from jaxrl_async.versions import protocol
from jaxrl_async.versions.store import StoredVersion, WeightStore, read_manifest

TIMEOUT_SECS = 20.0


@pytest.fixture
def make_server():
    servers = []

    def make():
        server = FakeServer().start()
        server.sglang = True
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


@contextlib.asynccontextmanager
async def sidecars(*servers, **options):
    """Addresses of the sidecars of so many servers."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for server in servers:
            serving = sidecar.serve(server.address, host="127.0.0.1", port=0, **options)
            addresses.append(f"http://127.0.0.1:{await stack.enter_async_context(serving)}")
        yield addresses


def tensors(number):
    rng = np.random.default_rng(0)
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight")
    made = {name: rng.normal(size=(64, 32)).astype(np.float32) for name in names}
    made[names[0]][0, 0] = number
    return made


@pytest.fixture
def write(tmp_path):
    store = WeightStore(tmp_path / "weights", keep=3)
    return lambda number: store.write(number, tensors(number).items(), {"a": 1})


async def push(client, address, path, version, **options):
    stored = path if isinstance(path, StoredVersion) else StoredVersion(path)
    transport = Transport("stream", mode="retract", **options)
    await transport(client, address, files=stored, version=version, timeout_secs=TIMEOUT_SECS)


def loaded(server):
    """The digest of the directory that a server loaded last, read again."""
    directory = server.payloads("/update_weights_from_disk")[-1]["model_path"]
    StoredVersion(directory).verify()
    return read_manifest(directory)["digest"]


async def test_sglang_loads_what_was_sent_under_the_names_of_a_push_from_disk(make_server, write):
    server, path = make_server(), write(1)
    async with sidecars(server) as (address,), InferenceClient() as client:
        await push(client, address, path, 1)
        assert loaded(server) == read_manifest(path)["digest"]
    assert server.version == "1" and not server.paused
    names = [call["weight_version"] for call in server.payloads("/update_weights_from_disk")]
    assert names == ["1-unverified"]
    changes = [r for r in server.routes() if r not in ("/model_info", "/server_info")]
    assert changes == [
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/weights_checker",
        "/update_weight_version",
        "/continue_generation",
    ]


async def test_a_server_that_can_prepare_loads_before_its_pause(make_server, write):
    server, path = make_server(), write(1)
    server.sglang = False
    writer = Identity("a", 1)
    async with sidecars(server) as (address,), InferenceClient() as client:
        await push(client, address, path, 1, writer=writer, pause_lease_secs=7)
        digest = read_manifest(path)["digest"]
        assert loaded(server) == digest
    changes = [r for r in server.routes() if r != "/model_info"]
    assert changes == [
        "/weights/prepare",
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    signed = {"run_id": "a", "generation": 1}
    for route in ("/weights/prepare", "/update_weights_from_disk"):
        (call,) = server.payloads(route)
        assert (call["weight_version"], call["weight_digest"]) == ("1", digest)
        assert call["writer"] == signed
    assert server.leases == {"/weights/prepare": "7", "/pause_generation": "7"}


async def test_a_server_s_refusal_of_a_preparation_is_the_push_s(make_server, write):
    server = make_server()
    server.sglang = False
    server.fail["/weights/prepare"] = (400, "model_path lies outside --weights-root")
    async with sidecars(server) as (address,), InferenceClient() as client:
        with pytest.raises(ServerError, match="lies outside --weights-root"):
            await push(client, address, write(1), 1)
    assert "/pause_generation" not in server.routes()


async def test_a_server_without_room_for_two_versions_loads_in_its_pause(make_server, write):
    server, path = make_server(), write(1)
    server.sglang = False
    server.fail["/weights/prepare"] = (507, "no room")
    async with sidecars(server) as (address,), InferenceClient() as client:
        await push(client, address, path, 1)
        assert loaded(server) == read_manifest(path)["digest"]
    assert "weight_digest" not in server.payloads("/update_weights_from_disk")[0]


async def test_differences_are_applied_here(make_server, write):
    server, sent = make_server(), []

    class Client(InferenceClient):
        async def call(self, method, address, route, *args, **call):
            if method == "PUT":
                sent.append(pathlib.Path(route).suffix)
            return await super().call(method, address, route, *args, **call)

    async with sidecars(server) as (address,), Client() as client:
        for number in (1, 2, 3):
            path = write(number)
            await push(client, address, path, number, delta=True)
            assert loaded(server) == read_manifest(path)["digest"] and server.version == str(number)
            assert (sent == [".difference"]) == (number > 1)
            sent.clear()


async def test_agents_hand_a_version_on(make_server, write):
    servers, path = [make_server() for _ in range(3)], StoredVersion(write(1))
    uploads = []

    class Client(InferenceClient):
        async def call(self, method, address, *args, **call):
            if method == "PUT":
                uploads.append(address)
            return await super().call(method, address, *args, **call)

    async with sidecars(*servers) as addresses, Client() as client:
        await asyncio.gather(*(push(client, a, path, 1, fanout=1) for a in addresses))
        assert [loaded(server) for server in servers] == [path.digest] * 3
    assert len(set(uploads)) == 1


async def test_an_agent_that_was_killed_is_gone_around(make_server, write):
    servers, path = [make_server() for _ in range(3)], StoredVersion(write(1))
    asked = []

    class Client(InferenceClient):
        async def call(self, method, address, route, body, *args, **call):
            if method == "PUT":
                asked.append((address, None))
            if route == protocol.FETCH:
                asked.append((address, json.loads(body)["source"]))
            return await super().call(method, address, route, body, *args, **call)

    options = {"fanout": 1, "delta": True}  # Each keeps a copy, and the files for the others.
    async with sidecars(servers[0], servers[2]) as (first, last), Client() as client:
        async with sidecars(servers[1]) as (killed,):
            await push(client, first, path, 1, **options)
            await push(client, killed, path, 1, **options)
        await push(client, last, path, 1, **options)
        assert loaded(servers[2]) == path.digest
    assert asked[-3:] == [(killed, first), (last, killed), (last, first)]
    assert set(asked[:-3]) == {(first, None)}


async def test_a_version_that_is_not_the_learner_s_is_not_loaded(make_server, write):
    server, path = make_server(), write(1)

    class Client(InferenceClient):
        async def call(self, method, address, route, body, *args, **call):
            if route == protocol.PREPARE:
                body = json.dumps(json.loads(body) | {"weight_digest": "0" * 64}).encode()
            return await super().call(method, address, route, body, *args, **call)

    async with sidecars(server) as (address,), Client() as client:
        with pytest.raises(ServerError, match="the push is of 0000"):
            await push(client, address, path, 1)
    assert "/update_weights_from_disk" not in server.routes() and not server.paused


async def test_a_file_that_was_altered_here_is_not_loaded(make_server, write, monkeypatch):
    server, path, receive = make_server(), write(1), relay.Relay.receive

    async def alters(self, version, name, chunks, piece):
        await receive(self, version, name, chunks, piece)
        if name == "model.safetensors":
            file = self.directory(version) / name
            content = bytearray(file.read_bytes())
            content[-3] ^= 1
            file.write_bytes(content)

    monkeypatch.setattr(relay.Relay, "receive", alters)
    async with sidecars(server) as (address,), InferenceClient() as client:
        with pytest.raises(ServerError, match="its manifest says"):
            await push(client, address, path, 1)
    assert "/update_weights_from_disk" not in server.routes() and not server.paused


async def test_an_update_without_its_preparation_is_refused(make_server, write):
    async with sidecars(make_server()) as (address,), InferenceClient() as client:
        await push(client, address, write(1), 1)
        with pytest.raises(ServerError, match="no version with digest 'abc' was prepared"):
            update = protocol.Update(weight_version="1", flush_cache=True, weight_digest="abc")
            server = SglangApi(client, address)
            await server.update(protocol.UPDATE_FROM_UPLOAD, update.body(), 5.0)


async def test_all_other_calls_go_through_with_their_answers(make_server):
    server = make_server()
    server.fail["/flush_cache"] = (418, "short and stout")
    async with sidecars(server) as (address,), aiohttp.ClientSession() as session:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}
        async with session.post(f"{address}/generate", json=body) as answer:
            assert answer.status == 200 and len((await answer.json())["output_ids"]) == 3
        async with session.post(f"{address}/flush_cache") as answer:
            assert answer.status == 418 and "stout" in await answer.text()
        async with session.get(f"{address}/model_info") as answer:
            info = await answer.json()
            assert info["hands_on"] is True and info["weight_version"] == "default"


async def test_a_push_through_it_may_use_the_connection_of_a_probe(make_server, write):
    server, seen = make_server(), asyncio.Queue()
    async with sidecars(server) as (address,), InferenceClient() as client:
        probes = client.probes(
            interval_secs=0.02,
            timeout_secs=TIMEOUT_SECS,
            is_wanted=lambda _: seen.empty(),
            on_answer=lambda _, info: seen.put_nowait(info),
        )
        probes.add("server", address)
        probing = asyncio.create_task(probes.run())
        async with asyncio.timeout(TIMEOUT_SECS):
            while seen.empty():
                await asyncio.sleep(0.01)
        line = probes.open_line(address)
        await push(client, address, path := write(1), 1)
        assert line is not None and probes.open_line(address) is line
        assert loaded(server) == read_manifest(path)["digest"] and not server.paused
        probing.cancel()
        await asyncio.wait({probing})


async def test_a_server_that_is_gone_is_named(make_server):
    server = make_server()
    async with sidecars(server) as (address,), InferenceClient() as client:
        server.stop()
        asked = SglangApi(client, address)
        for call in (asked.report, asked.server_info):
            with pytest.raises(ServerError, match=f"{server.address} does not answer the sidecar"):
                await call(timeout_secs=5.0)
        server.start()


@contextlib.asynccontextmanager
async def answering(*parts):
    """The address of a server that answers a call with these bytes, and hangs up."""

    tasks = []

    async def answer(reader, writer):
        tasks.append(asyncio.current_task())
        with contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.writelines(parts)
            await writer.drain()
            await asyncio.sleep(0.05)  # The first bytes are passed on.

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await listener.stop(server)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # A transport lets go of its socket in a later turn.


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x" * 70_000),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n"),
    ],
    ids=["of a length", "in chunks"],
)
async def test_an_answer_that_breaks_off_does_so_for_who_asked(parts):
    async with (
        answering(*parts) as there,
        sidecar.serve(there, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession() as session,
        asyncio.timeout(TIMEOUT_SECS),
        session.get(f"http://127.0.0.1:{port}/server_info") as answer,
    ):
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


@pytest.mark.parametrize("body", ["<html>Welcome</html>", "[1]", '{"status": "ok"}', ""])
async def test_what_is_no_inference_server_is_named_by_its_answer(body):
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with (
        answering(head, body.encode()) as there,
        sidecar.serve(there, host="127.0.0.1", port=0) as port,
        InferenceClient() as client,
    ):
        words = re.escape(json.loads(body)["status"] if body[:1] == "{" else body)
        with pytest.raises(UnfitServerError, match=f"of no known kind, and answers .*{words}"):
            await client.recognise(f"http://127.0.0.1:{port}", timeout_secs=TIMEOUT_SECS)


@pytest.mark.parametrize("asked", ["gzip, deflate", None])
async def test_nobody_gets_an_answer_that_the_server_has_compressed(asked):
    async def compressed(request):
        response = web.json_response({"weight_version": "3", "text": "x" * 1000})
        response.enable_compression()  # Where it is asked for.
        return response

    app = web.Application()
    app.router.add_get("/{route:.*}", compressed)
    headers = {"Accept-Encoding": asked} if asked else {}
    async with (
        listener.listening(app, "127.0.0.1", 0) as there,
        sidecar.serve(f"http://127.0.0.1:{there}", host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(skip_auto_headers=["Accept-Encoding"], headers=headers) as session,
    ):
        for route in ("/model_info", "/server_info"):
            async with session.get(f"http://127.0.0.1:{port}{route}") as answer:
                assert answer.status == 200 and (await answer.json())["weight_version"] == "3"


async def test_a_call_goes_by_no_connection_that_its_server_may_be_closing():
    """The server closes each connection with its second call, as uvicorn does one that has rested."""
    seen = set()

    async def pause(request):
        if request.transport in seen:
            request.transport.abort()
        seen.add(request.transport)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/pause_generation", pause)
    async with (
        listener.listening(app, "127.0.0.1", 0) as there,
        sidecar.serve(f"http://127.0.0.1:{there}", host="127.0.0.1", port=0) as port,
        InferenceClient() as client,
    ):
        server = SglangApi(client, f"http://127.0.0.1:{port}")
        await server.pause(mode="retract", timeout_secs=TIMEOUT_SECS)
        await asyncio.sleep(1.5 * sidecar.KEEPALIVE_SECS)
        await server.pause(mode="retract", timeout_secs=TIMEOUT_SECS)
    assert len(seen) == 2


async def test_a_pause_does_not_wait_for_the_requests_that_it_holds(make_server):
    server, num_requests = make_server(), 120
    server.hang.add("/generate")
    async with sidecars(server) as (address,), InferenceClient() as client:
        asked = SglangApi(client, address)
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        calls = [
            asyncio.create_task(asked.post("/generate", body, 3600.0)) for _ in range(num_requests)
        ]
        async with asyncio.timeout(3 * TIMEOUT_SECS):
            while server.routes().count("/generate") < num_requests:
                await asyncio.sleep(0.05)
        await asked.pause(mode="retract", timeout_secs=TIMEOUT_SECS)
        assert server.paused
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_pause_ends_with_its_lease(make_server, monkeypatch):
    server, timers, begin = make_server(), [], pause_lease.Lease.begin

    def noted(self, secs):
        begin(self, secs)
        timers.append(self._timer)

    monkeypatch.setattr(pause_lease.Lease, "begin", noted)
    async with sidecars(server) as (address,), InferenceClient() as client:
        await SglangApi(client, address).pause(mode="retract", timeout_secs=5.0, lease_secs=0.05)
        async with asyncio.timeout(TIMEOUT_SECS):
            while server.paused or "/continue_generation" not in server.routes():
                await asyncio.sleep(0.01)
        pause = {"mode": "retract", "timeout_secs": 5.0, "lease_secs": 3600.0}
        await SglangApi(client, address).pause(**pause)
        assert server.paused and not timers[-1].cancelled()
        await SglangApi(client, address).continue_(timeout_secs=5.0)
        assert not server.paused and timers[-1].cancelled()
    assert server.routes().count("/continue_generation") == len(timers) == 2


async def test_a_pause_whose_learner_is_gone_before_its_answer_has_its_lease(make_server):
    server, pause = make_server(), {"mode": "retract", "timeout_secs": 5.0, "lease_secs": 0.05}
    asked = asyncio.Event()

    async def pause_generation(payload):
        server.paused = True
        loop.call_soon_threadsafe(asked.set)
        while server.paused:
            await asyncio.sleep(0.01)
        return web.json_response({})

    loop, server.pause_generation = asyncio.get_running_loop(), pause_generation
    async with sidecars(server) as (address,), InferenceClient() as client:
        pausing = asyncio.create_task(SglangApi(client, address).pause(**pause))
        async with asyncio.timeout(TIMEOUT_SECS):
            await asked.wait()
            pausing.cancel()
            while server.paused:
                await asyncio.sleep(0.01)


async def test_a_refused_end_of_a_pause_leaves_it_its_lease(make_server):
    server, stranger = make_server(), InferenceClient(api_key="c" * 32)
    server.api_key = server.admin_api_key = "a" * 32
    async with sidecars(server, key="a" * 32) as (address,), stranger:
        async with InferenceClient(api_key="a" * 32) as client:
            pause = {"mode": "retract", "timeout_secs": 5.0, "lease_secs": 0.5}
            await SglangApi(client, address).pause(**pause)
        with pytest.raises(ServerError, match="401"):
            await SglangApi(stranger, address).continue_(timeout_secs=5.0)
        async with asyncio.timeout(TIMEOUT_SECS):
            while server.paused:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", ["refuses", "is_gone"])
async def test_a_pause_that_the_server_does_not_end_is_tried_again(fault, make_server, monkeypatch):
    server = make_server()
    monkeypatch.setattr(pause_lease, "RETRY_SECS", 0.01)
    async with sidecars(server) as (address,), InferenceClient() as client:
        if fault == "refuses":
            server.fail["/continue_generation"] = (503, "busy")
        else:
            server.drop.add("/continue_generation")
        pause = {"mode": "retract", "timeout_secs": 5.0, "lease_secs": 0.05}
        await SglangApi(client, address).pause(**pause)
        async with asyncio.timeout(TIMEOUT_SECS):
            while server.routes().count("/continue_generation") < 2:
                await asyncio.sleep(0.01)
            server.fail.clear()
            server.drop.clear()
            while server.paused:
                await asyncio.sleep(0.01)


async def test_its_own_routes_need_its_key_and_the_others_the_server_s(make_server, write):
    server, path = make_server(), write(1)
    server.api_key, server.admin_api_key = "a" * 32, "b" * 32
    async with sidecars(server, key="b" * 32) as (address,):
        async with InferenceClient(api_key="a" * 32, admin_api_key="b" * 32) as client:
            await push(client, address, path, 1)
        async with InferenceClient(api_key="a" * 32, admin_api_key="c" * 32) as client:
            with pytest.raises(ServerError, match="needs the admin api key of this sidecar"):
                await push(client, address, path, 1)
    assert server.version == "1"


async def test_vllm_loads_what_was_sent_and_is_compared(write):
    async with (
        fake_vllm.serving() as server,
        sidecars(server) as (address,),
        InferenceClient() as client,
    ):
        for number in (1, 2):
            stored = write(number)
            await push(client, address, stored, number, delta=True)
            assert server.version == str(number) and not server.paused
            for name, tensor in tensors(number).items():
                np.testing.assert_array_equal(server.tensors[name], tensor)
        loads = server.payloads("/collective_rpc")
        assert [load["method"] for load in loads] == ["load_version"] * 2
        assert str(stored) not in str(loads)  # It is the sidecar's directory.
        server.packs = True
        with pytest.raises(ServerError, match="up_proj.weight has checksum .*holds version 2"):
            await push(client, address, write(3), 3)
        assert server.version == "3-unverified" and not server.paused


async def test_a_load_that_vllm_refuses_is_the_push_s(write):
    async with (
        fake_vllm.serving() as server,
        sidecars(server) as (address,),
        InferenceClient() as client,
    ):
        server.missing = {"/collective_rpc"}
        with pytest.raises(ServerError, match="Not Found"):
            await push(client, address, write(1), 1)
        assert not server.paused


async def test_before_vllm_it_asks_for_its_key_where_vllm_asks_for_none(write):
    async with fake_vllm.serving() as server, sidecars(server, key="b" * 32) as (address,):
        server.api_key = "a" * 32
        async with InferenceClient(api_key="a" * 32, admin_api_key="b" * 32) as client:
            await push(client, address, write(1), 1)
        async with aiohttp.ClientSession() as session:
            asked, keyed = len(server.calls), {"Authorization": "Bearer " + server.api_key}
            for route in (
                "/pause",
                "/resume",
                "/collective_rpc",
                "/v1/../pause",
                "/v1/%2e%2e/pause",
            ):
                url = yarl.URL(address + route, encoded=True)
                async with session.post(url, json={}, headers=keyed) as answer:
                    assert answer.status == 401 and "of this sidecar" in await answer.text()
            assert len(server.calls) == asked
            async with session.get(f"{address}/weight_info") as answer:
                assert (await answer.json())["weight_version"] == "1"
            body = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
            route = f"{address}/inference/v1/generate"
            async with session.post(route, json=body, headers=keyed) as answer:
                assert len((await answer.json())["choices"][0]["token_ids"]) == 2


async def test_a_web_page_pauses_no_server_through_it(make_server):
    server = make_server()
    async with sidecars(server) as (address,), aiohttp.ClientSession() as session:
        async with session.post(f"{address}/pause_generation", data="{}") as answer:  # text/plain
            assert answer.status == 415 and "application/json" in await answer.text()
        assert not server.paused


async def test_what_a_server_is_that_does_not_say_is_asked_again():
    async with fake_vllm.serving() as server, sidecars(server, key="b" * 32) as (address,):
        async with aiohttp.ClientSession() as session:
            for broken, status in (({"/weight_info"}, 502), (set(), 401)):
                server.broken = broken
                async with session.post(f"{address}/pause", json={}) as answer:
                    assert answer.status == status, await answer.text()
        assert not server.paused


async def test_a_web_page_loads_no_adapter_through_it():
    async with fake_vllm.serving() as server, sidecars(server) as (address,):
        async with aiohttp.ClientSession() as session:
            for route in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                async with session.post(f"{address}{route}", data="{}") as answer:  # text/plain
                    assert answer.status == 415
        assert not server.calls


async def test_a_pause_of_vllm_ends_with_its_lease():
    async with (
        fake_vllm.serving() as server,
        sidecars(server) as (address,),
        InferenceClient() as client,
    ):
        kind = await client.recognise(address, timeout_secs=5.0)
        await kind.pause(mode="retract", timeout_secs=5.0, lease_secs=0.05)
        async with asyncio.timeout(TIMEOUT_SECS):
            while server.paused or "/resume" not in server.routes():
                await asyncio.sleep(0.01)


async def test_the_preflight_of_a_vllm_behind_it_wants_the_extension_on_every_device():
    config = {"vocab_size": 100, "num_hidden_layers": 2}
    expected = Expected(config, 256, "stream", "", "")
    async with (
        fake_vllm.serving() as server,
        sidecars(server) as (address,),
        InferenceClient() as client,
    ):
        server.shape = config
        await preflight(client, address, expected)
        server.device, server.extension = "cuda", ""
        with pytest.raises(UnfitServerError, match="its sidecar loads by it: .*--worker-extension"):
            await preflight(client, address, expected)


async def test_a_superseded_learner_changes_nothing(make_server, write):
    server, path = make_server(), write(1)
    async with sidecars(server) as (address,), InferenceClient() as client:
        await push(client, address, path, 1, writer=Identity("a", 2))
        with pytest.raises(ServerError, match="superseded by generation 2"):
            await push(client, address, write(2), 2, writer=Identity("a", 1))
    assert server.version == "1"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "must be a JSON object"),
        (b"{", "Expecting"),
        (json.dumps({"weight_version": "1"}).encode(), "weight_digest must be a string, got None"),
        (
            json.dumps({"weight_version": "../1", "weight_digest": "a"}).encode(),
            "no file of version",
        ),
        (
            json.dumps(
                {"weight_version": "1", "weight_digest": "a", "difference": "../x.difference"}
            ).encode(),
            "difference must be a file's name",
        ),
    ],
)
async def test_a_preparation_that_cannot_be_is_refused(make_server, body, message):
    async with sidecars(make_server()) as (address,), aiohttp.ClientSession() as session:
        async with session.post(f"{address}/weights/prepare", data=body) as answer:
            assert answer.status == 400 and message in await answer.text()


def test_a_relay_beyond_loopback_needs_a_key():
    async def start():
        async with sidecar.serve("http://127.0.0.1:1", host="0.0.0.0", port=0):
            pass

    with pytest.raises(ValueError, match="--admin_api_key_env"):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--server=http://host:port is needed, got ''"),
        (["--server=http://a:1", "--host=0.0.0.0"], "not loopback, without TLS"),
        (
            ["--server=http://a:1", "--host=0.0.0.0", "--insecure"],
            "--admin_api_key_env",
        ),
    ],
)
def test_the_verb_refuses_what_it_cannot_serve(flags, message, capsys):
    assert main.main(["relay", *flags]) == 2
    assert message in capsys.readouterr().err
