"""The port to inference servers: the errors and the answers of any kind of server."""

import dataclasses

import numpy as np


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


class ForeignVersionError(ServerError):
    """A server samples with weights that this run did not push: another run's, or those it started with."""


class ForeignWeightsError(ValueError):
    """Tokens of weights that no push gave, as of a server that has just restarted."""


class UnfitServerError(ServerError):
    """A server that answers and cannot take part in the run; the message says what to change."""

    def __init__(self, address: str, route: str, reason: str):
        super().__init__(address, route, reason, retryable=False)


@dataclasses.dataclass(frozen=True)
class Completion:
    """The sampled tokens of one request: N tokens, the stop token included."""

    tokens: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N], at the sampling temperature, ≤ 0
    versions: np.ndarray  # int32 [N], the weights that sampled each token, ≥ 0
    finish_reason: str  # "stop" | "length" | "abort"; N = 0 is possible under "abort" only
