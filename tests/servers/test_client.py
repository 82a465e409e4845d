"""The client of inference servers, against a fake one."""

import asyncio
import base64
import dataclasses
import json
import time
import types

import aiohttp
import numpy as np
import pytest
from aiohttp.http_writer import StreamWriter
from fixtures.fake_sglang import FakeServer, answer, logprob, token

from jaxrl_async.servers import kinds
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.completions import checked_completion, read_completion
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import (
    ANYTHING,
    ForeignWeightsError,
    NonsenseError,
    Request,
    ServerError,
    ServerTimeoutError,
    UnfitServerError,
)
from jaxrl_async.types import Record


@pytest.fixture
def server():
    server = FakeServer().start()
    yield server
    server.stop()


async def generate(client, address, timeout_secs=10.0, **sampling):
    return await client.generate(
        address,
        rid="000000000000-0000-0000-0000",
        input_ids=[5, 6],
        sampling_params={"max_new_tokens": 3, "sampling_seed": 1} | sampling,
        timeout_secs=timeout_secs,
    )


async def test_a_completion_holds_tokens_logprobs_versions_and_why_it_ended(server):
    server.version = "8"
    async with InferenceClient() as client:
        completion = await generate(client, server.address)
    tokens = [token(1, 2), token(1, 3), token(1, 4)]
    assert completion.tokens.tolist() == tokens and completion.tokens.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    np.testing.assert_array_equal(completion.logprobs, np.float32([logprob(t) for t in tokens]))
    assert completion.versions.tolist() == [8, 8, 8] and completion.versions.dtype == np.int32
    assert completion.finish_reason == "length"


async def test_a_request_asks_for_logprobs_and_no_stream(server):
    server.version = "0"
    async with InferenceClient() as client:
        await generate(client, server.address, temperature=1.0)
    ((_, sent),) = server.calls
    assert sent == {
        "rid": "000000000000-0000-0000-0000",
        "input_ids": [5, 6],
        "sampling_params": {
            **{"max_new_tokens": 3, "sampling_seed": 1, "temperature": 1.0},
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0},
            **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        },
        "return_logprob": True,
        "stream": False,
    }


async def generate_many(client, address, seeds, timeout_secs=10.0):
    """The completions, or errors, of calls that begin together."""
    calls = [
        client.generate(
            address,
            rid=f"000000000000-0000-{seed:04d}-0000",
            input_ids=[5, 6],
            sampling_params={"max_new_tokens": 3, "sampling_seed": seed},
            timeout_secs=timeout_secs,
        )
        for seed in seeds
    ]
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("streams", [False, True])
async def test_calls_that_begin_together_share_a_request_where_the_server_says_so(server, streams):
    server.version, server.streams = "0", streams
    async with InferenceClient() as client:
        await generate(client, server.address)
        completions = await generate_many(client, server.address, range(4))
    for seed, completion in enumerate(completions):
        assert completion.tokens.tolist() == [token(seed, position) for position in (2, 3, 4)]
    sent = server.payloads("/generate")[1:]
    assert [payload["stream"] for payload in sent] == ([True] if streams else [False] * 4)
    if streams:
        assert sent[0]["input_ids"] == [[5, 6]] * 4 and len(set(sent[0]["rid"])) == 4


async def test_a_batch_that_ends_early_costs_the_calls_without_an_answer(server):
    server.version, server.streams, server.ends_after = "0", True, 1
    async with InferenceClient() as client:
        await generate(client, server.address)
        first, second = await generate_many(client, server.address, (0, 1))
    assert second.tokens.tolist() == [token(1, position) for position in (2, 3, 4)]
    assert isinstance(first, ServerError) and first.retryable
    assert "the answer ended before its requests" in str(first)


