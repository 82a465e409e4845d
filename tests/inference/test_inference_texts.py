"""Requests in texts: SGLang's `text` and OpenAI's two routes give what the token requests give."""

import base64
import json

import aiohttp
import numpy as np
import pytest
import tokenizers
from fixtures.models import tiny
from fixtures.served_engine import CONFIG, DEADLINE_SECS, SHAPE, serving, weights
from fixtures.tokenizers_hf import write_hf
from flax import nnx

from jaxrl_async.inference import engine as engine_lib
from jaxrl_async.inference import fields, texts
from jaxrl_async.inference.requests import Completion, InvalidRequestError
from jaxrl_async.models import transformer
from jaxrl_async.tasks.tokenizer import CharTokenizer, load_tokenizer

TOKENIZER = CharTokenizer("0123456789+-=abcd")
PROMPT = "12+3="
MANY = SHAPE["max_total_tokens"]
assert TOKENIZER.vocab_size == CONFIG.vocab_size


@pytest.fixture(scope="module")
def engine():
    engine = engine_lib.Engine(CONFIG, **SHAPE, max_queued_requests=8, name="served")
    engine.start()
    engine.update_weights(weights(0), "3").result(DEADLINE_SECS)
    yield engine
    engine.close(timeout_secs=DEADLINE_SECS)


@pytest.fixture
async def client(engine):
    async with serving(engine, tokenizer=TOKENIZER) as client:
        yield client


async def expected(client, prompt=PROMPT, num=8, **sampling):
    """The answer to the same request in tokens."""
    sampling = {"stop_token_ids": [1], "logit_bias": {"0": -100}} | sampling
    status, answer = await client(
        "/generate",
        {
            "input_ids": TOKENIZER.encode(prompt),
            "sampling_params": {"max_new_tokens": num, **sampling},
        },
    )
    assert status == 200, answer
    return answer


async def test_text_goes_in_and_comes_out(client):
    tokens = await expected(client, sampling_seed=5)
    params = {"max_new_tokens": 8, "sampling_seed": 5}
    status, answer = await client("/generate", {"text": PROMPT, "sampling_params": params})
    assert status == 200, answer
    assert answer["output_ids"] == tokens["output_ids"]
    assert answer["text"] == tokens["text"] == TOKENIZER.decode(tokens["output_ids"]) != ""
    assert answer["meta_info"]["prompt_tokens"] == len(PROMPT)
    status, answers = await client("/generate", {"text": [PROMPT, "4="], "sampling_params": params})
    assert status == 200 and [a["meta_info"]["prompt_tokens"] for a in answers] == [5, 2]
    assert answers[0]["text"] == answer["text"]
    status, answer = await client("/generate", {"text": PROMPT})
    assert status == 200 and answer["meta_info"]["completion_tokens"] <= MANY - len(PROMPT)


