"""The preflight of an inference server: one that cannot take part in a run is refused before the run has cost anything.

It reads what a server says of itself, asks for one token, and changes nothing but to end a pause. A server that does
not answer yet is not refused. Versions, pushes and the states of servers are the publisher's.
"""

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import ServerError, UnfitServerError

TIMEOUT_SECS = 60.0  # of the whole preflight of one server


@dataclasses.dataclass(frozen=True)
class Expected:
    """The needs of a run, by the names of its settings."""

    config: Mapping[str, Any]  # config.json of the model
    max_total_tokens: int  # server.max_total_tokens: prompt + completion of one request
    transport: str  # weights.transport
    api_key_env: str  # server.api_key_env, for messages
    admin_api_key_env: str  # server.admin_api_key_env, for messages
    adapters: "Adapters | None" = None  # of a run that trains them


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a run."""

    rank: int  # model.lora.rank
    alpha: float
    targets: tuple[str, ...]
    base_dtype: str
    has_base_files: bool  # whether model.path is the base
    kept: int  # versions that a server holds at once


def kept_adapters(max_staleness: int) -> int:
    """Versions of an adapter that a server keeps.

    While a group is sampled, at most max_staleness + 1 versions follow the one that it began with: an older one has no
    request left, which its removal would wait for.
    """
    return max_staleness + 2


async def preflight(
    client: InferenceClient,
    address: str,
    expected: Expected,
    *,
    timeout_secs: float = TIMEOUT_SECS,
) -> None:
    """Refuses a server that takes control calls and cannot take part in the run.

    Compared are keys, routes of weights, architecture, layers, vocabulary, context length, and the log-probs and
    versions of a sampled token. A server's own config.json is compared too, where this machine can read it.

    Args:
      client: has the run's keys.
      address: "http://host:port", where the server takes control calls.
      expected: the run's needs.
      timeout_secs: bound on the whole.

    Raises:
      UnfitServerError: the server answers, and waiting would not help; names the setting and what to do.
      ServerError: it does not answer, or not yet.
    """
    server = _Server(client, address, expected, time.monotonic() + timeout_secs)
    info = await server.model_info()
    await server.check_admin_key()
    ours = "weight_digest" in info
    if expected.adapters:
        await server.check_adapters(info, ours)
    await server.check_routes(ours, has_sidecar=bool(info.get("hands_on")))
    server.check_model(info)
    await server.check_vocabulary(info)
    await server.check_context(info)
    # Ours compare names and shapes before they load, and sample nothing before the first push.
    if not ours:
        await server.check_tensors()
        await server.check_answer()


async def preflight_router(
    client: InferenceClient,
    address: str,
    expected: Expected,
    *,
    timeout_secs: float = TIMEOUT_SECS,
) -> None:
    """Refuses an address that takes requests alone, as a router does. Arguments and errors as of `preflight`."""
    await _Server(client, address, expected, time.monotonic() + timeout_secs).check_answer()


class _Server:
    """The questions to one server, within one deadline."""

    def __init__(self, client, address, expected: Expected, deadline):
        self._client, self._address = client, address
        self._expected = expected
        self._deadline = deadline

    def _call(self) -> dict[str, float]:
        return {"timeout_secs": max(self._deadline - time.monotonic(), 1e-3)}

    def _unfit(self, route: str, reason: str) -> UnfitServerError:
        return UnfitServerError(self._address, route, reason)

    def _wrong_key(self, error: ServerError, setting: str, flag: str) -> UnfitServerError:
        named = getattr(self._expected, setting.removeprefix("server."))
        if named:
            advice = f"the key in {named} ({setting}) is not its {flag}"
        else:
            advice = f"it has a key ({flag}): set {setting} to the environment variable with it"
        return self._unfit(error.route, f"{error.reason}: {advice}")

    async def model_info(self) -> Mapping[str, Any]:
        try:
            return await self._client.model_info(self._address, **self._call())
        except ServerError as error:
            if error.status in (401, 403):
                raise self._wrong_key(error, "server.api_key_env", "--api-key") from error
            if error.status == 404:
                raise self._unfit(error.route, await self._kind()) from error
            raise

    async def _kind(self) -> str:
        """The reason of a server without /model_info, with the remedy for its kind."""
        info = await self._get("/get_server_info")
        if "router_manager" in info or "workers_count" in info:
            return (
                "this is a router, which passes on requests alone: put it in server.addresses, and the servers "
                "behind it in server.control_addresses"
            )
        if any("precompile" in key for key in info):
            return (
                "this is a plain SGLang-JAX, which has no routes for weights: start "
                "jaxrl_async/extras/sglang_jax/server.py with the same flags in place of sgl_jax.launch_server"
            )
        if version := info.get("version"):
            return f"SGLang {version} has no such route: install 0.5.23, which is tested"
        return "no such route: this is no inference server with SGLang's API"

    async def _get(self, route: str) -> Mapping[str, Any]:
        """The answer of an information route; {} where there is none."""
        try:
            return await self._client.get(self._address, route, **self._call())
        except ServerError as error:
            if error.retryable:
                raise
            return {}

    async def check_admin_key(self) -> None:
        """Also ends the pause that a killed learner left behind."""
        try:
            await self._client.continue_(self._address, **self._call())
        except ServerError as error:
            if error.status in (401, 403):
                raise self._wrong_key(
                    error, "server.admin_api_key_env", "--admin-api-key"
                ) from error
            if error.status in (404, 405):
                reason = "it has no control routes: SGLang 0.5.23 is tested"
                raise self._unfit(error.route, reason) from error
            raise

    async def check_routes(self, ours: bool, *, has_sidecar: bool) -> None:
        transport = self._expected.transport
        routes = _ROUTES[ours] if ours or not self._expected.adapters else _ADAPTER_ROUTES
        if has_sidecar and routes is _ROUTES[False]:
            routes = routes | _SIDECAR_ROUTES
        if transport in _OF_OTHERS[ours] - routes.keys():
            raise self._unfit(
                "/model_info",
                f"it takes no weights by weights.transport {transport!r}: set it to {' or '.join(map(repr, routes))}",
            )
        for route in routes.get(transport, ()):
            if not await self._client.has_route(self._address, route, **self._call()):
                raise self._unfit(
                    route,
                    f"it has no such route, which weights.transport {transport!r} needs: SGLang 0.5.23 is tested; "
                    "in front of SGLang-JAX, start jaxrl_async/extras/sglang_jax/server.py",
                )

    def check_model(self, info: Mapping[str, Any]) -> None:
        """Compares the model as the server reports it, and the config.json that it names."""
        config = self._expected.config
        wanted, found = config.get("architectures"), info.get("architectures")
        if found and wanted and not set(found) & set(wanted):
            raise self._other_model("/model_info", f"architecture {found[0]}", wanted[0])
        self._compare("/model_info", info)
        self._compare("/model_info", _read_json(info.get("model_path")))

    def _compare(self, route: str, found: Mapping[str, Any]) -> None:
        for key in _SHAPE:
            wanted = self._expected.config.get(key)
            has = found.get(key)
            if None not in (has, wanted) and has != wanted:
                raise self._other_model(route, f"{key} {has}", wanted)

    def _other_model(self, route: str, found: str, wanted: Any) -> UnfitServerError:
        return self._unfit(
            route,
            f"it has another model: {found}, the run's has {wanted}. Start it with the model of this run: its "
            "model.path, or the directory that `python -m jaxrl_async init --out=DIR` writes",
        )

    async def check_vocabulary(self, info: Mapping[str, Any]) -> None:
        found = await self._client.vocab_size(self._address, info, **self._call())
        wanted = self._expected.config["vocab_size"]
        if found is not None and found != wanted:
            raise self._other_model("/generate", f"a vocabulary of {found} tokens", wanted)

    async def check_context(self, info: Mapping[str, Any]) -> None:
        limits = {"max_total_tokens": info.get("max_total_tokens")}
        if limits["max_total_tokens"] is None:
            server = await self._get("/server_info")
            limits = {
                "--context-length": server.get("context_length") or await self._model_length(),
                "--max-total-tokens": server.get("max_total_num_tokens"),
            }
        wanted = self._expected.max_total_tokens
        for flag, limit in limits.items():
            if isinstance(limit, int) and limit < wanted:
                raise self._unfit(
                    "/server_info",
                    f"it takes requests of {limit} tokens ({flag}), and server.max_total_tokens is {wanted}: start "
                    f"it with more, or set server.max_total_tokens to {limit} or less",
                )

    async def _model_length(self) -> int | None:
        models = (await self._get("/v1/models")).get("data") or [{}]
        return models[0].get("max_model_len")

    async def check_adapters(self, info: Mapping[str, Any], ours: bool) -> None:
        wanted = self._expected.adapters
        if ours and "lora" not in info:
            raise self._unfit(
                "/model_info",
                "it takes no adapters, as SGLang-JAX does not: use SGLang or embedded servers, or model.lora.rank = 0",
            )
        if ours:
            found = info["lora"] or {}
            for key in ("rank", "alpha", "targets", "base_dtype"):
                has, want = found.get(key), getattr(wanted, key)
                if has != (list(want) if key == "targets" else want):
                    raise self._unfit(
                        "/model_info", f"its model.lora.{key} is {has}, the run's is {want}"
                    )
            return
        if not wanted.has_base_files:
            raise self._unfit(
                "/model_info",
                "the base of the adapters is made by the run itself, and SGLang takes adapters alone: set model.path, "
                "without a warm start, or use embedded servers",
            )
        server = await self._get("/server_info")
        if not server.get("enable_lora"):
            raise self._unfit(
                "/server_info", f"it takes no adapters: start it with {_flags(wanted)}"
            )
        targets = server.get("lora_target_modules") or ()
        lacks = set(wanted.targets) - set(targets) if "all" not in targets else set()
        rank, loaded = server.get("max_lora_rank") or 0, server.get("max_loaded_loras")
        if lacks or rank < wanted.rank or (loaded is not None and loaded <= wanted.kept):
            raise self._unfit(
                "/server_info",
                f"it takes adapters of rank ≤ {rank} for {', '.join(sorted(targets))}, {loaded} at a time: start it "
                f"with {_flags(wanted)}",
            )

    async def check_tensors(self) -> None:
        """Counts the layers by the names of SGLang's tensors: a push of another count loads, and serves garbage."""
        server = await self._get("/server_info")
        if server.get("pp_size", 1) != 1:  # Each rank has a part of the layers.
            return
        names = await self._client.checksums(self._address, **self._call())
        layers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
        wanted = self._expected.config["num_hidden_layers"]
        if layers and len(layers) != wanted:
            raise self._other_model("/weights_checker", f"{len(layers)} layers", wanted)

    async def check_answer(self) -> None:
        """Samples one token, whose log-prob and version must come with it."""
        try:
            answer = await self._client.sample_one(self._address, **self._call())
        except ServerError as error:
            if error.status in (401, 403):
                raise self._wrong_key(error, "server.api_key_env", "--api-key") from error
            if error.retryable:
                raise
            raise self._unfit(error.route, error.reason) from error
        meta = answer.get("meta_info") or {}
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            raise ServerError(self._address, "/generate", "the request was aborted", retryable=True)
        triples = meta.get("output_token_logprobs")
        if not (isinstance(triples, list) and triples and len(triples[-1]) >= 2):
            raise self._unfit("/generate", "its answers have no output_token_logprobs")
        if not meta.get("weight_versions"):
            raise self._unfit(
                "/generate",
                "its tokens carry no weight_versions: SGLang 0.5.23 is tested; in front of SGLang-JAX, start "
                "jaxrl_async/extras/sglang_jax/server.py",
            )


