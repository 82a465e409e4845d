"""SGLang's API over real HTTP: answers, refusals, and that the server goes on after each."""

import asyncio
import concurrent.futures
import io
import json
import pathlib
import socket
import time

import aiohttp
import jax
import pytest
import yarl
from fixtures.served_engine import (
    CONFIG,
    DEADLINE_SECS,
    LONG,
    SHAPE,
    serving,
    upload,
    weights,
    write_weights,
)
from prometheus_client.parser import text_string_to_metric_families

from jaxrl_async.inference import engine as engine_lib
from jaxrl_async.inference import http, loading, programs
from jaxrl_async.intake import receiver
from jaxrl_async.models import hf
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import NEUTRAL
from jaxrl_async.versions import difference, protocol
from jaxrl_async.versions import store as weight_store

INT32 = "[-2147483648, 2147483648)"


@pytest.fixture(scope="module")
def compiled():
    return programs.Programs(programs.Shapes(CONFIG, **SHAPE))


@pytest.fixture
def bare_engine(compiled, monkeypatch):
    """A started engine without weights. Programs hold no state, so all engines share them."""
    monkeypatch.setattr(programs, "Programs", lambda *_, **__: compiled)
    engine = engine_lib.Engine(CONFIG, **SHAPE, max_queued_requests=8, name="served")
    engine.start()
    yield engine
    engine.close(timeout_secs=DEADLINE_SECS)


@pytest.fixture
def engine(bare_engine):
    bare_engine.update_weights(weights(0), "3").result(DEADLINE_SECS)
    return bare_engine


class Held:
    """An engine that decodes three chunks, and from then on one for each command, until released."""

    def __init__(self, engine):
        self._engine, self._inner = engine, engine._programs
        self._chunks, self._released = 0, False
        engine._programs = self

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def release(self):
        self._released = True

    async def began(self):
        """Waits until it is held: a request that is merely in its slot has no token yet."""
        async with asyncio.timeout(DEADLINE_SECS):
            while self._chunks <= 3:
                await asyncio.sleep(0.001)

    def decode(self, *args):
        self._chunks += 1
        deadline = time.monotonic() + DEADLINE_SECS
        while self._chunks > 3 and not self._released and self._engine._commands.empty():
            assert time.monotonic() < deadline, "neither a command nor release() came"
            time.sleep(0.001)
        return self._inner.decode(*args)


@pytest.fixture
async def client(engine):
    async with serving(engine) as client:
        yield client


# Answers.


async def test_an_answer_has_sglangs_fields(client):
    answer = await client.generate(rid="group-0001", max_new_tokens=5)
    meta = answer["meta_info"]
    assert answer.keys() == {"output_ids", "meta_info"}
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 5
    assert meta["id"] == "group-0001"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["prompt_tokens"] == 3 and meta["cached_tokens"] == 0
    assert meta["weight_version"] == "3"
    assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 5}]
    assert meta["num_retractions"] == 0 and meta["e2e_latency"] > 0
    logprobs, ids, texts = zip(*meta["output_token_logprobs"], strict=True)
    assert list(ids) == answer["output_ids"] and set(texts) == {None}
    assert all(logprob < 0 for logprob in logprobs)


async def test_neutral_parameters_change_nothing(client):
    plain = (await client.generate(max_new_tokens=10))["output_ids"]
    assert (await client.generate(max_new_tokens=10, **NEUTRAL))["output_ids"] == plain


async def test_a_stop_token_is_named_and_included(client):
    free = (await client.generate(max_new_tokens=10))["output_ids"]
    answer = await client.generate(max_new_tokens=10, stop_token_ids=[free[4]])
    length = free.index(free[4]) + 1
    assert answer["output_ids"] == free[:length]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[4]}
    ignored = await client.generate(max_new_tokens=10, stop_token_ids=[free[4]], ignore_eos=True)
    assert ignored["output_ids"] == free


async def test_without_return_logprob_there_are_none(client):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
    status, answer = await client("/generate", body)
    assert status == 200 and len(answer["output_ids"]) == 2
    assert "output_token_logprobs" not in answer["meta_info"]


async def test_the_same_seed_gives_the_same_answer_and_no_seed_gives_others(client):
    first, second = [(await client.generate(max_new_tokens=30))["output_ids"] for _ in range(2)]
    assert first == second
    unseeded = [
        (await client.generate(max_new_tokens=30, sampling_seed=None))["output_ids"]
        for _ in range(2)
    ]
    assert unseeded[0] != unseeded[1]


