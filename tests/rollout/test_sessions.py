"""The endpoint of agents: rows that are exactly what was sampled, refusals, failures, and clients that misbehave."""

import asyncio
import dataclasses
import errno
import json
import threading

import aiohttp
import hypothesis
import numpy as np
import pytest
from fixtures import chat as templates
from fixtures.conversations import Server, call_of, check_exact
from fixtures.sessions import Policy, nobody, rng, runner_of
from hypothesis import strategies as st

from jaxrl_async.rollout import chat, sessions
from jaxrl_async.rollout.agent import agent_of
from jaxrl_async.rollout.chat import RefusedError
from jaxrl_async.rollout.context import Context, RolloutError
from jaxrl_async.servers.port import Completion
from jaxrl_async.types import NOT_SAMPLED, Prompt

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("multiply", "look_up")
]
ASKED = [{"role": "user", "content": "how?"}]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    return {name: templates.tokenizer_of(directory / name, name) for name in templates.TEMPLATES}


@pytest.fixture(scope="module")
def qwen(tokenizers):
    return tokenizers["qwen"]


PROMPT = Prompt(3, np.ones(1, np.int32), "how?", "12", {"level": 2})


async def rows_of(agent, tokenizer, policy, **changes):
    """The `Sample` of one session; all are trained, unless `rows` says which."""
    runner = runner_of(agent, tokenizer, **{"agent_rows": "all"} | changes)
    try:
        found = await runner.run(PROMPT, policy, rng)
        runner.check(found)
        return found
    finally:
        await runner.close()


async def played(agent, tokenizer, policy, **changes):
    """The one row of one session."""
    (row,) = (
        await rows_of(agent, tokenizer, policy, **{"agent_rows": "one"} | changes)
    ).trajectories
    return row


async def failed(agent, tokenizer, policy, **changes):
    """The failure of one session."""
    with pytest.raises(RolloutError) as caught:
        await played(agent, tokenizer, policy, **changes)
    return caught.value


async def post(base_url, messages, **fields):
    """(status, JSON) of a call."""
    body = {"model": "any", "messages": messages} | fields
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{base_url}/chat/completions", json=body) as response:
            found = response.status, await response.json()
    await asyncio.sleep(0)  # The connection is closed in the loop's next round.
    return found


async def ask(base_url, messages, **fields):
    """The first message of an answer."""
    status, answer = await post(base_url, messages, **fields)
    assert status == 200, answer
    return answer["choices"][0]["message"]


# How the answer comes back in the next call, as frameworks send it.
SENT_BACK = (
    lambda m: m,
    lambda m: {name: value for name, value in m.items() if value},
    lambda m: m | {"content": m["content"] or "", "refusal": None, "annotations": []},
    lambda m: m | {"content": [{"type": "text", "text": m["content"] or ""}]},
    lambda m: m | {"content": (m["content"] or "").strip()},
)


def replies_to(message, said):
    """The results of a message's calls, or else what a user says."""
    calls = message.get("tool_calls", ())
    if not calls:
        return [{"role": "user", "content": said}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": said} for call in calls]


STEPS = st.fixed_dictionaries(
    {
        "said": st.text(max_size=10).map(lambda text: text + "<|im_end|>" * (len(text) == 3)),
        "back": st.sampled_from(SENT_BACK),
        "max_tokens": st.sampled_from([None, None, None, 1, 30]),
        "stream": st.booleans(),
    }
)


def conversation(data, tokenizer):
    """Plays one random session and checks its row; returns it with the number of cut and called turns."""
    server = Server(data.draw, tokenizer)
    plan = data.draw(st.lists(STEPS, min_size=1, max_size=5))
    budget = data.draw(st.sampled_from([3, 40, 200, 4000]))
    row_tokens = data.draw(st.sampled_from([400, 900, 9000]))
    seen = {"calls": 0, "refused": 0}

    async def agent(base_url, prompt):
        messages = [{"role": "developer", "content": "be brief"}, *ASKED]
        for step in plan:
            bounds = {} if step["max_tokens"] is None else {"max_tokens": step["max_tokens"]}
            if step["stream"]:
                status, message = await streamed(base_url, messages, tools=TOOLS, **bounds)
            else:
                status, answer = await post(base_url, messages, tools=TOOLS, **bounds)
                message = answer["choices"][0]["message"] if status == 200 else answer
            if status != 200:
                assert message["error"]["code"] == "context_length_exceeded"
                seen["refused"] += 1
                return 0.5
            seen["calls"] += "tool_calls" in message
            messages = [*messages, step["back"](message), *replies_to(message, step["said"])]
        return 0.5

    bounds = {"max_new_tokens": budget, "max_tokens": row_tokens}
    try:
        row = asyncio.run(played(agent, tokenizer, server, **bounds))
    except RolloutError as error:  # Not even the first answer has a token.
        assert error.reason == "agent_error" and not server.sampled and seen["refused"]
        return None, seen
    messages = [{"role": "system", "content": "be brief"}, *ASKED]
    ids = np.array(tokenizer.encode_chat(messages, tools=TOOLS), np.int32)
    check_exact(row, Prompt(0, ids, "", ""), server, tokenizer)
    assert row.reward == 0.5 and row.components == {"turns": len(server.sampled)}
    return row, seen


async def streamed(base_url, messages, **fields):
    """(status, message put together from the events of a stream)."""
    body = {"model": "any", "messages": messages, "stream": True} | fields
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{base_url}/chat/completions", json=body) as response:
            if response.status != 200:
                return response.status, await response.json()
            assert response.content_type == "text/event-stream"
            text = await response.text()
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    message, reasons = {"content": None}, []
    for event in map(json.loads, events):
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            message |= choice["delta"]
            reasons.append(choice["finish_reason"])
    for number, call in enumerate(message.get("tool_calls", ())):
        assert call.pop("index") == number
    assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1]
    return 200, message


