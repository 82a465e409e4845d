"""The embedded server's border: TLS, keys, paths, sizes, and random bytes that never stop it."""

import asyncio
import contextlib
import io
import json
import logging
import os
import pathlib
import re
import socket
import urllib.error
import urllib.request

import aiohttp
import pytest
from fixtures.security import ADMIN_KEY, API_KEY, LONG, ROOT, fuzz, in_a_thread, post, tls_of
from fixtures.served_engine import CONFIG, upload, write_weights
from hypothesis import strategies as st

from jaxrl_async.inference import fields, http, loading
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import ServerError

# The servers.


async def test_a_server_speaks_https_to_whom_trusts_it(engine, certificates):
    keys = {"api_key": API_KEY, "admin_api_key": ADMIN_KEY}
    served = http.serve(engine, host="127.0.0.1", port=0, **keys, **tls_of(certificates))
    async with served as port:
        address = f"https://127.0.0.1:{port}"
        async with InferenceClient(**keys, tls_ca=str(certificates / "queue.pem")) as client:
            info = await SglangApi(client, address).report(timeout_secs=10)
            assert info["weight_version"] == "3"
            sampling = {"max_new_tokens": 3, "sampling_seed": 1}
            asked = {"input_ids": [1, 2], "sampling_params": sampling}
            answer = await client.generate(address, rid="r", **asked, timeout_secs=10)
            assert len(answer.tokens) == 3
            await SglangApi(client, address).continue_(timeout_secs=10)
            with pytest.raises(ServerError, match="connection lost"):
                await SglangApi(client, f"http://127.0.0.1:{port}").report(timeout_secs=10)
        for ca in ("", str(certificates / "other.pem")):
            async with InferenceClient(**keys, tls_ca=ca) as client:
                said = f"{address}/model_info: its certificate is of no authority in server.tls_ca"
                with pytest.raises(ServerError, match=said) as caught:
                    await SglangApi(client, address).report(timeout_secs=10)
                assert not caught.value.retryable
    async with http.serve(engine, host="127.0.0.1", port=0) as port:
        async with InferenceClient(tls_ca=str(certificates / "queue.pem")) as client:
            with pytest.raises(ServerError, match="connection lost: .*SSL"):
                await SglangApi(client, f"https://127.0.0.1:{port}").report(timeout_secs=10)


async def test_a_server_for_another_host_is_not_trusted(engine, certificates):
    served = http.serve(engine, host="127.0.0.1", port=0, **tls_of(certificates, "away"))
    async with served as port, InferenceClient(tls_ca=str(certificates / "away.pem")) as client:
        with pytest.raises(ServerError, match="or not of that host: .*127.0.0.1"):
            await SglangApi(client, f"https://127.0.0.1:{port}").report(timeout_secs=10)


