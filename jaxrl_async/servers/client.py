"""The client of inference servers: one HTTP session with deadlines and errors, and the kinds that it recognised.

Every call has a deadline and fails with a ServerError that names the address, the route and the reason. What is called
is the kinds' matter. Routing and retries are the sampler's; the version that a server should hold is the publisher's.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, Self

import aiohttp

from jaxrl_async import security
from jaxrl_async.servers import answers, descriptors, kinds
from jaxrl_async.servers.port import (
    NEUTRAL,
    Completion,
    OutOfFilesError,
    Request,
    ServerError,
    ServerTimeoutError,
)
from jaxrl_async.servers.probes import LostAnswerError, Probes
from jaxrl_async.types import Record

CONNECT_SECS = 10.0  # bound on a connection: a host that is gone refuses none
# of a connection at rest: uvicorn closes one after 5 s, which a busy process may count late
KEEPALIVE_SECS = 2.0
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class InferenceClient:
    """One HTTP session, for all servers: a `port.Servers`.

    Raises:
      ValueError: no certificate in tls_ca.
    """

    # Of generation and of the information routes, a server's `--api-key`.
    api_key: str | None = None
    # Of the control routes, a server's `--admin-api-key`; without one they take the api_key.
    admin_api_key: str | None = None
    # PEM file of the authorities to trust at https:// addresses; "" for the system's.
    tls_ca: str = ""
    # The run whose weights may sample; tokens of others are refused. "" for any run.
    run_id: str = ""
    adapters: bool = False  # the versions are adapters
    vocab_size: int = Request.vocab_size  # of the run's model; tokens beyond it are refused
    record: Record = Request.record  # the choices that the run records of each token

    def __post_init__(self):
        self._tls = security.client_context(self.tls_ca) if self.tls_ca else True
        self._session: aiohttp.ClientSession | None = None
        # Address → its server, of the kind that was recognised last or is presumed.
        self._servers: dict[str, Any] = {}
        self._tasks: set[asyncio.Task] = set()
        self._probes: Probes | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # Calls beyond it wait for a connection within their deadline, instead of failing for want of files.
                limit=descriptors.connection_limit(),
                limit_per_host=0,  # A server bounds its own requests, and queues the rest.
                keepalive_timeout=KEEPALIVE_SECS,
                ssl=self._tls,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            auto_decompress=False,  # Nothing compressed is asked for, and its size has a bound.
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # The port.

    async def generate(self, address: str, *, timeout_secs: float, **request: Any) -> Completion:
        """Samples one completion; `request` as of `port.Request`, errors as of `port.Server`.

        A server that was not recognised is asked as most are, so that a router, which tells nothing, needs that route
        alone. Where the route is missing, the server is recognised, and asked as its kind is.
        """
        request["sampling_params"] = NEUTRAL | request["sampling_params"]
        run = {"run_id": self.run_id, "adapters": self.adapters, "vocab_size": self.vocab_size}
        asked = Request(**run, record=self.record, **request)
        start, known = time.monotonic(), type(self._servers.get(address))
        if self.adapters and known in (type(None), kinds.presumed()):
            await self.recognise(address, timeout_secs=timeout_secs)
            timeout_secs = max(timeout_secs - (time.monotonic() - start), 1e-3)
        server = self._server(address)
        try:
            return await server.generate(asked, timeout_secs=timeout_secs)
        except ServerError as error:
            left = timeout_secs - (time.monotonic() - start)
            if error.status != 404 or left <= 0:
                raise
            try:
                found = await self.recognise(address, timeout_secs=left)
            except ServerError:
                raise error from None
            if isinstance(found, type(server)):
                raise
        return await found.generate(asked, timeout_secs=left)

    async def abort(self, address: str, *, rid: str | None, timeout_secs: float) -> None:
        """Ends every request whose id starts with `rid`, or all requests when it is None."""
        await self._server(address).abort(rid, timeout_secs=timeout_secs)

    async def recognise(self, address: str, *, timeout_secs: float) -> Any:
        """Asks a server what it is and holds: a `Kind`, the same object until the server is of another kind."""
        known = self._servers.get(address)
        kind, info = await kinds.recognise(self, address, known, timeout_secs)
        if known is None or type(known) is not kind:
            known = self._servers[address] = kind(self, address)
        known.info = info
        return known

    def probes(self, **options: Any) -> Probes:
        """Probes with this client's key and authorities; options as of `Probes`.

        From now on the short calls of a push use their connections, where one is open and free.
        """
        self._probes = Probes(
            route_of=lambda address: self._server(address).INFO,
            api_key=self.api_key,
            tls=self._tls,
            **options,
        )
        return self._probes

    def _server(self, address: str) -> Any:
        if address not in self._servers:
            self._servers[address] = kinds.presumed()(self, address)
        return self._servers[address]

    # The session, for the kinds.

    async def call(
        self,
        method: str,
        address: str,
        route: str,
        body: bytes | BinaryIO | None,
        timeout_secs: float,
        *,
        is_control: bool = False,
        is_short: bool = False,
        headers: Mapping[str, str] = NO_HEADERS,
        max_bytes: int = answers.MAX_BYTES,
    ) -> dict[str, Any]:
        """One call.

        Args:
          method, address, route: "GET", "http://host:port" and a path.
          body: JSON, an open file, or nothing.
          timeout_secs: bound on the whole call.
          is_control: takes the key of control routes.
          is_short: has a short answer, and may use the connection of a probe.
          headers: more of them.
          max_bytes: bound on the answer.

        Returns:
          the answer's JSON object; of an answer that is none its text, as "message".

        Raises:
          NonsenseError: the answer is beyond the bound.
          ServerError: refused, lost or late.
        """
        content = "json" if isinstance(body, bytes) else "octet-stream"
        sent = self.headers(content, is_control=is_control) | dict(headers)
        line = self._probes.open_line(address) if is_short and self._probes else None
        if line is not None and (body is None or isinstance(body, bytes)):
            try:
                status, text = await line.call(method, route, body or b"", sent, timeout_secs)
                return read_answer(status, text, address, route)
            except TimeoutError:
                raise no_answer(address, route, timeout_secs) from None
            except LostAnswerError as error:
                # A connection that the server has closed in the meantime. What may have been executed is not repeated.
                if method != "GET":
                    reason = f"connection lost: {error}"
                    raise ServerError(address, route, reason, retryable=True) from error
        async with self.request(method, address, route, body, sent, timeout_secs) as response:
            return await self.answer(response, address, route, max_bytes)

    async def answer(
        self, response: aiohttp.ClientResponse, address: str, route: str, max_bytes: int
    ) -> dict[str, Any]:
        """The JSON of a response, of at most max_bytes; errors as of `call`."""
        try:
            text = await answers.read(response, max_bytes)
        except answers.LongAnswerError as error:
            raise answers.malformed(address, route, error, retryable=True) from None
        return read_answer(response.status, text, address, route)

    def headers(self, content: str = "json", *, is_control: bool = False) -> dict[str, str]:
        """The headers of a call."""
        headers = {"Content-Type": f"application/{content}"}
        key = (is_control and self.admin_api_key) or self.api_key
        return headers if key is None else headers | {"Authorization": f"Bearer {key}"}

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        address: str,
        route: str,
        body: bytes | BinaryIO | None,
        headers: Mapping[str, str],
        timeout_secs: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request over the session; an error of its connection is a ServerError."""
        assert self._session is not None, "the client is not open"
        timeout = aiohttp.ClientTimeout(total=timeout_secs, sock_connect=CONNECT_SECS)
        options = {"data": body, "headers": headers, "timeout": timeout, "allow_redirects": False}
        send = functools.partial(self._session.request, method, address + route, **options)
        try:
            async with asyncio.timeout(timeout_secs):  # of both attempts
                try:
                    response = await send()
                except aiohttp.ClientOSError as error:
                    # The server has closed a connection at rest, and nothing was sent.
                    unsent = isinstance(error.__cause__, aiohttp.ClientConnectionResetError)
                    if not unsent or not isinstance(body, bytes):
                        raise
                    response = await send()
                except UnicodeError as error:
                    reason = f"no host can have this name: {error}"
                    raise ServerError(address, route, reason, retryable=False) from error
            async with response:
                yield response
        except aiohttp.ConnectionTimeoutError:
            reason = f"no connection within {CONNECT_SECS:g} s"
            raise ServerError(address, route, reason, retryable=True) from None
        except TimeoutError:
            raise no_answer(address, route, timeout_secs) from None
        except aiohttp.ClientConnectorCertificateError as error:
            reason = (
                f"its certificate is of no authority in server.tls_ca, or not of that host: {error}"
            )
            raise ServerError(address, route, reason, retryable=False) from error
        except (aiohttp.ClientError, OSError) as error:
            if descriptors.is_out_of_files(error):
                descriptors.report_out_of_files(error)
                limit = descriptors.open_file_limit()
                reason = f"not called: this process has {limit} open files, its limit"
                raise OutOfFilesError(address, route, reason, retryable=True) from error
            reason = f"connection lost: {error or type(error).__name__}"
            raise ServerError(address, route, reason, retryable=True) from error

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task:
        """Starts a task that ends with the client."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def no_answer(address: str, route: str, timeout_secs: float) -> ServerTimeoutError:
    """The error of a call without an answer."""
    reason = f"no answer within {timeout_secs:g} s"
    return ServerTimeoutError(address, route, reason, retryable=True)


def read_answer(status: int, text: bytes, address: str, route: str) -> dict[str, Any]:
    """The JSON of an answer; raises ServerError for a refusal."""
    if status != 200:
        raise refusal(status, _message(text), address, route)
    if not text.strip():  # The control routes may answer with an empty body.
        return {}
    try:
        answer = answers.decode(text)
    except ValueError:
        answer = text[:_MESSAGE_CHARS].decode(errors="replace")
    # flush_cache and its like answer with a line of text.
    return answer if isinstance(answer, dict) else {"message": answer}


def refusal(status: int, message: object, address: str, route: str) -> ServerError:
    """The error of a refusal; one of HTTP status 429 or 5xx may end by itself."""
    retryable, reason = status >= 500 or status == 429, f"HTTP {status}: {message}"
    return ServerError(address, route, reason, retryable=retryable, status=status)


def _message(text: bytes) -> str:
    """The server's own message, from any of its shapes of error."""
    try:
        answer = answers.decode(text)
    except ValueError:
        return text[:_MESSAGE_CHARS].decode(errors="replace").strip()
    while isinstance(answer, dict) and (inner := answer.get("error") or answer.get("message")):
        answer = inner
    return answer[:_MESSAGE_CHARS] if isinstance(answer, str) else answers.shown(answer)


_MESSAGE_CHARS = 500
encode = json.JSONEncoder(separators=(",", ":")).encode
