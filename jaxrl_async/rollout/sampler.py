"""What `generate` is for a rollout function: routing, resuming and versions, hidden behind one call.

A request goes to the HEALTHY server with the fewest outstanding tokens. When it is aborted or its server is lost,
it goes on elsewhere from prompt + tokens so far, with the tokens that are left to it and the same seed: an engine's
random keys depend on the seed and the absolute position, so the stream continues. What was sampled keeps its
log-probs and versions. The sampler knows nothing of prompts' texts, rewards or the queue.
"""

import asyncio
import functools
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.queue.records import Permit
from jaxrl_async.rollout.single_turn import Generate
from jaxrl_async.servers.client import (
    Completion,
    InferenceClient,
    ServerError,
    ServerTimeoutError,
)
from jaxrl_async.servers.fleet import DEAD, Fleet


class RolloutError(Exception):
    """A rollout that gave no sample: `reason` is one of the queue's return reasons."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Sampler:
    """Runs the requests of one worker."""

    def __init__(
        self,
        *,
        client: InferenceClient,
        fleet: Fleet,
        controls: Mapping[str, Sequence[str]],
        sampling: Mapping[str, Any],
        run_seed: int,
        vocab_size: int,
        request_timeout_secs: float,
        max_retries: int,
    ):
        """Sends nothing yet.

        Args:
          client: the HTTP client.
          fleet: where to route; kept up to date by its owner.
          controls: address → where the servers behind it take aborts, which a router refuses; an address that
            is not in it takes them itself.
          sampling: SGLang's sampling parameters, max_new_tokens among them, without the seed.
          run_seed: with prompt_index, attempt and sample it makes each request's seed.
          vocab_size: ids outside [0, vocab_size) are never sent: one kills an SGLang server.
          request_timeout_secs: bound on one `generate`, all its tries together.
          max_retries: tries after the first.
        """
        self._client = client
        self._fleet = fleet
        self._controls = dict(controls)
        self._sampling = dict(sampling)
        self._run_seed = run_seed
        self._vocab_size = vocab_size
        self._request_timeout_secs = request_timeout_secs
        self._max_retries = max_retries
        self._running: dict[str, str] = {}  # rid → address, of what may still run on a server
        self._asking: dict[str, asyncio.Task[Completion]] = {}  # rid → the call that waits for it
        self._unrouted: set[str] = set()  # prefixes of samples that wait for a HEALTHY server

    def bind(self, permit: Permit, sample: int) -> Generate:
        """The `generate` of one sample of a permit.

        `await generate(tokens, **sampling)` continues a row of token ids [T] and returns a Completion whose
        finish_reason is "stop" or "length"; `sampling` replaces single sampling parameters.

        Raises (when awaited):
          RolloutError: server_error, timeout or aborted.
          ValueError: a token id outside the vocabulary.
        """
        seed = request_seed(self._run_seed, permit, sample)
        prefix = _sample_prefix(permit, sample)
        return functools.partial(self._generate, prefix, itertools.count(), seed)

    async def abort(self, permit: Permit, *, timeout_secs: float) -> None:
        """Ends what may still run of a permit, on whichever servers."""
        prefix = _permit_prefix(permit)
        rids = [rid for rid in self._running if rid.startswith(prefix)]
        calls = []
        for rid in rids:  # One by one: SGLang ignores a prefix that is no live id itself.
            server = self._running.pop(rid)
            for address in self._controls.get(server, (server,)):
                calls.append(self._client.abort(address, rid=rid, timeout_secs=timeout_secs))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ServerError):
                raise result

    def place_of(self, permit: Permit, sample: int) -> str:
        """In words: where a sample is that was not returned yet."""
        prefix = _sample_prefix(permit, sample)
        if prefix in self._unrouted:
            return f"a HEALTHY server ({self._fleet.describe()})"
        running = (a for rid, a in self._running.items() if rid.startswith(prefix))
        address = next(running, None)
        return f"server {address}" if address else "its rollout function"

    def leave_dead(self) -> None:
        """Gives up every call to a server that the fleet holds for DEAD: its requests go on elsewhere.

        A machine that vanishes, or a process that is stopped, closes no connection.
        """
        for rid, call in self._asking.items():
            if self._fleet.state(self._running[rid]) == DEAD:
                call.cancel()

    async def _generate(
        self,
        prefix: str,
        resumes: Iterator[int],
        seed: int,
        tokens: Sequence[int] | np.ndarray,
        **overrides: Any,
    ) -> Completion:
        sampling = self._sampling | overrides | {"sampling_seed": seed}
        input_ids = self._checked_ids(tokens)
        deadline = time.monotonic() + self._request_timeout_secs
        parts: list[Completion] = []
        reason, detail, last = "", "", ""
        for retry in range(self._max_retries + 1):
            last = await self._route(prefix, last, deadline)
            rid = f"{prefix}{next(resumes):04d}"
            try:
                part = await self._ask(last, rid, input_ids, sampling, deadline)
            except ServerTimeoutError as error:
                raise RolloutError("timeout", str(error)) from error
            except ServerError as error:
                if not error.retryable:
                    raise RolloutError("server_error", str(error)) from error
                self._fleet.suspect(last)
                reason, detail = "server_error", str(error)
                await self._back_off(retry, deadline)
                continue
            parts.append(part)
            if part.finish_reason != "abort":
                return part if len(parts) == 1 else _join(parts, part.finish_reason)
            reason, detail = "aborted", f"{last} aborted {rid}"
            input_ids = input_ids + part.tokens.tolist()
            sampling["max_new_tokens"] -= len(part.tokens)
            if sampling["max_new_tokens"] == 0:
                return _join(parts, "length")
        raise RolloutError(reason, f"gave up after {self._max_retries + 1} tries: {detail}")

    async def _ask(self, address, rid, input_ids, sampling, deadline) -> Completion:
        num_tokens = len(input_ids) + sampling["max_new_tokens"]
        self._running[rid] = address
        call = asyncio.create_task(
            self._client.generate(
                address,
                rid=rid,
                input_ids=input_ids,
                sampling_params=sampling,
                timeout_secs=max(deadline - time.monotonic(), 1e-3),
            )
        )
        self._asking[rid] = call
        try:
            with self._fleet.serving(address, num_tokens):
                completion = await call
        except ServerTimeoutError:
            raise  # It may still run there; so it may when this task is cancelled.
        except ServerError:
            self._running.pop(rid, None)
            raise
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            self._running.pop(rid, None)
            reason = "the server is DEAD, its answer is not waited for"
            raise ServerError(address, "/generate", reason, retryable=True) from None
        finally:
            del self._asking[rid]
        self._running.pop(rid, None)
        return completion

    async def _route(self, prefix: str, excluding: str, deadline: float) -> str:
        address = self._fleet.route((excluding,))
        if address is not None:
            return address
        self._unrouted.add(prefix)
        try:
            while (address := self._fleet.route((excluding,))) is None:
                if time.monotonic() > deadline:
                    detail = (
                        f"no HEALTHY server within {self._request_timeout_secs:g} s: "
                        f"{self._fleet.describe()}"
                    )
                    raise RolloutError("server_error", detail)
                await asyncio.sleep(_ROUTE_POLL_SECS)
        finally:
            self._unrouted.discard(prefix)
        return address

    async def _back_off(self, retry: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        await asyncio.sleep(max(0.0, min(_BACKOFF_SECS * 2**retry, _MAX_BACKOFF_SECS, left)))

    def _checked_ids(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ValueError(
                f"tokens to continue must be [T ≥ 1] ids in [0, {self._vocab_size}), got {ids}"
            )
        return ids.tolist()

    @property
    def num_unrouted(self) -> int:
        """Requests that wait for a HEALTHY server."""
        return len(self._unrouted)

    @property
    def num_running(self) -> int:
        """Requests that may run on a server now."""
        return len(self._running)


def request_seed(run_seed: int, permit: Permit, sample: int) -> int:
    """A stable 31-bit hash of (run_seed, prompt_index, sample, attempt)."""
    key = f"{run_seed}/{permit.prompt_index}/{sample}/{permit.attempt}"
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def _permit_prefix(permit: Permit) -> str:
    return f"{permit.prompt_index:012d}-{permit.attempt:04d}-"


def _sample_prefix(permit: Permit, sample: int) -> str:
    return f"{_permit_prefix(permit)}{sample:04d}-"


def _join(parts: list[Completion], finish_reason: str) -> Completion:
    arrays = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("tokens", "logprobs", "versions")
    )
    return Completion(*arrays, finish_reason)


_BACKOFF_SECS = 0.05
_MAX_BACKOFF_SECS = 5.0
_ROUTE_POLL_SECS = 0.05
