"""The SGLang-JAX engine, with SGLang's weight updates and per-token weight versions added.

    python -m jaxrl_async.extras.sglang_jax.server --model-path DIR --port P [--weights-root DIR …]
        [flags of sgl_jax.launch_server]

/update_weights_from_disk reads from within --model-path and the --weights-root directories alone.

One process: HTTP and tokenizer manager on the main thread, sgl_jax's scheduler on a thread of its own
(upstream's --enable-single-process). New weights are read, checked and put on the devices by a third thread,
and swapped in by the scheduler thread between two steps: the same shapes and shardings, so nothing is compiled.
Old and new weights are on the devices together for that time.

It runs in the environment of SGLang-JAX, and of this project it imports its two neighbours, engine and checkpoints, and
the rooms intake, versions and security. It serves one host: no speculative decoding, LoRA, quantization,
disaggregation or multimodal models.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl_async import security
from jaxrl_async.extras.sglang_jax import engine as sglang_jax_engine
from jaxrl_async.extras.sglang_jax.engine import Weights, WeightsLoader, end_process
from jaxrl_async.intake.pause_lease import PauseLease
from jaxrl_async.intake.receiver import Answer, Receiver, read_body, refused
from jaxrl_async.versions import protocol
from jaxrl_async.versions.protocol import RequestError, Update

MAX_BODY_BYTES = 16 << 20  # of the routes here, but an upload
SGLANG_JAX_VERSION = "0.1.0rc0"  # The version whose internals engine.py relies on.

# SGLang's routes of level "admin optional".
_ADMIN_PATHS = {
    "/abort_request",
    "/configure_logging",
    "/continue_generation",
    "/flush_cache",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_internal_state",
    "/start_profile",
    "/start_trace",
    "/stop_profile",
    "/stop_trace",
    "/update_weights_from_disk",
    "/update_weights_from_upload",
}

log = logging.getLogger(__name__)


# Keys.


def is_allowed(
    path: str, authorization: str, *, api_key: str | None, admin_api_key: str | None
) -> bool:
    """SGLang's rule: with an admin key, control routes take it alone; all other routes take the API key.

    Args:
      path: of the URL. /health… and /metrics… are always allowed.
      authorization: the header, "" without one.
      api_key: None leaves other routes open.
      admin_api_key: None leaves the control routes to the API key.
    """
    if path.startswith(("/health", "/metrics")):
        return True
    key = (admin_api_key or api_key) if _is_control(path) else api_key
    if not key:
        return True
    return security.is_bearer(authorization, key)


def _is_control(path: str) -> bool:
    return path in _ADMIN_PATHS or path.startswith("/weights/")


class _KeyCheck:
    """ASGI middleware; not of Starlette's kind, which hides disconnects from handlers."""

    def __init__(self, app, *, api_key, admin_api_key):
        self._app = app
        self._keys = {"api_key": api_key, "admin_api_key": admin_api_key}

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            headers = {
                name.decode("latin-1").title(): value.decode("latin-1")
                for name, value in scope["headers"]
            }
            if not is_allowed(scope["path"], headers.get("Authorization", ""), **self._keys):
                return await _json(401, {"error": "Unauthorized"})(scope, receive, send)
            comes_from_a_page = security.may_come_from_a_page(scope["method"], headers)
            if _is_control(scope["path"]) and comes_from_a_page:
                return await _json(*refused(security.WANTS_JSON, 415))(scope, receive, send)
        await self._app(scope, receive, send)


class _PauseLeases:
    """ASGI middleware: begins and ends the lease of upstream's pauses."""

    def __init__(self, app, *, lease: PauseLease):
        self._app = app
        self._lease = lease

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] not in (protocol.PAUSE, protocol.CONTINUE):
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(protocol.LEASE_HEADER.lower().encode())
        try:
            secs = protocol.read_lease(None if given is None else given.decode("latin-1"))
        except ValueError as error:
            return await _json(*refused(error))(scope, receive, send)

        async def watched(message):
            if message["type"] == "http.response.start" and message["status"] == 200:
                if scope["path"] == protocol.PAUSE:
                    self._lease.begin(secs)
                else:  # A pause that goes on keeps its lease.
                    self._lease.end()
            await send(message)

        await self._app(scope, receive, watched)


# HTTP.