def _flags(adapters: Adapters) -> str:
    return (
        f"--enable-lora --max-lora-rank={adapters.rank} --lora-target-modules {' '.join(adapters.targets)} "
        f"--max-loaded-loras={adapters.kept + 1}"
    )


def _read_json(directory: Any) -> Mapping[str, Any]:
    """The config.json in a directory; {} where this machine cannot read it."""
    try:
        found = json.loads((pathlib.Path(directory) / "config.json").read_text("utf-8"))
    except (OSError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# Of config.json: the sizes of the tensors.
_SHAPE = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
)
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")
# Whether a server is this project's → transport → its routes that refuse an empty request, and change nothing.
_ROUTES = {
    True: {"disk": ("/update_weights_from_disk",), "stream": ("/update_weights_from_upload",)},
    False: {
        "disk": ("/update_weights_from_disk", "/update_weight_version"),
        "tensor": ("/update_weights_from_tensor", "/end_weight_update", "/update_weight_version"),
        "distributed": (
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/update_weight_version",
        ),
    },
}
_SIDECAR_ROUTES = {"stream": ("/update_weights_from_upload", "/update_weight_version")}
_ADAPTER_ROUTES = {
    "disk": ("/load_lora_adapter", "/update_weight_version"),
    "tensor": ("/load_lora_adapter_from_tensors", "/update_weight_version"),
}
_OF_OTHERS = {ours: _ROUTES[not ours].keys() - _ROUTES[ours].keys() for ours in (True, False)}