async def test_a_refusal_of_a_batch_reaches_each_of_its_calls(server):
    server.version, server.streams = "0", True
    async with InferenceClient() as client:
        await generate(client, server.address)
        server.fail["/generate"] = (503, "no weights yet")
        refusals = await generate_many(client, server.address, (0, 1))
    assert [(e.status, e.retryable) for e in refusals] == [(503, True)] * 2


async def test_a_call_of_a_batch_is_late_by_its_own_deadline(server):
    server.version, server.streams = "0", True
    async with InferenceClient() as client:
        await generate(client, server.address)
        server.paused = True
        patient = asyncio.create_task(generate(client, server.address))
        (late,) = await generate_many(client, server.address, (1,), timeout_secs=0.05)
        assert isinstance(late, ServerTimeoutError)
        async with asyncio.timeout(10.0):
            while not server.payloads("/abort_request"):
                await asyncio.sleep(0.01)
        server.paused = False
        assert (await patient).finish_reason == "length"
    assert len(server.payloads("/generate")) == 2
    assert server.payloads("/abort_request") == [{"rid": "000000000000-0000-0001-0000"}]


def test_spans_of_versions_are_spread_over_the_output_tokens():
    completion = read_completion(answer([7, 8, 9, 7], versions=[("3", 2), ("4", 0), ("5", 2)]))
    assert completion.versions.tolist() == [3, 3, 5, 5]


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [("3", 0, 2)],
        [("3", 0, 4)],
        [("3", 1, 3)],
        [("3", 0, 1), ("4", 2, 3)],
        [("3", 0, 2), ("4", 1, 3)],
        [("3", 0, 2), ("4", 2, 1), ("5", 1, 3)],
    ],
)
def test_spans_that_do_not_cover_the_tokens_exactly_are_refused(spans):
    broken = answer([7, 8, 9], versions=[])
    broken["meta_info"]["weight_versions"] = [
        {"version": v, "start": start, "end": end} for v, start, end in spans
    ]
    with pytest.raises(ValueError, match=r"weight_versions .*\[0, 3\)"):
        read_completion(broken)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"stop_token_ids": [9, 8]}, "stop"),
        ({"stop_token_ids": [7]}, "length"),
        ({"stop_token_ids": [8], "ignore_eos": True}, "length"),
        ({"stop_token_ids": None}, "length"),
        ({}, "length"),
    ],
)
def test_a_stop_token_in_the_last_place_is_the_end_that_counts(sampling, reason):
    """SGLang says "length" of it, as it looks at the number of tokens first."""
    asked = Request("", (), {"max_new_tokens": 2} | sampling)
    found = read_completion(answer([7, 8], versions=[("3", 2)], reason="length"), asked)
    assert found.finish_reason == reason


@pytest.mark.parametrize("version", ["default", "-1", "1.5.2", "1.", ".5", "", 3, None])
def test_a_version_that_is_no_integer_from_zero_is_refused(version):
    with pytest.raises(ValueError, match="weight version .* 0"):
        read_completion(answer([7], versions=[(version, 1)]))


KEPT = [[9, 7], [8], [2, 9, 5]]
ASKS = Request("", (), {"max_kept": 3}, vocab_size=10)


def with_kept(kept):
    found = answer([7, 8, 9], versions=[("3", 3)])
    found["meta_info"]["kept_ids"] = kept
    return found


