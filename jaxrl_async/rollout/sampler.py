"""`generate` of the samples of a worker: routing, resuming and versions behind one call.

The samples of a group go to one server, which computes their prompt once; a sample's later requests go to the server
that has its prefix. The fleet chooses the first, and a lighter one in place of a crowded one. When a request is aborted
or its server is lost, it is resumed elsewhere from prompt + tokens so far, with the tokens that are left to it and the
same seed: an engine's random keys depend on the seed and the absolute position, so the stream continues. Tokens that
arrived keep their log-probs and versions. A token that was ruled out, and sampled all the same, is drawn again.
Independent of texts, rewards and the queue.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.records import SERVER_FAULT, Permit
from jaxrl_async.rollout.context import Generate, RolloutError
from jaxrl_async.servers.fleet import DEAD, HEALTHY, Fleet
from jaxrl_async.servers.port import (
    Completion,
    ForeignVersionError,
    NonsenseError,
    OutOfFilesError,
    ServerError,
    Servers,
    ServerTimeoutError,
    seed_of,
)
from jaxrl_async.types import NEVER_BIAS, spread_kept


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Sampler:
    """Runs the requests of one worker."""

    client: Servers
    fleet: Fleet  # the servers' states; kept up to date by its owner
    # Address of a router → addresses of the servers behind it, which take the aborts that a router refuses; any other
    # address takes them itself.
    controls: Mapping[str, Sequence[str]]
    sampling: dict[str, Any]  # SGLang's parameters, max_new_tokens among them, without the seed
    run_seed: int  # with prompt_index, attempt and sample it makes each request's seed
    # Bound on one `generate`, all its tries together, without the waits for a HEALTHY server and the time in which this
    # process was stopped.
    request_timeout_secs: float
    max_retries: int  # tries after the first
    # Bound on one wait for a HEALTHY server, at least request_timeout_secs.
    outage_secs: float = 0.0
    clock: ActiveClock = dataclasses.field(default_factory=ActiveClock)  # its owner reads it often

    def __post_init__(self):
        self.outage_secs = max(self.outage_secs, self.request_timeout_secs)
        self._running: dict[str, str] = {}  # rid → address, of requests that may run on a server
        self._calls: dict[str, asyncio.Task[Completion]] = {}  # rid → the call that waits for it
        self._live: set[Permit] = set()  # that may sample: bound, and not aborted
        self._homes: dict[Permit, str] = {}  # the server of a group's first request
        # Of a group: the servers that sampled, each time with their oldest and newest version.
        self._sources: dict[Permit, list[tuple[str, int, int]]] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}  # rid → of a server that has left
        self._unrouted: set[str] = set()  # prefixes of samples that wait for a HEALTHY server

    def bind(self, permit: Permit, sample: int) -> Generate:
        """The `generate` of one sample of a permit.

        `await generate(tokens, **sampling)` continues token ids [T] of the vocabulary and returns a Completion whose
        finish_reason is "stop" or "length"; `sampling` replaces single sampling parameters.

        Raises (when awaited):
          RolloutError: server_error, server_fault, foreign_version, timeout or aborted.
        """
        self._live.add(permit)
        seed = request_seed(self.run_seed, permit, sample)
        return functools.partial(
            self._generate, _Requests(permit, _sample_prefix(permit, sample), seed)
        )

    def take_run(self, run_id: str) -> None:
        """From now on only weights of this run may sample, unless those of any run may."""
        if self.client.run_id:
            self.client.run_id = run_id

    def distrust(self, permit: Permit, refusal: str) -> None:
        """Distrusts the servers that sampled the tokens for which a group was refused: its oldest, or its newest."""
        sources = self._sources.get(permit, ())
        if refusal == "over_age":
            bound = min((oldest for _, oldest, _ in sources), default=0)
            guilty = {address for address, oldest, _ in sources if oldest == bound}
        else:
            bound = max((newest for *_, newest in sources), default=0)
            guilty = {address for address, _, newest in sources if newest == bound}
        for address in guilty:
            self.fleet.distrust(address, permit.prompt_index)

    def release(self, permit: Permit) -> None:
        """Forgets the servers of a permit that has ended."""
        self._homes.pop(permit, None)
        self._sources.pop(permit, None)

    async def abort(self, permit: Permit) -> None:
        """Ends the requests of a permit that may still run, on every server; none follows them."""
        self._live.discard(permit)
        prefix = _permit_prefix(permit)
        rids = [rid for rid in self._running if rid.startswith(prefix)]
        # One by one: SGLang ignores a prefix that is no live id itself.
        await asyncio.gather(*(self._abort(rid) for rid in rids))

    async def _abort(self, rid: str) -> None:
        """Ends a request that may still run; nothing where its server does not answer, or it has ended meanwhile."""
        if (server := self._running.pop(rid, None)) is None:
            return
        calls = [
            self.client.abort(address, rid=rid, timeout_secs=_ABORT_TIMEOUT_SECS)
            for address in self.controls.get(server, (server,))
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ServerError):
                raise result

    def place_of(self, permit: Permit, sample: int) -> str:
        """In words: the server that a sample waits for; "" where it waits for none."""
        prefix = _sample_prefix(permit, sample)
        if prefix in self._unrouted:
            return f"a HEALTHY server ({self.fleet.describe()})"
        running = (a for rid, a in self._running.items() if rid.startswith(prefix))
        address = next(running, None)
        return f"server {address}" if address else ""

    def cancel_dead(self) -> None:
        """Ends every call to a server that is DEAD or has left: its requests are resumed elsewhere.

        A machine that vanishes, or a process that is stopped, closes no connection. One that has left the table may
        still answer: its requests are aborted there, so that they bring their tokens.
        """
        for rid, call in self._calls.items():
            if (address := self._running.get(rid)) is None:
                continue  # It was aborted, and a task that outlives its group waits for it.
            if self.fleet.has_left(address):
                if rid not in self._drains:
                    drain = asyncio.create_task(self._drain(rid, address, call))
                    self._drains[rid] = drain
                    drain.add_done_callback(lambda _, rid=rid: self._drains.pop(rid, None))
            elif self.fleet.state(address) == DEAD:
                call.cancel()

    async def _drain(self, rid: str, address: str, call: asyncio.Task[Completion]) -> None:
        """Aborts a request on a server that has left; cancels a call that does not end by it."""
        for control in self.controls.get(address, (address,)):
            with contextlib.suppress(ServerError):
                await self.client.abort(control, rid=rid, timeout_secs=_DRAIN_SECS)
        await asyncio.wait({call}, timeout=_DRAIN_SECS)
        call.cancel()

    async def _generate(
        self,
        requests: "_Requests",
        tokens: Sequence[int] | np.ndarray,
        **overrides: Any,
    ) -> Completion:
        sampling: dict[str, Any] = self.sampling | {"sampling_seed": requests.seed} | overrides
        input_ids, bias = np.asarray(tokens).tolist(), sampling.get("logit_bias") or {}
        ruled_out = [int(token) for token, value in bias.items() if value <= NEVER_BIAS]
        deadline = self.clock.now() + self.request_timeout_secs
        parts: list[Completion] = []
        reason, detail, failed = "", "", ""
        retry = redraws = 0
        while retry <= self.max_retries:
            self._check_live(requests.permit)
            before = self.clock.now()
            address = await self._route(requests, failed)
            self._check_live(requests.permit)  # It may have ended during a wait for a server.
            deadline += self.clock.now() - before
            rid = f"{requests.prefix}{next(requests.resumes):04d}"
            try:
                part = await self._request(requests, address, rid, input_ids, sampling, deadline)
            except ServerTimeoutError as error:
                if self.clock.now() < deadline:  # This process was stopped meanwhile.
                    await self._abort(rid)
                    continue
                reason = SERVER_FAULT if self.fleet.fails_several(address) else "timeout"
                raise RolloutError(reason, str(error)) from error
            # This process's fault: no server is suspect, no try is lost.
            except OutOfFilesError as error:
                if self.clock.now() > deadline:
                    raise RolloutError("timeout", str(error)) from error
                await asyncio.sleep(_OUT_OF_FILES_SECS)
                continue
            except ServerError as error:
                if not error.retryable:
                    raise RolloutError("server_error", str(error)) from error
                detail, failed, reason = str(error), address, "server_error"
                if isinstance(error, ForeignVersionError):
                    reason = "foreign_version"
                elif not isinstance(error, NonsenseError):
                    self.fleet.suspect(address)
                elif self.fleet.fails_several(address):
                    reason = SERVER_FAULT
                backoff = min(_BACKOFF_SECS * 2**retry, _MAX_BACKOFF_SECS)
                await asyncio.sleep(max(0.0, min(backoff, deadline - self.clock.now())))
                retry += 1
                continue
            kept = _before(part, ruled_out)
            is_cut = kept is not part
            redraws = redraws + 1 if is_cut and not len(kept.tokens) else 0
            if redraws > _MAX_REDRAWS:
                text = (
                    f"{address} samples token {part.tokens[0]} for ever, which logit_bias rules out"
                )
                raise RolloutError("server_error", text)
            part = kept
            retry += not is_cut
            parts.append(part)
            if len(part.versions):
                span = (address, int(part.versions.min()), int(part.versions.max()))
                self._sources.setdefault(requests.permit, []).append(span)
            if is_cut:
                # Of the token that is drawn again, and of those behind it.
                sampling["sampling_seed"] = seed_of(f"{sampling['sampling_seed']}/again")
            elif part.finish_reason != "abort":
                return part if len(parts) == 1 else _join(parts, part.finish_reason)
            else:
                reason, detail, failed = "aborted", f"{address} aborted {rid}", address
            input_ids = input_ids + part.tokens.tolist()
            sampling["max_new_tokens"] -= len(part.tokens)
            if sampling["max_new_tokens"] == 0:
                return _join(parts, "length")
        raise RolloutError(reason, f"failed after {self.max_retries + 1} tries: {detail}")

    def _check_live(self, permit: Permit) -> None:
        if permit not in self._live:
            raise RolloutError("aborted", f"{permit} has ended")

    async def _request(
        self,
        requests: "_Requests",
        address: str,
        rid: str,
        input_ids: list[int],
        sampling: Mapping[str, Any],
        deadline: float,
    ) -> Completion:
        num_tokens = len(input_ids) + sampling["max_new_tokens"]
        self._running[rid] = address
        call = asyncio.create_task(
            self.client.generate(
                address,
                rid=rid,
                input_ids=input_ids,
                sampling_params=sampling,
                timeout_secs=max(deadline - self.clock.now(), 1e-3),
            )
        )
        self._calls[rid] = call
        is_silent = self.fleet.silence(address)
        try:
            with self.fleet.serving(address, num_tokens) as fault:
                try:
                    completion = await call
                except ServerTimeoutError:
                    if is_silent() and self.clock.now() >= deadline:
                        self.fleet.failed(address, requests.permit.prompt_index, fault)
                    raise
                except (NonsenseError, ForeignVersionError):
                    self.fleet.failed(address, requests.permit.prompt_index, fault)
                    raise
                if completion.finish_reason != "abort":
                    self.fleet.answered(address, fault)
        except ServerTimeoutError:
            raise  # It may still run there, as it may when this task is cancelled.
        except ServerError:
            self._running.pop(rid, None)
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            self._running.pop(rid, None)
            reason = "the server is DEAD"
            raise ServerError(address, "/generate", reason, retryable=True) from None
        finally:
            del self._calls[rid]
        self._running.pop(rid, None)
        return completion

    async def _route(self, requests: "_Requests", failed: str) -> str:
        """Waits for a server: that of the sample or its group, or a new one."""
        prefers = requests.server or self._homes.get(requests.permit)
        address = self.fleet.route((failed,), prefers=prefers)
        if address is None:
            address = await self._wait_for_server(requests.prefix, failed)
        requests.server = address
        if self.fleet.state(self._homes.setdefault(requests.permit, address)) != HEALTHY:
            self._homes[requests.permit] = address
        return address

    async def _wait_for_server(self, prefix: str, failed: str) -> str:
        deadline = self.clock.now() + self.outage_secs
        self._unrouted.add(prefix)
        try:
            while (address := self.fleet.route((failed,))) is None:
                left = deadline - self.clock.now()
                if left <= 0:
                    text = f"no HEALTHY server within {self.outage_secs:g} s"
                    raise RolloutError(SERVER_FAULT, f"{text}: {self.fleet.describe()}")
                await self.fleet.wait_for_change(left)
        finally:
            self._unrouted.discard(prefix)
        return address

    @property
    def num_unrouted(self) -> int:
        """Samples that wait for a HEALTHY server."""
        return len(self._unrouted)

    @property
    def num_running(self) -> int:
        """Requests that may run on a server."""
        return len(self._running)


@dataclasses.dataclass
class _Requests:
    """The requests of one sample of a permit."""

    permit: Permit
    prefix: str  # of their ids
    seed: int
    server: str = ""  # of the last one
    resumes: Iterator[int] = dataclasses.field(default_factory=itertools.count)


def request_seed(run_seed: int, permit: Permit, sample: int) -> int:
    """A stable 31-bit hash of (run_seed, prompt_index, sample, attempt)."""
    return seed_of(f"{run_seed}/{permit.prompt_index}/{sample}/{permit.attempt}")


def _before(part: Completion, ruled_out: list[int]) -> Completion:
    """A completion before its first token that was ruled out; itself without one.

    A server, or a router before it, may ignore the bias. To draw such a token again until it is another one samples as
    if it were ruled out.
    """
    found = (part.tokens[:, None] == np.array(ruled_out)).any(axis=1)
    return part.cut(int(found.argmax()), "abort") if found.any() else part


def _permit_prefix(permit: Permit) -> str:
    return f"{permit.prompt_index:012d}-{permit.attempt:04d}-"


def _sample_prefix(permit: Permit, sample: int) -> str:
    return f"{_permit_prefix(permit)}{sample:04d}-"


def _join(parts: list[Completion], finish_reason: str) -> Completion:
    """The completion of requests each of which continued the one before.

    The last one computed the tokens of all others anew, and has the routes of all.
    """
    arrays = (
        [getattr(part, name) for part in parts] for name in ("tokens", "logprobs", "versions")
    )
    tokens, logprobs, versions = map(np.concatenate, arrays)
    starts = itertools.accumulate((len(part.tokens) for part in parts), initial=0)
    kept = spread_kept(len(tokens), zip(starts, (part.kept for part in parts), strict=False))
    routes = parts[-1].routes
    return Completion(tokens, logprobs, versions, finish_reason, routes=routes, kept=kept)


_MAX_REDRAWS = 32  # of one token
_DRAIN_SECS = 5.0  # a server that has left has to answer
_ABORT_TIMEOUT_SECS = 5.0
_BACKOFF_SECS = 0.05
_MAX_BACKOFF_SECS = 5.0
_OUT_OF_FILES_SECS = 0.5  # backoff of a process without a free file descriptor
