"""Probes of servers: what is reported of each answer, and how many connections it takes."""

import asyncio
import contextlib
import json
import re

import pytest

from jaxrl_async import listener
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import ServerError, ServerTimeoutError
from jaxrl_async.servers.probes import MAX_ANSWER_BYTES, Probes

INFO = {"weight_version": "3", "weight_digest": "d"}


def plain(body: bytes, status="200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


GOOD = plain(json.dumps(INFO).encode())


@contextlib.asynccontextmanager
async def serving(answers):
    """A server that gives these answers in turn, the last for ever; None closes the connection, b"" says nothing."""
    requests, connections = [], []

    async def handle(reader, writer):
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                requests.append(head + await reader.readexactly(int(length[1]) if length else 0))
                answer = answers[min(len(requests), len(answers)) - 1]
                if answer is None:
                    break
                for byte in (answer[:40], answer[40:]):  # It arrives in parts.
                    writer.write(byte)
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests, connections
    finally:
        for writer in connections:
            writer.transport.abort()
        await listener.stop(server)


@contextlib.asynccontextmanager
async def probing(*addresses, api_key=None, timeout_secs=20.0, is_wanted=lambda _: True):
    """Probes each address; yields a queue of (address, info)."""
    seen = asyncio.Queue()
    probes = Probes(
        interval_secs=0.02,
        timeout_secs=timeout_secs,
        is_wanted=is_wanted,
        on_answer=lambda server, info: seen.put_nowait((server, info)),
        api_key=api_key,
    )
    for address in addresses:
        probes.add(address, address)
    task = asyncio.create_task(probes.run())
    try:
        yield seen, probes
    finally:
        task.cancel()
        await asyncio.wait({task})


async def next_of(seen):
    return await asyncio.wait_for(seen.get(), 20.0)


async def test_many_probes_take_one_connection_and_carry_the_key():
    async with serving([GOOD]) as (address, requests, connections):
        async with probing(address, api_key="secret") as (seen, _):
            for _ in range(5):
                assert await next_of(seen) == (address, INFO)
    assert len(connections) == 1
    host = address.removeprefix("http://")
    lines = requests[0].decode().split("\r\n")
    assert lines[0] == "GET /model_info HTTP/1.1"
    assert f"Host: {host}" in lines and "Authorization: Bearer secret" in lines


@pytest.mark.parametrize(
    "answer",
    [
        None,
        plain(b"{}", "500 Internal Server Error"),
        plain(b"{}", "401 Unauthorized"),
        plain(b"[1]"),
        plain(b"{"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"x" * (MAX_ANSWER_BYTES + 1),
    ],
    ids=["closed", "500", "401", "list", "broken", "chunked", "huge"],
)
async def test_an_answer_that_is_not_plain_is_none_and_the_next_probe_begins_anew(answer):
    async with serving([answer, GOOD]) as (address, _, connections):
        async with probing(address) as (seen, _):
            assert await next_of(seen) == (address, None)
            assert await next_of(seen) == (address, INFO)
    assert len(connections) == 2


async def test_a_server_that_is_gone_or_silent_is_none():
    async with serving([b""]) as (silent, _, _), serving([GOOD]) as (gone, _, _):
        pass
    async with serving([b""]) as (silent, _, _):
        async with probing(silent, gone, timeout_secs=0.1) as (seen, _):
            found = {await next_of(seen) for _ in range(20)}
    assert found == {(silent, None), (gone, None)}


async def test_servers_that_are_not_wanted_or_were_removed_are_not_looked_at():
    wanted = set()
    async with serving([GOOD]) as (one, _, _), serving([GOOD]) as (two, requests, _):
        wanted.add(one)
        async with probing(one, two, is_wanted=wanted.__contains__) as (seen, probes):
            for _ in range(5):
                assert await next_of(seen) == (one, INFO)
            assert requests == []
            wanted.add(two)
            while (await next_of(seen))[0] != two:
                pass
            probes.remove(one)
            while not seen.empty():
                seen.get_nowait()
            for _ in range(5):
                assert await next_of(seen) == (two, INFO)


@contextlib.asynccontextmanager
async def client_with_open_line(address):
    """A client whose probe has opened a connection to a server, and that probes no more."""
    seen, wanted = asyncio.Queue(), {address}

    def on_answer(server, info):
        wanted.clear()  # At once: the next probe may be due before the test goes on.
        seen.put_nowait(info)

    async with InferenceClient(api_key="key", admin_api_key="admin") as client:
        probes = client.probes(
            interval_secs=0.02,
            timeout_secs=20.0,
            is_wanted=wanted.__contains__,
            on_answer=on_answer,
        )
        probes.add(address, address)
        task = asyncio.create_task(probes.run())
        try:
            assert await next_of(seen) == INFO
            yield client
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_the_calls_of_a_push_use_the_connection_of_the_probes():
    async with serving([GOOD]) as (address, requests, connections):
        async with client_with_open_line(address) as client:
            assert await SglangApi(client, address).report(timeout_secs=20.0) == INFO
            await SglangApi(client, address).pause(
                mode="retract", timeout_secs=20.0, lease_secs=3.0
            )
            assert len(connections) == 1
            await SglangApi(client, address).flush_cache(
                timeout_secs=20.0
            )  # It may answer with anything.
            assert len(connections) == 2
    get, pause = (request.decode() for request in requests[1:3])
    assert get.startswith("GET /model_info HTTP/1.1\r\n") and "Bearer key\r\n" in get
    assert pause.startswith("POST /pause_generation HTTP/1.1\r\n") and "Bearer admin\r\n" in pause
    assert "X-Pause-Lease-Secs: 3\r\n" in pause and pause.endswith('\r\n\r\n{"mode":"retract"}')


async def test_a_refusal_on_an_open_connection_is_an_error_with_its_status():
    refusal = plain(b'{"error": {"message": "no such mode"}}', "400 Bad Request")
    async with serving([GOOD, refusal, GOOD]) as (address, _, connections):
        async with client_with_open_line(address) as client:
            with pytest.raises(ServerError, match="HTTP 400: no such mode") as caught:
                await SglangApi(client, address).pause(mode="x", timeout_secs=20.0)
            assert caught.value.status == 400 and not caught.value.retryable
            await SglangApi(client, address).continue_(timeout_secs=20.0)
    assert len(connections) == 1


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [None, CHUNKED], ids=["closed", "chunked"])
async def test_a_change_whose_answer_is_lost_is_not_sent_twice(answer):
    async with serving([GOOD, answer, CHUNKED]) as (address, requests, _):
        async with client_with_open_line(address) as client:
            with pytest.raises(ServerError, match="connection lost") as caught:
                await SglangApi(client, address).continue_(timeout_secs=20.0)
            assert caught.value.retryable and len(requests) == 2
            await SglangApi(client, address).continue_(
                timeout_secs=20.0
            )  # on a connection of its own
            assert len(requests) == 3


async def test_a_question_whose_answer_is_lost_is_asked_again():
    async with serving([GOOD, None, GOOD]) as (address, _, connections):
        async with client_with_open_line(address) as client:
            assert await SglangApi(client, address).report(timeout_secs=20.0) == INFO
    assert len(connections) == 2


async def test_a_late_answer_is_an_error_and_reaches_no_later_call():
    async with serving([GOOD, b"", plain(b"{}")]) as (address, _, connections):
        async with client_with_open_line(address) as client:
            with pytest.raises(ServerTimeoutError, match=r"no answer within 0\.05 s"):
                await SglangApi(client, address).report(timeout_secs=0.05)
            assert await SglangApi(client, address).report(timeout_secs=20.0) == {}
    assert len(connections) == 2


async def test_a_connection_that_the_server_will_close_is_not_used_again():
    closing = GOOD.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    async with serving([GOOD, closing, GOOD]) as (address, _, connections):
        async with client_with_open_line(address) as client:
            for _ in range(2):
                assert await SglangApi(client, address).report(timeout_secs=20.0) == INFO
    assert len(connections) == 2