async def test_a_bias_of_minus_100_rules_a_token_out(client):
    free = (await client.generate(max_new_tokens=30, sampling_seed=0))["output_ids"]
    bias = {str(token): -100 for token in set(free[:4])}
    bound = await client.generate(max_new_tokens=30, sampling_seed=0, logit_bias=bias)
    assert not set(bound["output_ids"]) & set(map(int, bias))
    later = (await client.generate(max_new_tokens=30, sampling_seed=0))["output_ids"]
    assert later == free  # The slot keeps nothing of it.


async def events_of(client, body):
    """The events of a stream."""
    url = f"http://127.0.0.1:{client.port}/generate"
    async with client.session.post(url, data=json.dumps(body | {"stream": True})) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        *events, done, rest = (await response.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_streamed_batch_is_answered_as_its_requests_end(client):
    prompts, lengths = [[1, 2, 3], [4], [5, 6]], (9, 3, 6)
    params = [{"max_new_tokens": n, "sampling_seed": 0} for n in lengths]
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    events = await events_of(client, body)
    assert [event["index"] for event in events] == [1, 2, 0]
    for event in events:
        alone = await client.generate(prompts[event["index"]], **params[event["index"]])
        assert event["output_ids"] == alone["output_ids"]
        assert event["meta_info"]["weight_versions"] == alone["meta_info"]["weight_versions"]


async def test_a_refusal_in_a_streamed_batch_costs_its_request_alone(client):
    params = {"max_new_tokens": 3, "sampling_seed": 0}
    body = {"input_ids": [[1], [99], [2], [3]], "rid": ["a", "b", "c", "d"]}
    body["sampling_params"] = [params, params, params | {"no_such": 1}, params]
    *refused, first, last = await events_of(client, body)
    reasons = {event["index"]: event["error"]["message"] for event in refused}
    assert "token id 99 is outside [0, 19)" in reasons[1] and "no_such" in reasons[2]
    assert {event["error"]["code"] for event in refused} == {400}
    assert {a["index"]: a["meta_info"]["id"] for a in (first, last)} == {0: "a", 3: "d"}


@pytest.mark.parametrize("count", [1, 2])
async def test_calls_of_a_batch_that_are_cancelled_end_on_the_server(engine, count):
    """The other goes on; where all are, the client hangs up."""
    held = Held(engine)
    async with serving(engine) as client, InferenceClient() as ours:
        address = f"http://127.0.0.1:{client.port}"

        def start(rid, tokens):
            return asyncio.create_task(
                ours.generate(
                    address,
                    rid=rid,
                    input_ids=[1],
                    sampling_params={"max_new_tokens": tokens, "sampling_seed": 1},
                    timeout_secs=DEADLINE_SECS,
                )
            )

        await start("first", 2)  # Its answer says that batches are streamed.
        calls = [start("one", 50), start("two", 50)]
        await client.until(num_running_requests=2)
        for call in calls[:count]:
            call.cancel()
        await client.until(num_running_requests=2 - count)
        held.release()
        if count == 1:
            assert len((await calls[1]).tokens) == 50


async def test_a_batch_is_answered_in_order(client):
    prompts = [[1, 2, 3], [4], [5, 6]]
    params = [{"max_new_tokens": n, "sampling_seed": 0} for n in (5, 3, 4)]
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    status, answers = await client("/generate", body)
    assert status == 200
    for answer, prompt, param in zip(answers, prompts, params, strict=True):
        alone = await client.generate(prompt, **param)
        assert answer["output_ids"] == alone["output_ids"]
    status, answers = await client("/generate", {**body, "sampling_params": params[0]})
    assert [len(answer["output_ids"]) for answer in answers] == [5, 5, 5]


async def test_many_requests_at_once_are_each_answered_with_their_own(client):
    answers = await asyncio.gather(
        *(client.generate([i % 19], rid=f"r{i:03d}", sampling_seed=i) for i in range(14))
    )
    for i, answer in enumerate(answers):
        assert answer["meta_info"]["id"] == f"r{i:03d}"
        alone = await client.generate([i % 19], sampling_seed=i)
        assert alone["output_ids"] == answer["output_ids"]


async def test_model_info_and_health_answer_also_while_paused(client):
    await client("/pause_generation", {"mode": "in_place"})
    status, info = await client.get("/model_info")
    assert status == 200
    assert info["weight_version"] == "3" and info["is_generation"]
    assert (await client.get("/health"))[0] == 200


async def test_metrics_say_whether_it_is_paused(client):
    async def paused():
        async with client.session.get(f"http://127.0.0.1:{client.port}/metrics") as answer:
            families = {f.name: f for f in text_string_to_metric_families(await answer.text())}
        assert families["jaxrl_engine_slots"].samples[0].value == SHAPE["num_slots"]
        return families["jaxrl_engine_paused"].samples[0].value

    assert await paused() == 0
    await client("/pause_generation", {"mode": "in_place"})
    assert await paused() == 1


async def test_a_pause_with_a_lease_ends_by_itself(client, caplog):
    url = f"http://127.0.0.1:{client.port}/pause_generation"
    for lease, status in (("soon", 400), ("0.2", 200)):
        headers = {"X-Pause-Lease-Secs": lease}
        async with client.session.post(url, json={"mode": "in_place"}, headers=headers) as answer:
            assert answer.status == status
    answer = await asyncio.wait_for(client.generate(), 30.0)
    assert len(answer["output_ids"]) == 5
    assert (await client.get("/model_info"))[1]["num_expired_pauses"] == 1
    assert "the server continues" in caplog.text
    await client("/pause_generation", {"mode": "in_place"})  # without one


async def test_a_pause_whose_learner_is_gone_before_its_answer_has_its_lease(engine, monkeypatch):
    pause, paused = engine.pause, asyncio.Event()

    def slow(mode):
        paused.set()
        pause(mode)
        return concurrent.futures.Future()  # The answer is late.

    monkeypatch.setattr(engine, "pause", slow)
    async with serving(engine) as client:
        url = f"http://127.0.0.1:{client.port}/pause_generation"
        options = {"json": {"mode": "in_place"}, "headers": {"X-Pause-Lease-Secs": "0.2"}}
        asked = asyncio.create_task(client.session.post(url, **options).__aenter__())
        await asyncio.wait_for(paused.wait(), DEADLINE_SECS)
        asked.cancel()
        answer = await asyncio.wait_for(client.generate(), 30.0)
        assert len(answer["output_ids"]) == 5


async def test_it_serves_from_a_thread_of_its_own(engine):
    def run():
        async def main():
            async with serving(engine) as client:
                return await client.generate()

        return asyncio.run(main())

    answer = await asyncio.to_thread(run)
    assert len(answer["output_ids"]) == 5


# Pauses, aborts, weights.


async def test_retract_and_continue_over_an_update_give_spans(client, engine, tmp_path):
    held = Held(engine)
    running = client.start(**LONG)
    await held.began()
    assert (await client("/pause_generation", {"mode": "retract"}))[0] == 200
    await client.until(num_running_requests=0, num_waiting_requests=1)
    queued = client.start()
    status, answer = await client(
        "/update_weights_from_disk",
        {"model_path": write_weights(tmp_path), "weight_version": "4", "flush_cache": True},
    )
    assert status == 200 and answer["success"] and answer["num_paused_requests"] in (1, 2)
    info = (await client.get("/model_info"))[1]
    assert info["weight_version"] == "4" and info["model_path"].startswith(str(tmp_path))
    held.release()
    await client("/continue_generation")
    meta = (await running)["meta_info"]
    cut = meta["weight_versions"][0]["end"]
    assert 0 < cut < 50
    assert meta["weight_versions"] == [
        {"version": "3", "start": 0, "end": cut},
        {"version": "4", "start": cut, "end": 50},
    ]
    assert meta["num_retractions"] == 1 and meta["weight_version"] == "4"
    assert (await queued)["meta_info"]["weight_version"] == "4"


async def test_flush_during_an_in_place_update_is_refused_before_anything_changes(
    client, engine, tmp_path
):
    held = Held(engine)
    running = client.start(**LONG)
    await held.began()
    await client("/pause_generation", {"mode": "in_place"})
    body = {"model_path": write_weights(tmp_path), "weight_version": "4"}
    status, answer = await client("/update_weights_from_disk", {**body, "flush_cache": True})
    assert status == 400 and not answer["success"] and "in_place" in answer["message"]
    assert (await client.get("/model_info"))[1]["weight_version"] == "3"
    status, answer = await client("/update_weights_from_disk", {**body, "flush_cache": False})
    assert status == 200 and answer["num_paused_requests"] == 1
    held.release()
    await client("/continue_generation")
    spans = (await running)["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["3", "4"]


async def test_pause_abort_answers_with_partial_tokens(client, engine):
    Held(engine)
    running = client.start(**LONG)
    await client.until(num_running_requests=1)
    await client("/pause_generation", {"mode": "abort"})
    answer = await running
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["finish_reason"]["message"]
    assert 0 <= len(answer["output_ids"]) == len(meta["output_token_logprobs"]) < 50


async def test_abort_request_matches_by_prefix_or_all(client, engine):
    Held(engine)
    tasks = [client.start(rid=rid, **LONG) for rid in ("a-1", "a-2", "b-1")]
    await client.until(num_running_requests=3)
    await client("/pause_generation", {"mode": "in_place"})
    assert (await client("/abort_request", {"rid": "a-"}))[0] == 200
    for task in tasks[:2]:
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    assert not tasks[2].done()
    assert (await client("/abort_request", {"rid": "nobody"}))[0] == 200
    assert (await client("/abort_request", {"abort_all": True}))[0] == 200
    assert (await tasks[2])["meta_info"]["finish_reason"]["type"] == "abort"


async def test_flush_cache_is_refused_while_a_request_is_live(client):
    assert (await client("/flush_cache"))[0] == 200
    await client("/pause_generation", {"mode": "in_place"})
    waiting = client.start()
    await client.until(num_waiting_requests=1)
    status, answer = await client("/flush_cache")
    assert status == 400 and "running or waiting" in answer["error"]["message"]
    await client("/continue_generation")
    await waiting
    assert (await client("/flush_cache"))[0] == 200


async def test_a_client_that_hangs_up_frees_its_slot_and_nobody_elses(client):
    await client("/pause_generation", {"mode": "in_place"})
    lost, kept = client.start(rid="r1"), client.start(rid="r10")
    await client.until(num_waiting_requests=2)
    lost.cancel()
    await client.until(num_waiting_requests=1)
    await client("/continue_generation")
    assert len((await kept)["output_ids"]) == 5
    await client.generate(rid="r1")


async def test_weights_that_are_refused_leave_the_old_ones_serving(client, tmp_path):
    expected = (await client.generate())["output_ids"]
    path = write_weights(tmp_path)
    file = tmp_path / path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    nowhere = str(tmp_path / "nowhere")
    for broken, message in ((path, "model.safetensors"), (nowhere, "not a directory")):
        body = {"model_path": broken, "weight_version": "4"}
        status, answer = await client("/update_weights_from_disk", body)
        assert status == 400 and answer["success"] is False
        assert message in answer["message"]
    assert (await client.get("/model_info"))[1]["weight_version"] == "3"
    assert (await client.generate())["output_ids"] == expected


async def test_before_any_weights_generate_is_503_and_an_update_brings_them(bare_engine, tmp_path):
    async with serving(bare_engine) as client:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
        status, answer = await client("/generate", body)
        assert status == 503 and "no weights yet" in answer["error"]["message"]
        assert (await client.get("/model_info"))[1]["weight_version"] is None
        body = {"model_path": write_weights(tmp_path), "weight_version": "0"}
        assert (await client("/update_weights_from_disk", body))[0] == 200
        assert (await client.generate())["meta_info"]["weight_version"] == "0"


# Refusals.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling_params": {"temprature": 1}}, "unknown keys: temprature"),
        ({"sampling_params": {"temperature": -1}}, "temperature must be in [0, ∞), got -1"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature must be in [0, ∞), got 'hot'"),
        ({"sampling_params": {"top_p": 2}}, "top_p must be in (0, 1], got 2"),
        ({"sampling_params": {"top_k": 0}}, "top_k must be an integer in [1, ∞) or −1 for all"),
        (
            {"sampling_params": {"min_p": 0.1}},
            "min_p must be 0.0: no other value is supported, got 0.1",
        ),
        (
            {"sampling_params": {"repetition_penalty": 1.1}},
            "repetition_penalty must be 1.0: no other",
        ),
        (
            {"sampling_params": {"max_new_tokens": -1}},
            "max_new_tokens must be an integer in [0, ∞)",
        ),
        ({"sampling_params": {"max_new_tokens": None}}, "max_new_tokens 128 exceed"),
        ({"sampling_params": {"stop": "a"}}, "stop must be []: no other"),  # without a tokenizer
        ({"logprob_start_len": "all"}, "logprob_start_len must be in [-1, 2147483648]"),
        ({"sampling_params": {"sampling_seed": -3}}, "sampling_seed must be an integer"),
        ({"sampling_params": {"stop_token_ids": [19]}}, "in [0, 18], got 19"),
        ({"sampling_params": {"stop_token_ids": 4}}, "stop_token_ids must be a list, got 4"),
        ({"sampling_params": [1]}, "sampling_params must be an object"),
        ({"sampling_params": {"logit_bias": [0]}}, "logit_bias must be an object, token id → bias"),
        ({"sampling_params": {"logit_bias": {"a": -100}}}, "logit_bias: 'a' is no token id"),
        ({"sampling_params": {"logit_bias": {"3": 5.0}}}, "token 3 must be ≤ -100, which rules it"),
        (
            {"sampling_params": {"logit_bias": {"3": True}}},
            "token 3 must be ≤ -100, which rules it",
        ),
        ({"sampling_params": {"logit_bias": {"19": -100}}}, "in [0, 18], got 19"),
        ({"input_ids": [1, 19]}, "token id 19 is outside [0, 19)"),
        ({"input_ids": [-1]}, "token id -1 is outside [0, 19)"),
        ({"input_ids": [2**40]}, f"token ids of a prompt: {2**40} is no integer in {INT32}"),
        ({"input_ids": [1.5]}, f"token ids of a prompt: 1.5 is no integer in {INT32}"),
        ({"input_ids": [True]}, "token ids of a prompt: True is no integer"),
        ({"input_ids": ["1"]}, "token ids of a prompt: '1' is no integer"),
        ({"input_ids": []}, "input_ids must be a list"),
        ({"input_ids": [[]]}, "P ≥ 1"),
        ({"input_ids": "1 2 3"}, "input_ids must be a list"),
        ({"input_ids": None}, "input_ids must be a list"),
        ({"input_ids": [1] * 61}, "61 tokens and max_new_tokens 4 exceed the 64 tokens"),
        ({"sampling_params": {}}, "1 tokens and max_new_tokens 128 exceed"),  # SGLang's default
        ({"rid": 7}, "rid must be a string of 1 to 256 characters, got 7"),
        ({"rid": "x" * 257}, "rid must be a string of 1 to 256 characters"),
        ({"return_logprob": "yes"}, "return_logprob must be true or false, got 'yes'"),
        ({"text": "hello"}, "unknown keys: text"),
        ({"input_ids": [[1], [2]], "rid": "r"}, "rid of a batch must be a list of 2, got 'r'"),
        ({"input_ids": [[1], 2]}, "token ids of a prompt must be a list, got 2"),
        ({"input_ids": [[1], [2]], "rid": ["r", "r"]}, "rid 'r' is already in use"),
    ],
)
async def test_a_bad_request_is_400_and_names_what_is_wrong(client, change, message):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
    status, answer = await client("/generate", body | change)
    assert status == 400
    assert message in answer["error"]["message"]
    assert len((await client.generate())["output_ids"]) == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "the body is not JSON"),
        (b"\xff\xfe{", "the body is not JSON"),
        ("[1]", "the body must be a JSON object, got list"),
        ("", "input_ids must be a list"),
    ],
)
async def test_a_body_that_is_no_json_object_is_400(client, data, message):
    status, answer = await client("/generate", data=data)
    assert status == 400 and message in answer["error"]["message"]
    assert len((await client.generate())["output_ids"]) == 5