async def test_a_completion_of_openais_is_the_same(client):
    tokens = await expected(client, sampling_seed=5)
    body = {"model": "any", "prompt": PROMPT, "max_tokens": 8, "seed": 5, "temperature": 1.0}
    status, answer = await client("/v1/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["text"] == tokens["text"] and choice["index"] == 0
    assert choice["finish_reason"] == tokens["meta_info"]["finish_reason"]["type"]
    num = len(tokens["output_ids"])
    usage = {"prompt_tokens": 5, "completion_tokens": num, "total_tokens": 5 + num}
    assert (answer["object"], answer["usage"]) == ("text_completion", usage)
    status, answer = await client("/v1/completions", body | {"prompt": [PROMPT, "4="], "n": 2})
    assert status == 200 and [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["text"] == tokens["text"]
    assert answer["usage"]["prompt_tokens"] == 7
    second = await expected(client, sampling_seed=6)
    assert answer["choices"][1]["text"] == second["text"]


async def test_a_chat_is_the_completion_of_its_message(client):
    tokens = await expected(client, temperature=0.0)
    messages = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "max_completion_tokens": 8, "temperature": 0}
    status, answer = await client("/v1/chat/completions", body)
    assert status == 200 and answer["object"] == "chat.completion"
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": tokens["text"]}
    status, answer = await client("/v1/chat/completions", {"messages": messages})
    assert status == 200 and answer["usage"]["total_tokens"] <= MANY
    status, answer = await client("/v1/chat/completions", {"messages": messages * 2})
    assert status == 400 and "without a chat template takes one message, got 2" in str(answer)


NEUTRAL = {
    **{"min_p": 0.0, "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
    **{"regex": "", "json_schema": "", "ebnf": "", "skip_special_tokens": True, "stop_regex": []},
    **{"spaces_between_special_tokens": True, "no_stop_trim": False, "n": 1},
    **{"stop": [], "top_p": 1, "logit_bias": {"0": -100}},
}
OF_OPENAI = NEUTRAL | {
    **{"best_of": 1, "suffix": "", "logit_bias": {}, "min_tokens": 0, "tools": []},
    **{"tool_choice": "none", "response_format": {"type": "text"}, "user": "ada", "model": "any"},
    **{"metadata": {"a": "b"}, "stream": False, "stream_options": {}, "lora_path": ""},
}


async def test_nulls_and_neutral_values_ask_for_nothing(client):
    tokens = await expected(client, sampling_seed=5)
    sampling = {"max_new_tokens": 8, "sampling_seed": 5}
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 5}
    chat = {"messages": [{"role": "user", "content": PROMPT, "name": None}], "max_tokens": 8}
    for neutral in (NEUTRAL, dict.fromkeys(NEUTRAL)):
        params = neutral | sampling
        asked = {"text": PROMPT, "sampling_params": params, "lora_path": "", "rid": None}
        status, answer = await client("/generate", asked | {"top_logprobs_num": 0})
        assert (status, answer.get("output_ids")) == (200, tokens["output_ids"]), answer
    for neutral in (OF_OPENAI, dict.fromkeys([*OF_OPENAI, "temperature", "top_k", "a_name"])):
        status, answer = await client("/v1/completions", neutral | body)
        assert status == 200 and answer["choices"][0]["text"] == tokens["text"], answer
        chat |= {"max_completion_tokens": None, "seed": 5}
        status, answer = await client("/v1/chat/completions", neutral | chat)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == tokens["text"]


async def test_another_value_of_a_neutral_field_is_refused_by_name(client):
    for name, values in fields._NEUTRAL.items():
        for route, body in (
            ("/generate", {"text": "1", "sampling_params": {name: "other"}}),
            ("/v1/completions", {"prompt": "1", name: "other"}),
        ):
            if name in ("n", "stop", "logit_bias", "top_p", "top_k"):  # are read by one of them
                continue
            status, answer = await client(route, body)
            message = f"{name} must be {values[0]!r}: no other value is supported, got 'other'"
            assert status == 400 and message in answer["error"]["message"], answer


async def test_one_token_is_asked_for_under_either_name(client):
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]}
    for bound in ({"max_completion_tokens": None, "max_tokens": 1}, {"max_completion_tokens": 1}):
        status, answer = await client("/v1/chat/completions", chat | bound)
        assert status == 200 and answer["usage"]["completion_tokens"] == 1


async def test_prompts_are_texts_or_token_ids(client):
    ids = TOKENIZER.encode(PROMPT)
    answers = []
    for prompt in (PROMPT, [PROMPT], ids, [ids], [ids, PROMPT]):
        body = {"prompt": prompt, "max_tokens": 8, "seed": 5}
        status, answer = await client("/v1/completions", body)
        assert status == 200, answer
        answers += [choice["text"] for choice in answer["choices"]]
    assert len(answers) == 6 and len(set(answers)) == 1


