"""The routes that SGLang, SGLang-JAX and the embedded server share."""

import os
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_async.records import NOBODY, Identity
from jaxrl_async.servers import answers, port
from jaxrl_async.servers.batches import STREAMS_HEADER, Batches
from jaxrl_async.servers.client import InferenceClient, encode
from jaxrl_async.servers.completions import read_completion, read_scores
from jaxrl_async.servers.kinds.base import HttpKind
from jaxrl_async.servers.kinds.checks import Checks
from jaxrl_async.versions import protocol


class SglangApi(HttpKind):
    """One server. Its own weights, and how they change, are for the kinds."""

    INFO = protocol.MODEL_INFO

    def __init__(self, client: InferenceClient, address: str):
        super().__init__(client, address)
        self._batches = Batches(client, address, self.abort)
        self._streams = False  # whether it streams the answers of a batch

    async def generate(self, request: port.Request, *, timeout_secs: float) -> port.Completion:
        """Samples one completion.

        Calls of the same turn of the loop, as of a group, share one HTTP request where the server streams the answers
        of a batch. Each is answered when it ends, and is refused, late or cancelled alone.
        """
        if self._streams:
            bound = answers.max_bytes(request)
            answer = await self._batches.answer(_body(request), timeout_secs, bound)
            return self.read(answer, request)
        return await self.generate_alone(request, timeout_secs)

    async def generate_alone(
        self, request: port.Request, timeout_secs: float, adapter: str | None = None
    ) -> port.Completion:
        """Samples one completion by a call of its own, with an adapter of this name."""
        body = _body(request) | {"return_logprob": True, "stream": False}
        body |= {"lora_path": adapter} if adapter is not None else {}
        route, client, address = "/generate", self.client, self.address
        call = ("POST", address, route, encode(body).encode(), client.headers(), timeout_secs)
        bound = answers.max_bytes(request)
        async with client.request(*call) as response:
            answer = await client.answer(response, address, route, bound)
        self._streams = self._streams or STREAMS_HEADER in response.headers
        return self.read(answer, request, adapter)

    def read(
        self, answer: dict[str, Any], request: port.Request, adapter: str | None = None
    ) -> port.Completion:
        """The completion in an answer; `adapter`: the name of the weights of all tokens, None: it says it."""
        with self.reading("/generate", f"answer to {request.rid}", retryable=True):
            return read_completion(answer, request, adapter)

    async def score(self, tokens: Sequence[int], first: int, *, timeout_secs: float) -> np.ndarray:
        """Log-probs of a row's tokens; see `port.Teacher`."""
        body = {"rid": uuid.uuid4().hex, "input_ids": list(tokens), "stream": False}
        # Nothing is sampled. SGLang gives the first of the tokens that it scores none.
        body |= {"sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
        body |= {"return_logprob": True, "logprob_start_len": first - 1}
        answer = await self.post("/generate", body, timeout_secs, is_control=False)
        with self.reading("/generate", "scores", retryable=True):
            return read_scores(answer["meta_info"]["input_token_logprobs"], tokens[first:])

    async def abort(self, rid: str | None, *, timeout_secs: float) -> None:
        """Ends every request whose id starts with `rid`, or all requests when it is None."""
        which = {"abort_all": True} if rid is None else {"rid": rid}
        await self.post("/abort_request", which, timeout_secs)

    async def pause(self, *, mode: str, timeout_secs: float, lease_secs: float = 0.0) -> None:
        """As of `port.Kind`; "abort" ends the requests that run."""
        headers = protocol.lease_headers(lease_secs)
        await self.post(
            protocol.PAUSE, {"mode": mode}, timeout_secs, is_short=True, headers=headers
        )

    async def continue_(self, *, timeout_secs: float) -> None:
        """Ends a pause."""
        await self.post(protocol.CONTINUE, {}, timeout_secs, is_short=True)

    async def flush_cache(self, *, timeout_secs: float) -> None:
        """Empties the prefix cache. Servers refuse while requests run."""
        await self.post("/flush_cache", {}, timeout_secs)

    async def rename(self, name: str, *, timeout_secs: float) -> None:
        """Renames the weights that it holds. Earlier tokens keep their name."""
        payload = {"new_version": name, "abort_all_requests": False}
        await self.update("/update_weight_version", payload, timeout_secs, is_short=True)

    async def update_from_disk(
        self, push: port.Push, name: str, *, writer: Identity = NOBODY, digest: str | None = None
    ) -> None:
        """Loads the version's directory, and names the weights; `digest`: by which they may be prepared."""
        where = (os.fspath(push.stored), name, push.flush_cache, push.left())
        await self.load(*where, writer=writer, weight_digest=digest)

    async def load(
        self, path: str, name: str, flush_cache: bool, timeout_secs: float, **more: Any
    ) -> None:
        """Loads the weights of a directory in Hugging Face layout; `more` as of `protocol.DiskUpdate`."""
        update = protocol.DiskUpdate(
            weight_version=name,
            model_path=path,
            flush_cache=flush_cache,
            load_format="auto",
            **more,
        )
        await self.update(protocol.UPDATE_FROM_DISK, update.body(), timeout_secs, is_short=True)

    async def server_info(self, *, timeout_secs: float) -> dict[str, Any]:
        """Its settings: "device", "tp_size", "dtype", "version", …"""
        return await self.get("/server_info", timeout_secs)

    async def num_slots(self, *, timeout_secs: float) -> int:
        """How many requests it runs at once; 0 where it does not say."""
        if isinstance(self.info.get("num_slots"), int):
            return self.info["num_slots"]
        try:
            found = (await self.server_info(timeout_secs=timeout_secs)).get("max_running_requests")
        except port.ServerError as error:
            if error.status != 404:
                raise
            return 0
        return found if isinstance(found, int) and found > 0 else 0

    async def vocab_size(self, *, timeout_secs: float) -> int | None:
        """Its vocabulary; None where it does not tell it."""
        found = self.info.get("vocab_size")
        return found if isinstance(found, int) else None

    async def preflight(self, expected: port.Expected, *, deadline: float) -> None:
        """Compares keys, routes of weights, architecture, layers, vocabulary and context length."""
        checks = Checks(self, expected, deadline)
        await checks.admin_key(self.continue_)
        if expected.adapters:
            await self.check_adapters(checks)
        await checks.routes(self.ways_of(expected))
        checks.model()
        await checks.vocabulary(self.vocab_size)
        checks.context(await self._limits(checks))
        checks.kept_ids(self.info.get("max_kept", 0))
        if expected.replay_routes:
            checks.experts(await self.returns_routes(**checks.left()), "--" + ROUTES_FLAG)

    async def returns_routes(self, *, timeout_secs: float) -> bool:
        """Whether it returns the experts of each token, by its report or its flags."""
        flag = ROUTES_FLAG.replace("-", "_")
        if flag in self.info:
            return bool(self.info[flag])
        return bool((await self.optional("/server_info", timeout_secs=timeout_secs)).get(flag))

    async def check_adapters(self, checks: Checks) -> None:
        """Refuses it where it cannot take the run's adapters."""
        raise NotImplementedError

    async def _limits(self, checks: Checks) -> dict[str, Any]:
        """Flag → tokens that a request may have by it."""
        limit = self.info.get("max_total_tokens")
        if limit is not None:
            return {"max_total_tokens": limit}
        server = await self.optional("/server_info", **checks.left())
        length = server.get("context_length")
        if not length:
            models = (await self.optional("/v1/models", **checks.left())).get("data") or [{}]
            length = models[0].get("max_model_len")
        most = server.get("max_total_num_tokens")
        return {"--context-length": length, "--max-total-tokens": most}

    async def optional(self, route: str, *, timeout_secs: float) -> dict[str, Any]:
        """The answer of an information route; {} where there is none."""
        try:
            return await self.get(route, timeout_secs)
        except port.ServerError as error:
            if error.retryable:
                raise
            return {}

    async def sample_one(self, *, timeout_secs: float) -> dict[str, Any]:
        """The whole answer to a request of one token after token 0, which every vocabulary has."""
        sampling = port.NEUTRAL | {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 0}
        body = {"rid": f"preflight-{uuid.uuid4().hex}", "input_ids": [0]}
        body |= {"sampling_params": sampling, "return_logprob": True, "stream": False}
        return await self.post("/generate", body, timeout_secs, is_control=False)

    async def check_answer(self, checks: Checks) -> None:
        """Samples one token, whose log-prob and version must come with it."""
        answer = await checks.answer(self.sample_one)
        meta = answer.get("meta_info") or {}
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            reason = "the request was aborted"
            raise port.ServerError(self.address, "/generate", reason, retryable=True)
        triples = meta.get("output_token_logprobs")
        if not (isinstance(triples, list) and triples and len(triples[-1]) >= 2):
            raise checks.unfit("/generate", "its answers have no output_token_logprobs")
        if not meta.get("weight_versions"):
            raise checks.unfit("/generate", f"its tokens carry no weight_versions: {TESTED}")


def _body(request: port.Request) -> dict[str, Any]:
    body = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": request.sampling_params,
    }
    return body | ({"return_routed_experts": True} if request.record.num_layers else {})


ROUTES_FLAG = "enable-return-routed-experts"  # of SGLang and vLLM
TESTED = (
    "SGLang 0.5.23 is tested; in front of SGLang-JAX, start jaxrl_async/extras/sglang_jax/server.py"
)
