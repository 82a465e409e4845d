"""The SGLang-JAX engine, with SGLang's weight updates and per-token weight versions added.

    python -m jaxrl_async.extras.sglang_jax.server --model-path DIR --port P [--weights-root DIR …]
        [flags of sgl_jax.launch_server]

/update_weights_from_disk reads from within --model-path and the --weights-root directories alone.

One process: HTTP and tokenizer manager on the main thread, sgl_jax's scheduler on a thread of its own
(upstream's --enable-single-process). New weights are read, checked and put on the devices by a third thread,
and swapped in by the scheduler thread between two steps: the same shapes and shardings, so nothing is compiled.
Old and new weights are on the devices together for that time.

It runs in the environment of SGLang-JAX and imports of this project its two neighbours, engine and checkpoints,
security, and of weights the files that import nothing else of it. It serves one host: no speculative decoding, LoRA,
quantization, disaggregation or multimodal models.
"""

import argparse
import asyncio
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from typing import Any

from jaxrl_async import security
from jaxrl_async.extras.sglang_jax import engine as sglang_jax_engine
from jaxrl_async.extras.sglang_jax.checkpoints import WeightsError
from jaxrl_async.extras.sglang_jax.engine import RequestError, WeightsLoader, end_process
from jaxrl_async.intake.pause_lease import PauseLease
from jaxrl_async.intake.prepared import Prepared
from jaxrl_async.versions import difference, protocol
from jaxrl_async.versions import layout as files

MAX_BODY_BYTES = 16 << 20  # of the routes here, but an upload
SGLANG_JAX_VERSION = "0.1.0rc0"  # The version whose internals engine.py relies on.

_PAUSES = ("/pause_generation", "/continue_generation")
_VERSION_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_FILE_NAME = re.compile(
    r"config\.json|manifest\.json|model\.safetensors\.index\.json"
    r"|[0-9A-Za-z][0-9A-Za-z._-]{0,127}\.(safetensors|difference)"
)
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


# Uploads.


class Uploads:
    """The files of the newest uploaded version, under one private directory.

    A file is there in full or not at all. Not thread-safe: it belongs to the event loop.
    """

    def __init__(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="sglang-jax-weights-"))
        self._version: str | None = None
        self._claims = itertools.count()

    def begin(self, version: str, file: str) -> pathlib.Path:
        """The path for the bytes of a file; removes an earlier version.

        Raises:
          RequestError: no name of a version, or of a file of a checkpoint.
        """
        if not _VERSION_NAME.fullmatch(version):
            raise RequestError(
                f"version {version!r:.80} is not of the form {_VERSION_NAME.pattern}"
            )
        if not _FILE_NAME.fullmatch(file):
            raise RequestError(f"file name {file!r:.80} is not of the form {_FILE_NAME.pattern}")
        if version != self._version:
            self._drop()
            self._version = version
            self._directory.mkdir()
        return self.root / f"part-{uuid.uuid4().hex}"

    def commit(self, part: pathlib.Path, version: str, file: str) -> None:
        """Makes a written file part of its version.

        Raises:
          RequestError: another version was begun since, or this one was loaded.
        """
        if version != self._version:
            raise RequestError(f"version {version}: the upload is of {self._version} now")
        part.rename(self._directory / file)

    def claim(self, version: str) -> pathlib.Path:
        """Hands over the directory of a version, which the caller removes.

        Raises:
          WeightsError: it was not uploaded.
        """
        if version != self._version:
            raise WeightsError(f"version {version} was not uploaded (uploaded: {self._version})")
        claimed = self.root / f"claimed-{next(self._claims)}"
        self._directory.rename(claimed)
        self._version = None
        return claimed

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def _directory(self) -> pathlib.Path:
        return self.root / f"version-{self._version}"

    def _drop(self) -> None:
        if self._version is not None:
            shutil.rmtree(self._directory)


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
    is_admin = path in _ADMIN_PATHS or path.startswith("/weights/")
    key = (admin_api_key or api_key) if is_admin else api_key
    if not key:
        return True
    return security.is_bearer(authorization, key)


class _KeyCheck:
    """ASGI middleware; not of Starlette's kind, which hides disconnects from handlers."""

    def __init__(self, app, *, api_key, admin_api_key):
        self._app = app
        self._keys = {"api_key": api_key, "admin_api_key": admin_api_key}

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"").decode("latin-1")
            if not is_allowed(scope["path"], given, **self._keys):
                return await _json({"error": "Unauthorized"}, 401)(scope, receive, send)
        await self._app(scope, receive, send)


