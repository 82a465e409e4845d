"""Servers that answer nonsense: every field of every answer × 30 wrong values × (one of two servers, the only one).

    python benchmarks/nonsense.py [--smoke] [--every=1] [--kinds=embedded,sglang,batches,vllm] [--parts=samples,weights]

The servers are fakes that speak a kind's API; in the answers of one of them one field at a time has a wrong value, is
missing, or is where the answer is cut off. All else is a run's own.

- `samples`: a rollout worker and a queue train two steps. One of two servers answers nonsense for ever; the only one
  for its first NUM_BAD answers.
- `weights`: the publisher pushes a second version, while a server that has restarted answers nonsense to the preflight
  and the push. Then it answers well.

A run has `trained` nonsense where a leased group is not what a good server samples, or a HEALTHY server does not hold
the version; it has `ended` where a worker, the queue's budgets or the publisher ended it, or where it did not go on,
though a server was good at last. A prompt that was retired is `lost`. Times between two tries are shortened. Results:
benchmarks/results/nonsense.json (or --out=DIR).
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import record
from aiohttp import web
from record import ROOT

from jaxrl_async.config.settings import Queue
from jaxrl_async.learner.learner import _FailureBudgets
from jaxrl_async.listener import listening
from jaxrl_async.preflight.server import check as preflight
from jaxrl_async.publishing.health import weight_name
from jaxrl_async.publishing.publisher import Publisher, PublisherError
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.queue import admission as admissions
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.calls import NotReadyError
from jaxrl_async.queue.client import QueueClient
from jaxrl_async.queue.direct import DirectCalls
from jaxrl_async.queue.service import TICK_SECS, QueueService
from jaxrl_async.records import Permit, ServerRecord, new_run_id
from jaxrl_async.rewards.pool import Judgement
from jaxrl_async.rollout import sampler as samplers
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.rollout.worker import Worker
from jaxrl_async.servers.batches import STREAMS_HEADER
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.servers.kinds import checksums
from jaxrl_async.servers.kinds.vllm import stream_seed
from jaxrl_async.servers.port import Expected
from jaxrl_async.types import Prompt
from jaxrl_async.versions import protocol
from jaxrl_async.versions.store import StoredVersion, WeightStore, read_manifest

VOCAB_SIZE, MAX_NEW_TOKENS, GROUP_SIZE, BATCH_GROUPS, NUM_STEPS = 100, 4, 2, 2, 2
NUM_BAD = 10  # answers of the only server that are nonsense
RUN_SECS = 20.0  # deadline of a run
AT_ONCE = 8  # runs
SMOKE_EVERY = 331  # prime to the numbers of values and of servers
RUN_SEED = 1
LAYER = "model.layers.0.mlp.down_proj.weight"

# The wrong values: name → (the right value, bound on the answer) → JSON text. None leaves the field out.

DEEP, READABLE = 100_000, 300  # levels


def changed(value: Any) -> Any:
    """Another value of a like form."""
    if isinstance(value, bool) or value is None:
        return int(bool(value))
    if isinstance(value, int | float):
        return value + 0.7
    if isinstance(value, dict):
        return list(value.items())
    return value + value


VALUES: dict[str, Callable[[Any], str | None]] = {
    **{text: lambda _, text=text: text for text in ("null", "true", "false", "0.7", "1e308")},
    **{text: lambda _, text=text: text for text in ("NaN", "Infinity", "-Infinity", "1e999")},
    **{text: lambda _, text=text: text for text in ("-2147483648", "2147483648")},
    "2^63": lambda _: str(2**63),
    "5,000 digits": lambda _: "9" * 5000,
    **{text: lambda _, text=text: text for text in ('""', '"nonsense"', '"\\u0000"', '"\\ud800"')},
    "a long string": lambda _: f'"{"x" * 100_000}"',
    **{text: lambda _, text=text: text for text in ("[]", "[[]]", "[null]", "{}")},
    "a deep list": lambda _: "[" * DEEP + "]" * DEEP,
    "a list that can be read": lambda _: "[" * READABLE + "]" * READABLE,
    "an object that can be read": lambda _: '{"a":' * READABLE + "0" + "}" * READABLE,
    "in a list": lambda value: json.dumps([value]),
    "as a string": lambda value: json.dumps(f"{value}x" if isinstance(value, str) else str(value)),
    "changed": lambda value: json.dumps(changed(value)),
    "missing": lambda _: None,
    "cut off": lambda _: "",  # with all that follows
}
assert len(VALUES) == 30
MARK = "the wrong value"


def altered(answer: Any, path: tuple, value: str) -> str:
    """The JSON text of an answer with a wrong value at a path; of () in place of it all."""
    answer = json.loads(json.dumps(answer))
    if not path:
        return VALUES[value](answer) or ""
    owner = answer
    for key in path[:-1]:
        owner = owner[key]
    text = VALUES[value](owner[path[-1]])
    if text is None:
        del owner[path[-1]]
        return json.dumps(answer)
    owner[path[-1]] = MARK
    before, _, after = json.dumps(answer).partition(json.dumps(MARK))
    return before if value == "cut off" else before + text + after


# The servers.


def token(seed: int, position: int) -> int:
    return 1 + (seed * 31 + position * 7) % (VOCAB_SIZE - 1)


def logprob(token_id: int) -> float:
    return -token_id / 1000


class Server:
    """A fake of one kind. While `left` is above 0, a field of its answers at a route has a wrong value."""

    def __init__(self, kind: str):
        self.kind, self.route, self.path, self.value = kind, "", (), ""
        self.left = self.num_bad = 0
        self.version, self.files = "default", None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        if request.path in ("/generate", "/inference/v1/generate") and body.get("stream"):
            return await self._stream(body)
        answer = self.answer(request.path, body)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        headers = {STREAMS_HEADER: "1"} if self.kind == "batches" else {}
        return web.Response(text=self._text(request.path, answer), headers=headers)

    async def _stream(self, body: Mapping[str, Any]) -> web.Response:
        events = []
        for index, fields in enumerate(zip(*(body[key] for key in COMPLETION), strict=True)):
            event = {"index": index} | self._sglang_completion(*fields)
            events.append(self._text("event", event))
        return web.Response(text="".join(f"data: {event}\n\n" for event in events))

    def _text(self, route: str, answer: Any) -> str:
        if route != self.route or self.left <= 0:
            return json.dumps(answer)
        self.left, self.num_bad = self.left - 1, self.num_bad + 1
        return altered(answer, self.path, self.value)

    def answer(self, route: str, body: Mapping[str, Any]) -> Any:
        """The right answer; None where it has no such route."""
        answers = self._vllm if self.kind == "vllm" else self._sglang
        return answers(route, body)

    def _sglang(self, route: str, body: Mapping[str, Any]) -> Any:
        ours = self.kind == "embedded"
        match route:
            case "/model_info":
                info = {protocol.WEIGHT_VERSION: self.version, "model_path": "/nowhere"}
                info |= {"architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB_SIZE}
                digest = self.files and read_manifest(self.files)["digest"]
                return info | (
                    {protocol.WEIGHT_DIGEST: digest, "max_total_tokens": 64} if ours else {}
                )
            case "/server_info":
                found = {"device": "cpu", "tp_size": 1, "pp_size": 1, "dtype": "float32"}
                return found | {"context_length": 4096, "max_total_num_tokens": 4096}
            case "/generate":
                fields = (body["rid"], body["input_ids"], body["sampling_params"])
                return self._sglang_completion(*fields)
            case "/weights_checker":
                return {"success": True, "ranks": [{"checksums": self._checksums()}]}
            case "/pause_generation" | "/continue_generation" | "/abort_request":
                return {"status": "ok"}
            case "/update_weight_version" if body:
                self.version = body["new_version"]
            case "/update_weights_from_disk" if body:
                self.version, self.files = body["weight_version"], body["model_path"]
            case protocol.PREPARE if ours and body:
                pass
            case _:
                return {"success": False, "message": "incomplete"}
        return {"success": True, "message": "done"}

    def _vllm(self, route: str, body: Mapping[str, Any]) -> Any:
        match route:
            case "/weight_info":
                return {protocol.WEIGHT_VERSION: self.version}
            case "/version":
                return {"version": "0.32.0"}
            case "/v1/models":
                return {"data": [{"id": "model", "parent": None, "max_model_len": 4096}]}
            case "/server_info":
                parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
                parallel |= {"worker_extension_cls": "jaxrl_async.extras.vllm.Extension"}
                model = {"model": "/nowhere", "dtype": "torch.float32"}
                model |= {"logprobs_mode": "processed_logprobs"}
                found = {"model_config": model, "parallel_config": parallel}
                return {
                    "vllm_config": found | {"device_config": {"device": "cpu"}, "lora_config": None}
                }
            case "/inference/v1/generate":
                return self._vllm_completion(body)
            case "/weight_checker":
                digests = self._checksums().items()
                return {"checksums": {f"dp0:pp0:pcp0:tp0:{n}": digest * 4 for n, digest in digests}}
            case "/collective_rpc" if body.get("method") == "model_shape":
                return {"results": [{"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1}]}
            case "/collective_rpc" if body:
                self.files = body["kwargs"].get("path", self.files)
                return {"results": [None]}
            case "/update_weight_version" if body:
                self.version = body["new_version"]
                return {"success": True}
            case "/pause" | "/resume" | "/reset_prefix_cache" | "/abort_requests":
                return {"success": True, "status": "ok"}
        return None if route == "/model_info" else {"status": "ok"}

    def _checksums(self) -> dict[str, str]:
        if self.files is None:
            return {LAYER: "0" * 16}
        return checksums.checksums_of(StoredVersion(self.files), "float32")

    def _sglang_completion(self, rid: str, prompt: list[int], sampling: Mapping[str, Any]) -> dict:
        count, seed = sampling["max_new_tokens"], sampling.get("sampling_seed", 0)
        ids = [token(seed, len(prompt) + i) for i in range(count)]
        return {
            "output_ids": ids,
            "meta_info": {
                "id": rid,
                "finish_reason": {"type": "length"},
                "completion_tokens": count,
                "weight_versions": [{"version": self.version, "start": 0, "end": count}],
                "output_token_logprobs": [[logprob(id), id, None] for id in ids],
            },
        }

    def _vllm_completion(self, body: Mapping[str, Any]) -> dict:
        sampling, prompt = body["sampling_params"], body["token_ids"]
        count, seed = sampling["max_tokens"], sampling.get("seed", 0)
        ids = [token(seed, len(prompt) + i) for i in range(count)]
        choice = {
            "token_ids": ids,
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": i, "logprob": logprob(i)} for i in ids]},
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
        }
        return {"choices": [choice]}


def paths(answer: Any, path: tuple = ()) -> Iterator[tuple]:
    """The place of every field of an answer, of lists in the last element; () for all of it."""
    yield path
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield from paths(value, (*path, key))
    elif isinstance(answer, list) and answer:
        yield from paths(answer[-1], (*path, len(answer) - 1))


@contextlib.asynccontextmanager
async def serving(*servers: Server):
    """Answers over HTTP; yields the addresses."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for server in servers:
            app = web.Application()
            app.router.add_route("*", "/{route:.*}", server.handle)
            serves = listening(app, "127.0.0.1", 0, shutdown_secs=0.01)
            addresses.append(f"http://127.0.0.1:{await stack.enter_async_context(serves)}")
        yield addresses


