"""vLLM ≥ 0.32, in its development mode: tokens in, tokens out, and weights from a directory that it can see.

With a sidecar before it (`extras.relay`) the weights come in pieces, and its control routes ask for a key.

It is compared: on a CPU its own reload changes a part of the weights alone. Adapters are loaded without a pause.

A vLLM that takes part is started with FLAGS; docs/servers.md says what each is for.
"""

import functools
import io
import os
import re
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxrl_async.security import is_loopback
from jaxrl_async.servers import answers, port
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.completions import (
    checked_completion,
    integers,
    known_routes,
    read_base64,
    read_scores,
)
from jaxrl_async.servers.kinds.checks import Checks
from jaxrl_async.servers.kinds.compared import MODELS, Compared
from jaxrl_async.servers.kinds.intake import Intake
from jaxrl_async.servers.kinds.sglang_api import ROUTES_FLAG
from jaxrl_async.types import ROUTE_DTYPES, Record
from jaxrl_async.versions import protocol

GENERATE = "/inference/v1/generate"
PREFIX = "generate-tokens-"  # which it puts before the ids of requests
ABORT = "/inference/v1/abort_requests"
PAUSE, RESUME = "/pause", "/resume"
RPC = "/collective_rpc"
CHECKSUMS = "/weight_checker"
RENAME = "/update_weight_version"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
SETTINGS = "/server_info"
OLDEST = (0, 32)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of which it takes one as the largest
EXTENSION = "jaxrl_async.extras.vllm.Extension"
FLAGS = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs "
    f"--worker-extension-cls {EXTENSION}"
)


