"""Shared by the verbs that serve: TLS flags, and a life until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any

from jaxrl_async import security
from jaxrl_async.cli.config import refusing

TLS_FLAGS: dict[str, tuple[Any, str]] = {
    "tls_cert": ("", "PEM file of a certificate, for https"),
    "tls_key": ("", "PEM file of its key"),
    "insecure": (False, "allow a --host beyond loopback without TLS, on a network that is trusted"),
}


def check_tls(what: str, flags: Any) -> None:
    """Refuses --host beyond loopback without TLS or --insecure. Raises UsageError: names the flags."""
    address, remedy = f"{flags.host}:{flags.port}", "--tls_cert and --tls_key"
    with refusing(ValueError):
        security.check_tls(what, address, flags.tls_cert, flags.insecure, remedy, "--insecure")


def until_stopped(serve: Coroutine, errors: tuple[type[Exception], ...] = ()) -> int:
    """Logs to stderr and serves until Ctrl-C or SIGTERM.

    Returns:
      0, the exit code.

    Raises:
      UsageError: in place of one of the errors.
    """

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await serve

    security.log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    # CancelledError is SIGTERM's: what was served is closed by then.
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        with refusing(*errors):
            asyncio.run(run())
    return 0