def _add_routes(app: Any, routes: "Routes") -> None:
    """SGLang's routes that upstream lacks, or has in another form."""
    from fastapi import Request

    receiver = routes.receiver
    app.add_middleware(_PauseLeases, lease=receiver.lease)
    file_route = protocol.file_route("{version}", "{file}")
    ours = [
        ("GET", protocol.MODEL_INFO, routes.model_info),
        ("GET", "/get_model_info", routes.model_info),
        ("POST", "/abort_request", routes.abort_request),
        ("POST", protocol.UPDATE_FROM_DISK, _asking(receiver.update_from_disk)),
        ("POST", protocol.UPDATE_FROM_UPLOAD, _asking(receiver.update_from_upload)),
        ("POST", protocol.PREPARE, _asking(receiver.prepare, protocol.LEASE_HEADER)),
        ("POST", protocol.FETCH, _asking(receiver.fetch)),
        ("PUT", file_route, routes.receive),
        ("GET", file_route, routes.hand_on),
    ]
    paths = {path for _, path, _ in ours}
    upstream = {getattr(route, "path", None): route for route in app.router.routes}
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") not in paths]
    for method, path, handler in ours:
        app.add_route(path, handler, methods=[method])
    app.add_api_route("/server_info", upstream["/get_server_info"].endpoint, methods=["GET"])

    async def refuse(request: Request, error: Exception):
        return _json(*refused(error))

    app.add_exception_handler(RequestError, refuse)


class Routes:
    """The routes over upstream's tokenizer manager, which is the engine of their receiver."""

    def __init__(self, manager: Any, loader: WeightsLoader, roots: list[str], key: str | None):
        self._manager, self._loader = manager, loader
        self.receiver = Receiver(self, roots=roots, key=key)

    # An engine of a receiver.

    async def load(self, directory: pathlib.Path) -> Weights:
        return await self._manager.load_weights(functools.partial(self._loader, directory))

    async def swap(self, weights: Weights, update: Update) -> int:
        return await self._update(lambda: weights, update)

    async def update(self, directory: pathlib.Path, update: Update) -> int:
        return await self._update(functools.partial(self._loader, directory), update)

    async def _update(self, load: Callable[[], Weights], update: Update) -> int:
        num_held = await self._manager.update_weights(load, update)
        if isinstance(update, protocol.DiskUpdate):
            self._manager.model_path = update.model_path
        return num_held

    async def resume(self) -> None:
        from sgl_jax.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())

    # Routes.

    async def model_info(self, request):
        """Answers at once, in any state of the scheduler."""
        manager = self._manager
        config = manager.model_config.hf_config
        info = {
            "model_path": manager.model_path,
            "tokenizer_path": manager.server_args.tokenizer_path,
            "is_generation": manager.is_generation,
            "preferred_sampling_params": manager.server_args.preferred_sampling_params,
            "weight_version": manager.weight_version,
            "weight_digest": manager.weight_digest,
            **self.receiver.info(),
            "vocab_size": manager.vocab_size,
            "architectures": getattr(config, "architectures", None),
            "num_hidden_layers": getattr(config, "num_hidden_layers", None),
            "hidden_size": getattr(config, "hidden_size", None),
            "intermediate_size": getattr(config, "intermediate_size", None),
            "max_prompt_tokens": manager.max_prompt_tokens,
            "num_expired_pauses": self.receiver.lease.num_expired,
        }
        return _json(200, info)

    async def abort_request(self, request):
        body = await _read(request)
        rid, abort_all = body.get("rid") or "", body.get("abort_all") or False
        if not (isinstance(rid, str) and isinstance(abort_all, bool)):
            raise RequestError(
                f"rid must be a string and abort_all true or false, got {body!r:.80}"
            )
        await self._manager.abort(rid, abort_all)
        return _json(200, {})

    async def receive(self, request):
        names = request.path_params["version"], request.path_params["file"]
        num_bytes = request.headers.get("Content-Length")
        num_bytes = None if num_bytes is None else int(num_bytes)
        sha256 = request.headers.get(protocol.SHA256_HEADER)
        return _json(*await self.receiver.receive(*names, num_bytes, sha256, request.stream()))

    async def hand_on(self, request):
        from starlette.responses import StreamingResponse

        names = request.path_params["version"], request.path_params["file"]
        reading = await self.receiver.hand_on(*names)
        if isinstance(reading, tuple):
            return _json(*reading)
        # Where no more chunks come, the connection ends short of its Content-Length.
        headers = {"Content-Length": str(reading.num_bytes)}
        return StreamingResponse(reading.chunks, headers=headers)


def _asking(call: Callable[..., Awaitable[Answer]], *headers: str) -> Callable:
    """A handler that calls with the body and these headers."""

    async def handler(request):
        return _json(*await call(await _read(request), *map(request.headers.get, headers)))

    return handler


async def _read(request) -> dict[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(f"a body has at most {MAX_BODY_BYTES} bytes")
    return read_body(bytes(raw))


def _json(status: int, content: dict[str, Any]) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status)


# Start.


@dataclasses.dataclass(frozen=True)
class Keys:
    """Bearer tokens; None where a level is open. Never printed."""

    api_key: str | None = dataclasses.field(repr=False)
    admin_api_key: str | None = dataclasses.field(repr=False)


