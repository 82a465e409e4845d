"""The preflight of an inference server: one that cannot take part in a run is refused before the run has cost anything.

It reads what a server says of itself, asks for one token, and changes nothing but to end a pause. A server that does
not answer yet is not refused. The questions are the kinds'; versions, pushes and the states of servers the publisher's.
"""

import contextlib
import time
from collections.abc import Iterator

from jaxrl_async.servers import answers, kinds
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds.checks import Checks, wrong_key
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import Expected, Kind, ServerError, UnfitServerError

TIMEOUT_SECS = 60.0  # of the whole preflight of one server


def kept_adapters(max_staleness: int) -> int:
    """Versions of an adapter that a server keeps.

    While a group is sampled, at most max_staleness + 1 versions follow the one that it began with: an older one has no
    request left, which its removal would wait for.
    """
    return max_staleness + 2


async def check(
    client: InferenceClient,
    address: str,
    expected: Expected,
    *,
    timeout_secs: float = TIMEOUT_SECS,
) -> Kind:
    """Refuses a server that takes control calls and cannot take part in the run; returns it.

    Args:
      client: has the run's keys.
      address: "http://host:port", where the server takes control calls.
      timeout_secs: bound on the whole.

    Raises:
      UnfitServerError: the server answers, and waiting would not help; names the setting and what to do.
      ServerError: it does not answer, or not yet.
    """
    deadline = time.monotonic() + timeout_secs
    try:
        server = await client.recognise(address, timeout_secs=timeout_secs)
    except ServerError as error:
        if error.status in (401, 403):
            raise wrong_key(error, expected, "server.api_key_env", "--api-key") from error
        if error.status == 404:
            left = max(deadline - time.monotonic(), 1e-3)
            reason = await kinds.remedy(client, address, timeout_secs=left)
            raise UnfitServerError(address, error.route, reason) from error
        raise
    with _readable(address):
        await server.preflight(expected, deadline=deadline)
    return server


async def check_router(
    client: InferenceClient,
    address: str,
    expected: Expected,
    *,
    timeout_secs: float = TIMEOUT_SECS,
) -> None:
    """Refuses an address that takes requests alone, as a router does. Arguments and errors as of `check`."""
    server = SglangApi(client, address)
    with _readable(address):
        await server.check_answer(Checks(server, expected, time.monotonic() + timeout_secs))


@contextlib.contextmanager
def _readable(address: str) -> Iterator[None]:
    """Refuses a server whose answers have another form than its API says."""
    try:
        yield
    except answers.MALFORMED as error:
        of = "answer to the preflight"
        reason = answers.malformed(address, "", error, of, retryable=False).reason
        raise UnfitServerError(address, "", reason) from error