class _PauseLeases:
    """ASGI middleware: begins and ends the lease of upstream's pauses."""

    def __init__(self, app, *, lease: PauseLease):
        self._app = app
        self._lease = lease

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] not in _PAUSES:
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(protocol.LEASE_HEADER.lower().encode())
        try:
            secs = protocol.read_lease(None if given is None else given.decode("latin-1"))
        except ValueError as error:
            return await _json({"error": {"message": str(error)}}, 400)(scope, receive, send)
        self._lease.end()

        async def watched(message):
            done = message["type"] == "http.response.start" and message["status"] == 200
            if done and scope["path"] == "/pause_generation":
                self._lease.begin(secs)
            await send(message)

        await self._app(scope, receive, watched)


# HTTP.


def _add_routes(app, manager, loader: WeightsLoader, uploads: Uploads, roots: list[str]) -> None:
    """SGLang's routes that upstream lacks, or has in another form."""
    from fastapi import Request
    from sgl_jax.srt.managers.io_struct import ContinueGenerationReqInput

    lease = PauseLease(lambda: manager.continue_generation(ContinueGenerationReqInput()))
    app.add_middleware(_PauseLeases, lease=lease)
    routes = _Routes(manager, loader, uploads, roots, lease)
    ours = [
        ("GET", "/model_info", routes.model_info),
        ("GET", "/get_model_info", routes.model_info),
        ("POST", "/abort_request", routes.abort_request),
        ("POST", "/update_weights_from_disk", routes.update_from_disk),
        ("POST", "/update_weights_from_upload", routes.update_from_upload),
        ("PUT", "/weights/{version}/{file:path}", routes.put_weights),
        ("POST", "/weights/prepare", routes.prepare_weights),
    ]
    paths = {path for _, path, _ in ours}
    upstream = {getattr(route, "path", None): route for route in app.router.routes}
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") not in paths]
    for method, path, handler in ours:
        app.add_route(path, handler, methods=[method])
    app.add_api_route("/server_info", upstream["/get_server_info"].endpoint, methods=["GET"])

    async def refuse(request: Request, error: Exception):
        return _json({"error": {"message": str(error)}}, 400)

    app.add_exception_handler(RequestError, refuse)


