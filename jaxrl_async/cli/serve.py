"""`serve`: a checkpoint of a run over HTTP, SGLang's API and OpenAI's, on the embedded engine."""

import asyncio
import dataclasses
import logging
import pathlib

from jaxrl_async import security
from jaxrl_async.cli.config import UsageError, load_config, parse_flags, refusing, settings_of
from jaxrl_async.cli.serving import TLS_FLAGS, check_tls, until_stopped
from jaxrl_async.config.checks import key_named
from jaxrl_async.config.settings import Settings

CLOSE_TIMEOUT_SECS = 30.0

log = logging.getLogger(__name__)

USAGE = """Serves the weights of a run's checkpoint, on the embedded engine of this machine, until Ctrl-C or SIGTERM.

It answers SGLang's /generate, in token ids or in texts, and OpenAI's /v1/completions and /v1/chat/completions, so that
lm_eval, litellm and others evaluate it: docs/servers.md."""


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        workdir=("", "directory of the run"),
        step=(-1, "checkpoint; default the last"),
        host=("127.0.0.1", "address to bind"),
        port=(30000, "port to bind; 0 picks a free one"),
        api_key_env=("", "name of the environment variable with the key of every route"),
        admin_api_key_env=("", "the same for the key of the control routes"),
        **TLS_FLAGS,
    )
    if not flags.workdir:
        raise UsageError("--workdir=DIR is needed")
    if flags.step < -1:
        raise UsageError(f"--step must be ≥ 0, or -1 for the last checkpoint, got {flags.step}")
    variables = {"api_key": flags.api_key_env, "admin_api_key": flags.admin_api_key_env}
    keys = {name: key_named(f"--{name}_env", value) for name, value in variables.items()}
    with refusing(ValueError):
        security.check_listener(
            "the server", f"{flags.host}:{flags.port}", keys["api_key"], "--api_key_env"
        )
        check_tls("the server", flags)
        security.server_context(flags.tls_cert, flags.tls_key)
    names = ("host", "port", "tls_cert", "tls_key")
    options = keys | {name: getattr(flags, name) for name in names}
    workdir = pathlib.Path(flags.workdir).absolute()
    settings = settings_of(load_config(str(workdir / "config.json")))
    for chatty in ("absl", "jax"):  # They log every missing backend.
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return until_stopped(_serve(settings, workdir, flags.step, options), (OSError, ValueError))


async def _serve(settings: Settings, workdir: pathlib.Path, step: int, options: dict) -> None:
    from jaxrl_async import parts
    from jaxrl_async.inference import http

    room, context = settings.server.max_total_tokens, parts.context_tokens_of(settings)
    if context and context < room:
        log.warning("requests end at the model's context length: %d of %d tokens", context, room)
        server = dataclasses.replace(settings.server, max_total_tokens=context)
        settings = dataclasses.replace(settings, server=server)
    step, params = parts.checkpoint_params(settings, workdir, None if step < 0 else step)
    engine = parts.engine_of(settings, workdir, name="serve")
    engine.start()
    try:
        await asyncio.wrap_future(engine.update_weights(params, str(step)))
        roots = parts.weight_roots_of(settings, workdir)
        tokenizer = parts.tokenizer_of(settings, workdir)
        options |= {"weight_roots": roots, "tokenizer": tokenizer}
        async with http.serve(engine, **options) as port:
            url = f"{'https' if options['tls_cert'] else 'http'}://{options['host']}:{port}"
            log.info("checkpoint %d of %s at %s", step, workdir, url)
            await asyncio.wrap_future(engine.stopped)
    finally:
        log.info("ending: requests that run are given up")
        engine.close(timeout_secs=CLOSE_TIMEOUT_SECS)
