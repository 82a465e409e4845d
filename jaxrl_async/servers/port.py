"""The port to inference servers: what a server of any kind does, what a push asks of it, and its errors.

A kind is a class in `servers.kinds`, one object for each server. Workers use a `Server`, publishing a `Kind`; the
client that recognises kinds and remembers them is a `Servers`.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self

import numpy as np

from jaxrl_async.records import NOBODY, Identity
from jaxrl_async.types import NO_RECORD, Record
from jaxrl_async.versions.store import StoredVersion
from jaxrl_async.versions.version import Version


class ServerError(Exception):
    """A failed call: its address, route and reason, whether a retry can help, and its HTTP status, if any."""

    def __init__(
        self, address: str, route: str, reason: str, *, retryable: bool, status: int | None = None
    ):
        detail = f"{route}: {reason}" if route else f" {reason}"
        super().__init__(f"inference server {address}{detail}")
        self.address = address
        self.route = route
        self.reason = reason
        self.retryable = retryable
        self.status = status


class ServerTimeoutError(ServerError):
    """A call without an answer before its deadline."""


class OutOfFilesError(ServerError):
    """A call that was never made: this process has no free file descriptor. It says nothing about the server."""


class NonsenseError(ServerError):
    """An answer that breaks the API: a fault of the server's, whatever was asked of it."""


class ForeignVersionError(ServerError):
    """A server samples with weights that this run did not push: another run's, or those it started with."""


class ObsoleteVersionError(ServerError):
    """A push that was dropped for a newer version, while its server held verified weights or none."""


class UnfitServerError(ServerError):
    """A server that answers and cannot take part in the run; the message says what to change."""

    def __init__(self, address: str, route: str, reason: str):
        super().__init__(address, route, reason, retryable=False)


class ForeignWeightsError(ValueError):
    """Tokens of weights that no push gave, as of a server that has just restarted."""


# By SGLang's names, the parameters that leave the distribution of a token as it is. Every request carries them, so that
# no preference of a server's own applies.
NEUTRAL: dict[str, float] = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
}


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for one completion."""

    rid: str  # fixed width, since servers abort by prefix
    # below the vocabulary size: an id beyond it kills an SGLang server
    input_ids: Sequence[int] | np.ndarray
    # SGLang's names: max_new_tokens, temperature, stop_token_ids, sampling_seed, and those of NEUTRAL. max_kept is this
    # project's: the ids that each token was drawn from are wanted, this many at most.
    sampling_params: Mapping[str, Any]
    run_id: str = ""  # the run whose weights may sample; "" for any
    adapters: bool = False  # the versions are adapters
    # Take tokens of weights that are no version, as before any push, and stamp them 0.
    any_weights: bool = False
    vocab_size: int = 2**31  # Tokens beyond it are refused.
    record: Record = NO_RECORD  # the routes that are wanted, where the server gives any


def seed_of(key: str) -> int:
    """A stable 31-bit hash of a text: a seed that every server takes."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


ANYTHING = Request("", (), {})  # Completions are checked by themselves alone.