def test_kept_ids_become_ascending_rows_where_the_request_asks_for_them():
    found = read_completion(with_kept(KEPT), ASKS)
    assert found.kept.tolist() == [[7, 9, -1], [8, -1, -1], [2, 5, 9]]
    assert found.kept.dtype == np.int32
    assert read_completion(with_kept(KEPT)).kept is None
    # A token that logit_bias rules out is in no set that the policy is trained on.
    bias = {"max_kept": 3, "logit_bias": {"5": -100.0}}
    found = read_completion(with_kept(KEPT), dataclasses.replace(ASKS, sampling_params=bias))
    assert found.kept.tolist() == [[7, 9], [8, -1], [2, 9]]


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (None, "no kept ids, and the request has a max_kept"),
        ([[7], [8]], "3 tokens, but kept ids of 2"),
        ({"7": 1}, "3 tokens, but kept ids of 1"),
        ([[7], [8], [9, 10]], r"kept ids: 10 is no integer in \[0, 10\)"),
        ([[7], [8], 9], "kept ids must be a list, got 9"),
        ([[7], [8], [9, 1.5]], "kept ids: 1.5 is no integer"),
        ([[7], [8], [9, 1, 2, 3]], "must be up to 3 distinct ids with its token 9"),
        ([[7], [8], [9, 9]], "must be up to 3 distinct ids"),
        ([[7], [7], [9]], "must be up to 3 distinct ids with its token 8"),
        ([[7], [], [9]], "must be up to 3 distinct ids with its token 8"),
    ],
)
def test_kept_ids_that_cannot_be_are_refused_by_name(kept, words):
    with pytest.raises(ValueError, match=words):
        read_completion(with_kept(kept), ASKS)


RECORD = Record(num_layers=2, experts_per_token=1, num_experts=8)
WANTS = Request("", (5, 6), {}, record=RECORD)


def with_routes(routes):
    found = answer([7, 8, 9], versions=[("3", 3)])
    is_array = isinstance(routes, np.ndarray)
    text = base64.b64encode(routes.astype("<i4").tobytes()).decode() if is_array else routes
    found["meta_info"]["routed_experts"] = text
    return found


def test_routes_are_read_where_the_request_wants_them_and_the_last_tokens_are_not_known():
    routes = np.arange(8).reshape(4, 2, 1)
    found = read_completion(with_routes(routes), WANTS).routes
    assert found.dtype == np.uint8 and found[:4].tolist() == routes.tolist()
    assert found[4:].tolist() == [[[255], [255]]]
    assert (
        read_completion(with_routes(np.where(routes == 3, -1, routes)), WANTS).routes[1, 1] == 255
    )
    assert read_completion(with_routes(routes)).routes is None
    assert read_completion(answer([7], versions=[("3", 1)]), WANTS).routes is None


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (np.zeros((4, 3, 1)), "has 48 bytes, 5 tokens of 2 layers and 1 experts need 8 each"),
        (np.zeros((4, 2, 2)), "has 64 bytes"),
        (np.zeros((3, 2, 1)), "has 24 bytes"),
        (np.full((4, 2, 1), 8), r"expert 8 in routed_experts is outside \[0, 8\)"),
        (np.full((4, 2, 1), -2), "expert -2"),
        (7, "routed_experts must be base64, got 7"),
        ("é", "ASCII"),
    ],
)
def test_routes_of_another_number_of_layers_or_experts_are_refused_by_name(routes, words):
    with pytest.raises(ValueError, match=words):
        read_completion(with_routes(routes), WANTS)


async def test_requests_ask_for_routes_where_the_run_records_them(server):
    server.version = "0"
    async with InferenceClient(record=RECORD) as client:
        await generate(client, server.address)
        server.streams = True
        await generate(client, server.address)
        await generate(client, server.address)
    async with InferenceClient() as client:
        await generate(client, server.address)
    asked = [p.get("return_routed_experts") for p in server.payloads("/generate")]
    assert asked == [True, True, True, None]


def test_the_version_stands_behind_the_run_epoch():
    assert read_completion(answer([7, 8], versions=[("3.12", 2)])).versions.tolist() == [12, 12]


RUN = "abcdefghij23"
OURS = dataclasses.replace(ANYTHING, run_id=RUN)


def test_tokens_of_another_runs_weights_are_refused():
    mine = answer([7, 8], versions=[(f"{RUN}.0.12", 2)])
    assert read_completion(mine, OURS).versions.tolist() == [12, 12]
    assert read_completion(mine).versions.tolist() == [12, 12]
    for other in ("12", "1.12", f"{RUN[::-1]}.0.12", "default", f"{RUN}.0.12-unverified"):
        with pytest.raises(ForeignWeightsError, match=f"weight version '{other}'"):
            read_completion(answer([7, 8], versions=[(f"{RUN}.0.12", 1), (other, 1)]), OURS)


