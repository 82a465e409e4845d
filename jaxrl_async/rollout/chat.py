"""OpenAI's chat format: the body of a request becomes a `Call`, and sampled tokens become its answer.

Checks and translates; keeps nothing and sends nothing. A field that would sample otherwise than the run does is refused
by name: what is trained is what was sampled.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import numpy as np

from jaxrl_async.environments.tools import OPENS, parse_calls
from jaxrl_async.rollout.parameters import SHAPING

MAX_MESSAGES = 1024  # of a call
MAX_TOOLS = 128
MAX_CHOICES = 16  # n
MAX_STOPS = 4  # OpenAI's
MAX_STOP_CHARS = 64  # of one
MODEL = "policy"  # its name in /models; a call may name any other

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}
# Fields that change nothing here.
_IGNORED = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
}
# Field → the one value that it may have, beside null: it is the run's, or asks for nothing.
_FIXED: dict[str, Any] = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "top_logprobs": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
_READ = {
    *("messages", "tools", "n", "stop", "max_tokens", "max_completion_tokens", "temperature"),
    *("stream", "stream_options", "logprobs"),
}


class RefusedError(Exception):
    """A request that is not answered; its message names the field or setting, the value and the bound."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "", status: int = 400
    ):
        super().__init__(message)
        self.param, self.code, self.status = param, code or None, status

    def body(self) -> dict[str, Any]:
        """The JSON of OpenAI's errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked request for chat completions."""

    messages: tuple[Mapping[str, Any], ...]  # each with `role` and `content`, a text
    tools: tuple[Mapping[str, Any], ...]  # JSON schemas
    n: int  # choices
    stop: tuple[str, ...]  # texts that end an answer
    max_tokens: int | None  # bound on an answer, ≥ 1
    stream: bool
    include_usage: bool  # at the end of a stream
    logprobs: bool
    shaping: Mapping[str, Any]  # sampling parameters other than the run's; {} where it is trained


@dataclasses.dataclass(frozen=True)
class Choice:
    """One answer."""

    message: Mapping[str, Any]  # OpenAI's, of the assistant
    finish_reason: str  # "stop" | "length" | "tool_calls"
    tokens: np.ndarray  # int32 [N], as sampled
    logprobs: np.ndarray  # float32 [N]


def read_call(body: Any, *, run: Mapping[str, Any], is_trained: bool) -> Call:
    """Checks the body of a request.

    Args:
      body: JSON.
      run: the run's temperature and what it cuts off, by SGLang's names.
      is_trained: whether a call must sample as the run does.

    Raises:
      RefusedError: names the field, the value and the bound.
    """
    if not isinstance(body, dict):
        raise RefusedError(f"the body must be a JSON object, got {body!r:.80}")
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() - _IGNORED - _FIXED.keys() - _READ:
        raise RefusedError(f"{name!r:.80} is not supported, got {given[name]!r:.80}", param=name)
    fixed = {**_FIXED, **run}
    others = {name: given[name] for name in fixed if name in given and given[name] != fixed[name]}
    for name, value in others.items():
        if is_trained or name not in (*SHAPING, "temperature"):
            _refuse(name, f"must be {fixed[name]!r}, as in the run", value)
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        _refuse("stream_options", "must be {include_usage}", options)
    return Call(
        messages=_messages(given.get("messages")),
        tools=_tools(given.get("tools", [])),
        n=_whole("n", given.get("n", 1), MAX_CHOICES),
        stop=_stops(given.get("stop", [])),
        max_tokens=_max_tokens(given),
        stream=_flag("stream", given),
        include_usage=_flag("include_usage", options),
        logprobs=_flag("logprobs", given),
        shaping=others,
    )


def message_of(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    """An answer as a message, and whether it calls tools.

    It does where every call in it is whole and names one of `tools`; any other answer is its text.
    """
    names = {tool["function"]["name"] for tool in tools}
    calls = parse_calls(text) if tools else []
    if not calls or not all(
        not c.problem and c.name in names and isinstance(c.arguments, dict) for c in calls
    ):
        return {"role": "assistant", "content": text}, False
    return {
        "role": "assistant",
        "content": text.partition(OPENS)[0].strip() or None,
        "tool_calls": [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _json_of(call.arguments),
                },
            }
            for call in calls
        ],
    }, True


