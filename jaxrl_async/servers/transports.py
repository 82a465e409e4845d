"""Ways of giving a server a version: functions of one signature, by name.

A transport returns when the server holds the version and samples with it, and raises ServerError when it does
not. It knows nothing of other servers, schedules or states.
"""

import time
from collections.abc import Awaitable, Callable

from jaxrl_async.servers.client import InferenceClient, ServerError

Transport = Callable[..., Awaitable[None]]


async def disk(
    client: InferenceClient, address: str, *, path: str, version: int, timeout_secs: float
) -> None:
    """Has a server read a version from a directory that it can see.

    Running requests are kept: retracted, so that their KV is recomputed under the new weights, and continued.

    Args:
      client: the HTTP client.
      address: "http://host:port".
      path: directory in Hugging Face layout.
      version: its number.
      timeout_secs: bound on pause, load and check together.

    Raises:
      ServerError: the server refused, was lost, was late, or reports another version afterwards. It was told to
        go on sampling in every case, with whatever weights it then has.
    """
    deadline = time.monotonic() + timeout_secs
    try:
        await client.pause(address, mode="retract", timeout_secs=timeout_secs)
        await client.update_weights_from_disk(
            address,
            path=path,
            version=version,
            flush_cache=True,
            timeout_secs=_left(deadline),
        )
        await _verify(client, address, version, _left(deadline))
    except BaseException:
        await _continue_anyway(client, address)
        raise
    await client.continue_(address, timeout_secs=_left(deadline))


TRANSPORTS: dict[str, Transport] = {"disk": disk}


async def _verify(client: InferenceClient, address: str, version: int, timeout_secs: float) -> None:
    info = await client.model_info(address, timeout_secs=timeout_secs)
    if info.get("weight_version") != str(version):
        reason = f"reports version {info.get('weight_version')!r} after a push of version {version}"
        raise ServerError(address, "/model_info", reason, retryable=False)


async def _continue_anyway(client: InferenceClient, address: str) -> None:
    """A server that lives must not stay paused; one that does not has failed already."""
    try:
        await client.continue_(address, timeout_secs=CONTINUE_TIMEOUT_SECS)
    except ServerError:
        pass


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)


CONTINUE_TIMEOUT_SECS = 5.0
