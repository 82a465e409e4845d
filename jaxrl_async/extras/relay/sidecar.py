"""A relay beside an inference server that has none, SGLang, vLLM or SGLang-JAX: versions come to this host over HTTP.

    learner, other sidecars ──▶ sidecar ──▶ the server, all else as it came
                                └─▶ a directory of this host, from which the server loads by its disk route

It takes control calls in the server's place. It prepares versions while the server generates: pieces and differences
(relay.py, difference.py) become a directory whose tensors are those of the manifest. SGLang-JAX prepares that
directory in its turn; SGLang and vLLM load it in their pause. Whether the server holds them afterwards is verified by
the learner, as without a sidecar. vLLM asks for its key where it generates alone: at its other routes the sidecar asks
for its own. Knows no engine and imports no JAX.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import pathlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import yarl
from aiohttp import web

from jaxrl_async import security
from jaxrl_async.intake import routes
from jaxrl_async.intake.receiver import Answer, Receiver, RefusedError, read_body, refused
from jaxrl_async.listener import listening
from jaxrl_async.servers.client import KEEPALIVE_SECS
from jaxrl_async.servers.kinds import vllm
from jaxrl_async.servers.kinds.embedded import Embedded
from jaxrl_async.servers.probes import MAX_ANSWER_BYTES
from jaxrl_async.versions import protocol
from jaxrl_async.versions.protocol import Update
from jaxrl_async.versions.store import StoredVersion

MAX_BODY_BYTES = 16 << 20  # of a call that is passed on
CONNECT_SECS = 5.0  # to the server
CALL_SECS = 3600.0  # of a call without a deadline of its caller's
_ENDS = {protocol.PAUSE: protocol.CONTINUE, vllm.PAUSE: vllm.RESUME}  # pause → what ends it
_KEYED = ("/v1/", "/inference/")  # prefixes of the routes at which vLLM asks for its key
_GENERATES = (*_KEYED, "/generate")  # with SGLang's: prefixes of the routes that generate
_ADAPTERS = "load_lora_adapter"  # ends the routes among them that change the server
_DECISIVE = (200, 401, 403, 404, 405)  # statuses of a route that is there or is not
_OWN_HEADERS = {"host", "connection", "content-length", "transfer-encoding"}
_OWN_HEADERS |= {"content-encoding", "accept-encoding"}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Verified:
    """A directory whose tensors are those of its manifest."""

    path: pathlib.Path
    digest: str


@dataclasses.dataclass(eq=False, repr=False)
class Sidecar:
    """The sidecar of one server. Use within one event loop, as a context."""

    server: str  # "http://host:port"
    # in which versions are kept, visible to the server under the same path; "": the temporary one. A version may fill
    # its disk.
    directory: str = ""
    _: dataclasses.KW_ONLY
    key: str | None = None  # of control calls to it, and with which it calls others and the server
    context: ssl.SSLContext | None = None  # of certificates that are trusted; None: the system's

    def __post_init__(self):
        own = {"key": self.key, "context": self.context}
        self._receiver = Receiver(self, **own, reads_in_the_pause=True)
        self._loaded: Verified | None = None  # the last directory
        self._prepares = False  # whether the server can prepare, by its last /model_info
        self._is_swap = False  # whether it has prepared this version
        self._is_vllm: bool | None = None  # None: not asked yet
        self._ends = protocol.CONTINUE  # the route that ends the pause

    async def __aenter__(self) -> "Sidecar":
        timeout = aiohttp.ClientTimeout(CALL_SECS, sock_connect=CONNECT_SECS)
        # As many calls at once as come: a pause must not wait for those that it is to hold.
        tls = True if self.context is None else self.context
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECS, ssl=tls)
        self._receiver.open(self.directory)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=["Accept-Encoding"],  # Nothing compressed is asked for.
        )
        return self

    async def __aexit__(self, *error) -> None:
        self._receiver.close()
        await self._session.close()

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._check_key])
        app.add_routes(
            [
                *routes.routes(self._receiver, prepare=self._prepare),
                web.get(protocol.MODEL_INFO, self._info),
                web.get(vllm.Vllm.INFO, self._info),
                *(web.post(pause, self._pause) for pause in _ENDS),
                *(web.post(end, self._continue) for end in _ENDS.values()),
                web.route("*", "/{route:.*}", self._pass_on),
            ]
        )
        return app

    @web.middleware
    async def _check_key(self, request, handler):
        """The sidecar's own routes need its key, and those that vLLM leaves open; others are the server's to check."""
        said, path = request.headers.get("Authorization", ""), self._there(request).path
        if self.key is not None and not security.is_bearer(said, self.key):
            is_own = request.path.startswith("/weights/") or request.path.endswith("_from_upload")
            is_open = request.method != "GET" and not path.startswith(_KEYED)
            if is_own or (is_open and await self._serves_vllm()):
                reason = f"{request.path} needs the admin api key of this sidecar"
                return routes.answered(refused(reason, 401))
        from_a_page = security.may_come_from_a_page(request.method, request.headers)
        if from_a_page and (not path.startswith(_GENERATES) or path.endswith(_ADAPTERS)):
            return routes.answered(refused(f"{request.path}: {security.WANTS_JSON}", 415))
        return await handler(request)

    async def _serves_vllm(self) -> bool:
        """Whether the server is vLLM, which alone has its information route."""
        if self._is_vllm is None:
            async with self._errors(), self._session.get(self.server + vllm.Vllm.INFO) as answer:
                if answer.status not in _DECISIVE:
                    raise aiohttp.ClientError(f"HTTP {answer.status}")
                self._is_vllm = answer.status == 200
        return self._is_vllm

    async def _prepare(self, body: dict[str, Any], lease: str | None) -> Answer:
        """Prepares a version here, and then at a server that can: its update is a swap there too."""
        status, answer = await self._receiver.prepare(body, lease)
        if status == 200:
            self._is_swap = False
        if status != 200 or not self._prepares or self._loaded is None:
            return status, answer
        load = protocol.Preparation.read(body | {"model_path": str(self._loaded.path)})
        load = dataclasses.replace(load, difference="", keep=False, hand_on=False)
        status, answer = await self._call(protocol.PREPARE, load.body(), lease=lease)
        self._is_swap = status == 200
        if status in protocol.LOADS_IN_THE_PAUSE:
            return 200, {"success": True, "message": f"version {load.weight_version} is prepared"}
        return status, answer

    # An engine of a receiver.

    async def load(self, directory: pathlib.Path) -> Verified:
        def verified() -> Verified:
            version = StoredVersion(directory)
            version.verify()
            return Verified(directory, version.digest)

        self._loaded = await asyncio.to_thread(verified)
        return self._loaded

    async def swap(self, weights: Verified, update: Update) -> int:
        """Lets the server take the version that it prepared, or load the directory in its pause."""
        if await self._serves_vllm():
            load = {"method": "load_version", "kwargs": {"path": str(weights.path)}}
            status, answer = await self._call(vllm.RPC, load | {"timeout": CALL_SECS})
            if status != 200:
                raise RefusedError((status, answer))
            return 0
        signed = {"weight_digest": update.weight_digest, "writer": update.writer}
        load = protocol.DiskUpdate(
            weight_version=update.weight_version,
            flush_cache=update.flush_cache,
            model_path=str(weights.path),
            load_format="auto",
            **(signed if self._is_swap else {}),  # Servers that prepare nothing do not know these.
        )
        status, answer = await self._call(protocol.UPDATE_FROM_DISK, load.body())
        if status != 200 or answer.get("success") is not True:
            raise RefusedError((status, answer))
        return answer.get("num_paused_requests", 0)

    async def update(self, directory: pathlib.Path, update: Update) -> int:
        return await self.swap(await self.load(directory), update)

    async def resume(self) -> None:
        try:
            status, answer = await self._call(self._ends, {})
        except web.HTTPException as error:
            raise ConnectionError(error.text) from error
        if status != 200:
            raise RefusedError((status, answer))

    async def _info(self, request):
        """What the server says of itself, and that versions can be sent here."""
        async with self._errors(), self._asked(request) as answer:
            content = await answer.read()
            # An answer that names no weights is of no known kind: who asked gets it as it is.
            if answer.status == 200 and protocol.WEIGHT_VERSION in (info := _object(content)):
                self._prepares = Embedded.recognises(info)
                self._is_vllm = request.path == vllm.Vllm.INFO
                content = json.dumps(info | self._receiver.info()).encode()
            return web.Response(status=answer.status, body=content, content_type="application/json")

    async def _pause(self, request):
        """A pause ends by itself after its lease, which the server does not know."""
        try:
            lease_secs = protocol.read_lease(request.headers.get(protocol.LEASE_HEADER))
        except ValueError as error:
            return routes.answered(refused(error))
        status = 200  # Who asked, or the server, may be gone before the answer.
        try:
            answer = await self._pass_on(request)
            status = answer.status
        finally:
            if status == 200:
                self._ends = _ENDS[request.path]
                self._receiver.lease.begin(lease_secs)
        return answer

    async def _continue(self, request):
        async with self._errors(), self._asked(request) as answer:
            if answer.status == 200:  # A pause that goes on keeps its lease.
                self._receiver.lease.end()
            return await self._answer(request, answer)

    async def _pass_on(self, request):
        async with self._errors(), self._asked(request) as answer:
            return await self._answer(request, answer)

    async def _answer(self, request, answer):
        """Passes an answer of the server on: a short one with its length, which the connection of a probe needs."""
        passed = {"status": answer.status, "headers": _ours(answer.headers)}
        if answer.content_length is not None and answer.content_length <= MAX_ANSWER_BYTES:
            return web.Response(body=await answer.read(), **passed)
        response = web.StreamResponse(**passed)
        await response.prepare(request)
        try:
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("%s: the answer of %s broke off: %s", request.path, self.server, error)
            if request.transport:
                request.transport.abort()  # Who asked sees that the answer is not whole.
            return response
        await response.write_eof()
        return response

    def _there(self, request: web.Request) -> yarl.URL:
        """The address that a call goes on to, without "..": what is checked is what is asked."""
        return yarl.URL(self.server + request.path_qs)

    def _asked(self, request):
        body = request.content if request.can_read_body else None
        return self._session.request(
            request.method,
            self._there(request),
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
            reason = f"{self.server} does not answer the sidecar: {error or type(error).__name__}"
            raise web.HTTPBadGateway(
                text=json.dumps({"error": {"message": reason}}), content_type="application/json"
            ) from error

    async def _call(self, route: str, body: dict, *, lease: str | None = None) -> Answer:
        """The answer to a control call of the sidecar's own."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        if lease is not None:
            headers[protocol.LEASE_HEADER] = lease
        async with (
            self._errors(),
            self._session.post(self.server + route, json=body, headers=headers) as answer,
        ):
            content = await answer.read()
            try:
                return answer.status, read_body(content)
            except protocol.RequestError:  # A refusal in words.
                return refused(content.decode(errors="replace"), answer.status)


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
      server, directory, key: as of `Sidecar`; a key is needed beyond loopback.
      host, port: address to bind; 0 picks a free port.
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
    async with (
        Sidecar(server, directory, key=key, context=context) as sidecar,
        listening(sidecar.app(), host, port, listener) as bound,
    ):
        yield bound


def _object(content: bytes) -> dict[str, Any]:
    try:
        return read_body(content)
    except protocol.RequestError:
        return {}


def _ours(headers) -> dict[str, str]:
    """The headers that go through."""
    return {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}
