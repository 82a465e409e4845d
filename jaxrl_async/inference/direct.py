"""The client of engines in this process: the calls of `servers.client` that a run makes, answered without HTTP.

A failure has the same type as over HTTP, so that samplers, evaluations and the publisher treat it alike.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.inference import engine as engines
from jaxrl_async.inference.http import parse_sampling
from jaxrl_async.inference.loading import WeightsError
from jaxrl_async.servers.batches import expire
from jaxrl_async.servers.completions import checked_completion
from jaxrl_async.servers.port import (
    Completion,
    ForeignVersionError,
    ForeignWeightsError,
    ServerError,
    ServerTimeoutError,
)


class DirectClient:
    """Calls engines by their addresses. Use within one event loop, as `async with`."""

    def __init__(self, by_address: Mapping[str, engines.Engine], *, run_id: str = ""):
        """Arguments:

        by_address: the engines; an address is a name.
        run_id: the run whose weights may sample; tokens of others are refused. "" for any run.
        """
        self._engines = dict(by_address)
        self.run_id = run_id
        self._generating: dict[tuple[str, str], asyncio.Future] = {}  # (address, rid)
        self._unsent: dict[str, list[engines.Request]] = {}  # address → of this turn of the loop
        self._on_done = {address: self._resolver(address) for address in self._engines}

    async def __aenter__(self) -> "DirectClient":
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def probes(self, **kwargs: Any) -> "DirectProbes":
        """Probes of the engines; arguments as of `servers.probes.Probes`."""
        return DirectProbes(self._engines, **kwargs)

    async def generate(
        self,
        address: str,
        *,
        rid: str,
        input_ids: Sequence[int] | np.ndarray,
        sampling_params: Mapping[str, Any],
        timeout_secs: float,
    ) -> Completion:
        """Samples one completion; arguments and errors as of `InferenceClient.generate`."""
        engine, key = self._engines[address], (address, rid)
        done = self._loop.create_future()
        with self._refusals(address, "/generate", timeout_secs):
            sampling = parse_sampling(dict(sampling_params))
            request = engines.Request(rid, np.asarray(input_ids, np.int32), sampling)
            self._generating[key] = done
            late = self._loop.call_later(timeout_secs, expire, done)
            try:
                self._send_soon(address, request)
                found = await done
            except (TimeoutError, asyncio.CancelledError):
                engine.abort({rid}.__contains__)
                raise
            finally:
                late.cancel()
                del self._generating[key]
            spans = [{"version": s.version, "start": s.start, "end": s.end} for s in found.spans]
            return checked_completion(
                found.output_ids, found.logprobs, spans, found.finish_reason["type"], self.run_id
            )

    async def abort(self, address: str, *, rid: str | None, timeout_secs: float) -> None:
        """Ends every request whose id starts with `rid`, or all requests when it is None."""
        prefix = "" if rid is None else rid
        ended = self._engines[address].abort(lambda found: found.startswith(prefix))
        await self._result(address, "/abort_request", ended, timeout_secs)

    async def continue_(self, address: str, *, timeout_secs: float) -> None:
        """Ends a pause."""
        resumed = self._engines[address].resume()
        await self._result(address, "/continue_generation", resumed, timeout_secs)

    async def model_info(self, address: str, *, timeout_secs: float) -> dict[str, Any]:
        """The weights of an engine."""
        if error := self._engines[address].error:
            raise _lost(address, "/model_info", error)
        return _info(self._engines[address])

    async def take_weights(
        self, address: str, *, params: Any, version: str, mode: str, timeout_secs: float
    ) -> None:
        """Gives an engine weights by reference; `mode` as of `pause`.

        Raises:
          ServerError: refused, lost or late.
        """
        engine, route = self._engines[address], "/take_weights"

        async def change() -> None:
            if (
                mode != "in_place"
            ):  # Requests that run go on between two chunks, with new keys and values.
                await self._of(engine.update_weights, params, version)
                return
            await asyncio.wrap_future(engine.pause(mode))
            try:
                await self._of(engine.update_weights, params, version)
            finally:
                await asyncio.wrap_future(engine.resume())

        await self._result(address, route, change(), timeout_secs)

    async def _of(self, update: Callable, params: Any, version: str) -> None:
        # Its check of the numbers waits for the device.
        await asyncio.wrap_future(await asyncio.to_thread(update, params, version, copy=False))

    async def _result(
        self, address: str, route: str, call: Awaitable | Any, timeout_secs: float
    ) -> Any:
        with self._refusals(address, route, timeout_secs):
            async with asyncio.timeout(timeout_secs):
                is_future = not asyncio.iscoroutine(call)
                return await (asyncio.wrap_future(call) if is_future else call)

    @contextlib.contextmanager
    def _refusals(self, address: str, route: str, timeout_secs: float):
        """Raises an engine's errors as a server's."""
        try:
            yield
        except TimeoutError:
            reason = f"no answer within {timeout_secs:g} s"
            raise ServerTimeoutError(address, route, reason, retryable=True) from None
        except engines.UnavailableError as error:
            raise _lost(address, route, error) from error
        except ForeignWeightsError as error:
            raise ForeignVersionError(address, route, str(error), retryable=True) from error
        except (WeightsError, ValueError) as error:
            raise ServerError(address, route, str(error), retryable=False) from error

    def _send_soon(self, address: str, request: engines.Request) -> None:
        """Submits a request together with all others of this turn of the loop: a step begins with hundreds."""
        if address not in self._unsent:
            self._unsent[address] = []
            self._loop.call_soon(self._send, address)
        self._unsent[address].append(request)

    def _send(self, address: str) -> None:
        # Without those that were cancelled meanwhile.
        waiting = self._generating.get
        requests = [
            request
            for request in self._unsent.pop(address)
            if (done := waiting((address, request.rid))) and not done.done()
        ]
        refusals = self._engines[address].submit_all(requests, self._on_done[address])
        self._resolve(address, [(requests[i].rid, error) for i, error in refusals.items()])

    def _resolver(self, address: str) -> engines.OnDone:
        def on_done(ended: list) -> None:
            """On the engine's thread: wakes the loop once for all requests that ended together."""
            with contextlib.suppress(RuntimeError):  # The loop is closed, without waiters.
                self._loop.call_soon_threadsafe(self._resolve, address, ended)

        return on_done

    def _resolve(self, address: str, ended: list) -> None:
        for rid, outcome in ended:
            future = self._generating.get((address, rid))
            if future is None or future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class DirectProbes:
    """`servers.probes.Probes` at engines."""

    def __init__(
        self,
        by_address: Mapping[str, engines.Engine],
        *,
        interval_secs: float,
        timeout_secs: float,
        is_wanted: Callable[[Any], bool],
        on_answer: Callable[[Any, dict[str, Any] | None], None],
    ):
        """Arguments as of `Probes`."""
        self._engines, self._interval_secs = by_address, interval_secs
        self._is_wanted, self._on_answer = is_wanted, on_answer
        self._servers: dict[Any, str] = {}

    def add(self, server: Any, address: str) -> None:
        """Adds a server, its owner's object."""
        self._servers[server] = address

    def remove(self, server: Any) -> None:
        """Removes a server."""
        self._servers.pop(server, None)

    async def run(self) -> None:
        """Probes until it is cancelled."""
        while True:
            for server, address in tuple(self._servers.items()):
                if self._is_wanted(server):
                    engine = self._engines[address]
                    self._on_answer(server, None if engine.error else _info(engine))
            await asyncio.sleep(self._interval_secs)


def _info(engine: engines.Engine) -> dict[str, Any]:
    return {"weight_version": engine.weight_version, "weight_digest": engine.weight_digest}


def _lost(address: str, route: str, error: Exception) -> ServerError:
    return ServerError(address, route, str(error), retryable=True, status=503)