async def test_a_body_beyond_the_bound_is_413(client):
    data = io.BytesIO(b'{"rid": "' + b"x" * (http.MAX_BODY_BYTES + 1) + b'"}')
    status, answer = await client("/generate", data=data)
    assert status == 413 and str(http.MAX_BODY_BYTES) in answer["error"]["message"]
    assert len((await client.generate())["output_ids"]) == 5


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/pause_generation", {"mode": "gently"}, "abort, retract, in_place; got 'gently'"),
        ("/pause_generation", {"mod": "abort"}, "unknown keys: mod"),
        ("/continue_generation", {"mode": "x"}, "unknown keys: mode"),
        ("/abort_request", {}, "give a rid"),
        ("/abort_request", {"rid": ""}, "give a rid"),
        ("/update_weights_from_disk", {"weight_version": "1"}, "model_path must be a string"),
        (
            "/update_weights_from_disk",
            {"model_path": "/x", "weight_version": 1},
            "weight_version must be a string, got 1",
        ),
    ],
)
async def test_a_bad_command_is_400_and_names_what_is_wrong(client, route, body, message):
    status, answer = await client(route, body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert len((await client.generate())["output_ids"]) == 5


async def test_an_unknown_route_is_404_in_json(client):
    status, answer = await client("/generat")
    assert status == 404 and "/generat" in answer["error"]["message"]


async def test_a_live_rid_is_400_and_the_first_is_answered(client):
    await client("/pause_generation", {"mode": "in_place"})
    first = client.start(rid="same")
    await client.until(num_waiting_requests=1)
    body = {"input_ids": [1], "rid": "same", "sampling_params": {"max_new_tokens": 4}}
    status, answer = await client("/generate", body)
    assert status == 400 and "rid 'same' is already in use" in answer["error"]["message"]
    await client("/continue_generation")
    assert len((await first)["output_ids"]) == 5


async def test_one_bad_prompt_of_a_batch_leaves_none_behind(client):
    await client("/pause_generation", {"mode": "in_place"})
    body = {"input_ids": [[1], [2], [99]], "sampling_params": {"max_new_tokens": 4}}
    status, answer = await client("/generate", body)
    assert status == 400 and "token id 99" in answer["error"]["message"]
    await client.until(num_waiting_requests=0)


async def test_a_full_queue_is_503(client):
    await client("/pause_generation", {"mode": "in_place"})
    tasks = [client.start() for _ in range(14)]
    await client.until(num_waiting_requests=14)
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}
    status, answer = await client("/generate", body)
    assert status == 503
    assert "6 slots and 8 waiting requests" in answer["error"]["message"]
    await client("/continue_generation")
    await asyncio.gather(*tasks)