def conversations(tokenizers, num, **settings):
    rows, seen = [], []

    @hypothesis.given(st.data())
    @hypothesis.settings(max_examples=num, deadline=None, database=None, **settings)
    def play(data):
        name = data.draw(st.sampled_from(sorted(tokenizers)))
        row, counts = conversation(data, tokenizers[name])
        seen.append(counts)
        rows.extend([row] * (row is not None))

    play()
    counted = {
        "several turns": sum(row.components["turns"] > 1 for row in rows),
        "cut": sum(row.finish_reason == "length" for row in rows),
        "calls": sum(s["calls"] > 0 for s in seen),
        "refused": sum(s["refused"] > 0 for s in seen),
    }
    assert len(seen) >= num and min(counted.values()) > num // 20, counted


def test_trained_tokens_of_a_session_are_the_sampled_ones(tokenizers):
    conversations(tokenizers, 150, derandomize=True)


@pytest.mark.long
def test_trained_tokens_are_the_sampled_ones_in_thousands_of_sessions(tokenizers):
    conversations(tokenizers, 3000)


class Marked:
    """Samples ids that no other call samples; a version is the number of its call, and is noted of every row."""

    def __init__(self, tokenizer):
        self.tokenizer, self.sampling = tokenizer, []
        self.rows, self.open = (
            [],
            [],
        )  # (tokens, versions) that each call leaves, and which of them none went on from
        self.n = self.left = 1  # calls of a request, and those that are still to come

    async def __call__(self, tokens, *, max_new_tokens, **sampling):
        number = len(self.rows)
        if self.left == self.n:  # The first of its request takes the row that it goes on from.
            rows = [self.rows[i] for i in self.open]
            found = [row for row in rows if tokens[: len(row[0])] == row[0]]
            self.before = max(found, key=lambda row: len(row[0]), default=([], []))[1]
            self.open = [i for i in self.open if self.rows[i][1] is not self.before]
        self.left = self.left - 1 or self.n
        ids = [*self.tokenizer.encode(f"{number:03d}")[:max_new_tokens], self.tokenizer.eos_id]
        read = [NOT_SAMPLED] * (len(tokens) - len(self.before))
        self.rows.append(([*tokens, *ids], [*self.before, *read, *[number] * len(ids)]))
        self.open.append(number)
        self.sampling.append(sampling)
        await asyncio.sleep(0)
        arrays = np.full(len(ids), -0.5, np.float32), np.full(len(ids), number, np.int32)
        return Completion(np.array(ids, np.int32), *arrays, "stop")


# Calls of an agent: which history they go on from, how, and their number of answers.
PLANS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["on", "on", "edit", "new"]), st.integers(1, 3)),
    min_size=1,
    max_size=7,
)


async def follow(plan, base_url, policy):
    """Holds conversations that fork, are edited and begin anew, in any order; returns their histories."""
    histories = [list(ASKED)]
    for where, kind, n in plan:
        messages = list(histories[where % len(histories)])
        if kind == "new":
            messages = [{"role": "user", "content": f"another {len(histories)}"}]
        elif kind == "edit":
            messages[0] = {"role": "user", "content": "shorter"}
        policy.n = policy.left = n
        status, answer = await post(base_url, messages, n=n)
        assert status == 200
        for choice in answer["choices"]:
            said = {"role": "user", "content": f"go on {len(histories)}"}
            histories.append([*messages, choice["message"], said])
    return histories


@hypothesis.given(PLANS)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_of_several_rows_that_of_the_last_call_is_trained_as_it_was_sampled(tokenizers, plan):
    tokenizer, policy = tokenizers["qwen"], Marked(tokenizers["qwen"])

    async def agent(base_url, prompt):
        histories = await follow(plan, base_url, policy)
        policy.n = policy.left = 1
        await ask(base_url, histories[plan[-1][0] % len(histories)])
        return 1.0

    row = asyncio.run(played(agent, tokenizer, policy, agent_rows="last"))
    tokens, versions = policy.rows[-1]
    assert row.tokens.tolist() == tokens
    assert row.versions.tolist() == versions
    assert row.mask.tolist() == [version != NOT_SAMPLED for version in versions]
    assert row.components["turns"] == len({*versions} - {NOT_SAMPLED})


@hypothesis.given(PLANS)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_every_sampled_token_of_a_session_is_trained_once_after_what_it_was_sampled_from(
    tokenizers, plan
):
    tokenizer, policy = tokenizers["qwen"], Marked(tokenizers["qwen"])

    async def agent(base_url, prompt):
        await follow(plan, base_url, policy)
        return 1.0

    found = asyncio.run(rows_of(agent, tokenizer, policy))
    rows = found.trajectories
    sampled = [int(call) for row in rows for call in sorted({*row.versions[row.mask]})]
    assert sorted(sampled) == list(range(len(policy.rows))), "every call in one row"
    for row in rows:
        for call in {*row.versions[row.mask].tolist()}:
            tokens, versions = policy.rows[call]
            assert row.tokens[: len(tokens)].tolist() == tokens
            own = np.array(versions) == call
            assert (row.versions[: len(tokens)] == call).tolist() == own.tolist()
            assert set(row.logprobs[: len(tokens)][own]) == {-0.5}
        assert row.reward == 1.0
        assert row.components == {"turns": len(policy.rows), "rows": len(rows)}
    last = {*found.trajectories[found.judged].versions.tolist()}
    assert len(policy.rows) - plan[-1][2] in last, "the row of the last call's first answer"


async def test_a_session_with_an_edited_history_and_a_sub_agent_has_three_rows(qwen):
    """The text of each row, with what was sampled in brackets."""

    async def agent(base_url, prompt):
        message = await ask(base_url, ASKED)
        part = [{"role": "system", "content": "to"}, *ASKED]
        said = await ask(base_url, part)
        main = [*ASKED, message, {"role": "user", "content": said["content"]}]
        message = await ask(base_url, main)
        await ask(base_url, [{"role": "user", "content": "to 13"}, message, *ASKED])
        await ask(base_url, [*part, said, *ASKED])
        return 0.5

    policy = Policy(qwen, "12", "13", "a", "b", "c")
    found = await rows_of(agent, qwen, policy)
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nto<|im_end|>\n"
    expected = [
        turn.format("how?") + "[12<|im_end|>]\n" + turn.format("13") + "[a<|im_end|>]",
        system + turn.format("how?") + "[13<|im_end|>]\n" + turn.format("how?") + "[c<|im_end|>]",
        turn.format("to 13") + "a<|im_end|>\n" + turn.format("how?") + "[b<|im_end|>]",
    ]
    assert [bracketed(row, qwen) for row in found.trajectories] == expected
    assert found.judged == 1  # The last call went on there.
    for row in found.trajectories:
        assert row.reward == 0.5 and row.components == {"turns": 5.0, "rows": 3.0}
        for call in {*row.versions[row.mask].tolist()}:  # The number of the call.
            given = policy.given[call - 1]
            assert row.tokens[: len(given)].tolist() == given
        assert row.prompt_length == np.argmax(row.mask)


