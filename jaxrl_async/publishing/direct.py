"""The transport to engines in this process: a version is handed over by reference."""

import contextlib
from collections.abc import Callable
from typing import Any

from jaxrl_async.publishing.transports import Pausing, always, check_wanted
from jaxrl_async.versions.memory import MemoryVersion


async def hand_over(
    client: Any,
    address: str,
    *,
    path: MemoryVersion,
    version: int | str,
    mode: str,
    timeout_secs: float,
    is_wanted: Callable[[], bool] = always,
    pausing: Pausing = contextlib.nullcontext,
) -> None:
    """Gives an engine a version. Arguments and errors as of `FileTransport`.

    Args:
      client: an `inference.direct.DirectClient`.
      path: the version.
    """
    check_wanted(address, version, is_wanted)
    async with pausing():
        await client.take_weights(
            address, params=path.params, version=str(version), mode=mode, timeout_secs=timeout_secs
        )