@pytest.mark.parametrize("key", ["", "x", "é", "\udcff"])
async def test_a_key_of_odd_bytes_is_401(engine, key):
    async with http.serve(engine, host="127.0.0.1", port=0, api_key=API_KEY) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        header = f"Authorization: Bearer {key}".encode("utf-8", "surrogateescape")
        writer.write(b"GET /model_info HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b" 400 "),
        (b"GET /model_info HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 9000 + b"\r\n\r\n", b" 400 "),
        (
            b"GET /model_info HTTP/1.1\r\nHost: a\r\n"
            + b"".join(b"X-%d: a\r\n" % i for i in range(65))
            + b"\r\n",
            b" 400 ",
        ),
        (
            b"GET /model_info HTTP/1.1\r\nHost: a\r\n"
            + b"".join(b"X-%d: a\r\n" % i for i in range(60))
            + b"\r\n",
            b" 200 ",
        ),
    ],
    ids=["line", "field", "fields", "within"],
)
async def test_headers_of_http_are_bounded(engine, head, status):
    async with http.serve(engine, host="127.0.0.1", port=0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert status in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


# Paths.


@pytest.fixture
def places(tmp_path):
    """A root with a version in it, a version outside, and links to it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    inside = pathlib.Path(write_weights(root))
    foreign = pathlib.Path(write_weights(outside))
    (root / "link").symlink_to(foreign)
    (root / "loop").symlink_to(root / "loop")
    write_weights(tmp_path / "root-beside")
    return {"root": root, "inside": inside, "foreign": foreign}


def confined_paths(places):
    root, foreign = places["root"], places["foreign"]
    return {
        "elsewhere": foreign,
        "up": root / ".." / "outside" / foreign.name,
        "up from nowhere": f"{root}/none/../../outside/{foreign.name}",
        "link": root / "link",
        "through a link": root / "link" / ".." / foreign.name,
        "a name that begins alike": f"{root}-beside/{foreign.name}",
        "relative": os.path.relpath(places["inside"]),
        "circle": root / "loop" / "x",
        "zero byte": f"{root}/\0",
        "system": "/etc",
        "proc": "/proc/self/cwd",
        "dot": ".",
    }


@pytest.mark.parametrize("name", confined_paths({"root": ROOT, "foreign": ROOT, "inside": ROOT}))
async def test_weights_from_outside_the_roots_are_refused(engine, places, name):
    path = str(confined_paths(places)[name])
    roots = [places["root"]]
    async with http.serve(engine, host="127.0.0.1", port=0, weight_roots=roots) as port:
        named = {"model_path": path, "weight_version": "9"}
        address = f"http://127.0.0.1:{port}"
        for route, more in (
            ("/update_weights_from_disk", {}),
            ("/weights/prepare", {"weight_digest": "0"}),
            ("/weights/prepare", {"weight_digest": "0", "keep": True}),
            ("/weights/prepare", {"weight_digest": "0", "difference": "from-1.difference"}),
        ):
            body = json.dumps(named | more).encode()
            status, answer = await asyncio.to_thread(post, address, route, body)
            assert (status, answer["success"]) == (400, False), answer
            message = answer["message"]
            if name == "circle":
                assert "is no path" in message or "not a directory" in message
            else:
                assert re.search("model_path .* (within the directories|is no path)", message)
    assert engine.weight_version == "3"


async def test_weights_from_within_a_root_are_loaded(engine, places, tmp_path):
    (tmp_path / "to-root").symlink_to(places["root"])
    name = places["inside"].name
    for roots, path in (
        ([places["root"]], places["inside"]),
        ([tmp_path / "to-root"], places["inside"]),
        ([places["root"]], tmp_path / "to-root" / name),
        ([places["inside"]], places["inside"]),
        # Out through a link and in again: where it ends counts.
        (["/nowhere", places["root"]], places["root"] / "link" / ".." / ".." / "root" / name),
    ):
        async with http.serve(engine, host="127.0.0.1", port=0, weight_roots=roots) as port:
            body = {"model_path": str(path), "weight_version": "3", "abort_all_requests": True}
            status, answer = await asyncio.to_thread(
                post,
                f"http://127.0.0.1:{port}",
                "/update_weights_from_disk",
                json.dumps(body).encode(),
            )
        assert status == 200, answer
    async with http.serve(engine, host="127.0.0.1", port=0) as port:
        body = json.dumps({"model_path": str(places["inside"]), "weight_version": "3"}).encode()
        address = f"http://127.0.0.1:{port}"
        status, answer = await asyncio.to_thread(post, address, "/update_weights_from_disk", body)
        assert status == 400 and answer["message"].endswith("weights may come from: none")


async def test_an_upload_of_a_later_run_epoch_is_taken(client, tmp_path):
    await upload(client, pathlib.Path(write_weights(tmp_path)), "1.12")
    status, answer = await client("/update_weights_from_upload", {"weight_version": "1.12"})
    assert status == 200, answer
    assert (await client.get("/model_info"))[1]["weight_version"] == "1.12"


async def test_the_bytes_of_an_upload_are_bounded(client):
    bound = 8 * loading.num_parameters(CONFIG) + http.MAX_BODY_BYTES
    part = bound // 2 + 1
    for name, status in (("a", 200), ("a", 200), ("b", 400), ("c", 400)):
        url = f"http://127.0.0.1:{client.port}/weights/9/{name}.safetensors"
        async with client.session.put(url, data=io.BytesIO(b"x" * part)) as answer:
            assert answer.status == status
            if status == 400:
                message = (await answer.json())["error"]["message"]
                assert f"at most {bound} bytes together: {name}.safetensors" in message
    assert len((await client.generate())["output_ids"]) == 5


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/generate", {"rid": "x" * 257}, "rid must be a string of 1 to 256 characters"),
        (
            "/update_weights_from_disk",
            {"model_path": "/" * 4097},
            "at most 4096 characters, got 4097",
        ),
        (
            "/update_weights_from_disk",
            {"model_path": "/", "weight_version": "1" * 129},
            "weight_version has at most 128 characters, got 129",
        ),
        ("/update_weights_from_upload", {"weight_version": "1" * 129}, "at most 128 characters"),
        ("/generate", {LONG: 1}, "unknown keys: xxx"),
    ],
)
async def test_strings_over_http_are_bounded(client, route, body, message):
    status, answer = await client(
        route, {"input_ids": [1]} | body if route == "/generate" else body
    )
    assert status == 400
    assert message in answer["error"]["message"] and len(answer["error"]["message"]) < 400


PAGE = {"Origin": "http://elsewhere.example"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (PAGE, 415),
        ({"Content-Type": "text/plain"} | PAGE, 415),
        ({"Content-Type": "text/plain;charset=UTF-8"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=a"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"} | PAGE, 200),
        ({"Content-Type": "application/octet-stream"}, 200),
        ({}, 200),
    ],
)
async def test_a_web_page_pauses_no_server(client, headers, status):
    """A browser sends such calls of any page without asking; for JSON it asks, and gets no leave."""
    body = None if headers in ({}, PAGE) else b"{}"
    async with aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as session:
        for route in ("/continue_generation", "/abort_request", "/flush_cache"):
            url = f"http://127.0.0.1:{client.port}{route}"
            async with session.post(url, data=body, headers=headers) as answer:
                assert (answer.status == 415) == (status == 415)
                assert answer.status != 415 or "application/json" in await answer.text()
        async with session.options(
            f"http://127.0.0.1:{client.port}/pause_generation", headers=PAGE
        ) as answer:
            assert answer.status == 405 and "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("route", ["/generate", "/continue_generation", "/weights/prepare"])
async def test_a_body_that_is_not_what_its_encoding_says_is_refused(client, route):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session:
        async with session.post(
            f"http://127.0.0.1:{client.port}{route}", data=b"{}", headers=headers
        ) as answer:
            assert answer.status == 400 and "the body cannot be read" in await answer.text()
        file = f"http://127.0.0.1:{client.port}/weights/7/model.safetensors"
        async with session.put(file, data=b"{}", headers=headers) as answer:
            assert answer.status == 400 and "the body cannot be read" in await answer.text()


async def test_nesting_without_end_is_no_json(client):
    status, answer = await client("/generate", data=b"[" * 200_000)
    assert status == 400 and "the body is not JSON" in answer["error"]["message"]


JSON = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.floats(), st.text(max_size=20)),
        *(st.integers(-3, 20), st.integers(-(2**70), 2**70)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
SAMPLING = st.dictionaries(st.sampled_from(sorted(fields._SAMPLING_DEFAULTS)), JSON, max_size=4)
PROMPT = st.lists(st.integers(-1, 20), max_size=5)
FIELDS = {
    "rid": st.one_of(JSON, st.sampled_from(["a", "b"])),
    "input_ids": st.one_of(JSON, PROMPT, st.lists(PROMPT, max_size=3)),
    "sampling_params": st.one_of(JSON, SAMPLING, st.just({"max_new_tokens": 2})),
    "return_logprob": st.one_of(JSON, st.booleans()),
    "stream": JSON,
    "mode": st.one_of(JSON, st.sampled_from(["abort", "retract", "in_place"])),
    "abort_all": JSON,
    "model_path": st.one_of(JSON, st.sampled_from(["/", "/etc", "..", "\0"])),
    "weight_version": st.one_of(JSON, st.sampled_from(["3", "..", "a/b"])),
    "flush_cache": st.one_of(JSON, st.booleans()),
    "abort_all_requests": st.one_of(JSON, st.booleans()),
    "load_format": st.one_of(JSON, st.sampled_from(["auto"])),
    "weight_digest": st.one_of(JSON, st.just("0")),
    "difference": st.one_of(JSON, st.sampled_from(["from-1.difference", "../x.difference"])),
    "keep": st.one_of(JSON, st.booleans()),
    "writer": st.one_of(JSON, st.just({"run_id": "a", "generation": 1})),
}
KEYS = {
    "/generate": ("rid", "input_ids", "sampling_params", "return_logprob", "stream"),
    "/pause_generation": ("mode",),
    "/continue_generation": (),
    "/abort_request": ("rid", "abort_all"),
    "/flush_cache": (),
    "/update_weights_from_disk": (
        *("model_path", "weight_version", "flush_cache", "abort_all_requests", "load_format"),
    ),
    "/update_weights_from_upload": ("weight_version", "flush_cache"),
    "/weights/prepare": (
        *("model_path", "weight_version", "weight_digest", "difference", "keep", "writer"),
    ),
}
BODIES = st.sampled_from(sorted(KEYS)).flatmap(
    lambda route: st.tuples(
        st.just(route),
        st.one_of(
            JSON, st.fixed_dictionaries({}, optional={key: FIELDS[key] for key in KEYS[route]})
        ),
    )
)


@pytest.fixture
def address(engine, tmp_path):
    served = http.serve(engine, host="127.0.0.1", port=0, weight_roots=[tmp_path])
    with in_a_thread(served) as port:
        yield f"http://127.0.0.1:{port}"


def still_answers(address):
    """Whatever came before: it says what it holds, and generates."""
    assert post(address, "/continue_generation", b"")[0] == 200
    with urllib.request.urlopen(f"{address}/model_info", timeout=20) as answer:
        assert json.load(answer)["weight_version"] in ("3", "1.12")
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert post(address, "/generate", json.dumps(body).encode())[0] == 200


def test_random_bodies_never_stop_the_server(address, request):
    def check(route, body):
        status, _ = post(address, route, body)
        assert status in (200, 400, 413), (route, body, status)
        still_answers(address)

    fuzz(request, check, route=st.sampled_from(sorted(KEYS)), body=st.binary(max_size=100))


def test_random_json_never_stops_the_server(address, request):
    def check(asked):
        route, body = asked
        status, answer = post(address, route, json.dumps(body).encode())
        assert status in (200, 400), (route, body, status, answer)
        still_answers(address)

    fuzz(request, check, asked=BODIES)


HTTP_PIECES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [
                *(b"POST /generate HTTP/1.1\r\n", b"GET /model_info HTTP/1.1\r\n", b"\r\n"),
                *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Host: a\r\n"),
                *(b"Transfer-Encoding: chunked\r\n", b"ffffffffffffffff\r\n", b"0\r\n\r\n"),
                *(b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n", b"{}"),
                *(b"PUT /weights/1/config.json HTTP/1.1\r\n", b"Upgrade: h2c\r\n", b"\0"),
            ]
        ),
    ),
    max_size=8,
)


def test_random_bytes_on_the_wire_never_stop_the_server(address, request, caplog):
    caplog.set_level(logging.CRITICAL)
    host, port = address.removeprefix("http://").split(":")

    def check(pieces):
        with socket.create_connection((host, int(port)), 20) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(b"".join(pieces))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        with urllib.request.urlopen(f"{address}/health", timeout=20) as answer:
            assert answer.status == 200

    fuzz(request, check, pieces=HTTP_PIECES)