class Vllm(Compared):
    """One vLLM server."""

    INFO = "/weight_info"
    CHECKSUMS = CHECKSUMS
    WAYS: ClassVar = {"disk": (CHECKSUMS, RENAME, RPC)}
    ADAPTER_WAYS: ClassVar = {"disk": (LOAD_ADAPTER, RENAME)}

    def __init__(self, client: InferenceClient, address: str):
        super().__init__(client, address)
        self._running: set[str] = set()  # ids of this process's requests

    @classmethod
    def recognises(cls, info: Mapping[str, Any]) -> bool:
        """It alone has the route."""
        return protocol.WEIGHT_VERSION in info

    # Sampling.

    async def generate(self, request: port.Request, *, timeout_secs: float) -> port.Completion:
        """Samples one completion; with adapters, by the newest, whose name its tokens get."""
        adapter, left = None, timeout_secs
        if request.adapters:
            adapter, left = await self.newest_adapter(request.run_id, timeout_secs)
        body = {"request_id": request.rid, "token_ids": request.input_ids}
        body |= {"sampling_params": _sampling(request)} | ({"model": adapter} if adapter else {})
        self._running.add(request.rid)
        try:
            bound = {"max_bytes": answers.max_bytes(request)}
            answer = await self.post(GENERATE, body, left, is_control=False, **bound)
        finally:
            self._running.discard(request.rid)
        with self.reading(GENERATE, f"answer to {request.rid}", retryable=True):
            return _completion(answer, request, adapter)

    async def score(self, tokens: Sequence[int], first: int, *, timeout_secs: float) -> np.ndarray:
        """Log-probs of a row's tokens; see `port.Teacher`. One token is sampled, which it does not do without."""
        body = {"request_id": uuid.uuid4().hex, "token_ids": list(tokens)}
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        body |= {"sampling_params": sampling | {"detokenize": False}}
        answer = await self.post(GENERATE, body, timeout_secs, is_control=False)
        with self.reading(GENERATE, "scores", retryable=True):
            found = zip(answer["prompt_logprobs"], tokens, strict=True)
            entries = [(by_id[str(token)]["logprob"], token) for by_id, token in [*found][first:]]
            return read_scores(entries, tokens[first:])

    async def abort(self, rid: str | None, *, timeout_secs: float) -> None:
        """Ends every request of this process whose id starts with `rid`, or all of the server when it is None."""
        if rid is None:
            await self.post("/abort_requests", {}, timeout_secs)
            return
        ids = {rid, *(running for running in self._running if running.startswith(rid))}
        # vLLM's key, if it has one, guards this route as it does generation.
        ids |= {f"{PREFIX}{running}" for running in ids}
        await self.post(ABORT, {"request_ids": sorted(ids)}, timeout_secs, is_control=False)

    # Pushes.

    async def pause(self, *, mode: str, timeout_secs: float, lease_secs: float = 0.0) -> None:
        """As of `port.Pausable`; "retract" drops what was computed of the requests, "abort" ends them."""
        # It keeps requests and, in spite of what is said of it, empties the cache under them unless it is asked not to.
        keeps = {"abort": "mode=abort", "in_place": "mode=keep&clear_cache=false"}
        route, start = f"{PAUSE}?{keeps.get(mode, 'mode=keep')}", time.monotonic()
        headers = protocol.lease_headers(lease_secs)
        await self.post(route, {}, timeout_secs, is_short=True, headers=headers)
        if mode != "retract":
            return
        route = "/reset_prefix_cache?reset_running_requests=true"
        left = max(timeout_secs - (time.monotonic() - start), 1e-3)
        answer = await self.post(route, {}, left, is_short=True)
        if answer.get("success") is not True:
            reason = "some blocks of its cache are still held"
            raise port.ServerError(self.address, route, reason, retryable=True)

    async def continue_(self, *, timeout_secs: float) -> None:
        """Ends a pause."""
        await self.post(RESUME, {}, timeout_secs, is_short=True)

    async def rename(self, name: str, *, timeout_secs: float) -> None:
        """Renames the weights that it holds. Earlier tokens keep their name."""
        await self.post(RENAME, {"new_version": name}, timeout_secs, is_short=True)

    async def disk(self, push: port.Push) -> None:
        """The server reads the version from a directory that it can see."""
        if push.stored.is_adapter:
            await self.add_adapter(push)
            return
        settings = await self.settings_of(push)
        async with push.paused(self, await self.verification(push)):
            key, method = "path", "load_version"
            if not self.digests_parts(settings):
                key, method = "weights_path", "reload_weights"
            await self._rpc(method, push.left(), **{key: os.fspath(push.stored)})

    def digests_parts(self, settings: Mapping[str, Any]) -> bool:
        """By its extension; vLLM's own route digests all tensors."""
        return _is_extended(settings["vllm"])

    async def _rpc(self, method: str, timeout_secs: float, **kwargs: Any) -> Any:
        """Calls a method of every worker; the answer of the first."""
        call = {"method": method, "kwargs": kwargs, "timeout": timeout_secs}
        answer = await self.post(RPC, call, timeout_secs)
        with self.reading(RPC):
            return answer["results"][0]

    async def checksums(
        self, *, timeout_secs: float, names: Collection[str] = (), skipped: Collection[str] = ()
    ) -> dict[str, str]:
        if names:
            answer = {"checksums": await self._rpc("digests", timeout_secs, names=list(names))}
        else:
            answer = await self.post(CHECKSUMS, {"action": "checksum"}, timeout_secs)
        found = {}
        with self.reading(CHECKSUMS):
            for key, digest in answer["checksums"].items():
                ranks, name = _RANKS.fullmatch(key).groups()  # type: ignore[union-attr]
                if set(re.findall("[0-9]+", ranks)) == {"0"}:
                    found[name.replace(".base_layer.", ".")] = digest[:16]
        return found

    async def settings(self, *, timeout_secs: float) -> dict[str, Any]:
        """Its configuration, in the words of `checksums.expect`, with vLLM's own as "vllm"."""
        answer = await self.get(f"{SETTINGS}?config_format=json", timeout_secs)
        with self.reading(SETTINGS):
            found = answer["vllm_config"]
            parallel, model = found["parallel_config"], found["model_config"]
            size = parallel["tensor_parallel_size"] * parallel["pipeline_parallel_size"]
            # Digests are of the bytes in the host's memory, on every device.
            dtype = str(model["dtype"]).removeprefix("torch.")
            return {"vllm": found, "device": "cpu", "tp_size": size, "dtype": dtype}

    async def load_adapter(self, name: str, *, path: str, timeout_secs: float) -> None:
        load = {"lora_name": name, "lora_path": path}
        await self.post(LOAD_ADAPTER, load, timeout_secs, is_control=False)

    async def unload_adapter(self, name: str, *, timeout_secs: float) -> None:
        await self.post(UNLOAD_ADAPTER, {"lora_name": name}, timeout_secs, is_control=False)

    # The preflight.

    async def preflight(self, expected: port.Expected, *, deadline: float) -> None:
        """Names what its command line lacks, and compares model, context length and adapters."""
        checks = Checks(self, expected, deadline)
        self._check_port(checks)
        await self._check_release(checks)
        await checks.admin_key(self.continue_)
        models = await checks.answer(functools.partial(self.get, MODELS))
        settings = (await self.settings(**checks.left()))["vllm"]
        self._check_flags(checks, settings)
        await checks.routes(self.ways_of(expected))
        if expected.adapters:
            _check_adapters(checks, expected.adapters, settings["lora_config"])
        answer = await checks.answer(self._sample_one)
        await self._check_model(checks, settings)
        limit = (models.get("data") or [{}])[0].get("max_model_len")
        checks.context({"--max-model-len": limit})
        if not answer["choices"][0].get("weight_versions"):
            raise checks.unfit(GENERATE, f"its tokens carry no weight_versions: {TESTED}")

    def _check_port(self, checks: Checks) -> None:
        host = re.sub(r"^https?://|:[0-9]+$", "", self.address)
        if not (is_loopback(host) or checks.expected.insecure):
            raise checks.unfit(
                self.INFO,
                "whoever reaches this port can pause it and change its weights, as vLLM's key guards generation "
                "alone: let it listen on loopback with a sidecar before it (python -m jaxrl_async relay), or trust the "
                "network by security.insecure = True",
            )

    async def _check_release(self, checks: Checks) -> None:
        found = str((await self.get("/version", **checks.left())).get("version"))
        if _is_too_old(found):
            raise checks.unfit("/version", f"it is vLLM {found}: {TESTED}")

    def _check_flags(self, checks: Checks, settings: Mapping[str, Any]) -> None:
        mode = settings["model_config"].get("logprobs_mode")
        if mode != "processed_logprobs":
            why = f"its log-probs are {mode}, not those of the distribution that it samples from"
            raise _lacks(checks, "--logprobs-mode processed_logprobs", why)
        if checks.expected.max_kept and not settings["model_config"].get("return_sampling_mask"):
            why = "it returns none of the ids that a token was drawn from, which rollout.top_p, top_k and min_p need"
            raise _lacks(checks, "--return-sampling-mask", why)
        told = settings["model_config"], settings.get("aux_output_config") or {}
        name = ROUTES_FLAG.replace("-", "_")
        checks.experts(any(of.get(name) for of in told), f"--{ROUTES_FLAG}, on a GPU")
        if "cpu" in settings["device_config"].values() and not _is_extended(settings):
            why = "on a CPU it packs its linear layers, which a push would then not change"
            raise _lacks(checks, f"--worker-extension-cls {EXTENSION}", why)

    async def _check_model(self, checks: Checks, settings: Mapping[str, Any]) -> None:
        """Compares the model as the extension, its config.json and a refusal tell it."""
        told = {"model_path": settings["model_config"]["model"]}
        if _is_extended(settings):
            told |= await self._rpc("model_shape", **checks.left())
        checks.model(told)
        await checks.vocabulary(self.vocab_size)

    async def vocab_size(self, *, timeout_secs: float) -> int | None:
        """Its vocabulary, which it names when it refuses a bias on a token beyond it."""
        sampling = {"max_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}}
        body = {"token_ids": [0], "sampling_params": sampling}
        return await self.named_in_refusal(GENERATE, body, _VOCAB_REFUSAL, timeout_secs)

    def is_control(self, route: str) -> bool:
        """A key of vLLM guards the routes under /v1, as it does generation."""
        return not route.startswith("/v1/")

    async def _sample_one(self, *, timeout_secs: float) -> dict[str, Any]:
        """The whole answer to a request of one token after token 0, which every vocabulary has."""
        body = {"request_id": f"preflight-{uuid.uuid4().hex}", "token_ids": [0]}
        body |= {"sampling_params": {"max_tokens": 1, "logprobs": 0, "seed": 0}}
        try:
            return await self.post(GENERATE, body, timeout_secs, is_control=False)
        except port.ServerError as error:
            if error.status != 403 or "scale" not in error.reason:
                raise
            reason = f"{error.reason}: start it with --enable-scale-out, as in `{FLAGS}`"
            raise port.UnfitServerError(self.address, GENERATE, reason) from error

    @classmethod
    async def remedy(
        cls, client: InferenceClient, address: str, *, timeout_secs: float
    ) -> str | None:
        """What to do about a vLLM whose information route is missing."""
        server = cls(client, address)
        try:
            found = str((await server.get("/version", timeout_secs)).get("version"))
        except port.ServerError:
            return None
        if _is_too_old(found):
            return f"it is vLLM {found}: {TESTED}"
        return f"vLLM {found} takes weights in its development mode alone: start it by `{FLAGS}`"


class RelayedVllm(Vllm, Intake):
    """A vLLM server with a sidecar before it, which takes versions as this project's servers do."""

    WAYS: ClassVar = {**Vllm.WAYS, "stream": (protocol.UPDATE_FROM_UPLOAD, CHECKSUMS, RENAME)}

    @classmethod
    def recognises(cls, info: Mapping[str, Any]) -> bool:
        """The sidecar says so."""
        return bool(info.get(protocol.HANDS_ON))

    def _check_port(self, checks: Checks) -> None:
        """The sidecar guards what vLLM's key leaves open."""

    def _check_flags(self, checks: Checks, settings: Mapping[str, Any]) -> None:
        super()._check_flags(checks, settings)
        if not _is_extended(settings):
            raise _lacks(checks, f"--worker-extension-cls {EXTENSION}", "its sidecar loads by it")


def _is_too_old(release: str) -> bool:
    match = _RELEASE.match(release)
    return match is not None and (int(match[1]), int(match[2])) < OLDEST


def _lacks(checks: Checks, flag: str, why: str) -> port.UnfitServerError:
    return checks.unfit(SETTINGS, f"{why}: start it with {flag}, as in `{FLAGS}`")


def _is_extended(settings: Mapping[str, Any]) -> bool:
    return settings["parallel_config"].get("worker_extension_cls") == EXTENSION


def _check_adapters(checks: Checks, wanted: port.Adapters, found: Mapping[str, Any] | None) -> None:
    checks.base_files(LOAD_ADAPTER, "vLLM")
    allowed = next((rank for rank in LORA_RANKS if rank >= wanted.rank), wanted.rank)
    flags = (
        f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank={allowed} "
        f"--max-loras={wanted.kept + 1}"
    )
    found = found or {}
    rank, loaded = found.get("max_lora_rank") or 0, found.get("max_cpu_loras")
    loaded = loaded or found.get("max_loras") or 0
    if rank < wanted.rank or loaded <= wanted.kept:
        takes = f"it takes {loaded} adapters of rank ≤ {rank} at a time"
        raise checks.unfit(SETTINGS, f"{takes}: start it with {flags}")


def _sampling(request: port.Request) -> dict[str, Any]:
    """A request's parameters by vLLM's names, which also keep a server's own preferences out."""
    given = dict(request.sampling_params)
    seed = given.pop("sampling_seed", None)
    given.pop("max_kept", None)  # Its command line says so.
    params = {
        "max_tokens": given.pop("max_new_tokens"),
        "logprobs": 0,  # of the sampled token
        "ignore_eos": True,  # stop_token_ids are all that ends a row.
        "detokenize": False,
    }
    if given.get("top_k", 1) < 1:
        given["top_k"] = 0
    if seed is not None:
        params["seed"] = stream_seed(int(seed), len(request.input_ids))
    return given | params


def stream_seed(seed: int, position: int) -> int:
    """The seed of a request whose first new token is at this position of its row.

    vLLM's stream begins anew with each request. A row that goes on in a second request must not get the numbers of
    its first tokens again.
    """
    return port.seed_of(f"{seed}/{position}")


def _completion(
    answer: Mapping[str, Any], request: port.Request, adapter: str | None
) -> port.Completion:
    (choice,) = answer["choices"]
    ids, spans = choice["token_ids"] or [], choice.get("weight_versions") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    told = [item["token_id"] for item in content if "token_id" in item]
    if told and integers("the ids of logprobs", told) != ids:
        raise ValueError(f"the ids of logprobs are not token_ids ({len(ids)} tokens)")
    logprobs = [item["logprob"] for item in content]
    done = ids, logprobs, spans, choice["finish_reason"], request, adapter
    routes = None
    if request.record.num_layers and (text := choice.get("routed_experts")) is not None:
        routes = _read_routes(text, len(request.input_ids) + len(ids), request.record)
    return checked_completion(*done, kept=choice.get("sampling_mask"), routes=routes)


def _read_routes(text: Any, num_tokens: int, record: Record) -> np.ndarray:
    """Routes [P + N, L, K] from base64 of a .npy file, uint8 or uint16 [P + N − 1, L, K]."""
    file = io.BytesIO(read_base64("routed_experts", text))
    if (version := np.lib.format.read_magic(file)) != (1, 0):
        raise ValueError(f"routed_experts is a .npy file of version {version}, not (1, 0)")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    wanted = (num_tokens - 1, record.num_layers, record.experts_per_token)
    if shape != wanted or is_fortran or dtype not in ROUTE_DTYPES:
        raise ValueError(
            f"routed_experts is {dtype} {list(shape)}, must be uint8 or uint16 {list(wanted)}"
        )
    return known_routes(np.frombuffer(file.read(), dtype).reshape(shape), num_tokens, record)


TESTED = "vLLM 0.32 is tested; install it or a later one"
_RANKS = re.compile(r"((?:[a-z]+[0-9]+:)*)(.*)")
_VOCAB_REFUSAL = re.compile(r"Vocabulary size: ([0-9]+)")
_RELEASE = re.compile(r"([0-9]+)\.([0-9]+)")
