"""The HTTP routes of a relay (see relay.py), for the embedded server and for the sidecar of another one."""

import contextlib
import json
import logging
import re
from collections.abc import Callable

from aiohttp import web

from jaxrl_async.intake.lease import MAX_LEASE_SECS
from jaxrl_async.intake.relay import NO_SOURCE, Piece, PieceError, Relay, SourceError
from jaxrl_async.servers.client import SHA256_HEADER

VERSION = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,128}\.(json|safetensors|difference)")
MAX_FILES = 1 << 16  # of a version
MAX_SOURCE_CHARS = 256

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
        version, source, pieces, secs = _fetch_of(await request.read())
        try:
            await relay().fetch(version, source, pieces, timeout_secs=secs)
        except SourceError as error:
            return error_answer(NO_SOURCE, error)
        return web.json_response({"message": f"{len(pieces)} files of version {version} are here"})

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


def _fetch_of(content: bytes) -> tuple[str, str, dict[str, Piece], float]:
    """Version, source, pieces and seconds of the body of a fetch."""
    try:
        body = json.loads(content)
        version, source, listed, secs = (
            body[key] for key in ("weight_version", "source", "files", "timeout_secs")
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Refused(
            f"the body must be JSON with weight_version, source, files and timeout_secs: {error!r:.80}"
        ) from error
    if not (isinstance(source, str) and 0 < len(source) <= MAX_SOURCE_CHARS):
        raise _Refused(f"source must be an http://host:port, got {source!r:.80}")
    if not (isinstance(secs, int | float) and 0 < secs <= MAX_LEASE_SECS):
        raise _Refused(f"timeout_secs must be in (0, {MAX_LEASE_SECS:g}], got {secs!r:.80}")
    if not (isinstance(listed, dict) and 0 < len(listed) <= MAX_FILES):
        raise _Refused(f"files must be 1 to {MAX_FILES} files, got {listed!r:.80}")
    pieces = {}
    for name, entry in listed.items():
        _named(version, name)
        match entry:
            case {"num_bytes": int(num_bytes), "sha256": str(digest)} if num_bytes >= 0:
                pieces[name] = Piece(num_bytes, digest)
            case _:
                raise _Refused(f"{name} must have num_bytes ≥ 0 and sha256, got {entry!r:.80}")
    return version, source, pieces, secs
