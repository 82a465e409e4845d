"""A listener of HTTP: it answers while a context lasts, and leaves no connection open."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

SHUTDOWN_SECS = 2.0  # for requests that still run


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    host: str,
    port: int,
    context: ssl.SSLContext | None = None,
    *,
    backlog: int = 128,
    shutdown_secs: float = SHUTDOWN_SECS,
    **limits: Any,
) -> AsyncIterator[int]:
    """Answers over HTTP while the context lasts; yields the port, of which 0 picks a free one.

    A client that hangs up cancels its request. `limits`: of headers, as of web.AppRunner.

    Raises:
      OSError: the address cannot be bound; the message names it.
    """
    options = {"handler_cancellation": True, "shutdown_timeout": shutdown_secs}
    runner = web.AppRunner(app, access_log=None, **options, **limits)
    await runner.setup()
    assert runner.server is not None
    try:
        try:
            server = await asyncio.get_running_loop().create_server(
                runner.server, host, port, ssl=context, backlog=backlog
            )
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {error.strerror}"
            raise OSError(error.errno, reason) from None
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            await stop(server)
    finally:
        await runner.cleanup()


async def stop(server: asyncio.Server) -> None:
    """Accepts no more, and closes the server.

    An accepted connection gets its transport a turn later. Where the server is closed by then, that fails, and the
    connection stays open (CPython's gh-109564).
    """
    for sock in server.sockets:
        server.get_loop().remove_reader(sock.fileno())
    await asyncio.sleep(0)
    server.close()