async def test_a_text_ends_a_completion_at_the_token_that_completes_it(client):
    free = await expected(client, num=30, sampling_seed=7)
    text, ids = free["text"], free["output_ids"]
    stop = text[3:5]
    end = text.find(stop)
    for stops in (stop, [stop], ["no", stop, text[3:9]], [stop[1], stop]):
        body = {"prompt": PROMPT, "max_tokens": 30, "seed": 7, "stop": stops}
        status, answer = await client("/v1/completions", body)
        (choice,) = answer["choices"]
        assert status == 200 and (choice["text"], choice["finish_reason"]) == (text[:end], "stop")
        assert answer["usage"]["completion_tokens"] == end + 2
        params = {"max_new_tokens": 30, "sampling_seed": 7, "stop": stops}
        body = {"text": PROMPT, "sampling_params": params, "return_logprob": True}
        status, answer = await client("/generate", body)
        meta = answer["meta_info"]
        assert answer["text"] == text[:end] and answer["output_ids"] == ids[: end + 2]
        assert meta["finish_reason"] == {"type": "stop", "matched": stop}
        assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": end + 2}]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == end + 2
    await client.until(num_running_requests=0)


async def test_what_a_text_ends_has_the_routes_of_its_tokens():
    config = tiny(
        **{"vocab_size": TOKENIZER.vocab_size, "num_layers": 1, "family": "qwen3_moe"},
        **{"num_experts": 4, "experts_per_token": 2, "expert_mlp_dim": 8},
    )
    shape = {"num_slots": 1, "max_total_tokens": 16, "decode_chunk": 2}
    engine = engine_lib.Engine(config, **shape, max_queued_requests=1, name="experts")
    engine.start()
    try:
        params = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)))[1]
        engine.update_weights(params, "0").result(DEADLINE_SECS)
        async with serving(engine, tokenizer=TOKENIZER) as client:
            params = {"max_new_tokens": 11, "sampling_seed": 7, "ignore_eos": True}
            body = {"text": PROMPT, "sampling_params": params, "return_routed_experts": True}
            whole = (await client("/generate", body))[1]
            params["stop"] = whole["text"][3:5]
            ended = (await client("/generate", body))[1]
    finally:
        engine.close(timeout_secs=DEADLINE_SECS)
    assert ended["meta_info"]["finish_reason"]["matched"] == params["stop"]
    num = len(PROMPT) + len(ended["output_ids"]) - 1
    of_whole, own = (
        base64.b64decode(answer["meta_info"]["routed_experts"]) for answer in (whole, ended)
    )
    assert own == of_whole[: num * 2 * 4]