def test_of_too_many_logprobs_the_last_ones_count():
    repeated = answer([7, 8], versions=[("0", 2)])
    repeated["meta_info"]["output_token_logprobs"].insert(0, [-0.5, 7, None])
    assert read_completion(repeated).logprobs.tolist() == pytest.approx([-0.007, -0.008])


def test_logprobs_of_other_tokens_are_refused():
    broken = answer([7, 8], versions=[("0", 2)])
    broken["meta_info"]["output_token_logprobs"][0][1] = 9
    with pytest.raises(ValueError, match="output_token_logprobs.*output_ids"):
        read_completion(broken)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf"), 1e-4])
def test_a_logprob_that_is_not_finite_or_above_zero_is_refused(bad):
    broken = answer([7, 8], versions=[("0", 2)])
    broken["meta_info"]["output_token_logprobs"][1][0] = bad
    with pytest.raises(ValueError, match="log-prob .*finite.* 0"):
        read_completion(broken)


@pytest.mark.parametrize("bad", [-1e30, -101, "-0.1", True, None, [-0.1], 10**400])
def test_a_logprob_is_a_number_that_a_drawn_token_may_have(bad):
    broken = answer([7, 8], versions=[("0", 2)])
    broken["meta_info"]["output_token_logprobs"][1][0] = bad
    with pytest.raises((ValueError, OverflowError)):
        read_completion(broken)


ASKED = dataclasses.replace(
    ANYTHING, rid="r", vocab_size=100, sampling_params={"max_new_tokens": 2}
)


def set_at(value, path, new):
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


META, TRIPLES = "meta_info", "output_token_logprobs"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("output_ids",), [7, 8, 9], "3 output_ids"),
        (("output_ids",), "78", "are not output_ids"),
        (("output_ids", 1), 8.0, "is no integer in"),
        (("output_ids", 1), "8", "are not output_ids"),
        ((META, TRIPLES, 1, 1), 8.0, "is no integer in"),
        ((META, TRIPLES, 1, 1), True, "is no integer in"),
        ((META, "completion_tokens"), 2.0, "completion_tokens is 2.0"),
        ((META, "weight_versions", 0, "start"), False, "is no integer in"),
        ((META, "weight_versions", 0, "end"), 2.0, "is no integer in"),
        ((META, "finish_reason", "type"), ["stop"], "finish_reason .*stop.* is not"),
        ((META, "id"), "q", "id 'q' is not that of the request, r"),
    ],
)
def test_a_value_of_another_type_is_refused_though_it_equals_the_right_one(path, value, words):
    broken = answer([7, 8], versions=[("0", 2)])
    set_at(broken, path, value)
    with pytest.raises(ValueError, match=words):
        read_completion(broken, ASKED)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([7, 8.7], "is no integer in"),
        ([7, "8"], "is no integer in"),
        ([7, True], "is no integer in"),
        ([7, 100], r"100 is no integer in \[0, 100\)"),
        ([7, -1], r"-1 is no integer in \[0, 100\)"),
        ([7, 2**63], r"9223372036854775808 is no integer in"),
        ([7, 8, 9], "3 tokens, and max_new_tokens is 2"),
    ],
)
def test_token_ids_are_integers_of_the_vocabulary_and_no_more_than_were_asked_for(ids, words):
    """They say so twice, and agree."""
    with pytest.raises(ValueError, match=words):
        checked_completion(ids, [-1.0] * len(ids), [], "length", ASKED)


