"""Batches: requests of one turn of the loop that share one HTTP request to SGLang's /generate."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from jaxrl_async.servers import answers
from jaxrl_async.servers.client import InferenceClient, encode, no_answer, refusal
from jaxrl_async.servers.port import ServerError

ROUTE = "/generate"
# In an answer of it: the server streams the answers of a batch, one event for each when it ends.
STREAMS_HEADER = "X-Streams-Batches"


class Batches:
    """The batches of one server. Use within one event loop."""

    def __init__(
        self, client: InferenceClient, address: str, abort: Callable[..., Awaitable[None]]
    ):
        """`abort`: ends a request by its rid, `Server.abort`."""
        self._client, self._address, self._abort = client, address, abort
        self._next: Batch | None = None  # of this turn of the loop, not sent yet

    async def answer(
        self, request: dict[str, Any], timeout_secs: float, max_bytes: int
    ) -> dict[str, Any]:
        """The answer, of max_bytes at most, of a request that goes with all others of this turn of the loop.

        Raises:
          ServerError: refused, lost, late or malformed.
        """
        loop, batch = asyncio.get_running_loop(), self._next
        if batch is None or not batch.has_room(request):
            batch = self._next = Batch()
            loop.call_soon(self._send, batch)
        done = batch.add(request, timeout_secs, max_bytes)
        late = loop.call_later(timeout_secs, expire, done)
        try:
            return await done
        except (TimeoutError, asyncio.CancelledError) as error:
            self._abandon(batch, request["rid"])
            if isinstance(error, TimeoutError):
                raise no_answer(self._address, ROUTE, timeout_secs) from None
            raise
        finally:
            late.cancel()

    def _send(self, batch: "Batch") -> None:
        if self._next is batch:
            self._next = None
        if not batch.is_over:
            batch.task = self._client.start(self._stream(batch), f"a batch of {self._address}")

    def _abandon(self, batch: "Batch", rid: str) -> None:
        """Ends a request on its server, as hanging up on it alone would; hangs up where nobody waits any more."""
        if batch.task is None or batch.task.done():
            return
        if batch.is_over:
            batch.task.cancel()
        else:
            self._client.start(self._abort_quietly(rid), f"abort of {rid}")

    async def _abort_quietly(self, rid: str) -> None:
        with contextlib.suppress(ServerError):
            await self._abort(rid, timeout_secs=_ABORT_SECS)

    async def _stream(self, batch: "Batch") -> None:
        """Sends a batch, and gives each of its requests its answer or error."""
        address = self._address
        try:
            call = ("POST", address, ROUTE, batch.body(), self._client.headers())
            async with self._client.request(*call, batch.timeout_secs) as response:
                if response.status != 200:
                    await self._client.answer(response, address, ROUTE, answers.MAX_BYTES)
                async for event in events(response.content, batch.max_event_bytes):
                    batch.take(event, address)
            reason = "the answer ended before its requests"
            raise ServerError(address, ROUTE, reason, retryable=True)
        except ServerError as error:
            batch.fail(error)
        except answers.MALFORMED as error:
            of = "answer to a batch"
            batch.fail(answers.malformed(address, ROUTE, error, of, retryable=True))
        finally:
            # Where this task is cancelled.
            batch.fail(ServerError(address, ROUTE, "the client is closed", retryable=True))


class Batch:
    """Requests that share one HTTP request, and those who wait for their answers."""

    def __init__(self):
        self._requests: list[dict] = []
        self._waiters: list[asyncio.Future[dict]] = []
        self._num_tokens = 0
        self.timeout_secs, self.max_event_bytes = 0.0, 0
        self.task: asyncio.Task | None = None  # None until it is sent

    def has_room(self, request: Mapping[str, Any]) -> bool:
        """Whether one more keeps the body far below what a server takes."""
        num_tokens = self._num_tokens + len(request["input_ids"])
        return len(self._requests) < _MAX_BATCH and num_tokens <= _MAX_BATCH_TOKENS

    def add(self, request: dict, timeout_secs: float, bound: int) -> "asyncio.Future[dict]":
        """Adds a request; returns the future of its answer."""
        self._requests.append(request)
        self._num_tokens += len(request["input_ids"])
        self.timeout_secs = max(self.timeout_secs, timeout_secs)
        self.max_event_bytes = max(self.max_event_bytes, bound)
        self._waiters.append(asyncio.get_running_loop().create_future())
        return self._waiters[-1]

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any more."""
        return all(waiter.done() for waiter in self._waiters)

    def body(self) -> bytes:
        """JSON. A prompt that many share is encoded once."""
        prompts = [tuple(request["input_ids"]) for request in self._requests]
        encoded = {prompt: encode(prompt) for prompt in set(prompts)}
        ids = [encoded[prompt] for prompt in prompts]
        rids, params = ([r[name] for r in self._requests] for name in ("rid", "sampling_params"))
        wanted = any("return_routed_experts" in request for request in self._requests)
        routes = '"return_routed_experts":true,' if wanted else ""
        return (
            f'{{"rid":{encode(rids)},"input_ids":[{",".join(ids)}],"sampling_params":{encode(params)},'
            f'{routes}"return_logprob":true,"stream":true}}'
        ).encode()

    def take(self, event: dict[str, Any], address: str) -> None:
        """Takes one event. SGLang sends several for a request, of which the last has a finish_reason."""
        index = event.get("index", 0)
        if type(index) is not int or index < 0:
            raise ValueError(f"index {answers.shown(index)} is no integer ≥ 0")
        waiter = self._waiters[index]
        if waiter.done():
            return
        if "error" in event:
            error = event["error"]
            status = int(error.get("code", 500))
            waiter.set_exception(refusal(status, error.get("message"), address, ROUTE))
        elif event["meta_info"]["finish_reason"] is not None:
            waiter.set_result(event)

    def fail(self, error: ServerError) -> None:
        """Ends all who still wait."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)


async def events(content: aiohttp.StreamReader, max_bytes: int) -> AsyncIterator[dict]:
    """The JSON objects of server-sent events; raises ValueError for one beyond its bound."""
    buffer = b""
    async for data in content.iter_any():
        *lines, buffer = (buffer + data).split(b"\n\n")
        for line in lines:
            text = line.removeprefix(b"data: ").strip()
            if text and text != b"[DONE]":
                yield answers.decode(text)
        if len(buffer) > max_bytes:
            raise answers.LongAnswerError(f"an event has more than {max_bytes} bytes, the bound")


def expire(waiter: asyncio.Future) -> None:
    """Ends a wait with a TimeoutError, unless it is over. Cheaper than a timeout's context."""
    if not waiter.done():
        waiter.set_exception(TimeoutError())


_ABORT_SECS = 5.0
_MAX_BATCH, _MAX_BATCH_TOKENS = 1024, 500_000  # requests, and tokens of their prompts, in one body
