"""`relay`: versions over HTTP for an inference server of this host that takes them from a directory alone."""

import asyncio
import logging

from jaxrl_async.cli.config import UsageError, parse_flags
from jaxrl_async.cli.serving import TLS_FLAGS, check_tls, until_stopped
from jaxrl_async.config.checks import key_named

log = logging.getLogger(__name__)

USAGE = """Takes control calls for an SGLang or vLLM server of this host, until Ctrl-C or SIGTERM:
server.control_addresses names it, server.addresses the server. With weights.transport="stream" the learner sends it
each version, or the difference from the one before (weights.delta), or another relay does (weights.fanout); the server
then loads it from a directory of this host. All other calls go on to the server. It needs no JAX.

    python -m jaxrl_async relay --server=http://127.0.0.1:30000 --port=30001 --directory=/dev/shm"""


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        server=("", "http://host:port of the server"),
        host=("127.0.0.1", "address to bind"),
        port=(30001, "port to bind; 0 picks a free one"),
        directory=("", "of versions, which the server sees too; default the temporary directory"),
        admin_api_key_env=("", "name of the environment variable with the server's admin key"),
        tls_ca=("", "PEM file of the authorities of other relays, and of the server"),
        **TLS_FLAGS,
    )
    if not flags.server.startswith(("http://", "https://")):
        raise UsageError(f"--server=http://host:port is needed, got {flags.server!r}")
    check_tls("the relay", flags)
    key = key_named("--admin_api_key_env", flags.admin_api_key_env)
    names = ("host", "port", "directory", "tls_cert", "tls_key", "tls_ca")
    options = {name: getattr(flags, name) for name in names}
    return until_stopped(_serve(flags.server.rstrip("/"), key, options), (OSError, ValueError))


async def _serve(server: str, key: str | None, options: dict) -> None:
    from jaxrl_async.extras.relay import sidecar
    from jaxrl_async.servers.descriptors import raise_open_file_limit

    raise_open_file_limit()
    async with sidecar.serve(server, key=key, **options) as port:
        log.info("relay for %s at port %d", server, port)
        await asyncio.Event().wait()