def test_rounding_above_zero_becomes_zero():
    rounded = answer([7], versions=[("0", 1)])
    rounded["meta_info"]["output_token_logprobs"][0][0] = 9e-7
    assert read_completion(rounded).logprobs.tolist() == [0.0]


def test_a_dropped_special_token_is_noticed():
    broken = answer([7, 8], versions=[("0", 2)])
    broken["meta_info"]["completion_tokens"] = 3
    with pytest.raises(ValueError, match="2 output_ids.*completion_tokens.* 3"):
        read_completion(broken)


def test_a_request_aborted_in_the_queue_has_no_tokens():
    completion = read_completion(
        {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    )
    assert completion.finish_reason == "abort"
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == 0


def test_an_abort_in_a_queue_keeps_its_tokens_with_less_about_them():
    """SGLang's answer for a request that is aborted while it is retracted."""
    short = answer([5, 6], versions=[("3", 2)], reason="abort")
    del short["meta_info"]["completion_tokens"]
    completion = read_completion(short)
    assert completion.tokens.tolist() == [5, 6]
    assert completion.versions.tolist() == [3, 3]
    assert completion.finish_reason == "abort"


async def test_a_malformed_answer_is_nonsense_and_another_server_may_be_asked(server):
    server.answers = [{"output_ids": [1]}]
    async with InferenceClient() as client:
        with pytest.raises(NonsenseError, match=r"/generate: malformed .*meta_info") as caught:
            await generate(client, server.address)
    assert caught.value.retryable


async def test_tokens_of_a_restarted_server_are_refused_and_retryable(server):
    async with InferenceClient() as client:
        with pytest.raises(ServerError, match="weight version 'default'") as caught:
            await generate(client, server.address)
    assert caught.value.retryable


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (429, True), (503, True)])
async def test_a_refusal_has_the_server_s_message_and_is_retryable_by_its_status(
    server, status, retryable
):
    server.fail["/generate"] = (status, "the prompt is too long")
    async with InferenceClient() as client:
        with pytest.raises(ServerError, match="the prompt is too long") as caught:
            await generate(client, server.address)
    assert caught.value.retryable is retryable
    assert f"{server.address}/generate: HTTP {status}" in str(caught.value)


async def test_a_call_that_is_not_answered_ends_at_its_deadline(server):
    server.hang.add("/generate")
    async with InferenceClient() as client:
        with pytest.raises(ServerTimeoutError, match=r"/generate: .* 0\.1 s") as caught:
            await generate(client, server.address, timeout_secs=0.1)
    assert caught.value.retryable


async def test_a_connection_that_breaks_is_an_error_to_retry(server):
    server.drop.add("/generate")
    async with InferenceClient() as client:
        with pytest.raises(ServerError, match="/generate: connection") as caught:
            await generate(client, server.address)
    assert caught.value.retryable


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
async def test_a_name_that_no_host_can_have_is_an_error_of_its_server(host):
    async with InferenceClient() as client:
        with pytest.raises(ServerError, match=f"{host}:80/.*no host can have.* label") as caught:
            await client.recognise(f"http://{host}:80", timeout_secs=10.0)
    assert not caught.value.retryable


