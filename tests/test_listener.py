"""The listener of HTTP leaves no connection open."""

import asyncio
import gc
import socket

import pytest
from aiohttp import web

from jaxrl_async.listener import listening


@pytest.mark.parametrize("turns", range(6))
async def test_a_client_that_comes_while_it_stops_is_hung_up_on(turns):
    async with listening(web.Application(), "127.0.0.1", 0, shutdown_secs=0.01) as port:
        client = socket.create_connection(("127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
    gc.collect()  # A connection that is still open would be a warning.
    with client:
        client.setblocking(False)
        try:
            assert (
                await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 10) == b""
            )
        except ConnectionResetError:
            pass