def take_keys(argv: list[str], environ: dict[str, str]) -> tuple[Keys, list[str]]:
    """Takes the keys out of the arguments and the environment, so that they are neither logged nor inherited.

    Args:
      argv: --api-key and --admin-api-key count before the environment.
      environ: SGLANG_API_KEY and SGLANG_ADMIN_API_KEY are removed from it.

    Returns:
      The keys, and the other arguments.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("api_key", "admin_api_key"):
        default = environ.pop(f"SGLANG_{name.upper()}", None)
        parser.add_argument(f"--{name.replace('_', '-')}", default=default)
    found, rest = parser.parse_known_args(argv)
    return Keys(found.api_key or None, found.admin_api_key or None), rest


def take_roots(argv: list[str]) -> tuple[list[str], list[str]]:
    """Takes every --weights-root out of the arguments; returns them, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--weights-root", action="append", default=[])
    found, rest = parser.parse_known_args(argv)
    return found.weights_root, rest


def check_version() -> None:
    """Raises SystemExit, naming both versions, when sgl_jax is another version than the supported one."""
    try:
        found = importlib.metadata.version("sglang-jax")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    if found != SGLANG_JAX_VERSION:
        raise SystemExit(f"sglang-jax must be {SGLANG_JAX_VERSION}, it is {found}")


def main() -> None:
    """Serves until SIGTERM, or until a part of the engine dies (exit code 1)."""
    keys, argv = take_keys(sys.argv[1:], os.environ)
    check_version()
    _end_on_signals()
    import setproctitle

    # Otherwise `ps` would show the keys.
    setproctitle.setproctitle("sglang-jax-server")
    code = 1
    try:
        _serve(keys, argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        log.exception("The server died.")
    end_process(code)


def _end_on_signals() -> None:
    """Ends the process at SIGTERM and SIGINT, from a thread of its own, even when other threads hang."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def wait():
        signum = signal.sigwait(signals)
        log.warning("%s: the end.", signal.Signals(signum).name)
        end_process(0)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _serve(keys: Keys, argv: list[str]) -> None:
    import uvicorn
    from sgl_jax.srt.entrypoints import engine, http_server
    from sgl_jax.srt.managers import scheduler as upstream
    from sgl_jax.srt.managers.template_manager import TemplateManager  # noqa: F401
    from sgl_jax.srt.server_args import PortArgs, ServerArgs

    roots, argv = take_roots(argv)
    server_args = ServerArgs.from_cli(argv)
    server_args.enable_single_process = True
    _refuse_unsupported(server_args)
    listener = _bind(server_args.host, server_args.port, keys.api_key)
    upstream.Scheduler = type(
        "Scheduler", (sglang_jax_engine.SchedulerMixin, upstream.Scheduler), {}
    )
    engine.TokenizerManager = type(
        "TokenizerManager", (sglang_jax_engine.TokenizerManagerMixin, engine.TokenizerManager), {}
    )
    upstream.ScheduleBatch._merge_cache_loc = sglang_jax_engine.copied_result(
        upstream.ScheduleBatch._merge_cache_loc
    )
    with sglang_jax_engine.recorded_mappings() as mappings:
        # With given ports upstream does not log the arguments.
        manager, templates, info = engine._launch_threads(
            server_args, PortArgs.init_new(server_args)
        )
    scheduler = info.pop("scheduler")
    manager.attach(scheduler)
    http_server.set_global_state(http_server._GlobalState(manager, templates, info))
    app = http_server.app
    app.server_args = server_args
    loader = WeightsLoader(scheduler.tp_worker.model_runner, server_args.model_path, mappings)
    key = keys.admin_api_key or keys.api_key
    routes = Routes(manager, loader, [server_args.model_path, *roots], key)
    routes.receiver.open()
    sglang_jax_engine.at_end.append(routes.receiver.remove_files)
    _add_routes(app, routes)
    app.add_middleware(_KeyCheck, **dataclasses.asdict(keys))
    http_server.set_uvicorn_logging_configs()
    config = uvicorn.Config(
        app, log_level=server_args.log_level_http or server_args.log_level, timeout_keep_alive=5
    )
    uvicorn.Server(config).run(sockets=[listener])


def _refuse_unsupported(args) -> None:
    unsupported = {
        "--nnodes": args.nnodes > 1,
        "--speculative-algorithm": args.speculative_algorithm,
        "--enable-lora": args.enable_lora or args.lora_paths,
        "--quantization-config-path": args.quantization_config_path,
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--pd-disaggregation": args.pd_disaggregation,
        "--multimodal": args.multimodal,
    }
    if used := [flag for flag, value in unsupported.items() if value]:
        raise SystemExit(f"weights cannot be updated with {', '.join(used)}")


def _bind(host: str, port: int, api_key: str | None) -> socket.socket:
    """Binds the port before the model is loaded, so that a taken one is found at once."""
    try:
        security.check_listener("the server", f"{host}:{port}", api_key, "SGLANG_API_KEY")
    except ValueError as error:
        raise SystemExit(str(error)) from None
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SystemExit(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


if __name__ == "__main__":
    main()