async def test_a_call_that_found_its_connection_closed_before_it_was_sent_is_sent_again(
    server, monkeypatch
):
    class ClosedOnce(StreamWriter):
        left = 1

        async def write(self, *args, **options):
            if self.left:
                ClosedOnce.left -= 1
                raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
            await super().write(*args, **options)

    monkeypatch.setattr(aiohttp.client_reqrep, "StreamWriter", ClosedOnce)
    async with InferenceClient() as client:
        await SglangApi(client, server.address).rename("7", timeout_secs=10.0)
    assert ClosedOnce.left == 0
    assert server.calls == [
        ("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
    ]


async def test_control_routes_send_what_sglang_expects(server):
    async with InferenceClient() as client:
        await SglangApi(client, server.address).pause(mode="retract", timeout_secs=10)
        await SglangApi(client, server.address).load("/weights/9", "9", True, 10)
        await SglangApi(client, server.address).continue_(timeout_secs=10)
        await client.abort(server.address, rid="000000000007-", timeout_secs=10)
        await client.abort(server.address, rid=None, timeout_secs=10)
        await SglangApi(client, server.address).flush_cache(timeout_secs=10)
        info = await SglangApi(client, server.address).report(timeout_secs=10)
    assert server.calls == [
        ("/pause_generation", {"mode": "retract"}),
        (
            "/update_weights_from_disk",
            {
                "model_path": "/weights/9",
                "load_format": "auto",
                "weight_version": "9",
                "flush_cache": True,
                "abort_all_requests": False,
            },
        ),
        ("/continue_generation", {}),
        ("/abort_request", {"rid": "000000000007-"}),
        ("/abort_request", {"abort_all": True}),
        ("/flush_cache", {}),
        ("/model_info", {}),
    ]
    assert info["weight_version"] == "9"


async def test_a_port_where_nobody_listens_is_a_lost_connection_that_names_it():
    address = FakeServer().address
    async with InferenceClient() as client:
        with pytest.raises(ServerError, match=f"{address}/model_info: connection") as caught:
            await SglangApi(client, address).report(timeout_secs=5)
    assert caught.value.retryable


async def test_many_requests_run_at_once(server):
    server.version, server.paused = "0", True
    async with InferenceClient() as client:
        calls = [asyncio.create_task(generate(client, server.address)) for _ in range(300)]
        deadline = time.monotonic() + 20
        while len(server.calls) < 300:
            assert time.monotonic() < deadline, len(server.calls)
            await asyncio.sleep(0.01)
        server.paused = False
        assert len(await asyncio.gather(*calls)) == 300


DEEP = "[" * 100_000


async def test_an_answer_that_is_nested_without_end_is_an_answer_of_no_known_kind(server):
    server.answer_all = DEEP
    async with InferenceClient() as client:
        with pytest.raises(UnfitServerError, match=r"no known kind, and answers '\[\["):
            await client.recognise(server.address, timeout_secs=10)
        with pytest.raises(NonsenseError, match="malformed"):
            await generate(client, server.address)


async def test_a_server_of_no_known_kind_is_recognised_within_one_deadline(monkeypatch):
    now, given = [0.0], []

    class Slow(InferenceClient):
        async def call(self, method, address, route, body, timeout_secs, **more):
            given.append(timeout_secs)
            now[0] += 3.0
            return {"message": "a page"}

    monkeypatch.setattr(kinds, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(ServerError, match="of no known kind"):
        await Slow().recognise("http://somewhere:1", timeout_secs=5.0)
    assert given == [5.0, 2.0]


async def test_an_answer_beyond_its_bound_is_not_read(server):
    """1 MiB, and 1 KiB for each of 3 tokens."""
    async with InferenceClient() as client:
        for size, words in ((1 << 20, "meta_info"), ((1 << 20) + 3073, "1051648 bytes, the bound")):
            server.answer_all = " " * size
            with pytest.raises(NonsenseError, match=words):
                await generate(client, server.address)


GOOD = answer([1, 2, 3], versions=[("0", 3)])


@pytest.mark.parametrize(
    "event", [{"index": -1} | GOOD, {"index": True} | GOOD, {"index": 9} | GOOD, [], DEEP]
)
async def test_an_event_of_a_batch_that_is_nonsense_costs_its_batch_alone(server, event):
    server.version, server.streams = "0", True
    async with InferenceClient() as client:
        await generate(client, server.address)
        text = event if isinstance(event, str) else json.dumps(event)
        server.answer_all = f"data: {text}\n\n"
        errors = await generate_many(client, server.address, (0, 1))
        assert all(isinstance(error, NonsenseError) for error in errors), errors
        server.answer_all = None
        assert (await generate(client, server.address)).finish_reason == "length"
