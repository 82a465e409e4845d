"""A receiver's routes for a server of aiohttp: requests in, answers out."""

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from jaxrl_async import security
from jaxrl_async.intake.receiver import Answer, Receiver, read_body, refused
from jaxrl_async.intake.relay import PieceError
from jaxrl_async.versions import protocol
from jaxrl_async.versions.protocol import RequestError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def routes(
    receiver: Receiver, prepare: Callable[..., Awaitable[Answer]] | None = None
) -> list[web.RouteDef]:
    """All but UPDATE_FROM_DISK, which a relay leaves to its server; `prepare` in the place of the receiver's."""

    async def receive(request: web.Request) -> web.Response:
        sha256 = request.headers.get(protocol.SHA256_HEADER)
        chunks = request.content.iter_any()
        names = request.match_info["version"], request.match_info["file"]
        try:
            return answered(await receiver.receive(*names, request.content_length, sha256, chunks))
        except web.RequestPayloadError as error:
            return answered(refused(security.unreadable(error)))

    async def hand_on(request: web.Request) -> web.StreamResponse:
        reading = await receiver.hand_on(request.match_info["version"], request.match_info["file"])
        if isinstance(reading, tuple):
            return answered(reading)
        response = web.StreamResponse(headers={"Content-Length": str(reading.num_bytes)})
        await response.prepare(request)
        async with contextlib.aclosing(reading.chunks) as chunks:
            try:
                async for chunk in chunks:
                    await response.write(chunk)
            except PieceError as error:
                log.warning("%s is not handed on: %s", request.path, error)
                if request.transport:
                    request.transport.abort()  # The other server sees that the file is not whole.
                return response
        await response.write_eof()
        return response

    file_route = protocol.file_route("{version}", "{file}")
    return [
        web.put(file_route, receive),
        web.get(file_route, hand_on),
        web.post(protocol.FETCH, asking(receiver.fetch)),
        web.post(protocol.PREPARE, asking(prepare or receiver.prepare, protocol.LEASE_HEADER)),
        web.post(protocol.UPDATE_FROM_UPLOAD, asking(receiver.update_from_upload)),
    ]


def asking(call: Callable[..., Awaitable[Answer]], *headers: str) -> Handler:
    """A handler that calls with the body and these headers."""

    async def handler(request: web.Request) -> web.Response:
        try:
            body = await body_of(request)
        except RequestError as error:
            return answered(refused(error))
        return answered(await call(body, *map(request.headers.get, headers)))

    return handler


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request's body, as of `read_body`; raises RequestError for bytes that cannot be read."""
    try:
        return read_body(await request.read())
    except web.RequestPayloadError as error:
        raise RequestError(security.unreadable(error)) from None


def answered(answer: Answer) -> web.Response:
    """An answer as a response."""
    status, body = answer
    return web.json_response(body, status=status)