def bracketed(row, tokenizer):
    """Its text, with each sampled piece in brackets."""
    cuts = np.flatnonzero(np.diff(row.mask)) + 1
    pieces = zip(np.split(row.tokens, cuts), np.split(row.mask, cuts), strict=True)
    texts = ((tokenizer.decode(ids.tolist(), special=True), mask[0]) for ids, mask in pieces)
    return "".join(f"[{text}]" if is_own else text for text, is_own in texts)


async def test_other_answers_have_rows_that_read_what_was_sampled_before_them(qwen):
    async def agent(base_url, prompt):
        message = await ask(base_url, ASKED)
        await post(base_url, [*ASKED, message, *ASKED], n=3)

    found = await rows_of(agent, qwen, Policy(qwen, "12", "a", "b", "c"))
    turn = "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n"
    assert [bracketed(row, qwen) for row in found.trajectories] == [
        f"{turn}[12<|im_end|>]\n{turn}[a<|im_end|>]",
        f"{turn}12<|im_end|>\n{turn}[b<|im_end|>]",
        f"{turn}12<|im_end|>\n{turn}[c<|im_end|>]",
    ]
    assert found.judged == 0 and {row.reward for row in found.trajectories} == {None}


async def test_a_session_has_so_many_rows_and_no_more(qwen, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_ROWS", 3)
    refused = []

    async def agent(base_url, prompt):
        message = await ask(base_url, ASKED)
        for n in (4, 3):
            refused.append(await post(base_url, ASKED, n=n))
        await post(base_url, ASKED, n=2)
        await ask(base_url, [*ASKED, message, *ASKED])  # The first row goes on.
        refused.append(await post(base_url, ASKED))

    found = await rows_of(agent, qwen, Marked(qwen))
    for num_rows, (status, answer) in zip((5, 4, 4), refused, strict=True):
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"at most 3 rows, and would have {num_rows}" in answer["error"]["message"]
    assert [row.finish_reason for row in found.trajectories] == ["length"] * 3


async def test_the_rows_of_a_session_have_so_many_tokens_together_and_no_more(qwen):
    """A call may leave a row of more than 400 tokens, the bound: alone it is taken, and beside another it is not."""
    refused = []

    async def agent(base_url, prompt):
        message = await ask(base_url, ASKED, max_tokens=20)
        refused.append(await post(base_url, ASKED))
        refused.append(await post(base_url, ASKED, n=2))
        await ask(base_url, [*ASKED, message, *ASKED])  # Alone, it fits.

    runner = runner_of(agent, qwen, agent_rows="all")
    runner = dataclasses.replace(runner, max_sample_tokens=400)
    found = await runner.run(PROMPT, Policy(qwen, "12", "13"), rng)
    await runner.close()
    for status, answer in refused:
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "at most 400 tokens together" in answer["error"]["message"]
        assert "raise queue.max_message_bytes" in answer["error"]["message"]
    (row,) = found.trajectories
    assert row.finish_reason == "length" and row.components["turns"] == 2


async def test_a_failure_after_several_rows_is_no_sample(qwen):
    async def agent(base_url, prompt):
        await ask(base_url, ASKED)
        await ask(base_url, ASKED)
        raise LookupError("lost")

    with pytest.raises(RolloutError, match="agent_error: .*LookupError: lost"):
        await rows_of(agent, qwen, Policy(qwen, "12", "13"))


async def test_rows_that_begin_alike_have_seeds_of_their_own(qwen):
    async def agent(base_url, prompt):
        for n in (1, 3):
            await post(base_url, ASKED, n=n)
        message = await ask(base_url, ASKED)
        await ask(base_url, [*ASKED, message, *ASKED])

    policy = Marked(qwen)
    row = await played(agent, qwen, policy, agent_rows="last")
    sampling = policy.sampling
    assert sampling[0] == {} and sampling[5] == sampling[4]
    seeds = [given["sampling_seed"] for given in sampling[1:5]]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**31 for seed in seeds)
    assert row.components == {"turns": 2.0, "rows": 5.0}


async def test_a_row_that_a_stop_text_cut_keeps_its_seed(qwen):
    async def agent(base_url, prompt):
        message = await ask(base_url, ASKED, stop=["2"])
        await ask(base_url, [*ASKED, message, *ASKED])

    policy = Policy(qwen, "1 2 3", "13")
    await played(agent, qwen, policy)
    assert policy.sampling == [{}, {}]


async def test_each_row_of_a_session_has_a_budget_that_counts_what_it_keeps(qwen):
    policy, sampled = Policy(qwen), []

    async def call(base_url, messages, turn, **fields):
        policy.turns = [turn]
        status, answer = await post(base_url, messages, **fields)
        assert status == 200, answer
        sampled.append(answer["usage"]["completion_tokens"])
        return [*messages, answer["choices"][0]["message"], *ASKED]

    async def agent(base_url, prompt):
        for _ in range(2):
            messages = await call(base_url, ASKED, "to")
            await call(base_url, messages, "to")
        messages = await call(base_url, ASKED, "12to13", stop=["12"])
        await call(base_url, messages, "to")

    found = await rows_of(agent, qwen, policy, max_new_tokens=3)
    # A stop token is one of them; of the third row two were thrown away.
    assert sampled == [2, 1, 2, 1, 1, 2]
    assert [row.num_sampled for row in found.trajectories] == [3, 3, 3]


