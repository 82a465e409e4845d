"""Tools: schemas, the text of calls, results by the chat template, and rows that are exactly what was sampled."""

import asyncio
import json

import hypothesis
import numpy as np
import pytest
from fixtures import chat, environments
from fixtures.conversations import Server, call_of, check_exact
from fixtures.runners import conversing
from hypothesis import strategies as st

from jaxrl_async.environments import environment_class
from jaxrl_async.environments.tools import Call, ToolUse, parse_calls, tool_of
from jaxrl_async.rollout.context import rng_of
from jaxrl_async.rollout.environment import EnvironmentRollout
from jaxrl_async.tasks.tokenizer import InstructedTokenizer
from jaxrl_async.types import Prompt

MULTIPLY, LOOK_UP = "fixtures.environments:multiply", "fixtures.environments:look_up"


class Here(ToolUse):
    """The tools on this event loop: their exactness is the same, and no process starts."""

    own_process = False


@pytest.fixture(scope="module", params=list(chat.TEMPLATES))
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat") / request.param
    return chat.tokenizer_of(directory, request.param)


async def test_the_reward_of_the_last_turn_may_have_components_and_asks_for_no_more_than_text_and_answer():
    tools = ToolUse([MULTIPLY], reward=f"{__name__}:detailed")
    await tools.reset(Prompt(0, np.ones(1, np.int32), "q", "12"), np.random.default_rng(0))
    last = await tools.step("12")
    assert (last.reward, last.components, last.done) == (1.0, {"length": 2.0}, True)
    with pytest.raises(
        ValueError, match=r"reward 'code' is given the text .*'metadata'.*the task's"
    ):
        environment_class("tools", {"tools": [MULTIPLY], "reward": "code"})


def detailed(completion, answer):
    return {"reward": completion == answer, "length": len(completion)}


def test_a_schema_is_made_of_type_hints_and_the_docstring():
    assert tool_of(MULTIPLY).schema == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiplies two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number"},
                    "b": {"type": "integer", "description": "the second number"},
                },
                "required": ["a", "b"],
            },
        },
    }
    parameters = tool_of(LOOK_UP).schema["function"]["parameters"]
    assert parameters["required"] == ["key"]
    where = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    assert parameters["properties"]["where"] == where
    with pytest.raises(ValueError, match="'untyped': parameter 'a' has no type hint"):
        tool_of("fixtures.environments:untyped")
    with pytest.raises(ValueError, match="two tools have one name"):
        environment_class("tools", {"tools": [MULTIPLY, MULTIPLY]})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": 1, "b": 2}, ""),
        ({"a": 1}, "argument 'b' is missing"),
        ({"a": 1, "b": 2, "c": 3}, "unknown argument 'c'; it takes a, b"),
        ({"a": 1, "b": "2"}, "argument 'b' must be of type integer, got '2'"),
        ({"a": 1, "b": True}, "argument 'b' must be of type integer, got True"),
        ([1, 2], "arguments must be an object"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, problem):
    assert tool_of(MULTIPLY).problem(arguments).startswith(problem)
    assert bool(tool_of(MULTIPLY).problem(arguments)) == bool(problem)


