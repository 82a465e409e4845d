"""A relay beside an inference server that has none, SGLang or SGLang-JAX: versions come to this host over HTTP.

    learner, other sidecars ──▶ sidecar ──▶ the server, all else as it came
                                └─▶ a directory of this host, from which the server loads by its disk route

It takes control calls in the server's place. It prepares versions while the server generates: pieces and differences
(relay.py, difference.py) become a directory whose tensors are those of the manifest. SGLang-JAX prepares that
directory in its turn; SGLang loads it in its pause. Whether the server holds them afterwards is verified by the
learner, as without a sidecar. Knows no engine and imports no JAX.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import pathlib
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from jaxrl_async import security
from jaxrl_async.intake import relay_routes
from jaxrl_async.intake.pause_lease import PauseLease
from jaxrl_async.intake.relay import Relay
from jaxrl_async.intake.relay_routes import error_answer
from jaxrl_async.servers.kinds.embedded import Embedded
from jaxrl_async.versions import difference, protocol, store
from jaxrl_async.versions import layout as files

MAX_BODY_BYTES = 16 << 20  # of a call that is passed on
CONNECT_SECS = 5.0  # to the server
CALL_SECS = 3600.0  # of a call without a deadline of its caller's
_OWN_HEADERS = {"host", "connection", "content-length", "transfer-encoding", "content-encoding"}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Verified:
    """A directory whose tensors are those of its manifest."""

    path: pathlib.Path
    digest: str


class Sidecar:
    """The sidecar of one server. Use within one event loop, as a context."""

    def __init__(
        self,
        server: str,
        root: pathlib.Path,
        *,
        key: str | None = None,
        context: ssl.SSLContext | None = None,
    ):
        """Args:
        server: "http://host:port" of the server.
        root: an empty directory, which the server sees under the same path. A version may fill its disk.
        key: required of control calls, and with which others and the server are called; None: none.
        context: of certificates that are trusted of the server and other sidecars; None: the system's authorities.
        """
        self._server, self._root, self._key, self._context = server, root, key, context
        uploads = root / "versions"
        uploads.mkdir()
        free = shutil.disk_usage(root).free
        self._relay = Relay(uploads, max_bytes=free, key=key, context=context)
        self._copy = difference.Copy(root)
        self._writers = files.Writers()
        self._prepared: Verified | None = None
        self._prepares = False  # whether the server can prepare, by its last /model_info
        self._is_swap = False  # whether it has prepared this version
        self._lease = PauseLease(self._continue)

    async def __aenter__(self) -> "Sidecar":
        timeout = aiohttp.ClientTimeout(CALL_SECS, sock_connect=CONNECT_SECS)
        options: dict[str, Any] = {"auto_decompress": False, "timeout": timeout}
        if self._context is not None:
            options["connector"] = aiohttp.TCPConnector(ssl=self._context)
        self._session = aiohttp.ClientSession(**options)
        return self

    async def __aexit__(self, *error) -> None:
        self._lease.end()
        self._relay.close()
        await self._session.close()

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._check_key])
        app.add_routes(
            [
                *relay_routes.routes(lambda: self._relay),
                web.post("/weights/prepare", self._answering(self._prepare)),
                web.post("/update_weights_from_upload", self._answering(self._update)),
                web.get("/model_info", self._model_info),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._resume),
                web.route("*", "/{route:.*}", self._pass_on),
            ]
        )
        return app

    @web.middleware
    async def _check_key(self, request, handler):
        """The sidecar's own routes need its key; all others are the server's to check."""
        is_own = request.path.startswith("/weights/") or request.path.endswith("_from_upload")
        said = request.headers.get("Authorization", "")
        if is_own and self._key is not None and not security.is_bearer(said, self._key):
            return error_answer(401, f"{request.path} needs the admin api key of this sidecar")
        return await handler(request)

    def _answering(self, handler):
        """A handler of JSON whose refusals are answers."""

        async def answering(request):
            try:
                body = json.loads(await request.read() or b"{}")
                if not isinstance(body, dict):
                    raise ValueError(f"the body must be a JSON object, got {body!r:.80}")
                return await handler(request, body)
            except difference.DifferenceError as error:
                return _refused(protocol.NO_DIFFERENCE, error)
            except (ValueError, OSError, RecursionError) as error:  # of WeightStoreError's kind too
                return _refused(400, error)

        return answering

    async def _prepare(self, request, body):
        """Makes a directory of the pieces of a version, or of a difference from the version before it."""
        version, digest = _text(body, "weight_version"), _text(body, "weight_digest")
        name, hand_on = body.get("difference", ""), body.get("hand_on", False) is True
        if name and not (isinstance(name, str) and protocol.FILE.fullmatch(name)):
            raise ValueError(f"difference must be a file's name, got {name!r:.80}")
        directory = self._relay.directory(version) if protocol.VERSION.fullmatch(version) else None
        if directory is None:
            raise ValueError(f"no file of version {version!r:.80} was uploaded")
        self._writers.check(body.get("writer"))
        keep = body.get("keep", False) is True
        source = difference.Source(directory, name, keep, is_upload=not hand_on)
        verified = await self._copy.load(source, digest, _verify)
        if verified.digest != digest:
            raise ValueError(
                f"version {version} has digest {verified.digest}, the push is of {digest}"
            )
        self._prepared = verified
        self._is_swap = False
        if self._prepares:
            load = {"model_path": str(verified.path), "weight_version": version}
            load |= {"weight_digest": digest, "writer": body.get("writer")}
            lease = request.headers.get(protocol.LEASE_HEADER)
            status, content = await self._call("/weights/prepare", load, lease=lease)
            self._is_swap = status == 200
            if not self._is_swap and status not in protocol.LOADS_IN_THE_PAUSE:
                return web.Response(status=status, body=content, content_type="application/json")
        return web.json_response({"success": True, "message": f"version {version} is prepared"})

    async def _update(self, request, body):
        """Lets the server take the version that it prepared, or load the directory in its pause."""
        digest = _text(body, "weight_digest")
        self._writers.check(body.get("writer"))
        if self._prepared is None or self._prepared.digest != digest:
            raise ValueError(f"no version with digest {digest!r:.80} was prepared")
        known = ("weight_version", "flush_cache")
        known += ("weight_digest", "writer") if self._is_swap else ()
        load = {key: body[key] for key in known if key in body}
        load |= {"model_path": str(self._prepared.path), "abort_all_requests": False}
        status, content = await self._call("/update_weights_from_disk", load)
        return web.Response(status=status, body=content, content_type="application/json")

    async def _model_info(self, request):
        """What the server says of itself, and that versions can be sent here."""
        async with self._errors(), self._asked(request) as answer:
            content = await answer.read()
            if answer.status == 200:
                ours = {"hands_on": True, "difference_base": self._copy.digest}
                info = json.loads(content)
                self._prepares = Embedded.recognises(info)
                content = json.dumps(info | ours).encode()
            return web.Response(status=answer.status, body=content, content_type="application/json")

    async def _pause(self, request):
        """A pause ends by itself after its lease, which the server does not know."""
        try:
            lease_secs = protocol.read_lease(request.headers.get(protocol.LEASE_HEADER))
        except ValueError as error:
            return error_answer(400, error)
        answer = await self._pass_on(request)
        if answer.status == 200:
            self._lease.begin(lease_secs)
        return answer

    async def _resume(self, request):
        self._lease.end()
        return await self._pass_on(request)

    async def _pass_on(self, request):
        async with self._errors(), self._asked(request) as answer:
            response = web.StreamResponse(status=answer.status, headers=_ours(answer.headers))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    def _asked(self, request):
        body = request.content if request.can_read_body else None
        return self._session.request(
            request.method,
            self._server + request.path_qs,
            data=body,
            headers=_ours(request.headers),
            allow_redirects=False,
        )

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Answers 502 where the server does not answer."""
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"{self._server} does not answer the sidecar: {error or type(error).__name__}"
            raise web.HTTPBadGateway(
                text=json.dumps({"error": {"message": reason}}), content_type="application/json"
            ) from error

    async def _call(self, route: str, body: dict, *, lease: str | None = None) -> tuple[int, bytes]:
        """(status, body) of a control call of the sidecar's own."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if lease is not None:
            headers[protocol.LEASE_HEADER] = lease
        async with (
            self._errors(),
            self._session.post(self._server + route, json=body, headers=headers) as answer,
        ):
            return answer.status, await answer.read()

    async def _continue(self) -> None:
        try:
            await self._call("/continue_generation", {})
        except web.HTTPException as error:
            log.error("a pause could not be ended: %s", error.text)


@contextlib.asynccontextmanager
async def serve(
    server: str,
    *,
    host: str,
    port: int,
    directory: str = "",
    key: str | None = None,
    tls_cert: str = "",
    tls_key: str = "",
    tls_ca: str = "",
) -> AsyncIterator[int]:
    """Answers for a server while the context lasts.

    Args:
      server: its "http://host:port".
      host: address to bind.
      port: 0 picks a free one.
      directory: in which versions are kept, visible to the server under the same path; "": the temporary one.
      key: as of `Sidecar`; needed beyond loopback.
      tls_cert, tls_key: PEM files of a certificate and its key; "" for http.
      tls_ca: PEM file of the authorities that are trusted; "" for the system's.

    Yields:
      the port.

    Raises:
      OSError: the address cannot be bound, or the directory not written.
      ValueError: a host beyond loopback without a key, or files without a certificate.
    """
    security.check_listener("the relay", f"{host}:{port}", key, "--admin_api_key_env")
    context = security.client_context(tls_ca) if tls_ca else None
    listener = security.server_context(tls_cert, tls_key)
    with tempfile.TemporaryDirectory(prefix="jaxrl-relay-", dir=directory or None) as root:
        async with Sidecar(server, pathlib.Path(root), key=key, context=context) as sidecar:
            runner = web.AppRunner(
                sidecar.app(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0
            )
            await runner.setup()
            try:
                await web.TCPSite(runner, host, port, ssl_context=listener).start()
                yield runner.addresses[0][1]
            finally:
                await runner.cleanup()


async def _verify(path: pathlib.Path) -> Verified:
    def verified():
        store.verify(path)
        return Verified(path, store.read_manifest(path)["digest"])

    return await asyncio.to_thread(verified)


def _ours(headers) -> dict[str, str]:
    """The headers that go through."""
    return {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}


def _text(body, name) -> str:
    value = body.get(name)
    if not (isinstance(value, str) and 0 < len(value) <= 256):
        raise ValueError(f"{name} must be a text of 1 to 256 characters, got {value!r:.80}")
    return value


def _refused(status: int, error: Exception) -> web.Response:
    log.warning("refused: %s", error)
    return web.json_response({"success": False, "message": str(error)}, status=status)