async def test_a_session_that_is_not_trained_may_sample_otherwise(qwen):
    given = {"top_p": 0.9, "temperature": 0, "frequency_penalty": 0.5, "min_p": 0.1}

    async def agent(base_url, prompt):
        message = await ask(base_url, ASKED, **given)
        await ask(base_url, [*ASKED, message, *ASKED], temperature=1.0, top_p=1)
        status, answer = await post(base_url, ASKED, tool_choice="required")
        assert status == 400 and answer["error"]["param"] == "tool_choice"

    policy = Policy(qwen, "12", "13")
    runner = runner_of(agent, qwen)
    try:
        await runner.run(PROMPT, policy, rng, is_trained=False)
    finally:
        await runner.close()
    assert policy.sampling == [given, {}]


async def test_several_answers_of_the_last_call_are_no_sample(qwen):
    async def agent(base_url, prompt):
        await post(base_url, ASKED, n=2)

    error = await failed(agent, qwen, Marked(qwen), agent_rows="last")
    assert error.reason == "agent_rows" and "has n = 2 answers" in error.detail


async def test_an_agent_is_given_the_prompt_and_its_reward_is_kept(qwen):
    async def agent(base_url, prompt):
        assert prompt is PROMPT
        assert (await ask(base_url, ASKED))["content"] == "12"
        return np.float32(0.25)

    row = await played(agent, qwen, Policy(qwen, "12"))
    assert row.reward == 0.25 and type(row.reward) is float and row.finish_reason == "stop"
    text = qwen.decode(row.tokens, special=True)
    assert text == "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n12<|im_end|>"
    assert row.prompt_length == len(row) - 2  # "12" is one token

    async def leaves_it_to_the_task(base_url, prompt):
        await ask(base_url, ASKED)

    row = await played(leaves_it_to_the_task, qwen, Policy(qwen, "12"))
    assert row.reward is None


async def test_tools_are_shown_and_their_calls_and_results_are_messages(qwen):
    turns = [
        f"well {call_of('multiply', a=2)}\n{call_of('look_up')}",
        call_of("divide"),  # not among the tools
        "<tool_call>{broken",
    ]
    seen = []

    async def agent(base_url, prompt):
        messages = list(ASKED)
        for _ in turns:
            _, answer = await post(base_url, messages, tools=TOOLS, tool_choice="auto")
            (choice,) = answer["choices"]
            seen.append(choice)
            message = choice["message"]
            messages = [*messages, message, *replies_to(message, "4")]
        return 1.0

    row = await played(agent, qwen, Policy(qwen, *turns))
    assert [choice["finish_reason"] for choice in seen] == ["tool_calls", "stop", "stop"]
    message = seen[0]["message"]
    assert message["content"] == "well"
    called = [call["function"] for call in message["tool_calls"]]
    assert called == [
        {"name": "multiply", "arguments": '{"a": 2}'},
        {"name": "look_up", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert [choice["message"]["content"] for choice in seen[1:]] == turns[1:]
    text = qwen.decode(row.tokens, special=True)
    assert '"name": "look_up"' in text.partition("how?")[0]
    assert text.count("<tool_response>\n4\n</tool_response>") == 2


def test_a_call_with_half_a_pair_of_surrogates_can_be_streamed_and_sent_again():
    text = r'<tool_call>{"name": "add", "arguments": {"a": "é \ud83d"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add"}}]
    message, has_calls = chat.message_of(text, tools)
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert has_calls and arguments.encode().decode() == r'{"a": "é \ud83d"}'
    (call,) = chat.read_message(message)["tool_calls"]
    assert call["function"]["arguments"] == json.loads(r'{"a": "é \ud83d"}')


async def test_white_space_around_an_answer_and_the_ids_of_its_calls_may_change(qwen):
    turns = ["\n 12 ", f" so {call_of('look_up', a=[1], b=2)}", "13"]

    async def agent(base_url, prompt):
        messages = [*ASKED, await ask(base_url, ASKED, tools=TOOLS)]
        assert messages[-1]["content"] == turns[0]
        messages = [*ASKED, {"role": "assistant", "content": "12"}, *ASKED]
        message = await ask(base_url, messages, tools=TOOLS)
        called = {"name": "look_up", "arguments": '{"b":2,  "a":[1]}'}
        call = {"id": "another", "type": "function", "function": called}
        messages.append({"role": "assistant", "content": message["content"], "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "another", "content": "4"})
        await ask(base_url, messages, tools=TOOLS)

    row = await played(agent, qwen, Policy(qwen, *turns))
    shown = qwen.decode(row.tokens[row.mask], special=True)
    assert shown == "".join(f"{turn}<|im_end|>" for turn in turns)


async def test_the_name_of_a_results_tool_is_found_by_the_id_of_its_call(tokenizers):
    tight = tokenizers["tight"]

    async def agent(base_url, prompt):
        message = await ask(base_url, ASKED, tools=TOOLS)
        await ask(base_url, [*ASKED, message, *replies_to(message, "4")], tools=TOOLS)

    row = await played(agent, tight, Policy(tight, call_of("look_up"), "4"))
    assert "<|im_start|>result of look_up:4" in tight.decode(row.tokens, special=True)


async def test_logprobs_and_usage_are_of_the_sampled_tokens(qwen):
    found = []

    async def agent(base_url, prompt):
        found.append(await post(base_url, ASKED, logprobs=True))
        body = {"messages": ASKED, "stream": True, "stream_options": {"include_usage": True}}
        messages = [*ASKED, found[0][1]["choices"][0]["message"], *ASKED]
        async with aiohttp.ClientSession() as client:
            url = f"{base_url}/chat/completions"
            async with client.post(url, json=body | {"messages": messages}) as response:
                found.append((await response.text()).split("\n\n"))

    row = await played(agent, qwen, Policy(qwen, "to12", "x"))
    (_, answer), events = found
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["to", "12", ""]
    assert [entry["logprob"] for entry in entries] == [-0.125, -0.25, -0.375]
    assert entries[0]["bytes"] == [116, 111]
    first = row.prompt_length + 3
    assert row.logprobs[row.prompt_length : first].tolist() == [-0.125, -0.25, -0.375]
    assert answer["usage"] == {
        "prompt_tokens": row.prompt_length,
        "completion_tokens": 3,
        "total_tokens": row.prompt_length + 3,
    }
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["choices"] == [] and last["usage"]["total_tokens"] == len(row)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_a_stop_text_ends_the_row_at_the_token_that_completes_it(tokenizers, data):
    tokenizer = tokenizers[data.draw(st.sampled_from(sorted(tokenizers)))]
    stops = data.draw(st.lists(st.sampled_from(["b", "ab", "to", ":", "12:", "zz"]), min_size=1))
    turns = data.draw(
        st.lists(st.text(alphabet="abtol12: zé", max_size=120), min_size=1, max_size=3)
    )
    answers, counts, policy = [], [], Policy(tokenizer)

    async def agent(base_url, prompt):
        messages = list(ASKED)
        for turn in turns:
            policy.turns = [turn]  # What was sampled beyond the text is gone.
            status, answer = await post(base_url, messages, stop=stops[:4], logprobs=True)
            assert status == 200
            (choice,) = answer["choices"]
            message = choice["message"]
            counts.append(len(choice["logprobs"]["content"]))
            assert answer["usage"]["completion_tokens"] == counts[-1]
            answers.append(message["content"])
            messages = [*messages, message, *ASKED]

    row = asyncio.run(played(agent, tokenizer, policy, max_new_tokens=3000))
    expected = list(row.tokens[: row.prompt_length])
    mask = [False] * len(expected)
    for turn, answer, count in zip(turns, answers, counts, strict=True):
        ids = [*tokenizer.encode(turn), tokenizer.eos_id]
        has = lambda text: any(stop in text for stop in stops[:4])  # noqa: E731
        for end in range(1, len(ids) + 1):
            if has(tokenizer.decode(ids[:end])):
                break
        if mask[-1]:
            stop = expected[-1] if expected[-1] == tokenizer.eos_id else None
            between = tokenizer.encode_reply(ASKED, stop)
            expected += between
            mask += [False] * len(between)
        expected += ids[:end]
        mask += [True] * end
        text = tokenizer.decode(ids[:end])
        found = [text.find(stop) for stop in stops[:4] if stop in text]
        assert count == end and answer == text[: min(found, default=None)] and not has(answer)
    assert row.tokens.tolist() == expected and row.mask.tolist() == mask


REFUSED = [
    ({"temperature": 0.7}, "temperature", "must be 1.0, as in the run, got 0.7"),
    ({"temperature": float("nan")}, "temperature", "must be 1.0"),
    ({"top_p": 0.9}, "top_p", "must be 1, as in the run, got 0.9"),
    ({"presence_penalty": 1}, "presence_penalty", "must be 0"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "must be {}"),
    ({"seed": 5}, "seed", "'seed' is not supported, got 5"),
    ({"top_k": 5}, "top_k", "must be -1, as in the run, got 5"),
    ({"min_p": 0.1}, "min_p", "must be 0, as in the run"),
    ({"beams": 5}, "beams", "'beams' is not supported"),
    ({"tool_choice": "required"}, "tool_choice", "must be 'auto', as in the run, got 'required'"),
    ({"response_format": {"type": "json_object"}}, "response_format", "must be {'type': 'text'}"),
    ({"n": 2}, "n", "n must be 1 where rollout.agent_rows = 'one', got 2"),
    ({"n": 17}, "n", "n must be an integer ≥ 1 and ≤ 16, got 17"),
    ({"n": True}, "n", "got True"),
    ({"max_tokens": 0}, "max_tokens", "must be an integer ≥ 1, got 0"),
    ({"stop": ["a"] * 5}, "stop", "must be 4 texts at most, of 1 to 64 characters"),
    ({"stop": ""}, "stop", "must be 4 texts"),
    ({"stream": "yes"}, "stream", "must be true or false"),
    ({"tools": [{"name": "f"}]}, "tools", 'must be {"type": "function"'),
    ({"tools": [TOOLS[0]] * 129}, "tools", "must be a list of 128 at most, got 129"),
    ({"messages": []}, "messages", "must be a list of 1 to 1024 messages, got 0"),
    ({"messages": ASKED * 1025}, "messages", "must be a list of 1 to 1024 messages, got 1025"),
    ({"messages": [{"role": "robot"}]}, "messages", "messages[0] must have a role of"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "messages[0].content must be a text",
    ),
    (
        {"messages": [{"role": "user", "content": "", "audio": {"id": 1}}]},
        "messages",
        "messages[0].audio is not supported",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 3}]}]},
        "messages",
        "messages[0].tool_calls must be a list",
    ),
]


