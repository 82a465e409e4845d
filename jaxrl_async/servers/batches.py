"""Batches: requests of one turn of the loop that share one HTTP request."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from jaxrl_async.servers.port import ServerError


class Batch:
    """Requests that share one HTTP request, and those who wait for their answers."""

    def __init__(self):
        self._requests: list[dict] = []
        self._waiters: list[asyncio.Future[dict]] = []
        self._num_tokens = 0
        self.timeout_secs = 0.0
        self.task: asyncio.Task | None = None  # None until it is sent

    def has_room(self, request: Mapping[str, Any]) -> bool:
        """Whether one more keeps the body far below what a server takes."""
        num_tokens = self._num_tokens + len(request["input_ids"])
        return len(self._requests) < _MAX_BATCH and num_tokens <= _MAX_BATCH_TOKENS

    def add(self, request: dict, timeout_secs: float) -> "asyncio.Future[dict]":
        """Adds a request; returns the future of its answer."""
        self._requests.append(request)
        self._num_tokens += len(request["input_ids"])
        self.timeout_secs = max(self.timeout_secs, timeout_secs)
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
        return (
            f'{{"rid":{encode(rids)},"input_ids":[{",".join(ids)}],"sampling_params":{encode(params)},'
            '"return_logprob":true,"stream":true}'
        ).encode()

    def take(self, event: Mapping[str, Any], address: str) -> None:
        """Takes one event. SGLang sends several for a request, of which the last has a finish_reason."""
        waiter = self._waiters[event.get("index", 0)]
        if waiter.done():
            return
        if "error" in event:
            status = int(event["error"].get("code", 500))
            reason = f"HTTP {status}: {event['error'].get('message')}"
            retryable = status >= 500 or status == 429
            waiter.set_exception(
                ServerError(address, "/generate", reason, retryable=retryable, status=status)
            )
        elif event["meta_info"]["finish_reason"] is not None:
            waiter.set_result(event)

    def fail(self, error: ServerError) -> None:
        """Ends all who still wait."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)


async def events(content: aiohttp.StreamReader) -> AsyncIterator[dict]:
    """The JSON objects of server-sent events."""
    buffer = b""
    async for data in content.iter_any():
        *lines, buffer = (buffer + data).split(b"\n\n")
        for line in lines:
            text = line.removeprefix(b"data: ").strip()
            if text and text != b"[DONE]":
                yield json.loads(text)


def expire(waiter: asyncio.Future) -> None:
    """Ends a wait with a TimeoutError, unless it is over. Cheaper than a timeout's context."""
    if not waiter.done():
        waiter.set_exception(TimeoutError())


_MAX_BATCH, _MAX_BATCH_TOKENS = 1024, 500_000  # requests, and tokens of their prompts, in one body
encode = json.JSONEncoder(separators=(",", ":")).encode