class _Routes:
    def __init__(self, manager, loader, uploads, roots, lease):
        self._lease = lease
        self._manager = manager
        self._roots = roots
        self._loader = loader
        self._uploads = uploads
        self._writers = files.Writers()
        self._prepared = Prepared()
        self._copy = difference.Copy(uploads.root)

    async def model_info(self, request):
        """Answers at once, in any state of the scheduler."""
        manager = self._manager
        config = manager.model_config.hf_config
        return _json(
            {
                "model_path": manager.model_path,
                "tokenizer_path": manager.server_args.tokenizer_path,
                "is_generation": manager.is_generation,
                "preferred_sampling_params": manager.server_args.preferred_sampling_params,
                "weight_version": manager.weight_version,
                "weight_digest": manager.weight_digest,
                "difference_base": self._copy.digest,
                "vocab_size": manager.vocab_size,
                "architectures": getattr(config, "architectures", None),
                "num_hidden_layers": getattr(config, "num_hidden_layers", None),
                "hidden_size": getattr(config, "hidden_size", None),
                "intermediate_size": getattr(config, "intermediate_size", None),
                "max_prompt_tokens": manager.max_prompt_tokens,
                "num_expired_pauses": self._lease.num_expired,
            }
        )

    async def abort_request(self, request):
        body = await _read(request)
        rid = _field(body, "rid", str, default="")
        await self._manager.abort(rid, _field(body, "abort_all", bool, default=False))
        return _json({})

    async def prepare_weights(self, request):
        """Loads a version beside the served one, during generation; an update to it is then a swap.

        It comes from model_path, or from an upload, whose files are removed then. `difference` names a file there that
        leads to it from the version that was kept last; `keep` keeps this one for the next.
        """
        body = await _read(request)
        version = _field(body, "weight_version", str)
        digest = _field(body, "weight_digest", str)
        claimed = None
        try:
            lease_secs = protocol.read_lease(request.headers.get(protocol.LEASE_HEADER))
            self._writers.check(body.get("writer"))
            if "model_path" in body:
                directory = self._confined(body)
            else:
                directory = claimed = self._uploads.claim(version)
            name = _field(body, "difference", str, default="")
            if name and not _FILE_NAME.fullmatch(name):
                raise RequestError(f"difference must be a file's name, got {name!r:.80}")
            source = difference.Source(
                pathlib.Path(directory),
                name,
                _field(body, "keep", bool, default=False),
                is_upload=claimed is not None,
            )
            load = functools.partial(self._copy.load, source, digest, self._load)
            await self._prepared.prepare(version, digest, load, lease_secs)
        except difference.DifferenceError as error:
            return _refusal(error, protocol.NO_DIFFERENCE)
        except ValueError as error:  # of WeightsError's kind too
            return _refusal(error)
        finally:
            if claimed is not None:
                await asyncio.to_thread(shutil.rmtree, claimed, ignore_errors=True)
        return _json({"success": True, "message": f"version {version} is prepared"})

    async def _load(self, path):
        return await self._manager.load_weights(functools.partial(self._loader, path))

    def _confined(self, body) -> str:
        """The directory in model_path; raises ValueError for one that weights may not come from."""
        path = _field(body, "model_path", str)
        try:
            return str(security.confined(path, self._roots))
        except ValueError as error:
            raise ValueError(f"model_path {error}") from None

    async def update_from_disk(self, request):
        body = await _read(request)
        try:
            path = self._confined(body)
        except RequestError:
            raise
        except ValueError as error:
            return _refusal(error)
        answer = await self._update(body, functools.partial(self._loader, path))
        if answer.status_code == 200:
            self._manager.model_path = path
        return answer

    async def update_from_upload(self, request):
        body = await _read(request)
        version = _field(body, "weight_version", str)
        if self._prepared.version == version:  # Its files are gone.
            return await self._update(body, None)
        try:
            directory = self._uploads.claim(version)
        except WeightsError as error:
            return _refusal(error)
        try:
            return await self._update(body, functools.partial(self._loader, directory))
        finally:
            await asyncio.to_thread(shutil.rmtree, directory)

    async def _update(self, body, load):
        version = _field(body, "weight_version", str)
        try:
            self._writers.check(body.get("writer"))
        except ValueError as error:
            return _refusal(error)
        weights = self._prepared.take(version, body.get("weight_digest"))
        if weights is None and load is None:
            return _refusal(f"version {version} was prepared with another digest")
        try:
            num_held = await self._manager.update_weights(
                load if weights is None else lambda: weights,
                version=version,
                flush_cache=_field(body, "flush_cache", bool, default=True),
                abort_all_requests=_field(body, "abort_all_requests", bool, default=False),
            )
        except WeightsError as error:
            return _refusal(error)
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        return _json({"success": True, "message": message, "num_paused_requests": num_held})

    async def put_weights(self, request):
        version, file = request.path_params["version"], request.path_params["file"]
        part = self._uploads.begin(version, file)
        try:
            with open(part, "wb") as stream:
                async for chunk in request.stream():
                    await asyncio.to_thread(stream.write, chunk)
                num_bytes = stream.tell()
            self._uploads.commit(part, version, file)
        finally:
            part.unlink(missing_ok=True)
        return _json({"success": True, "num_bytes": num_bytes})


async def _read(request) -> dict[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(f"a body has at most {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:  # The last of "[[[[…".
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


_REQUIRED = object()


def _field(body, name, kind, default=_REQUIRED):
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or value == "":
        raise RequestError(f"{name} must be a {kind.__name__}, got {value!r:.80}")
    return value


def _refusal(error, status=400):
    log.error("Weights refused: %s", error)
    return _json({"success": False, "message": str(error), "num_paused_requests": 0}, status)


def _json(content, status_code=200):
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code)


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
    uploads = Uploads()
    sglang_jax_engine.at_end.append(uploads.close)
    http_server.set_global_state(http_server._GlobalState(manager, templates, info))
    app = http_server.app
    app.server_args = server_args
    loader = WeightsLoader(scheduler.tp_worker.model_runner, server_args.model_path, mappings)
    _add_routes(app, manager, loader, uploads, [server_args.model_path, *roots])
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