# The runs.


@dataclasses.dataclass(frozen=True)
class Case:
    """One wrong value."""

    part: str
    kind: str
    route: str
    path: tuple
    value: str
    is_alone: bool  # the only server, or one of two

    def bad(self) -> Server:
        """The server, which does not answer nonsense yet."""
        server = Server(self.kind)
        server.route, server.path, server.value = self.route, self.path, self.value
        return server

    def __str__(self) -> str:
        where = "".join(f"[{key!r}]" for key in self.path)
        servers = "the only server" if self.is_alone else "one of two"
        return f"{self.part}, {self.kind}, {self.route}{where} = {self.value}, {servers}"


@dataclasses.dataclass
class Outcome:
    """What became of a run."""

    num_bad: int = 0  # wrong answers
    trained: int = 0
    lost: int = 0
    ended: str = ""


class Prompts:
    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, np.array([1 + index % 90, 2, 3], np.int32), "?", "!")


class Rewards:
    async def judge(self, text, answer, seen) -> Judgement:
        return Judgement(float(len(text)))

    def waits_for(self) -> str:
        return "a reward"


class InOrder:
    """Draws the first servers, so that the one with the wrong answers is asked."""

    def sample(self, population, k):
        return population[:k]


def worker_of(service: QueueService, client: InferenceClient) -> Worker:
    fleet = Fleet(suspect_secs=0.01, clock=time.monotonic, speeds={}, rng=InOrder())
    return Worker(
        name="rollout-0",
        queue=QueueClient(DirectCalls(service)),
        sampler=samplers.Sampler(
            client=client,
            fleet=fleet,
            controls={},
            sampling={"max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.0},
            run_seed=RUN_SEED,
            request_timeout_secs=RUN_SECS,
            max_retries=3,
        ),
        fleet=fleet,
        rewards=Rewards(),
        prompts=Prompts(),
        runner=Runner(
            single_turn,
            encode=lambda text: [int(word) for word in text.split()],
            decode=lambda ids: " ".join(map(str, ids)),
            stop_token_ids=(),
            vocab_size=VOCAB_SIZE,
            max_new_tokens=MAX_NEW_TOKENS,
            max_request_tokens=64,
            max_tokens=64,
        ),
        group_size=GROUP_SIZE,
        max_running_groups=BATCH_GROUPS,
        drop_equal_rewards=False,
        overlong=lambda num_tokens: 0.0,
        frictions=None,
        run_seed=RUN_SEED,
    )


def service_of() -> QueueService:
    admission = admissions.Admission(
        batch_groups=BATCH_GROUPS,
        max_staleness=0,
        push_every_steps=1,
        max_running_groups=100,
        max_attempts=Queue().max_attempts,
        permit_timeout_secs=600.0,
        max_bytes=10**9,
    )
    bounds = {"group_size": GROUP_SIZE, "vocab_size": VOCAB_SIZE, "max_tokens": 64}
    return QueueService(admission, **bounds)


def is_right(kind: str, group: Any) -> bool:
    """Whether a group is what good servers sample."""
    permit = Permit(group.prompt_index, group.attempt)
    for sample, row in enumerate(group.trajectories):
        length = row.prompt_length
        seed = samplers.request_seed(RUN_SEED, permit, sample)
        seed = stream_seed(seed, length) if kind == "vllm" else seed
        ids = [token(seed, length + i) for i in range(MAX_NEW_TOKENS)]
        if row.tokens[length:].tolist() != ids or set(row.versions[length:]) != {0}:
            return False
        if not np.array_equal(row.logprobs[length:], np.float32([logprob(id) for id in ids])):
            return False
    return True


async def run_samples(case: Case) -> Outcome:
    """A run of NUM_STEPS steps."""
    service, outcome = service_of(), Outcome()
    bad, good = case.bad(), Server(case.kind)
    bad.left = NUM_BAD if case.is_alone else 10**9
    for server in (bad, good):
        server.version = weight_name(0, 0, service.run_id)
    calls, deadline = DirectCalls(service), time.monotonic() + RUN_SECS
    generation = (await calls.call("Begin", pb.BeginRequest(nonce="one"))).generation
    own = {"generation": generation}

    async def tick():
        while True:
            await service.tick()
            await asyncio.sleep(TICK_SECS / 50)

    async with contextlib.AsyncExitStack() as stack:
        servers = (bad,) if case.is_alone else (bad, good)
        addresses = await stack.enter_async_context(serving(*servers))
        options = {"run_id": service.run_id, "vocab_size": VOCAB_SIZE}
        client = await stack.enter_async_context(InferenceClient(**options))
        if case.kind == "vllm":
            for address in addresses:
                await client.recognise(address, timeout_secs=RUN_SECS)
        tasks = [asyncio.create_task(worker_of(service, client).run()), asyncio.create_task(tick())]
        status = wire.decode_status(await calls.call("Status", pb.StatusRequest()))
        budgets = _FailureBudgets(Queue(), status)
        try:
            for step in range(NUM_STEPS + 1):
                if step:
                    while (groups := await leased(calls, step, own)) is None:
                        status = wire.decode_status(await calls.call("Status", pb.StatusRequest()))
                        budgets(status)
                        if tasks[0].done():
                            tasks[0].result()
                        if time.monotonic() > deadline:
                            raise TimeoutError(f"no step {step}: {status.returned}")
                    outcome.trained += sum(not is_right(case.kind, group) for group in groups)
                    await calls.call("Commit", pb.CommitRequest(step=step, **own))
                table = wire.encode_servers([ServerRecord(a, "HEALTHY", step) for a in addresses])
                await calls.call(
                    "PublishVersion", pb.PublishRequest(version=step, servers=table, **own)
                )
        except Exception as error:
            outcome.ended = f"{type(error).__name__}: {error}"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    status = wire.decode_status(await calls.call("Status", pb.StatusRequest()))
    outcome.num_bad, outcome.lost = bad.num_bad, sum(status.retired.values())
    return outcome


async def leased(calls: DirectCalls, step: int, own: Mapping[str, int]) -> list | None:
    request = pb.LeaseRequest(step=step, chunk=0, wait_secs=0.1, num_processes=1, **own)
    try:
        _, *replies = await calls.call("Lease", request, 0.1)
    except NotReadyError:
        return None
    return [wire.decode_group(reply.group) for reply in replies]


EXPECTED = Expected({"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1}, 64, "disk", "", "")


async def run_weights(case: Case, store: WeightStore) -> Outcome:
    """The push of a second version; a server that answers well at last has it in the end."""
    run_id, outcome, states = new_run_id(), Outcome(), {}
    bad, good = case.bad(), Server(case.kind)
    servers = (bad,) if case.is_alone else (bad, good)

    def announce(version, records, resume_point, run_epoch):
        states.update((r.address, (r.state, r.version)) for r in records)

    async def check(client, address):
        await preflight(client, address, EXPECTED)

    async with serving(*servers) as addresses:
        publisher = Publisher(
            {address: [address] for address in addresses},
            client=InferenceClient(run_id=run_id),
            transport=Transport("disk", mode="retract"),
            pin=store.pin,
            announce=announce,
            push_timeout_secs=RUN_SECS / 2,
            poll_secs=0.02,
            start_timeout_secs=RUN_SECS,
            preflight=check,
            run_id=run_id,
        )
        try:
            await pushed(publisher, store, 0)
            bad.version, bad.files = "default", None
            bad.left = NUM_BAD if case.is_alone else 10**9
            deadline = time.monotonic() + RUN_SECS
            while states[addresses[0]][0] == "HEALTHY" and time.monotonic() < deadline:
                await asyncio.sleep(0.005)  # Its restart is seen, and its preflight begins.
            await pushed(publisher, store, 1)
            bad.left, deadline = 0, time.monotonic() + RUN_SECS
            while set(map(states.get, addresses)) != {("HEALTHY", 1)}:
                publisher.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(publisher.waits_for())
                await asyncio.sleep(0.01)
            holding = [(s.version, StoredVersion(s.files).version) for s in servers]
            outcome.trained = sum(held != (weight_name(1, 0, run_id), 1) for held in holding)
        except (PublisherError, TimeoutError) as error:
            outcome.ended = f"{type(error).__name__}: {error}"
        finally:
            await asyncio.to_thread(publisher.close)
    outcome.num_bad = bad.num_bad
    return outcome


async def pushed(publisher: Publisher, store: WeightStore, version: int) -> None:
    wait = {"timeout_secs": RUN_SECS}
    await asyncio.to_thread(publisher.publish, version, lambda: store.get(version), **wait)
    await asyncio.to_thread(publisher.wait, version, **wait)


# All of them.

COMPLETION = {"rid": "r", "input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
COMPLETIONS = {
    "sglang": {"/generate": COMPLETION},
    "batches": {"event": COMPLETION},
    "vllm": {"/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 2}}},
}
UPDATES = {"new_version": "1", "weight_version": "1", "model_path": None}
SGLANG = {
    "/model_info": {},
    "/continue_generation": {},
    "/pause_generation": {},
    "/update_weights_from_disk": UPDATES,
}
VLLM_ROUTES = ("/weight_info", "/version", "/v1/models", "/server_info", "/weight_checker")
VLLM_ROUTES += ("/pause", "/resume", "/reset_prefix_cache")
WEIGHTS = {
    "embedded": {**SGLANG, protocol.PREPARE: UPDATES},
    "sglang": {
        **SGLANG,
        "/server_info": {},
        "/generate": COMPLETION,
        "/weights_checker": {},
        "/update_weight_version": UPDATES,
    },
    "vllm": {
        **{route: {} for route in VLLM_ROUTES},
        **COMPLETIONS["vllm"],
        "/collective_rpc": {"method": "load_version", "kwargs": {}},
        "/update_weight_version": UPDATES,
    },
}


def cases(parts: list[str], kinds: list[str]) -> Iterator[Case]:
    """Every field × wrong value × (one of two, the only server)."""
    for part, routes in (("samples", COMPLETIONS), ("weights", WEIGHTS)):
        for kind in [kind for kind in routes if part in parts and kind in kinds]:
            for route, body in routes[kind].items():
                if route == "event":
                    event = Server(kind).answer("/generate", body)
                    found = [("index",), *paths(event)]
                else:
                    found = list(paths(Server(kind).answer(route, body)))
                for path, value, is_alone in itertools.product(found, VALUES, (False, True)):
                    yield Case(part, kind, route, path, value, is_alone)


async def run_all(chosen: list[Case], directory: str) -> list[tuple[Case, Outcome]]:
    store, places = WeightStore(directory, keep=10), asyncio.Semaphore(AT_ONCE)
    for version in (0, 1):
        store.write(version, [(LAYER, np.full((2, 2), version, np.float32))], {})

    async def run(case: Case) -> tuple[Case, Outcome]:
        async with places:
            run = run_samples(case) if case.part == "samples" else run_weights(case, store)
            return case, await run

    return await asyncio.gather(*map(run, chosen))


@contextlib.contextmanager
def short_waits() -> Iterator[None]:
    """Times between two tries, of milliseconds."""
    before = admissions.BACKOFF_SECS, samplers._BACKOFF_SECS
    admissions.BACKOFF_SECS, samplers._BACKOFF_SECS = 0.01, 0.001
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        admissions.BACKOFF_SECS, samplers._BACKOFF_SECS = before
        logging.disable(logging.NOTSET)


def summary(found: list[tuple[Case, Outcome]]) -> dict[str, Any]:
    """The figures by part and by whether the server was alone."""
    rows = []
    for part, is_alone in itertools.product(("samples", "weights"), (False, True)):
        of = [(c, o) for c, o in found if (c.part, c.is_alone) == (part, is_alone)]
        fields = {(case.kind, case.route, case.path) for case, _ in of}
        ended = [f"{case}: {outcome.ended}" for case, outcome in of if outcome.ended]
        rows.append(
            {
                "part": part,
                "servers": 1 if is_alone else 2,
                "fields": len(fields),
                "runs": len(of),
                "wrong_answers": sum(outcome.num_bad for _, outcome in of),
                # The route was not asked.
                "without_one": sum(not outcome.num_bad for _, outcome in of),
                "trained": sum(outcome.trained for _, outcome in of),
                "ended": len(ended),
                "prompts_lost": sum(outcome.lost for _, outcome in of),
                "faults": ended[:5] + [str(c) for c, o in of if o.trained or o.lost][:5],
            }
        )
    return {"rows": rows}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help=f"one run in {SMOKE_EVERY}")
    parser.add_argument("--every", type=int, default=1, help="one run in this many")
    parser.add_argument("--parts", default="samples,weights")
    parser.add_argument("--kinds", default="embedded,sglang,batches,vllm")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    args = parser.parse_args(argv)
    chosen = list(cases(args.parts.split(","), args.kinds.split(",")))
    chosen = chosen[:: SMOKE_EVERY if args.smoke else args.every]
    start = time.monotonic()
    with short_waits(), tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(run_all(chosen, directory))
    result = {"values": len(VALUES)} | summary(found)
    result["secs"] = round(time.monotonic() - start, 1)
    print(json.dumps(result, indent=1))
    record.write(pathlib.Path(args.out, "nonsense.json"), result, seeds=[RUN_SEED])


if __name__ == "__main__":
    main()