def read_message(found: Any, number: int = 0) -> dict[str, Any]:
    """A message of a call: its content one text, and the arguments of its calls values of JSON, as templates take them.

    Raises:
      RefusedError: names the message's number, the field and the value.
    """
    where = f"messages[{number}]"
    if not isinstance(found, dict) or found.get("role") not in _ROLES:
        _refuse("messages", f"{where} must have a role of {', '.join(_ROLES)}", found, where)
    for name, value in found.items():
        if name not in _MESSAGE_KEYS and value:
            _refuse("messages", f"{where}.{name} is not supported", value, where)
    role = "system" if found["role"] == "developer" else found["role"]
    message = {"role": role, "content": _text(found.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if (value := found.get(name)) is not None:
            if not isinstance(value, str):
                _refuse("messages", f"{where}.{name} must be a text", value, where)
            message[name] = value
    if calls := found.get("tool_calls"):
        message["tool_calls"] = _calls(calls, where)
    return message


def key_of(message: Mapping[str, Any]) -> tuple:
    """What two equal messages have in common: role, text, and tools called with the same arguments.

    Ids of calls are left out, and so is the white space around an answer: frameworks change both, and the row holds
    what was sampled.
    """
    calls = tuple(
        (c["function"]["name"], json.dumps(c["function"]["arguments"], sort_keys=True))
        for c in message.get("tool_calls", ())
    )
    is_answer = message["role"] == "assistant"
    content = message["content"].strip() if is_answer else message["content"]
    return message["role"], content, message.get("name"), calls


def answer_of(
    call: Call,
    choices: Sequence[Choice],
    *,
    num_prompt: int,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """OpenAI's answer.

    Args:
      call: the request.
      choices: its n answers.
      num_prompt: tokens before them.
      decode: token ids → text.
    """
    found = [
        {
            "index": index,
            "message": dict(choice.message),
            "logprobs": _logprobs(choice, decode) if call.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(choices)
    ]
    num_sampled = sum(len(choice.tokens) for choice in choices)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": found,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }


def events_of(call: Call, answer: Mapping[str, Any]) -> bytes:
    """An answer as server-sent events: of each choice its message, then its finish_reason; "[DONE]" at the end."""
    events = [*_chunks(answer)]
    if call.include_usage:
        events.append({"choices": [], "usage": answer["usage"]})
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    lines = [json.dumps(head | event, ensure_ascii=False) for event in events]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


def models() -> dict[str, Any]:
    """The answer of /models."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "jaxrl_async"}
    return {"object": "list", "data": [model]}


def _chunks(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for choice in answer["choices"]:
        message = dict(choice["message"])
        calls = message.get("tool_calls", ())
        if calls:
            message["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        same = {"index": choice["index"]}
        yield {
            "choices": [
                same | {"delta": message, "logprobs": choice["logprobs"], "finish_reason": None}
            ]
        }
        end = {"delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield {"choices": [same | end]}


def _json_of(arguments: Any) -> str:
    """Half a pair of surrogates, which the model wrote as an escape, stays one: UTF-8 has none."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()


def _logprobs(choice: Choice, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    content = []
    for token, logprob in zip(choice.tokens.tolist(), choice.logprobs.tolist(), strict=True):
        text = decode([token])
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append(entry | {"top_logprobs": []})
    return {"content": content, "refusal": None}


def _messages(found: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_MESSAGES:
        size = len(found) if isinstance(found, list) else found
        _refuse("messages", f"must be a list of 1 to {MAX_MESSAGES} messages", size)
    messages = [read_message(one, number) for number, one in enumerate(found)]
    called: dict[str, str] = {}  # id of a call → its tool
    for message in messages:
        for one in message.get("tool_calls", ()):
            called[one["id"]] = one["function"]["name"]
        if message["role"] == "tool":  # OpenAI's results have no name; some templates write it.
            name = called.get(message.get("tool_call_id", ""))
            if name is not None:
                message.setdefault("name", name)
    return tuple(messages)


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            text = f"{where}.content must be a text or parts of type 'text'"
            _refuse("messages", text, part, where)
    return "".join(part["text"] for part in parts)


def _calls(found: Any, where: str) -> list[dict[str, Any]]:
    calls = []
    for one in found if isinstance(found, list) else [found]:
        function = one.get("function") if isinstance(one, dict) else None
        if not _is_named(function) or not isinstance(one.get("id", ""), str):
            text = f"{where}.tool_calls must be a list of {{id, type, function}}"
            _refuse("messages", text, one, where)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass  # Left as it is.
        function = {"name": function["name"], "arguments": arguments}
        calls.append({"id": one.get("id", ""), "type": "function", "function": function})
    return calls


def _tools(found: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, list) or len(found) > MAX_TOOLS:
        size = len(found) if isinstance(found, list) else found
        _refuse("tools", f"must be a list of {MAX_TOOLS} at most", size)
    for tool in found:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not _is_named(function):
            _refuse("tools", 'must be {"type": "function", "function": {"name", …}}', tool)
    return tuple(found)


def _is_named(function: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _stops(found: Any) -> tuple[str, ...]:
    stops = [found] if isinstance(found, str) else found
    sound = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not sound or not all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_CHARS for s in stops):
        bound = f"must be {MAX_STOPS} texts at most, of 1 to {MAX_STOP_CHARS} characters"
        _refuse("stop", bound, found)
    return tuple(stops)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    return min((_whole(name, given[name], None) for name in names), default=None)


def _whole(name: str, value: Any, bound: int | None) -> int:
    if type(value) is not int or value < 1 or (bound is not None and value > bound):
        upper = "" if bound is None else f" and ≤ {bound}"
        _refuse(name, f"must be an integer ≥ 1{upper}", value)
    return value


def _flag(name: str, given: Mapping[str, Any]) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool | None):
        _refuse(name, "must be true or false", value)
    return bool(value)


def _refuse(param: str, bound: str, value: Any, where: str = "") -> NoReturn:
    text = bound if where else f"{param} {bound}"
    raise RefusedError(f"{text}, got {value!r:.80}", param=param)