async def test_a_call_that_would_sample_otherwise_or_is_malformed_is_refused_by_name(qwen):
    answers = []

    async def agent(base_url, prompt):
        for fields, *_ in REFUSED:
            answers.append(await post(base_url, fields.pop("messages", ASKED), **fields))
        same = {"temperature": 1, "top_p": 1.0, "frequency_penalty": 0.0, "seed": None}
        same |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
        await ask(base_url, ASKED, **same, user="me", parallel_tool_calls=True)

    await played(agent, qwen, Policy(qwen, "12"))
    for (status, answer), (_, param, text) in zip(answers, REFUSED, strict=True):
        error = answer["error"]
        assert status == 400 and error["type"] == "invalid_request_error", error
        assert error["param"] == param and text in error["message"], error


async def test_bodies_and_routes_that_are_not_served_say_so(qwen, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_BODY_BYTES", 1000)
    found = []

    async def agent(base_url, prompt):
        async with aiohttp.ClientSession() as client:
            for method, path, data in (
                ("POST", "/chat/completions", b"{"),
                ("POST", "/chat/completions", b"[" * 900),
                ("POST", "/chat/completions", b"3"),
                ("POST", "/chat/completions", b" " * 2000),
                ("POST", "/responses", b"{}"),
                ("GET", "/chat/completions", None),
                ("GET", "/models", None),
            ):
                async with client.request(method, base_url + path, data=data) as response:
                    found.append((response.status, await response.json()))
        await ask(base_url, ASKED)

    await played(agent, qwen, Policy(qwen, "12"))
    assert [status for status, _ in found] == [400, 400, 400, 413, 404, 404, 200]
    texts = [answer["error"]["message"] for _, answer in found[:-1]]
    for text, part in zip(
        texts,
        [
            "the body must be JSON",
            "the body must be JSON",
            "must be a JSON object, got 3",
            "at most 1000 bytes, got 2000",
            "is not served: under its base URL a session has POST /chat/completions and GET /models",
            "is not served",
        ],
        strict=True,
    ):
        assert part in text
    assert [model["id"] for model in found[-1][1]["data"]] == ["policy"]


async def edits(base_url, prompt):
    message = await ask(base_url, ASKED)
    await ask(base_url, [{"role": "user", "content": "what?"}, message, *ASKED])


async def edits_the_answer(base_url, prompt):
    message = await ask(base_url, ASKED)
    await ask(base_url, [*ASKED, message | {"content": "13"}, *ASKED])


async def asks_again(base_url, prompt):
    await ask(base_url, ASKED)
    await ask(base_url, ASKED)


async def puts_words_into_its_mouth(base_url, prompt):
    message = await ask(base_url, ASKED)
    await ask(base_url, [*ASKED, message, {"role": "assistant", "content": "and"}, *ASKED])


async def has_other_tools(base_url, prompt):
    message = await ask(base_url, ASKED)
    await ask(base_url, [*ASKED, message, *ASKED], tools=TOOLS)


async def asks_twice_at_once(base_url, prompt):
    await asyncio.gather(ask(base_url, ASKED), ask(base_url, ASKED))


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        (edits, r"messages\[0\] is \('user', 'what\?'.*, and was \('user', 'how\?'"),
        (edits_the_answer, r"messages\[1\] is \('assistant', '13'.*, and was \('assistant', '12'"),
        (asks_again, "it has 1 messages, and the conversation so far 2"),
        (puts_words_into_its_mouth, "an answer of the assistant that was not sampled"),
        (has_other_tools, "it has other tools"),
        (asks_twice_at_once, "it came while another one was being answered"),
    ],
)
async def test_a_second_row_fails_the_session_and_names_the_difference(qwen, agent, text):
    class Slow(Policy):
        async def __call__(self, tokens, **sampling):
            await asyncio.sleep(9 * (agent is asks_twice_at_once))
            return await super().__call__(tokens, **sampling)

    policy = Slow(qwen, "12", "13")
    with pytest.raises(RolloutError, match=text) as caught:
        await played(agent, qwen, policy)
    assert caught.value.reason == "agent_rows" and caught.value.cause.place
    assert len(policy.given) <= 1  # Nothing was sampled for the second row.


