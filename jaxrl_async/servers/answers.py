"""The border to the answers of servers: their size, their JSON, and their values in words.

A server may answer anything. Nothing of it is read or repeated without a bound; its meaning is the kinds' matter.
"""

import json
import reprlib
from typing import Any

import aiohttp

from jaxrl_async.servers.port import NonsenseError, Request

# Of an answer about weights or settings: a large model has 100,000 names of tensors.
MAX_BYTES = 16 << 20
# Of an answer with tokens: in all, and more for each that was asked for.
_BASE_BYTES, _TOKEN_BYTES = 1 << 20, 1 << 10
_ID_BYTES, _ROUTE_BYTES = 12, 6  # of a kept id, and of an expert in base64
_REASON_CHARS = 400
_VALUES = reprlib.Repr()
_VALUES.maxlevel, _VALUES.maxstring, _VALUES.maxother = 3, 80, 80

# Raised by the reading of an answer that has another form than its API says.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def malformed(
    address: str, route: str, error: Exception, of: str = "answer", *, retryable: bool
) -> NonsenseError:
    """The error of an answer that one of MALFORMED was raised for."""
    reason = f"malformed {of}: {type(error).__name__}: {str(error)[:_REASON_CHARS]}"
    return NonsenseError(address, route, reason, retryable=retryable)


class LongAnswerError(ValueError):
    """An answer beyond its bound; the message has the bound."""


def max_bytes(request: Request) -> int:
    """The bound on an answer with the tokens, and the choices, that a request allows."""
    sampling_params, record = request.sampling_params, request.record
    num_tokens = sampling_params.get("max_new_tokens")
    of_token = _TOKEN_BYTES + _ID_BYTES * sampling_params.get("max_kept", 0)
    of_route = _ROUTE_BYTES * record.num_layers * record.experts_per_token
    num_new = num_tokens if isinstance(num_tokens, int) else 0
    return _BASE_BYTES + (of_token + of_route) * num_new + of_route * len(request.input_ids)


async def read(response: aiohttp.ClientResponse, bound: int = MAX_BYTES) -> bytes:
    """The body of an answer; raises LongAnswerError beyond the bound, in bytes."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > bound:
            raise LongAnswerError(f"it has more than {bound} bytes, the bound")
        parts.append(part)
    return b"".join(parts)


def decode(text: bytes) -> Any:
    """The value of a JSON text; raises ValueError where it is none, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def shown(value: object) -> str:
    """A value for a message, cut to some hundred characters."""
    return _VALUES.repr(value)