async def events_of(client, route, body):
    """The events of a stream."""
    url = f"http://127.0.0.1:{client.port}{route}"
    async with client.session.post(url, json=body | {"stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        *events, done, rest = (await response.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("stop", [None, "="])
async def test_a_stream_is_the_answer_in_pieces(client, stop):
    body = {"max_tokens": 30, "seed": 5, "n": 3, "stop": stop, "temperature": 2.0}
    usage = {"stream_options": {"include_usage": True}}
    route, own = "/v1/completions", {"prompt": PROMPT}
    whole = (await client(route, body | own))[1]
    *events, last = await events_of(client, route, body | own | usage)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len({event["id"] for event in events}) == 1
    pieces = [event["choices"][0] for event in events]
    assert len(pieces) > 10  # Two tokens each.
    for choice in whole["choices"]:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        reasons = [piece["finish_reason"] for piece in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]

    route, own = "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}
    whole = (await client(route, body | own | {"n": 1, "logprobs": True}))[1]["choices"][0]
    events = await events_of(client, route, body | own | {"n": 1, "logprobs": True})
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    pieces = [event["choices"][0] for event in events]
    assert "".join(p["delta"]["content"] for p in pieces) == whole["message"]["content"]
    assert [p["delta"].get("role") for p in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    logprobs = [entry for p in pieces for entry in p["logprobs"]["content"]]
    assert logprobs[: len(whole["logprobs"]["content"])] == whole["logprobs"]["content"]


async def test_a_stream_of_generate_has_all_tokens_so_far(client):
    params = {"max_new_tokens": 9, "sampling_seed": 7}
    body = {"text": PROMPT, "sampling_params": params, "return_logprob": True}
    body["logprob_start_len"] = 0
    whole = (await client("/generate", body))[1]
    events = await events_of(client, "/generate", body)
    assert [len(event["output_ids"]) for event in events] == [2, 4, 6, 8, 9]
    assert [e["meta_info"]["finish_reason"] is None for e in events] == [True] * 4 + [False]
    assert all(whole["text"].startswith(event["text"]) for event in events)
    for event in (whole, events[-1]):
        del event["meta_info"]["e2e_latency"], event["meta_info"]["id"]
    assert events[-1] == {"index": 0} | whole


async def test_a_stream_that_cannot_be_served_is_refused_before_it_begins(client):
    body = {"prompt": "1", "max_tokens": 10**6, "stream": True}
    status, answer = await client("/v1/completions", body)
    assert status == 400 and "tokens of a request" in answer["error"]["message"]


def test_a_part_of_a_character_or_of_a_stop_text_is_not_sent():
    class Bytes:
        pad_id, stop_token_ids = 0, (1,)

        def decode(self, ids, *, special=False):
            return bytes(ids).decode(errors="replace")

    codec = texts.Texts(Bytes(), max_total_tokens=64, model="m")
    prompt, ids = np.array([5], np.int32), list("aé##b##END".encode())
    request = texts.TextRequest("r", prompt, None, True, ("##END",))
    call = texts.Call(False, (request,), None, False, True, False, 0)
    before, pieces = None, []
    for n in range(1, len(ids) + 1):
        reason = None if n < len(ids) else {"type": "length", "length": n}
        now = Completion(
            "r", np.array(ids[:n], np.int32), np.zeros(n, np.float32), (), reason, 1, 0
        )
        now = codec.cut(now, request.stops)
        pieces.append(codec.chunk(call, 0, before, now)["choices"][0]["text"])
        before = now
    assert pieces == ["a", "", "é", "", "", "##b", *[""] * 5]
    assert now.finish_reason == {"type": "stop", "matched": "##END"}


def test_a_text_has_what_its_tokenizer_puts_around_one(tmp_path):
    write_hf(tmp_path)
    whole = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    whole.save(str(tmp_path / "tokenizer.json"))
    codec = texts.Texts(load_tokenizer(tmp_path), max_total_tokens=64, model="m")
    alone = codec.encode("12", special=False)
    assert codec.encode("12") == [0, *alone]

    def ids_of(**more):
        (request,) = codec.call("/v1/completions", {"prompt": "12"} | more).requests
        return request.input_ids.tolist()

    assert ids_of() == ids_of(add_special_tokens=True) == [0, *alone]
    assert ids_of(add_special_tokens=False) == ids_of(prompt=alone) == alone
    with pytest.raises(
        InvalidRequestError, match="add_special_tokens must be true or false, got 1"
    ):
        ids_of(add_special_tokens=1)


async def test_places_in_a_stream_go_on(client):
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 5, "logprobs": 0}
    status, whole = await client("/v1/completions", body)
    assert status == 200, whole
    found = [
        chunk["choices"][0]["logprobs"]
        for chunk in await events_of(client, "/v1/completions", body)
    ]
    for name in ("tokens", "text_offset"):
        pieces = [piece for part in found for piece in part[name]]
        assert pieces == whole["choices"][0]["logprobs"][name]
    assert len(found) > 1


def test_what_ends_at_a_text_has_the_kept_ids_and_routes_of_its_own_tokens():
    kept, routes = np.arange(6).reshape(3, 2), np.arange(5).reshape(5, 1, 1)
    ids, logprobs = np.array(TOKENIZER.encode("1+2"), np.int32), np.zeros(3, np.float32)
    end = {"type": "length", "length": 3}
    whole = Completion("r", ids, logprobs, (), end, 2, 0, routes=routes, kept=kept)
    found = texts.Texts(TOKENIZER, max_total_tokens=64, model="m").cut(whole, ["+"])
    assert len(found.output_ids) == 2
    assert found.kept.tolist() == kept[:2].tolist()
    assert found.routes.tolist() == routes[:4].tolist()  # Of two tokens before it, too.


async def test_log_probs_of_a_prompt_are_those_with_which_it_was_sampled(client):
    params = {"max_new_tokens": 20, "sampling_seed": 7, "temperature": 0.7}
    body = {"text": PROMPT, "sampling_params": params, "return_logprob": True}
    status, answer = await client("/generate", body)
    row = TOKENIZER.encode(PROMPT) + answer["output_ids"]
    logprobs = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    named = [TOKENIZER.decode([token], special=True) for token in row]

    body = {"prompt": [row], "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 0.7}
    status, answer = await client("/v1/completions", body)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert status == 200 and choice["text"].startswith("".join(named))
    assert found["tokens"][: len(row)] == named and found["token_logprobs"][0] is None
    assert found["text_offset"][: len(PROMPT)] == list(range(len(PROMPT)))
    assert {len(part) for part in found.values()} == {len(row) + 1}
    np.testing.assert_allclose(found["token_logprobs"][len(PROMPT) : -1], logprobs, atol=1e-5)
    for own, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
        assert own in top.values() and len(top) in (2, 3) and own <= max(top.values())
    status, answer = await client(
        "/v1/completions", body | {"max_tokens": 0, "prompt": "".join(named[:20])}
    )
    assert answer["choices"][0]["text"] == "".join(named[:20])
    assert answer["usage"]["completion_tokens"] == 0

    params |= {"max_new_tokens": 0}
    body = {"input_ids": [row, row[:1]], "sampling_params": params, "return_logprob": True}
    body |= {"logprob_start_len": 4, "return_text_in_logprobs": True}
    status, (answer, single) = await client("/generate", body)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert entries[0][2] == named[4] and [e[1] for e in entries] == row[4:]
    np.testing.assert_allclose([e[0] for e in entries[1:]], logprobs, atol=1e-5)
    assert answer["output_ids"] == [] and answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert single["meta_info"]["input_token_logprobs"] == []
    del body["logprob_start_len"]
    answer = (await client("/generate", body))[1][0]
    assert answer["meta_info"]["input_token_logprobs"][0] == [None, row[0], named[0]]
    assert answer["meta_info"]["input_token_logprobs"][4:] == entries


async def test_the_most_probable_tokens_stand_beside_those_of_a_chat(client):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 3}
    status, answer = await client("/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert status == 200 and len(content) == answer["usage"]["completion_tokens"]
    for entry in content:  # Greedy.
        tops = entry.pop("top_logprobs")
        assert entry == tops[0] and len(tops) == 3
        assert entry["bytes"] == list(entry["token"].encode())


async def test_log_probs_of_other_weights_are_not_given(client, engine):
    body = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 1}
    engine.score, score = lambda row, temperature: answered(row, temperature), engine.score

    def answered(row, temperature):
        engine.update_weights(weights(0), "4").result(DEADLINE_SECS)
        return score(row, temperature=temperature)

    status, answer = await client("/v1/completions", body)
    del engine.score
    engine.update_weights(weights(0), "3").result(DEADLINE_SECS)
    assert status == 503 and "'4' has come, and '3' sampled" in answer["error"]["message"]


async def test_the_routes_that_clients_look_at(client):
    status, model = await client.get("/v1/models/served")
    assert status == 200 and model["id"] == "served" and model["max_model_len"] == MANY
    status, answer = await client.get("/v1/models/an/other")
    assert status == 404 and "the model is 'served'" in answer["error"]["message"]
    assert (await client.get("/health_generate"))[0] == 200
    info = (await client.get("/model_info"))[1]
    for route in ("/get_model_info", "/server_info"):
        assert await client.get(route) == (200, info)
    assert info["context_length"] == MANY and info["max_running_requests"] == SHAPE["num_slots"]


async def test_padding_is_not_sampled_and_eos_ends(client):
    body = {"prompt": [PROMPT], "max_tokens": 20, "temperature": 50.0, "seed": 0, "n": 12}
    status, answer = await client("/v1/completions", body)
    assert status == 200
    lengths = [len(c["text"]) for c in answer["choices"] if c["finish_reason"] == "length"]
    assert lengths and set(lengths) == {20}  # Neither padding nor eos has a text.
    assert {c["finish_reason"] for c in answer["choices"]} == {"stop", "length"}


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/generate", {"text": "1", "input_ids": [1]}, "give text or input_ids, got both"),
        ("/generate", {"text": "x"}, "character 'x'"),
        ("/generate", {"text": 3}, "a prompt must be a text, got 3"),
        ("/generate", {"text": "1", "sampling_params": [1]}, "sampling_params must be an object"),
        ("/v1/completions", {}, "a prompt must be a text, got None"),
        ("/v1/completions", {"prompt": "1", "stream": True, "echo": True}, "takes no echo"),
        ("/v1/completions", {"prompt": "1", "stream_options": 1}, "stream_options must be an"),
        ("/v1/completions", {"prompt": "1", "stream_options": {"usage": True}}, "keys: usage"),
        ("/v1/completions", {"prompt": "1", "stop": [1]}, "stop must be 16 texts at most"),
        ("/v1/completions", {"prompt": "1", "stop": ["1"] * 17}, "stop must be 16 texts at most"),
        ("/v1/completions", {"prompt": "1", "logprobs": 21}, "logprobs must be in [0, 20]"),
        (
            "/v1/completions",
            {"prompt": [1, "2"]},
            "token ids of a prompt: '2' is no integer",
        ),
        ("/v1/completions", {"prompt": [[1], "2", 3]}, "a prompt must be a text, got 3"),
        ("/v1/completions", {"prompt": "1", "beams": 2}, "unknown keys: beams"),
        ("/v1/completions", {"prompt": "1", "n": 0}, "n must be in [1, 128], got 0"),
        ("/v1/completions", {"prompt": ["1", "2"], "n": 65}, "n must be in [1, 64], got 65"),
        ("/v1/completions", {"prompt": ["1"] * 129}, "129 prompts exceed the 128"),
        ("/v1/completions", {"prompt": "1", "seed": -1}, "seed must be in"),
        ("/v1/completions", {"prompt": "1", "max_tokens": -1}, "max_new_tokens must be an integer"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 10**6}, "tokens of a request"),
        ("/v1/completions", {"prompt": "1", "temperature": "hot"}, "temperature must be in"),
        ("/v1/completions", {"prompt": "1", "stop_token_ids": 1}, "stop_token_ids must be a list"),
        ("/v1/chat/completions", {}, "messages must be a list"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages must be a list"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 1}]}, "messages must"),
        ("/v1/chat/completions", {"messages": ["1"]}, "messages must be a list"),
        ("/v1/chat/completions", {"messages": [], "prompt": "1"}, "unknown keys: prompt"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs 2 needs logprobs: true"),
    ],
)
async def test_a_bad_request_is_400_and_names_what_is_wrong(client, route, body, message):
    status, answer = await client(route, body)
    assert (status, message in answer["error"]["message"]) == (400, True), answer


async def test_without_a_tokenizer_there_are_no_texts(engine):
    async with serving(engine) as client:
        for route in texts.KEYS:
            assert (await client(route, {"prompt": "1"}))[0] == 404
        status, answer = await client("/generate", {"text": "1"})
        assert status == 400 and "unknown keys: text" in str(answer)


async def test_the_texts_need_the_key_as_generate_does(engine):
    async with serving(engine, tokenizer=TOKENIZER, api_key="k", admin_api_key="a") as client:
        url = f"http://127.0.0.1:{client.port}"
        async with aiohttp.ClientSession() as session:
            for key, status in ((None, 401), ("a", 401), ("k", 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with session.get(f"{url}/v1/models", headers=headers) as answer:
                    assert answer.status == status
                body = {"prompt": PROMPT, "max_tokens": 1}
                async with session.post(f"{url}/v1/completions", headers=headers, json=body) as a:
                    assert a.status == status
