"""The HTTP routes of a relay (see relay.py), for the embedded server and for the sidecar of another one."""

import contextlib
import json
import logging
from collections.abc import Callable

from aiohttp import web

from jaxrl_async.intake.relay import PieceError, Relay, SourceError
from jaxrl_async.versions.protocol import FILE, NO_SOURCE, SHA256_HEADER, VERSION, Fetch, Piece

log = logging.getLogger(__name__)


class _Refused(ValueError):
    """A request that cannot be."""


def routes(relay: Callable[[], Relay]) -> list[web.RouteDef]:
    """The routes; `relay` is called for each request."""

    async def upload(request):
        """Stores one file of a version as it comes. Files of other versions are removed."""
        version, name = _named(**request.match_info)
        if (num_bytes := request.content_length) is None:
            raise _Refused(f"an upload needs Content-Length, {name} has none")
        piece = Piece(num_bytes, request.headers.get(SHA256_HEADER))
        await relay().receive(version, name, request.content.iter_any(), piece)
        return web.json_response({"message": f"stored {num_bytes} bytes of {name}"})

    async def hand_on(request):
        """Sends one file of a version to another server; one that still arrives, as it comes."""
        version, name = _named(**request.match_info)
        try:
            reading = await relay().read(version, name)
        except PieceError as error:
            return error_answer(404, error)
        response = web.StreamResponse(headers={"Content-Length": str(reading.num_bytes)})
        await response.prepare(request)
        async with contextlib.aclosing(reading.chunks) as chunks:
            try:
                async for chunk in chunks:
                    await response.write(chunk)
            except PieceError as error:
                log.warning("version %s is not handed on: %s", version, error)
                request.transport.abort()  # The other server sees that the file is not whole.
                return response
        await response.write_eof()
        return response

    async def fetch(request):
        """Gets files of a version from another server that has them, or gets them: see Relay.fetch."""
        fetch = _fetch_of(await request.read())
        version, files = fetch.weight_version, fetch.files
        try:
            await relay().fetch(version, fetch.source, files, timeout_secs=fetch.timeout_secs)
        except SourceError as error:
            return error_answer(NO_SOURCE, error)
        return web.json_response({"message": f"{len(files)} files of version {version} are here"})

    return [
        web.put("/weights/{version}/{file}", _refusing(upload)),
        web.get("/weights/{version}/{file}", _refusing(hand_on)),
        web.post("/weights/fetch", _refusing(fetch)),
    ]


def _refusing(handler):
    async def refusing(request):
        try:
            return await handler(request)
        except (_Refused, PieceError) as error:
            return error_answer(400, error)

    return refusing


def error_answer(status: int, error: object) -> web.Response:
    """A refusal in the form of SGLang's."""
    return web.json_response({"error": {"message": str(error)}}, status=status)


def _named(version, file) -> tuple[str, str]:
    """Both, safe in a path."""
    if not (isinstance(version, str) and VERSION.fullmatch(version) and FILE.fullmatch(file)):
        raise _Refused(
            "a version must be a name of letters, digits, - and _, and a file *.json, *.safetensors or *.difference; "
            f"got {version!r:.80} and {file!r:.80}"
        )
    return version, file


def _fetch_of(content: bytes) -> Fetch:
    """The body of a fetch."""
    try:
        fetch = Fetch.read(json.loads(content))
    except (ValueError, AttributeError, RecursionError) as error:
        raise _Refused(f"the body must be JSON, a Fetch: {error!r:.300}") from error
    for name in fetch.files:
        _named(fetch.weight_version, name)
    return fetch
