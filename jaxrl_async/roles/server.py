"""The server role: the embedded inference server, or the process of `server.command`."""

import asyncio
import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import urllib.parse

from jaxrl_async.config.forms import command_words
from jaxrl_async.config.settings import Settings
from jaxrl_async.parts import engine_of, keys_of, model_path, weight_roots_of
from jaxrl_async.runtime.gc_freeze import gc_freeze
from jaxrl_async.runtime.supervisor import how_it_ended

ENGINE_STOP_SECS = 30.0  # deadline of the engine's thread at the end
COMMAND_STOP_SECS = 4.0  # from SIGTERM to SIGKILL of the command; shorter than that of its role

log = logging.getLogger(__name__)


def run(settings: Settings, workdir: pathlib.Path, index: int) -> None:
    """Serves at server.addresses[index] until it is interrupted.

    Raises:
      RuntimeError: the process of server.command ended.
    """
    if settings.server.command:
        _run_command(settings, workdir, index)
    else:
        asyncio.run(_run_embedded(settings, workdir, index))


async def _run_embedded(settings: Settings, workdir: pathlib.Path, index: int) -> None:
    from jaxrl_async.inference import http

    engine = engine_of(settings, workdir, name=f"engine-{index}")
    address = settings.server.addresses[index]
    url = urllib.parse.urlparse(address)
    engine.start()
    gc_freeze("the engine's programs")
    log.info("engine ready: %d programs", engine.num_compiled)
    try:
        async with http.serve(
            engine,
            host=url.hostname,
            port=url.port,
            weight_roots=weight_roots_of(settings, workdir),
            tls_cert=settings.server.tls_cert,
            tls_key=settings.server.tls_key,
            tls_ca=settings.server.tls_ca,
            **keys_of(settings),
        ):
            log.info("server %d at %s", index, address)
            await asyncio.wrap_future(engine.stopped)
    finally:
        engine.close(timeout_secs=ENGINE_STOP_SECS)


def _run_command(settings: Settings, workdir: pathlib.Path, index: int) -> None:
    """Starts server.command and waits for it; neither outlives the other."""
    url = urllib.parse.urlparse(settings.server.addresses[index])
    words = command_words(
        settings.server.command,
        model_path=model_path(settings, workdir),
        host=url.hostname,
        port=url.port,
        index=index,
        weights=workdir / "weights",
    )
    log.info("server %d: %s", index, words)
    environment = {name: value for name, value in os.environ.items() if name != "JAXRL_PARENT"}
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment)
    try:
        code = process.wait()
    except BaseException:
        _terminate(process)
        raise
    raise RuntimeError(f"server.command ended {how_it_ended(code)}")


def _terminate(process: subprocess.Popen) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(COMMAND_STOP_SECS)
    process.kill()
    process.wait()
    if "JAXRL_PARENT" in os.environ:
        # This role leads a process group: kill the command's children too.
        os.killpg(0, signal.SIGKILL)