async def raises(base_url, prompt):
    await ask(base_url, ASKED)
    raise KeyError("no such room")


async def exits(base_url, prompt):
    raise SystemExit(3)


async def cancels(base_url, prompt):
    raise asyncio.CancelledError


async def asks_nothing(base_url, prompt):
    return 1.0


async def rewards_with_nan(base_url, prompt):
    await ask(base_url, ASKED)
    return float("nan")


async def rewards_with_text(base_url, prompt):
    await ask(base_url, ASKED)
    return "1"


SAMPLES = threading.Event()  # a call is being answered


async def call_under_way(base_url):
    """A call that has reached the policy."""
    SAMPLES.clear()
    call = asyncio.ensure_future(post(base_url, ASKED))
    while not SAMPLES.is_set():
        await asyncio.sleep(0.01)
    return call


async def leaves_a_call(base_url, prompt):
    leaves_a_call.call = await call_under_way(base_url)
    return 1.0


async def drops(base_url, prompt):
    """Closes its connection while the call is answered, and goes on as if nothing had been."""
    (await call_under_way(base_url)).cancel()
    await asyncio.sleep(9)
    return 1.0


async def drops_half_a_body(base_url, prompt):
    host, _, port = base_url.split("/")[2].partition(":")
    path = base_url.split(f":{port}")[1]
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{"
    writer.write(head.encode())
    await writer.drain()
    await asyncio.sleep(0.5)
    writer.close()
    await asyncio.sleep(9)
    return 1.0


@pytest.mark.parametrize(
    ("agent", "text", "place"),
    [
        (raises, "raised KeyError: 'no such room'", "KeyError at"),
        (exits, "raised SystemExit: 3", "SystemExit at"),
        (cancels, "raised CancelledError", "CancelledError"),
        (asks_nothing, "made no call that was answered", "no call"),
        (rewards_with_nan, "must return a finite number or None, got nan", "an agent that returns"),
        (
            rewards_with_text,
            "must return a finite number or None, got '1'",
            "an agent that returns",
        ),
        (
            leaves_a_call,
            "returned while 1 of its calls were being answered",
            "an agent that leaves",
        ),
        (drops, "connection dropped before its answer was sent", None),
        (drops_half_a_body, "connection dropped before its answer was sent", None),
    ],
)
async def test_a_session_that_fails_has_a_reason_and_no_sample(qwen, agent, text, place):
    class Slow(Policy):
        async def __call__(self, tokens, **sampling):
            SAMPLES.set()
            await asyncio.sleep(30 if agent in (drops, leaves_a_call) else 0)
            return await super().__call__(tokens, **sampling)

    error = await failed(agent, qwen, Slow(qwen, "12"))
    assert error.reason == "agent_error" and text in error.detail
    assert error.cause is None if place is None else error.cause.place.startswith(place)


async def test_an_agent_that_takes_too_long_or_blocks_costs_its_session_and_no_other(qwen):
    released = threading.Event()

    async def waits(base_url, prompt):
        await ask(base_url, ASKED)
        await asyncio.sleep(60)

    async def blocks(base_url, prompt):
        await ask(base_url, ASKED)
        released.wait(60)

    for agent in (waits, blocks):
        runner = runner_of(agent, qwen, agent_timeout_secs=0.3)
        text = r"agent_timeout: .* took longer than rollout.agent_timeout_secs = 0.3"
        with pytest.raises(RolloutError, match=text):
            await runner.run(PROMPT, Policy(qwen, "12"), rng)
        if agent is blocks:
            released.set()  # Not before this loop went on.
        await runner.close()


def context_of(tokenizer, policy):
    names = ("encode", "decode", "encode_chat", "encode_reply")
    functions = {name: getattr(tokenizer, name) for name in names}
    bounds = {"vocab_size": tokenizer.vocab_size, "max_new_tokens": 9, "max_row_tokens": 199}
    return Context(policy, **functions, **bounds, make_rng=rng)


async def test_the_time_in_which_calls_are_answered_is_not_the_agents(qwen):
    now = [100.0]

    class Slow(Policy):
        async def __call__(self, tokens, **sampling):
            now[0] += 40
            seen.append(session.own_secs())
            return await super().__call__(tokens, **sampling)

    bounds = {"agent_rows": "one", "agent_calls": 2, "clock": lambda: now[0]}
    session = sessions.Session(PROMPT, context_of(qwen, Slow(qwen, "12", "13")), **bounds)
    messages, seen = list(ASKED), []
    for _ in range(2):
        now[0] += 3
        _, answer = await asyncio.create_task(session.answer({"messages": messages}))
        messages += [answer["choices"][0]["message"], *ASKED]
    now[0] += 1
    assert [*seen, session.own_secs()] == [3, 6, 7]


async def test_a_failure_of_the_servers_is_the_sessions_and_every_later_call_is_refused(qwen):
    async def agent(base_url, prompt):
        while True:
            await post(base_url, ASKED)

    error = RolloutError("server_error", "no HEALTHY server")
    policy = Policy(qwen, error)
    assert await failed(agent, qwen, policy) is error and len(policy.given) == 1
    # What an agent reads that is not cancelled at once.
    policy = Policy(qwen, error)
    endpoint = sessions.Sessions(agent_rows="one", agent_calls=4)
    await endpoint.start()
    try:
        async with aiohttp.ClientSession() as client:
            with endpoint.session(PROMPT, context_of(qwen, policy)) as (base_url, session):
                for _ in range(2):
                    url, body = f"{base_url}/chat/completions", {"messages": ASKED}
                    async with client.post(url, json=body) as response:
                        text = (await response.json())["error"]["message"]
                        assert response.status == 503 and "no HEALTHY server" in text
                        # Else OpenAI's client tries again.
                        assert response.headers["x-should-retry"] == "false"
                assert session.failure.result() is error and len(policy.given) == 1
    finally:
        await endpoint.close()


async def test_a_failure_of_an_evaluation_reaches_it_as_it_is(qwen):
    class EvaluationError(Exception):
        pass

    async def agent(base_url, prompt):
        await post(base_url, ASKED)

    with pytest.raises(EvaluationError, match="the engine died"):
        await played(agent, qwen, Policy(qwen, EvaluationError("the engine died")))


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"max_new_tokens": 2}, "no token is left for an answer: 2 of rollout.max_new_tokens = 2"),
        (
            {"max_tokens": 45},
            "of 45 (the lesser of learner.row_tokens and server.max_total_tokens)",
        ),
        ({"agent_calls": 1}, "at most rollout.agent_calls = 1 calls"),
    ],
)
async def test_an_agent_without_tokens_or_calls_is_cut_where_it_ends_well_and_overlong_where_not(
    qwen, bounds, text
):
    async def ends(base_url, prompt):
        message = await ask(base_url, ASKED)
        status, answer = await post(base_url, [*ASKED, message, *ASKED])
        assert status == 400 and text in answer["error"]["message"], answer
        assert answer["error"]["code"] == "context_length_exceeded"
        return 0.25

    async def goes_on(base_url, prompt):
        await ends(base_url, prompt)
        raise ValueError("no more")

    row = await played(ends, qwen, Policy(qwen, "12"), **bounds)
    assert (row.reward, row.finish_reason) == (0.25, "length")
    error = await failed(goes_on, qwen, Policy(qwen, "12"), **bounds)
    assert error.reason == "overlong" and "no more" in error.detail


