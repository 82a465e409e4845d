"""Engines in this process, as servers: what a run asks of one over HTTP, answered without it.

A failure has the same type as over HTTP, so that samplers, evaluations and the publisher treat it alike.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Self

import numpy as np

from jaxrl_async.inference import engine as engines
from jaxrl_async.inference.fields import parse_sampling
from jaxrl_async.inference.loading import WeightsError
from jaxrl_async.inference.requests import Request, UnavailableError
from jaxrl_async.servers import port
from jaxrl_async.servers.batches import expire
from jaxrl_async.servers.client import no_answer
from jaxrl_async.servers.completions import checked_completion
from jaxrl_async.versions.memory import MemoryVersion

WAY = "memory"  # in which an engine takes a version: by reference


class Direct:
    """One engine: a `port.Kind`. Use within one event loop."""

    verifies_itself = True
    ends_pauses = True  # It ends with its learner.

    def __init__(self, engine: engines.Engine, address: str):
        """`address`: a name."""
        self.engine, self.address = engine, address
        self.info: Mapping[str, Any] = {}
        self._generating: dict[str, asyncio.Future] = {}  # by rid
        self._unsent: list[Request] = []  # of this turn of the loop
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, request: port.Request, *, timeout_secs: float) -> port.Completion:
        """Samples one completion; see `port.Server`."""
        self._loop = loop = asyncio.get_running_loop()
        done, rid = loop.create_future(), request.rid
        with self._refusals("/generate", timeout_secs):
            sampling = parse_sampling(dict(request.sampling_params))
            asked = Request(rid, np.asarray(request.input_ids, np.int32), sampling)
            self._generating[rid] = done
            late = loop.call_later(timeout_secs, expire, done)
            try:
                if not self._unsent:
                    # With all others of this turn of the loop: a step begins with hundreds.
                    loop.call_soon(self._send)
                self._unsent.append(asked)
                found = await done
            except (TimeoutError, asyncio.CancelledError):
                self.engine.abort({rid}.__contains__)
                raise
            finally:
                late.cancel()
                del self._generating[rid]
            spans = [{"version": s.version, "start": s.start, "end": s.end} for s in found.spans]
            reason = found.finish_reason["type"]
            done = found.output_ids, found.logprobs, spans, reason, request
            return checked_completion(*done, kept=found.kept, routes=found.routes)

    async def abort(self, rid: str | None, *, timeout_secs: float) -> None:
        """Ends every request whose id starts with `rid`, or all requests when it is None."""
        ended = self.engine.abort(lambda found: found.startswith(rid or ""))
        await self._result("/abort_request", asyncio.wrap_future(ended), timeout_secs)

    def difference(self, info: Mapping[str, Any], name: str, digest: str | None) -> str | None:
        """The difference between a report and the weights of that name, in words; None: none."""
        held = info["weight_version"]
        return None if held == name else f"version {held!r} instead of {name}"

    async def preflight(self, expected: port.Expected, *, deadline: float) -> None:
        """Does nothing: engine and learner are made of the same settings."""

    async def hold(self, push: port.Push) -> None:
        """Gives the engine weights by reference; see `port.Kind`."""
        if push.options.way != WAY or not isinstance(push.files, MemoryVersion):
            raise push.error(f"takes versions in memory alone, by {WAY!r}")
        push.check_wanted()
        mode, left, params = push.options.mode, push.left, push.files.params
        async with push.turn():
            await self._result("/take_weights", self._take(params, push.name, mode), left())

    async def _take(self, params: Any, version: str, mode: str) -> None:
        # Requests that run go on between two chunks, with new keys and values, or are kept by a pause.
        try:
            if mode == "in_place":
                await asyncio.wrap_future(self.engine.pause(mode))
            # Its check of the numbers waits for the device.
            update = self.engine.update_weights
            await asyncio.wrap_future(await asyncio.to_thread(update, params, version, copy=False))
        finally:
            if mode == "in_place":
                await asyncio.wrap_future(self.engine.resume())

    async def continue_(self, *, timeout_secs: float) -> None:
        """Ends a pause."""
        resumed = asyncio.wrap_future(self.engine.resume())
        await self._result("/continue_generation", resumed, timeout_secs)

    def report(self) -> dict[str, Any]:
        """The weights of the engine; raises ServerError once it has ended."""
        if error := self.engine.error:
            raise self._lost("/model_info", error)
        return {"weight_version": self.engine.weight_version}

    async def _result(
        self, route: str, call: asyncio.Future | Coroutine[Any, Any, None], timeout_secs: float
    ) -> None:
        with self._refusals(route, timeout_secs):
            async with asyncio.timeout(timeout_secs):
                await call

    @contextlib.contextmanager
    def _refusals(self, route: str, timeout_secs: float) -> Iterator[None]:
        """Raises an engine's errors as a server's."""
        try:
            yield
        except TimeoutError:
            raise no_answer(self.address, route, timeout_secs) from None
        except UnavailableError as error:
            raise self._lost(route, error) from error
        except port.ForeignWeightsError as error:
            raise port.ForeignVersionError(
                self.address, route, str(error), retryable=True
            ) from error
        except (WeightsError, ValueError) as error:
            raise port.ServerError(self.address, route, str(error), retryable=False) from error

    def _lost(self, route: str, error: Exception) -> port.ServerError:
        return port.ServerError(self.address, route, str(error), retryable=True, status=503)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        # Without those that were cancelled meanwhile.
        waiting = self._generating.get
        requests = [r for r in unsent if (done := waiting(r.rid)) and not done.done()]
        refusals = self.engine.submit_all(requests, self._on_done)
        self._resolve([(requests[i].rid, error) for i, error in refusals.items()])

    def _on_done(self, ended: list) -> None:
        """On the engine's thread: wakes the loop once for all requests that ended together."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop is closed, without waiters.
            self._loop.call_soon_threadsafe(self._resolve, ended)

    def _resolve(self, ended: list) -> None:
        for rid, outcome in ended:
            future = self._generating.get(rid)
            if future is None or future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class DirectClient:
    """Engines by their addresses: a `port.Servers`."""

    def __init__(self, by_address: Mapping[str, engines.Engine], *, run_id: str = ""):
        """Arguments:

        by_address: the engines; an address is a name.
        run_id: the run whose weights may sample; tokens of others are refused. "" for any run.
        """
        self._kinds = {address: Direct(engine, address) for address, engine in by_address.items()}
        self.run_id, self.vocab_size = run_id, port.Request.vocab_size
        self.record = port.Request.record

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def generate(
        self, address: str, *, timeout_secs: float, **request: Any
    ) -> port.Completion:
        """Samples one completion; `request` as of `port.Request`, errors as of `port.Server`."""
        run = {"run_id": self.run_id, "vocab_size": self.vocab_size, "record": self.record}
        asked = port.Request(**run, **request)
        return await self._kinds[address].generate(asked, timeout_secs=timeout_secs)

    async def abort(self, address: str, *, rid: str | None, timeout_secs: float) -> None:
        """Ends every request whose id starts with `rid`, or all requests when it is None."""
        await self._kinds[address].abort(rid, timeout_secs=timeout_secs)

    async def recognise(self, address: str, *, timeout_secs: float) -> Direct:
        """The engine, with what it holds; raises ServerError once it has ended."""
        kind = self._kinds[address]
        kind.info = kind.report()
        return kind

    def probes(self, **options: Any) -> "DirectProbes":
        """Probes of the engines; options as of `servers.probes.Probes`."""
        return DirectProbes(self._kinds, **options)


class DirectProbes:
    """`servers.probes.Probes` of engines, with its options."""

    def __init__(self, kinds: Mapping[str, Direct], **options: Any):
        self._kinds, self._interval_secs = kinds, options["interval_secs"]
        self._is_wanted, self._on_answer = options["is_wanted"], options["on_answer"]
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
                    kind = self._kinds[address]
                    self._on_answer(server, None if kind.engine.error else kind.report())
            await asyncio.sleep(self._interval_secs)