async def test_a_dead_engine_answers_503_with_its_error(client, engine):
    def broken(*_):
        raise RuntimeError("the device is gone")

    class Broken:
        prefill = decode = broken

    engine._programs = Broken()
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}
    for route in ("/generate", "/generate", "/pause_generation"):
        status, answer = await client(route, body if route == "/generate" else {"mode": "abort"})
        assert status == 503
        assert "engine 'served' died" in answer["error"]["message"]
        assert "the device is gone" in answer["error"]["message"]
    for route in ("/health", "/model_info"):
        status, answer = await client.get(route)
        assert status == 503 and "the device is gone" in answer["error"]["message"]


async def test_a_port_in_use_is_refused_with_the_address(engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with http.serve(engine, host="127.0.0.1", port=port):
                pass


async def test_the_servers_end_ends_its_answers_and_not_the_engine(engine):
    async with serving(engine) as client:
        await client("/pause_generation", {"mode": "in_place"})
        waiting = client.start()
        await client.until(num_waiting_requests=1)
    with pytest.raises(aiohttp.ClientError):
        await waiting
    assert engine.error is None
    async with serving(engine) as client:
        await client.until(num_waiting_requests=0)
        await client("/continue_generation")
        assert len((await client.generate())["output_ids"]) == 5


# Preparations.


@pytest.fixture
def stored(tmp_path):
    return pathlib.Path(write_weights(tmp_path))


def named(stored, version="4", **more):
    """The version and its digest, as a preparation and its update have them."""
    digest = weight_store.read_manifest(stored)["digest"]
    return {"weight_version": version, "weight_digest": digest} | more


async def prepare(client, stored, **more):
    return await client("/weights/prepare", named(stored, model_path=str(stored)) | more)


async def swap(client, stored, **more):
    body = named(stored, model_path=str(stored)) | more
    return await client("/update_weights_from_disk", body)


@pytest.fixture
def reads(monkeypatch):
    """The directories that were read."""
    reads, read = [], loading.read

    def recorded(path, *args):
        reads.append(path)
        return read(path, *args)

    monkeypatch.setattr(loading, "read", recorded)
    return reads


async def test_a_prepared_version_is_swapped_in_without_its_files(client, engine, stored, reads):
    held = Held(engine)
    running = client.start(**LONG)
    await held.began()
    status, answer = await prepare(client, stored)
    assert (status, answer["success"]) == (200, True)
    info = (await client.get("/model_info"))[1]
    assert (info["weight_version"], info["num_running_requests"]) == ("3", 1)  # It goes on.
    (stored / "model.safetensors").unlink()
    await client("/pause_generation", {"mode": "retract"})
    assert (await swap(client, stored))[0] == 200
    await client("/continue_generation")
    held.release()
    info = (await client.get("/model_info"))[1]
    assert info["weight_digest"] == named(stored)["weight_digest"]
    spans = (await running)["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["3", "4"]
    assert len(reads) == 1


async def test_a_swap_that_comes_twice_loads_the_version_again(client, stored, reads):
    await prepare(client, stored)
    for _ in range(2):
        assert (await swap(client, stored))[0] == 200
    info = (await client.get("/model_info"))[1]
    assert (info["weight_version"], len(reads)) == ("4", 2)


@pytest.mark.parametrize("other", [{"weight_version": "5"}, {"weight_digest": "0" * 64}])
async def test_an_update_to_other_weights_than_the_prepared_loads_them(
    client, stored, reads, other
):
    await prepare(client, stored)
    assert (await swap(client, stored, **other))[0] == 200
    assert len(reads) == 2


async def test_a_prepared_upload_is_swapped_in_and_its_files_are_gone(client, stored, reads):
    await upload(client, stored, "4")
    assert (await client("/weights/prepare", named(stored)))[0] == 200
    status, answer = await client("/weights/prepare", named(stored, "5"))
    assert (status, "no file of version '5'" in str(answer)) == (400, True)
    assert (await client("/weights/prepare", named(stored)))[0] == 400  # Its files are gone.
    await upload(client, stored, "4")
    assert (await client("/weights/prepare", named(stored)))[0] == 200
    assert (await client("/update_weights_from_upload", named(stored)))[0] == 200
    assert (await client.get("/model_info"))[1]["weight_version"] == "4"


async def test_damaged_files_are_refused_before_a_pause(client, stored):
    content = bytearray((stored / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (stored / "model.safetensors").write_bytes(content)
    status, answer = await prepare(client, stored)
    assert (status, answer["success"]) == (400, False) and "its manifest says" in answer["message"]
    assert (await client.get("/model_info"))[1]["weight_version"] == "3"


async def test_other_weights_than_those_of_the_push_are_refused(client, stored):
    status, answer = await prepare(client, stored, weight_digest="0" * 64)
    assert status == 400 and "the push is of 0000" in answer["message"]


async def test_a_superseded_learner_prepares_nothing_and_swaps_nothing(client, stored, reads):
    young, old = ({"run_id": "a", "generation": generation} for generation in (2, 1))
    assert (await prepare(client, stored, writer=young))[0] == 200
    for call in (prepare, swap):
        status, answer = await call(client, stored, writer=old)
        assert status == 400 and "superseded by generation 2" in answer["message"]
    assert (await swap(client, stored, writer=young))[0] == 200
    assert len(reads) == 1


async def test_a_version_from_outside_the_roots_is_not_prepared(client, stored):
    status, answer = await prepare(client, stored, model_path="/etc")
    assert status == 400 and "model_path" in answer["message"]


@pytest.fixture
def steps(tmp_path):
    """Writes versions of small steps: number → its directory."""
    store = weight_store.WeightStore(tmp_path / "steps", keep=2)

    def write(number):
        params = jax.tree.map(lambda leaf: leaf + number * 1e-6, weights(1))
        tensors = hf.to_tensors(params, CONFIG, "float32")
        return store.write(number, tensors, hf.write_config(CONFIG))

    return write


@pytest.fixture
def copies(monkeypatch):
    """The copies that servers make."""
    copies, make = [], receiver.Copy

    def made(root):
        copies.append(make(root))
        return copies[-1]

    monkeypatch.setattr(receiver, "Copy", made)
    return copies


@pytest.mark.parametrize("way", ["disk", "stream"])
async def test_differences_give_the_digests_of_full_versions(copies, client, steps, way):
    """The last of them is of a base that the server lost: it says so, and takes the full version."""

    async def give(path, version, file=None):
        """Prepares a version, in full or by a difference."""
        body = named(path, version, keep=True) | ({"difference": file.name} if file else {})
        if way == "disk":
            return await client("/weights/prepare", body | {"model_path": str(path)})
        files = [file] if file else [f for f in path.iterdir() if f.suffix != ".difference"]
        await upload(client, path, version, files=files)
        return await client("/weights/prepare", body)

    route = "/update_weights_from_" + {"disk": "disk", "stream": "upload"}[way]
    last = None
    for number in range(1, 6):
        path = steps(number)
        file = last and difference.write(last, path)
        if number == 5:
            copies[-1].drop()
        status, answer = await give(path, str(number), file)
        if number == 5:
            assert status == protocol.NO_DIFFERENCE and "is of None" in answer["message"]
            assert (await client.get("/model_info"))[1]["weight_version"] == "4"
            status, answer = await give(path, str(number))
        assert status == 200, answer
        where = {"model_path": str(path)} if way == "disk" else {}
        assert (await client(route, named(path, str(number)) | where))[0] == 200
        info = (await client.get("/model_info"))[1]
        digest = named(path)["weight_digest"]
        assert (info["weight_version"], info["weight_digest"]) == (str(number), digest)
        assert info["difference_base"] == digest
        last = path


async def test_a_difference_from_outside_the_version_is_refused(client, steps):
    path = steps(1)
    for name in ("../evil.difference", "/etc/passwd", ".difference", 3):
        body = named(path, keep=True, model_path=str(path), difference=name)
        status, answer = await client("/weights/prepare", body)
        assert status == 400 and "difference must be a file's name" in str(answer)


async def test_a_kept_upload_without_room_is_there_for_the_load_in_the_pause(
    client, stored, monkeypatch
):
    read = loading.read
    monkeypatch.setattr(loading, "read", no_room)
    await upload(client, stored, "4")
    status, _ = await client("/weights/prepare", named(stored, keep=True))
    assert status == protocol.NO_ROOM
    monkeypatch.setattr(loading, "read", read)
    status, _ = await client("/update_weights_from_upload", {"weight_version": "4"})
    assert status == 200


def no_room(*_):
    raise loading.NoRoomError("the device has no room for a second copy")


async def test_no_room_for_two_copies_is_507(client, stored, monkeypatch):
    monkeypatch.setattr(loading, "read", no_room)
    status, answer = await prepare(client, stored)
    assert (status, answer["success"]) == (protocol.NO_ROOM, False) and "no room" in answer[
        "message"
    ]


# Uploads and keys.


async def test_an_uploaded_version_is_loaded_and_removed(client, tmp_path):
    path = pathlib.Path(write_weights(tmp_path))
    await upload(client, path)
    body = {"weight_version": "9", "flush_cache": True}
    status, answer = await client("/update_weights_from_upload", body)
    assert (status, answer["success"]) == (200, True)
    _, info = await client.get("/model_info")
    manifest = weight_store.read_manifest(path)
    assert (info["weight_version"], info["weight_digest"]) == ("9", manifest["digest"])
    status, answer = await client("/update_weights_from_upload", body)
    assert status == 400
    assert "no file of version '9' was uploaded" in answer["error"]["message"]


async def test_an_upload_replaces_that_of_another_version(client, tmp_path):
    path = pathlib.Path(write_weights(tmp_path))
    await upload(client, path, "8")
    await upload(client, path, "9")
    assert (await client("/update_weights_from_upload", {"weight_version": "8"}))[0] == 400
    assert (await client("/update_weights_from_upload", {"weight_version": "9"}))[0] == 200


async def test_half_an_upload_is_refused_and_removed(client, tmp_path):
    path = pathlib.Path(write_weights(tmp_path))
    files = [file for file in path.iterdir() if file.suffix == ".json"]
    await upload(client, path, files=files)
    status, answer = await client("/update_weights_from_upload", {"weight_version": "9"})
    assert (status, answer["success"]) == (400, False)
    _, info = await client.get("/model_info")
    assert info["weight_version"] == "3"
    assert (await client("/update_weights_from_upload", {"weight_version": "9"}))[1].get("error")


@pytest.mark.parametrize(
    "place",
    ["9/..%2fevil.json", "9/.hidden.json", "9/model.bin", "..%2f9/config.json", "%2e%2e/a.json"],
)
async def test_an_upload_has_no_place_outside_its_directory(client, place):
    url = yarl.URL(f"http://127.0.0.1:{client.port}/weights/{place}", encoded=True)
    async with client.session.put(url, data=b"{}") as answer:
        assert answer.status in (400, 404), await answer.text()


async def test_a_load_format_that_is_none_of_ours_is_refused(client, tmp_path):
    body = {"model_path": write_weights(tmp_path), "weight_version": "9"}
    status, answer = await client("/update_weights_from_disk", body | {"load_format": "gguf"})
    assert status == 400
    assert "load_format must be auto or safetensors, got 'gguf'" in answer["error"]["message"]
    assert (await client("/update_weights_from_disk", body | {"load_format": "auto"}))[0] == 200


@pytest.mark.parametrize(
    ("keys", "data", "control"),
    [
        ({}, (None, "any"), (None, "any")),
        ({"api_key": "a"}, ("a",), ("a",)),
        ({"api_key": "a", "admin_api_key": "b"}, ("a",), ("b",)),
        ({"admin_api_key": "b"}, (None, "a", "b"), ("b",)),
    ],
)
async def test_keys_are_asked_for_as_sglang_does(engine, keys, data, control):
    async with (
        http.serve(engine, host="127.0.0.1", port=0, **keys) as port,
        aiohttp.ClientSession() as http_client,
    ):
        for key in (None, "a", "b", "any", "é"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for method, route, allowed in (
                ("GET", "/model_info", data),
                ("GET", "/metrics", data),
                ("POST", "/continue_generation", control),
                ("PUT", "/weights/1/config.json", control),
                ("GET", "/health", (None, "a", "b", "any", "é")),
            ):
                url = f"http://127.0.0.1:{port}{route}"
                async with http_client.request(method, url, headers=headers) as answer:
                    wanted = 200 if {None, key} & {*allowed} else 401
                    assert answer.status == wanted, (route, key)