async def test_calls_at_once_are_bounded(qwen, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_PARALLEL_CALLS", 3)
    refused = threading.Event()
    seen = []

    async def agent(base_url, prompt):
        for done in asyncio.as_completed([post(base_url, ASKED) for _ in range(8)]):
            status, answer = await done
            seen.append(status)
            if status == 429:
                assert "at most 3 may" in answer["error"]["message"]
                refused.set()
        await ask(base_url, ASKED)

    class Slow(Marked):
        async def __call__(self, tokens, **sampling):
            for _ in range(500):
                await asyncio.sleep(0 if refused.is_set() else 0.01)
            return await super().__call__(tokens, **sampling)

    row = await played(agent, qwen, Slow(qwen), agent_rows="last")
    assert set(seen) == {200, 429} and row.components["rows"] == seen.count(200) + 1


async def test_calls_after_the_end_and_of_no_session_are_not_found(qwen):
    addresses = []

    async def agent(base_url, prompt):
        addresses.append(base_url)
        await ask(base_url, ASKED)
        return 1.0

    runner = runner_of(agent, qwen)
    try:
        await runner.run(PROMPT, Policy(qwen, "12"), rng)
        await runner.run(PROMPT, Policy(qwen, "12"), rng)
        endpoint, _ = await runner.function._started
        assert endpoint._sessions == {}
        late, other = addresses
        guess = late.replace(late.split("/")[4], "0" * 32)
        for base_url in (late, guess):
            status, answer = await post(base_url, ASKED)
            assert status == 404 and answer["error"]["code"] == "session_not_found"
            assert "its agent returned, failed or ran out of time" in answer["error"]["message"]
        assert late.startswith("http://127.0.0.1:")
        assert late != other and len(late.split("/")[4]) >= 32
    finally:
        await runner.close()


async def test_a_call_that_arrives_as_its_session_ends_samples_nothing(qwen):
    policy = Policy(qwen, "12")
    bounds = {"agent_rows": "one", "agent_calls": 2}
    session = sessions.Session(PROMPT, context_of(qwen, policy), **bounds)
    session.end()
    with pytest.raises(RefusedError, match="no such session") as caught:
        await session.answer({"messages": ASKED})
    assert caught.value.status == 404 and policy.given == []


async def test_sessions_that_mix_up_their_ids_are_no_samples(qwen):
    addresses = []

    async def agent(base_url, prompt):
        if prompt.index == 1:
            await ask(base_url, ASKED)
            addresses.append(base_url)
            await asyncio.sleep(9)  # The other one calls here.
        while not addresses:
            await asyncio.sleep(0.01)
        status, _ = await post(addresses[0], ASKED)
        assert status == 503
        return 1.0

    runner = runner_of(agent, qwen)
    prompts = [Prompt(index, PROMPT.tokens, "", "") for index in range(2)]
    try:
        runs = (runner.run(prompt, Policy(qwen, "12"), rng) for prompt in prompts)
        errors = await asyncio.gather(*runs, return_exceptions=True)
    finally:
        await runner.close()
    assert [error.reason for error in errors] == ["agent_error", "agent_rows"]
    assert "made no call" in errors[0].detail


async def test_many_sessions_at_once_keep_their_rows_apart(qwen):
    async def agent(base_url, prompt):
        messages = [{"role": "user", "content": f"{prompt.index}?"}]
        async with aiohttp.ClientSession() as client:
            for _ in range(2):
                body = {"messages": messages}
                async with client.post(f"{base_url}/chat/completions", json=body) as response:
                    message = (await response.json())["choices"][0]["message"]
                assert message["content"] == str(prompt.index)
                messages = [*messages, message, *ASKED]
        return float(prompt.index)

    runner = runner_of(agent, qwen)
    try:
        prompts = [Prompt(index, PROMPT.tokens, "", "") for index in range(60)]
        rows = await asyncio.gather(
            *(runner.run(p, Policy(qwen, *[str(p.index)] * 2), rng) for p in prompts)
        )
    finally:
        await runner.close()
    for index, found in enumerate(rows):
        (row,) = found.trajectories
        assert row.reward == index and qwen.decode(row.tokens).startswith(f"user\n{index}?")
    assert not [t for t in threading.enumerate() if t.name.startswith("agents")]


async def test_an_endpoint_that_was_closed_starts_again(qwen):
    async def agent(base_url, prompt):
        await ask(base_url, ASKED)

    runner = runner_of(agent, qwen)
    assert runner.waits_for() == "its agent 'fixtures.sessions:nobody'"
    for _ in range(2):
        await runner.run(PROMPT, Policy(qwen, "12"), rng)
        await runner.close()


async def test_an_endpoint_that_could_not_start_is_started_for_the_next_session(qwen, monkeypatch):
    async def agent(base_url, prompt):
        await ask(base_url, ASKED)

    async def fails(self):
        raise OSError(errno.EMFILE, "too many open files")

    runner = runner_of(agent, qwen)
    with monkeypatch.context() as patched:
        patched.setattr(sessions.Sessions, "start", fails)
        with pytest.raises(OSError, match="too many"):
            await runner.run(PROMPT, Policy(qwen, "12"), rng)
    await runner.run(PROMPT, Policy(qwen, "12"), rng)
    await runner.close()


async def test_the_prompt_of_a_group_is_what_its_agents_messages_share(qwen):
    def row_of(text):
        async def agent(base_url, prompt):
            await ask(base_url, [{"role": "user", "content": text}])
            return 1.0

        return played(agent, qwen, Policy(qwen, "12"))

    runner = runner_of(nobody, qwen)
    rows = [await row_of(text) for text in ("abc?", "abd?", "ab")]
    shared = runner.with_one_prompt(rows)
    common = [*qwen.encode("<|im_start|>user\n"), *qwen.encode("ab")]
    for row, was in zip(shared, rows, strict=True):
        assert row.tokens[: row.prompt_length].tolist() == common
        assert row.tokens is was.tokens and row.mask is was.mask
        runner.check(row)
    alike = runner.with_one_prompt([rows[0], rows[0]])
    assert [row.prompt_length for row in alike] == [rows[0].prompt_length] * 2


async def takes_one(base_url):
    pass


def is_not_async(base_url, prompt):
    pass


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nobody", "must be 'module:function'"),
        ("test_sessions:lost", "must be `async def lost"),
        ("test_sessions:is_not_async", "must be `async def is_not_async"),
        ("test_sessions:takes_one", "must take .base_url, prompt."),
        ("no_such_module:agent", "no_such_module"),
    ],
)
def test_an_agent_is_found_by_its_name_and_checked(name, text):
    with pytest.raises((ValueError, ImportError), match=text):
        agent_of(name)


