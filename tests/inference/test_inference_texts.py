"""Requests in texts: SGLang's `text` and OpenAI's two routes give what the token requests give."""

import aiohttp
import pytest
from fixtures.served_engine import CONFIG, DEADLINE_SECS, SHAPE, serving, weights

from jaxrl_async.inference import engine as engine_lib
from jaxrl_async.inference import texts
from jaxrl_async.tasks.tokenizer import CharTokenizer

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
        ("/v1/completions", {"prompt": "1", "stream": True}, "stream: true is not supported"),
        ("/v1/completions", {"prompt": "1", "stop": "a"}, "unknown keys: stop"),
        ("/v1/completions", {"prompt": "1", "n": 0}, "n must be an integer ≥ 1"),
        ("/v1/completions", {"prompt": "1", "n": 129}, "≤ 128, got 129"),
        ("/v1/completions", {"prompt": "1", "seed": -1}, "seed must be in"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 0}, "max_new_tokens must be an integer"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 10**6}, "tokens of a request"),
        ("/v1/completions", {"prompt": "1", "temperature": "hot"}, "temperature must be in"),
        ("/v1/completions", {"prompt": "1", "stop_token_ids": 1}, "stop_token_ids must be a list"),
        ("/v1/chat/completions", {}, "messages must be a list"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages must be a list"),
        ("/v1/chat/completions", {"messages": [], "prompt": "1"}, "unknown keys: prompt"),
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
