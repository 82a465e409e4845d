"""Requests of the embedded engine, from their arrival to their completions."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from jaxrl_async.inference import sampling


class InvalidRequestError(ValueError):
    """A request that can never be served; the message names field, value and bound."""


class UnavailableError(RuntimeError):
    """The engine cannot serve: no weights yet, a full queue, or an ended thread."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to complete."""

    rid: str  # unique among the live ones
    input_ids: np.ndarray  # int32 [P], P ≥ 1
    sampling: sampling.SamplingParams
    reports: bool = False  # its tokens so far are delivered after each chunk, too

    def check(self, *, vocab_size: int, max_total_tokens: int, max_kept: int) -> None:
        """Raises InvalidRequestError where an engine with these bounds can never serve it."""
        ids = self.input_ids
        if ids.dtype != np.int32 or ids.ndim != 1 or not len(ids):
            raise InvalidRequestError(
                f"input_ids must be int32 [P] with P ≥ 1, got {ids.dtype} {list(ids.shape)}"
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise InvalidRequestError(f"token id {bad} is outside [0, {vocab_size})")
        try:
            self.sampling.check(vocab_size=vocab_size)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        if (wanted := self.sampling.max_kept) > max_kept:
            has = f"{max_kept} at most" if max_kept else "none"
            raise InvalidRequestError(
                f"max_kept {wanted}: this server returns {has} of the ids that a token is drawn from; its bound is "
                "rollout.max_kept of a config that truncates"
            )
        new = self.sampling.max_new_tokens
        if len(ids) + new > max_total_tokens:
            raise InvalidRequestError(
                f"a prompt of {len(ids)} tokens and max_new_tokens {new} exceed the "
                f"{max_total_tokens} tokens of a request"
            )


@dataclasses.dataclass(frozen=True)
class Span:
    """Output tokens [start, end) were sampled by the weights of this version."""

    version: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """The outcome of a request: after an abort, its partial tokens; of one that goes on, those so far."""

    rid: str
    output_ids: np.ndarray  # int32 [N], the stop token included
    # float32 [N], at the request's temperature, before top-p and top-k; with its max_kept after them
    logprobs: np.ndarray
    spans: tuple[Span, ...]  # cover [0, N)
    # {"type": "stop", "matched"} | {"type": "length", "length"} | {"type": "abort", "message"}; None: it goes on
    finish_reason: dict | None
    prompt_tokens: int
    num_retractions: int
    cached_tokens: int = 0  # of the prompt, whose keys and values were held when it was admitted
    # Of `types.Choices`, where they are recorded: uint8 or uint16 [P + N, L, K] of prompt and output, and
    # int32 [N, M] of the output.
    routes: np.ndarray | None = None
    kept: np.ndarray | None = None


# Called on the engine thread with all requests that ended, or went on, together, as (rid, completion or error).
OnDone = Callable[[list[tuple[str, Completion | UnavailableError]]], None]


class Live:
    """A request between `Engine.submit` and its end. Once submitted only the engine thread touches it."""

    def __init__(self, request: Request, on_done: OnDone):
        """It is in no slot yet."""
        self.request = request
        self.on_done = on_done
        self.slot: int | None = None
        # While in a slot, the rows are newer than these.
        self.tokens = request.input_ids
        self.logprobs = np.zeros(0, np.float32)
        self.kept: np.ndarray | None = None
        self.spans: list[Span] = []
        self.num_retractions = 0
        self.num_cached = 0
        # Of its tokens, once it has ended; None of a model without experts.
        self.routes: np.ndarray | None = None

    def close_span(self, version: str, num_tokens: int) -> None:
        """Records that the tokens since the last span, up to num_tokens with the prompt, are of this version."""
        end = num_tokens - len(self.request.input_ids)
        start = self.spans[-1].end if self.spans else 0
        if start == end:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(Span(version, start, end))

    def finish_reason(self) -> dict:
        """Why it ended by itself."""
        last = int(self.tokens[-1])
        if last in self.request.sampling.stop_token_ids:
            return {"type": "stop", "matched": last}
        return {"type": "length", "length": self.request.sampling.max_new_tokens}

    def completion(self, finish_reason: dict | None) -> Completion:
        """Its outcome, or what it has so far."""
        prompt_length = len(self.request.input_ids)
        return Completion(
            rid=self.request.rid,
            output_ids=self.tokens[prompt_length:],
            logprobs=self.logprobs,
            spans=tuple(self.spans),
            finish_reason=finish_reason,
            prompt_tokens=prompt_length,
            num_retractions=self.num_retractions,
            cached_tokens=self.num_cached,
            routes=self.routes,
            kept=self.kept,
        )


def deliver(outcomes: Iterable[tuple[Live, Completion | UnavailableError]]) -> None:
    """Calls each distinct on_done once: hundreds of requests end together and share one."""
    by_callback: dict[OnDone, list[tuple[str, Completion | UnavailableError]]] = {}
    for live, outcome in outcomes:
        by_callback.setdefault(live.on_done, []).append((live.request.rid, outcome))
    for on_done, ended in by_callback.items():
        on_done(ended)
