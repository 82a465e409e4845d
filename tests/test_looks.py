"""Looks at servers: what is reported of each answer, and how many connections it takes."""

import asyncio
import contextlib
import json

import pytest

from jaxrl_async.servers.looks import MAX_ANSWER_BYTES, Looks

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
                requests.append(await reader.readuntil(b"\r\n\r\n"))
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
        server.close()


@contextlib.asynccontextmanager
async def looking(*addresses, api_key=None, timeout_secs=20.0, is_wanted=lambda _: True):
    """Looks at each address; yields a queue of (address, info)."""
    seen = asyncio.Queue()
    looks = Looks(
        interval_secs=0.02,
        timeout_secs=timeout_secs,
        is_wanted=is_wanted,
        on_answer=lambda server, info: seen.put_nowait((server, info)),
        api_key=api_key,
    )
    for address in addresses:
        looks.add(address, address)
    task = asyncio.create_task(looks.run())
    try:
        yield seen, looks
    finally:
        task.cancel()
        await asyncio.wait({task})


async def next_of(seen):
    return await asyncio.wait_for(seen.get(), 20.0)


async def test_many_looks_take_one_connection_and_carry_the_key():
    async with serving([GOOD]) as (address, requests, connections):
        async with looking(address, api_key="secret") as (seen, _):
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
async def test_an_answer_that_is_not_plain_is_none_and_the_next_look_begins_anew(answer):
    async with serving([answer, GOOD]) as (address, _, connections):
        async with looking(address) as (seen, _):
            assert await next_of(seen) == (address, None)
            assert await next_of(seen) == (address, INFO)
    assert len(connections) == 2


async def test_a_server_that_is_gone_or_silent_is_none():
    async with serving([b""]) as (silent, _, _), serving([GOOD]) as (gone, _, _):
        pass
    async with serving([b""]) as (silent, _, _):
        async with looking(silent, gone, timeout_secs=0.1) as (seen, _):
            found = {await next_of(seen) for _ in range(20)}
    assert found == {(silent, None), (gone, None)}


async def test_servers_that_are_not_wanted_or_were_removed_are_not_looked_at():
    wanted = set()
    async with serving([GOOD]) as (one, _, _), serving([GOOD]) as (two, requests, _):
        wanted.add(one)
        async with looking(one, two, is_wanted=wanted.__contains__) as (seen, looks):
            for _ in range(5):
                assert await next_of(seen) == (one, INFO)
            assert requests == []
            wanted.add(two)
            while (await next_of(seen))[0] != two:
                pass
            looks.remove(one)
            while not seen.empty():
                seen.get_nowait()
            for _ in range(5):
                assert await next_of(seen) == (two, INFO)
