"""SGLang's HTTP API over an engine: the routes and the JSON of the project's one client.

It checks and translates; slots, caches and weights are the engine's.
"""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import time
import types
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily

from jaxrl_async import security
from jaxrl_async.inference import fields, loading, texts
from jaxrl_async.inference.engine import Engine
from jaxrl_async.inference.requests import Completion, InvalidRequestError, UnavailableError
from jaxrl_async.intake import routes as intake_routes
from jaxrl_async.intake.receiver import Receiver
from jaxrl_async.listener import listening
from jaxrl_async.servers.batches import STREAMS_HEADER
from jaxrl_async.versions import protocol
from jaxrl_async.versions.protocol import Update

MAX_BODY_BYTES = 16 << 20  # of all but an upload
MAX_HEADERS = 64
MAX_RID_CHARS = 256
_INFO_ROUTES = (protocol.MODEL_INFO, "/get_model_info", "/server_info")
_INFORMATION_ROUTES = {
    "/generate",
    "/health_generate",
    "/metrics",
    "/v1/models",
    *_INFO_ROUTES,
    *texts.KEYS,
}
_GENERATE_KEYS = {"rid", "input_ids", "sampling_params", "return_logprob", "stream"}
_GENERATE_KEYS |= {"logprob_start_len", "return_text_in_logprobs", "return_routed_experts"}


@contextlib.asynccontextmanager
async def serve(
    engine: Engine,
    *,
    host: str,
    port: int,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    weight_roots: Sequence[str | os.PathLike] = (),
    tls_cert: str = "",
    tls_key: str = "",
    tls_ca: str = "",
    tokenizer: texts.Tokenizer | None = None,
) -> AsyncIterator[int]:
    """Answers over HTTP while the context lasts; works in any thread's event loop.

    Args:
      engine: a started engine. It outlives the context: closing it is the caller's.
      host, port: address to bind; 0 picks a free port.
      api_key: required as "Authorization: Bearer KEY" by every route but /health; None for none, on loopback only.
      admin_api_key: required by the control routes in place of api_key.
      weight_roots: the directories within which /update_weights_from_disk reads.
      tls_cert, tls_key: PEM files of a certificate and its key; "" for http.
      tls_ca: PEM file of the authorities that are trusted of other servers, which hand versions on; "" for the
        system's.
      tokenizer: for requests in texts, and their routes; None for token ids alone.

    Yields:
      the port.

    Raises:
      OSError: the address cannot be bound; the message names it.
      ValueError: a host beyond loopback without an api_key, or files without a certificate.
    """
    security.check_listener(
        f"engine {engine.name!r}", f"{host}:{port}", api_key, "the server's api_key"
    )
    context = security.server_context(tls_cert, tls_key)
    routes = _Routes(engine, weight_roots, tokenizer, admin_api_key or api_key, tls_ca)
    app = web.Application(
        client_max_size=MAX_BODY_BYTES,
        middlewares=[_answer_errors, _key_check(api_key, admin_api_key)],
    )
    app.cleanup_ctx.append(routes.keep_receiver_open)
    app.add_routes(routes.table())
    limits = {"max_headers": MAX_HEADERS}
    limits |= dict.fromkeys(("max_line_size", "max_field_size"), security.MAX_HEADER_BYTES)
    async with listening(app, host, port, context, **limits) as bound:
        yield bound


@web.middleware
async def _answer_errors(request, handler):
    """Every refusal is JSON, in SGLang's form; so are the router's own (404, 405, 413)."""
    try:
        return await handler(request)
    except (InvalidRequestError, UnavailableError, protocol.RequestError) as error:
        return _error(_STATUS[type(error)], str(error))
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.text}")


def _key_check(api_key, admin_api_key):
    """SGLang's rule: with an admin key, the control routes accept no other. And none is a web page's to call."""

    @web.middleware
    async def check(request, handler):
        route = "/v1/models" if request.path.startswith("/v1/models/") else request.path
        information = route in _INFORMATION_ROUTES
        wanted = api_key if information else admin_api_key or api_key
        if wanted is not None and request.path != "/health":
            if not security.is_bearer(request.headers.get("Authorization", ""), wanted):
                which = "api" if information or not admin_api_key else "admin api"
                return _error(401, f"{request.path} needs the {which} key of this server")
        if not information and security.may_come_from_a_page(request.method, request.headers):
            return _error(415, f"{request.path}: {security.WANTS_JSON}")
        return await handler(request)

    return check