async def test_openais_client_is_a_client(qwen):
    openai = pytest.importorskip("openai")
    turns = [call_of("multiply", a=2), "to", "12", "a:b"]
    seen = []

    async def agent(base_url, prompt):
        # A client that blocks: its agents wait for one another, and no call waits for an agent.
        client = openai.OpenAI(base_url=base_url, api_key="any")
        assert [model.id for model in client.models.list()] == ["policy"]
        chat = client.chat.completions
        messages = [{"role": "developer", "content": "be brief"}, *ASKED]
        message = chat.create(model="m", messages=messages, tools=TOOLS).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("multiply", {"a": 2})
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        with chat.stream(model="m", messages=messages, tools=TOOLS) as stream:
            completion = stream.get_final_completion()
        seen.append(completion.choices[0].message.content)
        messages += [completion.choices[0].message.to_dict(), *ASKED]
        client = openai.AsyncOpenAI(base_url=base_url, api_key="any")
        bounds = {"max_completion_tokens": 9, "stop": ":", "logprobs": True, "temperature": 1.0}
        chunks = await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, stream=True, **bounds
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        seen.append(text)
        messages += [{"role": "assistant", "content": text}, *ASKED]
        with pytest.raises(openai.BadRequestError, match="temperature must be 1.0, as in the run"):
            await client.chat.completions.create(model="m", messages=messages, temperature=0.5)
        answer = await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, **bounds
        )
        seen.append(answer.choices[0].message.content)
        assert len(answer.choices[0].logprobs.content) == 2
        await client.close()
        return 1.0

    row = await played(agent, qwen, Policy(qwen, *turns))
    assert seen == ["to", "12", "a"] and row.components == {"turns": 4.0}
    shown = qwen.decode(row.tokens[row.mask], special=True)
    assert shown == f"{turns[0]}<|im_end|>to<|im_end|>12<|im_end|>a:"


async def test_openais_client_is_not_kept_waiting_by_a_session_that_is_over(qwen):
    openai = pytest.importorskip("openai")
    found = []

    async def agent(base_url, prompt):
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:
            try:
                await client.chat.completions.create(model="m", messages=ASKED)
            except openai.APIStatusError as error:  # Without a second try.
                found.append(error.message)
                raise

    policy = Policy(qwen, RolloutError("timeout", "no answer within 60 s"))
    error = await failed(agent, qwen, policy)
    assert error.reason == "timeout" and len(policy.given) == 1