def test_calls_are_read_out_of_a_turn_in_order():
    text = f"so: {call_of('f', a=1)}\n and {call_of('g')} done"
    assert parse_calls(text) == [Call("f", {"a": 1}), Call("g", {})]
    assert parse_calls("no call, {} and </tool_call>") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{", "no </tool_call> after"),
        ("<tool_call></tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", 'a call must be {"name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'a call must be {"name"'),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text, problem):
    (call,) = parse_calls(text)
    assert call.problem.startswith(problem)


@hypothesis.given(st.text(alphabet='<>tol_ca/{}[]":, 1\n', max_size=80) | st.text(max_size=40))
@hypothesis.settings(max_examples=200, deadline=None)
def test_no_text_breaks_the_parser(text):
    calls = parse_calls(text + "<tool_call>" + text)
    assert calls and all(call.problem or isinstance(call.name, str) for call in calls)


async def test_results_and_errors_are_messages_and_the_first_turn_without_a_call_is_judged():
    tools = ToolUse([MULTIPLY, LOOK_UP], reward="last_number")
    await tools.reset(Prompt(0, np.zeros(1, np.int32), "", "344630"), None)
    turn = call_of("multiply", a=482, b=715) + call_of("look_up", key="k", times=2)
    observation = await tools.step(turn + call_of("look_up", key="lost") + call_of("divide"))
    assert [m["content"] for m in observation.messages] == [
        "344630",
        "<k><k>",
        '{"error": "LookupError: nothing there"}',
        '{"error": "no tool \'divide\'; there are multiply, look_up"}',
    ]
    assert {m["role"] for m in observation.messages} == {"tool"}
    assert observation.components == {"calls": 4.0, "call_errors": 2.0} and not observation.done
    assert (await tools.step("it is 344630")).reward == 1.0
    last = await ToolUse([MULTIPLY]).step("it is 3")
    assert last.done and last.reward is None and not ToolUse([MULTIPLY]).judges


def test_a_chat_template_shows_the_tools_before_the_question(tmp_path):
    tokenizer = chat.tokenizer_of(tmp_path / "qwen", "qwen")
    schemas = ToolUse([MULTIPLY]).schemas
    asking = InstructedTokenizer(tokenizer, instruction="", system_prompt="", tools=schemas)
    text = tokenizer.decode(asking.encode_prompt("what?"), special=True)
    assert json.dumps(schemas[0], ensure_ascii=False) in text
    assert text.endswith("<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n")
    (tmp_path / "qwen" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    bare = type(tokenizer)(tmp_path / "qwen")
    with pytest.raises(ValueError, match="tools need a chat template"):
        InstructedTokenizer(bare, instruction="", system_prompt="", tools=schemas)
    with pytest.raises(ValueError, match="has no chat template"):
        bare.encode_reply([{"role": "tool", "content": "1"}])


def test_a_result_is_written_as_the_template_writes_it(tmp_path):
    tokenizer = chat.tokenizer_of(tmp_path / "qwen", "qwen")
    stop = tokenizer.eos_id
    results = [{"role": "tool", "name": "f", "content": text} for text in ("12", "a<|im_end|>b")]
    ids = tokenizer.encode_reply(results, stop)
    after = (
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n"
        "a< |im_end|>b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids, special=True) == after
    # The whole conversation, where the answer is written as it was sampled.
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "hm"}]
    whole = tokenizer.encode_chat([*asked, results[0]])
    row = [*tokenizer.encode_chat(asked[:1]), *tokenizer.encode("hm"), stop]
    assert row + tokenizer.encode_reply(results[:1], stop) == whole
    # An answer that no stop token ended, or another one, is ended by the template.
    for other in (None, tokenizer.stop_token_ids[1]):
        assert tokenizer.encode_reply(results[:1], other)[0] == stop


def conversation(data, tokenizer):
    """Plays one random conversation and checks its row."""
    server = Server(data.draw, tokenizer)
    # Bounds from those that cut the first turn to those that cut none.
    budget, row_tokens = (
        data.draw(st.sampled_from([3, 40, 200, 4000])),
        data.draw(st.sampled_from([150, 600, 9000])),
    )
    function = EnvironmentRollout(
        "test_tools:Here",
        {"tools": [MULTIPLY, LOOK_UP], "reward": "exact"},
        max_turns=data.draw(st.integers(1, 5)),
        max_turn_tokens=data.draw(st.sampled_from([0, 0, 25])),
        timeout_secs=60.0,
        num_processes=1,
        episode_secs=60.0,
        memory_bytes=0,
    )
    runner = conversing(function, tokenizer, max_new_tokens=budget, max_tokens=row_tokens)
    tokens = np.array(tokenizer.encode_chat([{"role": "user", "content": "how?"}]), np.int32)
    prompt = Prompt(0, tokens, "how?", "12")
    row = asyncio.run(runner.run(prompt, server, lambda: rng_of("rollout", 0, 0, 0, 0)))
    runner.check(row)
    check_exact(row, prompt, server, tokenizer)
    return row


def conversations(tokenizer, num, **settings):
    """Plays and checks random conversations; most have several turns, some are cut, some call wrongly."""
    rows = []

    @hypothesis.given(st.data())
    @hypothesis.settings(max_examples=num, deadline=None, database=None, **settings)
    def play(data):
        rows.append(conversation(data, tokenizer))

    play()
    seen = {
        "several turns": sum(row.components["turns"] > 1 for row in rows),
        "cut": sum(row.finish_reason == "length" for row in rows),
        "errors": sum(row.components.get("call_errors", 0) > 0 for row in rows),
        "results": sum(
            row.components.get("calls", 0) > row.components.get("call_errors", 0) for row in rows
        ),
    }
    assert len(rows) >= num and min(seen.values()) > num // 20, seen


def test_trained_tokens_are_the_sampled_ones(tokenizer):
    conversations(tokenizer, 170, derandomize=True)


@pytest.mark.long
def test_trained_tokens_are_the_sampled_ones_in_ten_thousand_conversations(tokenizer):
    conversations(tokenizer, 3400)


async def test_tools_run_in_a_process_of_their_own():
    rollout = EnvironmentRollout(
        "tools",
        {"tools": [MULTIPLY], "reward": "exact"},
        **{"max_turns": 3, "max_turn_tokens": 0, "timeout_secs": 30.0},
        **{"num_processes": 1, "episode_secs": 60.0, "memory_bytes": 1 << 28},
    )
    assert environments.multiply(3, 4) == 12
    try:
        async with rollout._episode() as episode:
            await episode.reset(Prompt(0, np.ones(1, np.int32), "", "12"), rng_of("a", 0, 0, 0, 0))
            observation = await episode.step(call_of("multiply", a=3, b=4))
            assert observation.messages == [{"role": "tool", "name": "multiply", "content": "12"}]
            assert (await episode.step("12")).reward == 1.0
    finally:
        await rollout.close()