@dataclasses.dataclass(frozen=True)
class Completion:
    """The sampled tokens of one request: N tokens, the stop token included."""

    tokens: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N], at the sampling temperature, ≤ 0
    versions: np.ndarray  # int32 [N], the weights that sampled each token, ≥ 0
    finish_reason: str  # "stop" | "length" | "abort"; N = 0 is possible under "abort" only
    # Of `types.Choices`, where they are recorded: uint8 or uint16 [P + N, L, K] of prompt and tokens, and int32 [N, M].
    routes: np.ndarray | None = None
    kept: np.ndarray | None = None

    def cut(self, num_tokens: int, finish_reason: str) -> "Completion":
        """Its first tokens alone."""
        kept, routes, left_out = self.kept, self.routes, len(self.tokens) - num_tokens
        return Completion(
            self.tokens[:num_tokens],
            self.logprobs[:num_tokens],
            self.versions[:num_tokens],
            finish_reason,
            routes=None if routes is None else routes[: len(routes) - left_out],
            kept=None if kept is None else kept[:num_tokens],
        )


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a run."""

    rank: int  # model.lora.rank
    alpha: float
    targets: tuple[str, ...]
    base_dtype: str
    has_base_files: bool  # whether model.path is the base
    kept: int  # versions that a server holds at once


@dataclasses.dataclass(frozen=True)
class Expected:
    """The needs of a run, by the names of its settings."""

    config: Mapping[str, Any]  # config.json of the model
    max_total_tokens: int  # server.max_total_tokens: prompt + completion of one request
    transport: str  # weights.transport
    api_key_env: str  # server.api_key_env, for messages
    admin_api_key_env: str  # server.admin_api_key_env, for messages
    adapters: Adapters | None = None  # of a run that trains them
    insecure: bool = False  # security.insecure
    max_kept: int = 0  # rollout.max_kept of a run that cuts tokens off
    replay_routes: str = ""  # learner.replay_routes of a model with experts


@dataclasses.dataclass(frozen=True)
class PushOptions:
    """The options of every push of a run; a kind takes those that mean something to it."""

    way: str  # weights.transport
    _: dataclasses.KW_ONLY
    # Of running requests. "retract": their tokens stay and their KV is computed again, so every token's log-prob is
    # exactly that of the version stamped on it. "in_place": stale KV stays, and later tokens come from a mixture of
    # versions.
    mode: str
    writer: Identity = NOBODY  # the learner; a server of this project refuses a superseded one
    # A server of this project continues by itself after a pause of this time, and drops a version that it prepared
    # this long ago; 0: never.
    pause_lease_secs: float = 0.0
    keep_adapters: int = 2  # versions of an adapter that an SGLang server keeps, ≥ 1
    # Of a server that verifies nothing itself: the digests of "all" tensors are compared at each push, or a "rotating"
    # part of them after the first.
    verify: str = "all"
    delta: bool = False  # give a server of this project the difference from a version that it keeps
    # Servers to which the learner and each server hand a version on; 0: the learner to all.
    fanout: int = 0
    rendezvous: str = "127.0.0.1"  # the learner's address, at which "distributed" servers find it


class Server(Protocol):
    """One server, for workers."""

    async def generate(self, request: Request, *, timeout_secs: float) -> Completion:
        """Samples one completion.

        Raises:
          ServerError: refused, lost, late, or an answer that breaks the API; the message says which.
          ForeignVersionError: tokens of weights that this run did not push.
        """
        ...

    async def abort(self, rid: str | None, *, timeout_secs: float) -> None:
        """Ends every request whose id starts with `rid`, or all requests when it is None."""
        ...


class Teacher(Protocol):
    """One server that a policy is distilled from."""

    async def score(self, tokens: Sequence[int], first: int, *, timeout_secs: float) -> np.ndarray:
        """Log-probs float32 [T − first] of a row of T tokens from `first` ≥ 1 on, at temperature 1.

            scores[i] = log π(tokens[first + i] | tokens[:first + i]), by the weights that it has now

        Raises:
          ServerError: as of `Server.generate`.
        """
        ...


class Kind(Server, Protocol):
    """One server, for publishing."""

    info: Mapping[str, Any]  # what it said when it was recognised last

    @property
    def verifies_itself(self) -> bool:
        """Whether it compares a version with its digest before it samples with it."""
        ...

    @property
    def ends_pauses(self) -> bool:
        """Whether it ends a pause whose learner has died, by a lease."""
        ...

    def difference(self, info: Mapping[str, Any], name: str, digest: str | None) -> str | None:
        """The difference between its report and the weights of that name and digest, in words; None: none."""
        ...

    async def preflight(self, expected: Expected, *, deadline: float) -> None:
        """Refuses it where it cannot take part in the run. Changes nothing, but to end a pause.

        Raises:
          UnfitServerError: it answers, and waiting would not help; names the setting and what to do.
          ServerError: it does not answer, or not yet.
        """
        ...

    async def hold(self, push: "Push") -> None:
        """Gives it a version; returns when it holds the version, verified, and samples with it.

        Raises:
          ObsoleteVersionError: the version is no longer wanted.
          ServerError: refused, lost, late, or it holds other weights afterwards.
        """
        ...

    async def continue_(self, *, timeout_secs: float) -> None:
        """Ends a pause."""
        ...


class Pausable(Kind, Protocol):
    """One server whose weights change in a pause."""

    async def pause(self, *, mode: str, timeout_secs: float, lease_secs: float = 0.0) -> None:
        """Stops sampling: "retract" recomputes running requests afterwards, "in_place" keeps KV.

        With lease_secs > 0 a server that `ends_pauses` continues by itself after that time.
        """
        ...

    async def rename(self, name: str, *, timeout_secs: float) -> None:
        """Renames the weights that it holds. Earlier tokens keep their name."""
        ...


class Sources(Protocol):
    """Where servers get the files of a version: from the learner, or from one another; `publishing.fanout.Tree`."""

    def source(self, address: str) -> str | None: ...
    def fail(self, address: str) -> None: ...


class Push(Protocol):
    """The push of a version to one server, as its kind sees it; `publishing.push.Push`."""

    @property
    def name(self) -> str: ...  # of the weights
    @property
    def files(self) -> Version: ...
    @property
    def stored(self) -> StoredVersion: ...  # raises ServerError for a version in memory
    @property
    def options(self) -> PushOptions: ...
    @property
    def is_first(self) -> bool: ...  # to this server, since it started
    @property
    def compares_all(self) -> bool: ...  # digests of tensors; else a part
    @property
    def flush_cache(self) -> bool: ...  # whether the load empties the prefix cache
    @property
    def collective(self) -> Any: ...  # the run's `extras.collective.Collective`
    def left(self) -> float: ...  # seconds until the push is late
    @property
    def is_wanted(self) -> Callable[[], bool]: ...
    def check_wanted(self) -> None: ...  # raises ObsoleteVersionError
    def error(self, reason: str) -> ServerError: ...  # that a retry does not mend
    def turn(self) -> AbstractAsyncContextManager[None]: ...  # of the server to pause
    def paused(
        self, kind: Pausable, verify: Callable[[], Awaitable[None]]
    ) -> AbstractAsyncContextManager[str]: ...
    async def difference(self, base: str | None) -> pathlib.Path | None: ...
    def sources(self, files: Sequence[pathlib.Path]) -> Sources: ...


class Probes(Protocol):
    """Asks many servers again and again what they hold; `servers.probes.Probes`."""

    def add(self, server: Any, address: str) -> None: ...
    def remove(self, server: Any) -> None: ...
    async def run(self) -> None: ...


class Servers(Protocol):
    """The servers of a run, by address. Use within one event loop, as `async with`."""

    run_id: str  # the run whose weights may sample; tokens of others are refused. "" for any run
    vocab_size: int  # of the run's model; tokens beyond it are refused
    record: Record  # the choices that the run records of each token

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: object) -> None: ...

    async def generate(
        self,
        address: str,
        *,
        rid: str,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        timeout_secs: float,
    ) -> Completion:
        """`Server.generate` of the server at an address; the rest as of `Request`."""
        ...

    async def abort(self, address: str, *, rid: str | None, timeout_secs: float) -> None:
        """`Server.abort` of the server at an address."""
        ...

    async def recognise(self, address: str, *, timeout_secs: float) -> Kind:
        """Asks a server what it is and holds. Its liveness, too: an answer comes during a pause.

        Raises:
          ServerError: lost, late, or of no kind.
        """
        ...

    def probes(self, **options: Any) -> Probes:
        """Probes of servers; options as of `servers.probes.Probes`."""
        ...