class _Routes:
    def __init__(self, engine, weight_roots, tokenizer, key, tls_ca):
        self._engine = engine
        self._texts = None
        if tokenizer is not None:
            room = engine.max_total_tokens
            self._texts = texts.Texts(tokenizer, max_total_tokens=room, model=engine.name)
        self.receiver = Receiver(
            self,
            roots=weight_roots,
            # The parameters in float32, twice, and room for headers.
            max_bytes=8 * loading.num_parameters(engine.config) + MAX_BODY_BYTES,
            key=key,
            context=security.client_context(tls_ca) if tls_ca else None,
        )
        self._loop = asyncio.get_running_loop()

    def table(self) -> list[web.RouteDef]:
        """Its routes; those in texts with a tokenizer alone."""
        updates = intake_routes.asking(self.receiver.update_from_disk)
        table = [
            web.post("/generate", self.generate),
            web.post(protocol.PAUSE, self.pause_generation),
            web.post(protocol.CONTINUE, self.continue_generation),
            web.post("/abort_request", self.abort_request),
            web.post("/flush_cache", self.flush_cache),
            *intake_routes.routes(self.receiver),
            web.post(protocol.UPDATE_FROM_DISK, updates),
            *(web.get(route, self.model_info) for route in _INFO_ROUTES),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/health_generate", self.health_generate),
        ]
        if self._texts is not None:
            table += [web.post(route, self.openai) for route in texts.KEYS]
            names = ("/v1/models", "/v1/models/{id:.+}")
            table += [web.get(route, self.models) for route in names]
        return table

    async def generate(self, http_request):
        start = time.monotonic()
        keys = _GENERATE_KEYS | ({"text"} if self._texts else set())
        body = await intake_routes.body_of(http_request)
        body = fields.asked("the body", body, keys)
        if "text" in body:
            body = self._encoded(body)
        has_names = fields.flag(body, "return_text_in_logprobs") and self._texts
        answer = functools.partial(
            self._answer,
            return_logprob=fields.flag(body, "return_logprob"),
            return_routes=fields.flag(body, "return_routed_experts"),
            from_prompt=fields.whole(body, "logprob_start_len", -1, 2**31, -1),
            name=self._texts.name if has_names else lambda token: None,
            start=start,
        )
        if fields.flag(body, "stream"):
            requests = _parse_generate(body, self._parsed_or_refused, stream=True)
            return await self._stream(http_request, requests, answer)
        requests = _parse_generate(body, self._parse_request)
        pairs = zip(requests, await self._complete(requests), strict=True)
        answers = [await answer(*pair) for pair in pairs]
        return _json(answers if _is_batch(body) else answers[0], headers=_STREAMS)

    async def _stream(self, http_request, requests, answer):
        """Answers each request of a batch when it ends, as an event of its own. A refusal costs its request alone.

        The events are SGLang's, which sends one for every few tokens; here requests have them that report.
        """
        response = web.StreamResponse(headers=_EVENTS | _STREAMS)
        async with contextlib.aclosing(self._ended(requests)) as batches:
            await response.prepare(http_request)
            async for batch in batches:
                events = []
                for index, outcome in batch:
                    try:
                        event = await answer(requests[index], _completed(outcome))
                    except (InvalidRequestError, UnavailableError) as error:
                        event = _failed(error)
                    events.append(_event({"index": index} | event))
                await response.write(b"".join(events))
        await response.write_eof(_DONE)
        return response

    async def _complete(self, requests):
        """The completions of requests, in their order; aborts all where one fails."""
        done = {}
        async with contextlib.aclosing(self._ended(requests)) as batches:
            async for batch in batches:
                done |= {index: _completed(outcome) for index, outcome in batch}
        return [done[index] for index in range(len(requests))]

    async def _ended(self, requests):
        """Submits requests; yields those that ended together, as (index, completion or error), refusals first.

        A request that reports comes before its end too, without a finish_reason. One may be its refusal already. Where
        the client is gone, what is left is aborted.
        """
        ended = asyncio.Queue()

        def on_done(outcomes):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(ended.put_nowait, outcomes)

        refusals = {i: r for i, r in enumerate(requests) if isinstance(r, InvalidRequestError)}
        valid = [i for i in range(len(requests)) if i not in refusals]
        refused = self._engine.submit_all([requests[i] for i in valid], on_done)
        refusals |= {valid[i]: refusal for i, refusal in refused.items()}
        left = {requests[i].rid: i for i in valid if i not in refusals}
        try:
            yield sorted(refusals.items())
            while left:
                batch = []
                for rid, outcome in await ended.get():
                    stops = requests[left[rid]].stops
                    goes_on = isinstance(outcome, Completion) and outcome.finish_reason is None
                    if stops and isinstance(outcome, Completion):
                        outcome, whole = self._texts.cut(outcome, stops), outcome
                        if goes_on and outcome is not whole:
                            self._engine.abort(rid.__eq__)
                            continue  # Its end has its routes, and is cut at the same text.
                    batch.append((left[rid] if goes_on else left.pop(rid), outcome))
                if batch:
                    yield batch
        finally:
            if left:
                self._engine.abort(left.__contains__)

    async def _scores(self, request, completion):
        """`Programs.score` of a prompt and its completion, by the weights that sampled it."""
        row = np.concatenate([request.input_ids, completion.output_ids])
        scored = self._engine.score(row, temperature=request.sampling.temperature or 1.0)
        version, scores = await asyncio.wrap_future(scored)
        if other := {span.version for span in completion.spans} - {version}:
            had = f"version {version!r} has come, and {min(other)!r} sampled"
            raise UnavailableError(f"{had}: ask again for a prompt's or the best tokens' log-probs")
        return scores

    def _encoded(self, body):
        """A body with `text` as one with `input_ids`."""
        if "input_ids" in body:
            raise InvalidRequestError("give text or input_ids, got both")
        given, params = body["text"], body.get("sampling_params")
        if not isinstance(given, list):
            ids = self._texts.encode(given)
            params = self._texts.sampling_of_generate(params, ids)
        else:
            ids = [self._texts.encode(text) for text in given]
            params = _per_prompt("sampling_params", params, len(ids), alone=dict | None)
            pairs = zip(params, ids, strict=True)
            params = [self._texts.sampling_of_generate(*pair) for pair in pairs]
        rest = {name: value for name, value in body.items() if name != "text"}
        return rest | {"input_ids": ids, "sampling_params": params}

    async def openai(self, http_request):
        call = self._texts.call(http_request.path, await intake_routes.body_of(http_request))
        if call.stream:
            return await self._stream_texts(http_request, call)
        done = await self._complete(call.requests)
        pairs = zip(call.requests, done, strict=True)
        scores = [await self._scores(*pair) if call.is_scored else None for pair in pairs]
        return _json(self._texts.answer(call, done, scores))

    async def _stream_texts(self, http_request, call):
        """OpenAI's stream: a chunk for every few tokens. What is refused is refused before it begins."""
        response, latest = web.StreamResponse(headers=_EVENTS), {}
        async with contextlib.aclosing(self._ended(call.requests)) as batches:
            done = {index: _completed(outcome) for index, outcome in await anext(batches)}
            await response.prepare(http_request)
            async for batch in batches:
                done = {i: o for i, o in batch if isinstance(o, Completion)}
                events = [self._texts.chunk(call, i, latest.get(i), now) for i, now in done.items()]
                events += [_failed(o) for i, o in batch if i not in done]
                await response.write(b"".join(map(_event, events)))
                latest |= done
        if call.include_usage:
            usage = texts.usage(call, list(latest.values()))
            await response.write(_event(self._texts.envelope(call, ".chunk", [], usage=usage)))
        await response.write_eof(_DONE)
        return response

    async def models(self, http_request):
        """All models, which are one, or the one of the route."""
        model = {"id": self._texts.model, "object": "model", "created": 0}
        model |= {"owned_by": "jaxrl_async", "max_model_len": self._engine.max_total_tokens}
        wanted = http_request.match_info.get("id")
        if wanted is not None and wanted != model["id"]:
            raise web.HTTPNotFound(text=f"the model is {model['id']!r}, not {wanted!r:.80}")
        return _json(model if wanted else {"object": "list", "data": [model]})

    async def pause_generation(self, http_request):
        body = await _read(http_request, {"mode"})
        lease_secs = protocol.read_lease(http_request.headers.get(protocol.LEASE_HEADER))
        paused = self._engine.pause(body.get("mode", "abort"))
        self.receiver.lease.begin(lease_secs)  # Who asked may be gone before the answer.
        await asyncio.wrap_future(paused)
        return _json({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(self, http_request):
        await _read(http_request, set())
        self.receiver.lease.end()
        await self.resume()
        return _json({"status": "ok", "message": "Generation continued successfully."})

    async def abort_request(self, http_request):
        body = await _read(http_request, {"rid", "abort_all"})
        prefix, abort_all = body.get("rid"), fields.flag(body, "abort_all")
        if not abort_all and not (isinstance(prefix, str) and prefix):
            raise InvalidRequestError(f"give a rid (a prefix) or abort_all: true, got {body!r}")
        num = await asyncio.wrap_future(
            self._engine.abort(lambda rid: abort_all or rid.startswith(prefix))
        )
        return _json({"num_aborted": num})

    async def flush_cache(self, http_request):
        if await asyncio.wrap_future(self._engine.flush()):
            return _json({"message": "Cache flushed."})
        return _error(400, "requests are running or waiting")

    # An engine of a receiver.

    async def load(self, directory: pathlib.Path) -> loading.Loaded:
        return await asyncio.wrap_future(self._engine.load_weights(str(directory)))

    async def swap(self, weights: loading.Loaded, update: Update) -> int:
        swapped = self._engine.swap_weights(weights, **_changes(update))
        return await asyncio.wrap_future(swapped)

    async def update(self, directory: pathlib.Path, update: Update) -> int:
        updated = self._engine.update_weights_from_disk(str(directory), **_changes(update))
        return await asyncio.wrap_future(updated)

    async def resume(self) -> None:
        await asyncio.wrap_future(self._engine.resume())

    async def keep_receiver_open(self, app: web.Application) -> AsyncIterator[None]:
        self.receiver.open()
        yield
        self.receiver.close()

    async def metrics(self, http_request):
        """The engine's state for Prometheus."""
        engine = self._engine
        values = {
            "running_requests": (engine.num_running, "requests that are decoded"),
            "waiting_requests": (engine.num_waiting, "requests that wait for a slot"),
            "slots": (engine.num_slots, "requests that can be decoded at once"),
            "paused": (engine.is_paused, "whether generation stands still for a push"),
            "expired_pauses": (self.receiver.lease.num_expired, "pauses of a lost learner, ended"),
        }
        families = [GaugeMetricFamily(f"jaxrl_engine_{n}", a, v) for n, (v, a) in values.items()]
        text = generate_latest(types.SimpleNamespace(collect=lambda: families))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def model_info(self, http_request):
        """Answers while paused: it is the liveness probe, and 503 once the engine is dead."""
        engine = self._engine
        if engine.error:
            raise engine.error
        return _json(
            {
                "model_path": engine.model_path,
                "weight_version": engine.weight_version,
                "weight_digest": engine.weight_digest,
                **self.receiver.info(),
                "is_generation": True,
                "vocab_size": engine.config.vocab_size,
                "num_hidden_layers": engine.config.num_layers,
                "hidden_size": engine.config.model_dim,
                "intermediate_size": engine.config.mlp_dim,
                "num_experts_per_tok": engine.config.experts_per_token or None,
                "lora": dataclasses.asdict(lora) if (lora := engine.config.lora) else None,
                "max_total_tokens": engine.max_total_tokens,
                "max_kept": engine.max_kept,
                "enable_return_routed_experts": bool(engine.config.num_experts),
                "context_length": engine.max_total_tokens,
                "max_running_requests": engine.num_slots,
                "num_slots": engine.num_slots,
                "num_running_requests": engine.num_running,
                "num_waiting_requests": engine.num_waiting,
                "num_compiled": engine.num_compiled,
                "num_expired_pauses": self.receiver.lease.num_expired,
            }
        )

    async def health(self, http_request):
        if self._engine.error:
            raise self._engine.error
        return _json({"status": "ok"})

    async def health_generate(self, http_request):
        """Samples one token after token 0, which every vocabulary has."""
        await self._complete([self._parse_request([0], None, {"max_new_tokens": 1})])
        return await self.health(http_request)

    async def _answer(
        self, request, completion, *, return_logprob, return_routes, from_prompt, name, start
    ):
        spans = [{"version": s.version, "start": s.start, "end": s.end} for s in completion.spans]
        output_ids = completion.output_ids.tolist()
        meta = {
            "id": completion.rid,
            "finish_reason": completion.finish_reason,
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(output_ids),
            "cached_tokens": completion.cached_tokens,
            "weight_version": spans[-1]["version"] if spans else self._engine.weight_version,
            "weight_versions": spans,
            "num_retractions": completion.num_retractions,
            "e2e_latency": time.monotonic() - start,
        }
        if return_routes and (routes := completion.routes) is not None:
            known = np.where(routes == np.iinfo(routes.dtype).max, -1, routes.astype("<i4"))
            raw = known[:-1].astype("<i4").tobytes()
            meta["routed_experts"] = base64.b64encode(raw).decode("ascii")
        if completion.kept is not None:
            meta["kept_ids"] = [ids[ids >= 0].tolist() for ids in completion.kept]
        if return_logprob:
            pairs = zip(completion.logprobs.tolist(), output_ids, strict=True)
            meta["output_token_logprobs"] = [(lp, token, name(token)) for lp, token in pairs]
            # What samples nothing asks for its prompt's. A row's first token alone has none; in SGLang 0.5.23 the first
            # given token has none, on which its own client fails.
            scored = from_prompt >= 0 or not request.sampling.max_new_tokens
            if scored and completion.finish_reason is not None:
                row = texts.scored(request, completion, await self._scores(request, completion))
                given = row[max(from_prompt, 0) : len(request.input_ids)]
                triples = [(logprob, token, name(token)) for token, logprob, _ in given]
                meta["input_token_logprobs"] = triples
        text = {"text": self._texts.decode(completion)} if self._texts else {}
        return text | {"output_ids": output_ids, "meta_info": meta}

    def _parse_request(self, input_ids, rid, params, *, reports=False):
        if rid is None:
            rid = uuid.uuid4().hex
        if not isinstance(rid, str) or not 0 < len(rid) <= MAX_RID_CHARS:
            raise InvalidRequestError(
                f"rid must be a string of 1 to {MAX_RID_CHARS} characters, got {rid!r:.80}"
            )
        stops, ids = (), fields.token_ids(input_ids)
        if self._texts and isinstance(params, dict) and (stop := params.get("stop")):
            stops, params = fields.stop_texts(stop), params | {"stop": None}
        reports = reports or bool(stops)
        return texts.TextRequest(rid, ids, fields.parse_sampling(params), reports, stops)

    def _parsed_or_refused(self, *request, **options):
        try:
            return self._parse_request(*request, **options)
        except InvalidRequestError as error:
            return error


async def _read(http_request, keys):
    """The body as a JSON object with no other keys than these; an empty body is {}."""
    body = await intake_routes.body_of(http_request)
    fields.check_keys("the body", body, keys)
    return body


def _completed(outcome):
    """The completion of a request; raises its error."""
    if isinstance(outcome, Completion):
        return outcome
    raise outcome


def _parse_generate(body, parse, *, stream=False):
    """One Request, which reports to a stream, or one for each prompt of a batch, by `parse`."""
    prompts = body.get("input_ids")
    if not isinstance(prompts, list) or not prompts:
        raise InvalidRequestError("input_ids must be a list of token ids, or a list of such lists")
    if not _is_batch(body):
        return [parse(prompts, body.get("rid"), body.get("sampling_params"), reports=stream)]
    num = len(prompts)
    rids = _per_prompt("rid", body.get("rid"), num, alone=type(None))
    params = _per_prompt("sampling_params", body.get("sampling_params"), num, alone=dict | None)
    return [parse(*parts) for parts in zip(prompts, rids, params, strict=True)]


def _is_batch(body):
    return isinstance(body["input_ids"][0], list)


def _per_prompt(name, value, num, *, alone):
    if isinstance(value, alone):
        return [value] * num
    if not isinstance(value, list) or len(value) != num:
        raise InvalidRequestError(f"{name} of a batch must be a list of {num}, got {value!r:.80}")
    return value


def _changes(update: Update) -> dict[str, Any]:
    """The arguments of an engine's update."""
    return {
        "version": update.weight_version,
        "flush_cache": update.flush_cache,
        "abort_all_requests": update.abort_all_requests,
    }


def _json(answer, status=200, headers=None):
    return web.Response(
        body=_encode(answer).encode(),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def _event(answer):
    return b"data: " + _encode(answer).encode() + b"\n\n"


def _failed(error):
    """A refusal within a batch, with the status that it would have alone."""
    return {"error": {"message": str(error), "code": _STATUS[type(error)]}}


def _error(status, message):
    return _json({"error": {"message": message}}, status)


_STATUS = {InvalidRequestError: 400, UnavailableError: 503, protocol.RequestError: 400}
_STREAMS = {STREAMS_HEADER: "1"}
_EVENTS = {"Content-Type": "text/event-stream"}
_DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode
