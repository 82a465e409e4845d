"""Tools that a policy calls: functions with JSON schemas, the text of calls, and the environment that runs them.

A call is written as Hermes and Qwen models write it, one or more in a turn:

    <tool_call>
    {"name": "multiply", "arguments": {"a": 482, "b": 715}}
    </tool_call>

A result is a message of the role "tool"; the tokenizer's chat template writes it. A call that cannot be run has an
error as its result: the policy reads what was wrong and goes on.
"""

import dataclasses
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.environments.environment import Observation
from jaxrl_async.names import find, register
from jaxrl_async.rewards import reward_function
from jaxrl_async.rewards.process import judged
from jaxrl_async.types import Prompt

TOOLS: dict[str, Callable | str] = {}
MAX_RESULT_CHARS = 4000  # of one result; the rest is left out
OPENS, CLOSES = "<tool_call>", "</tool_call>"
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_CLASSES: dict[str, Any] = {name: cls for cls, name in _TYPES.items()}
_CLASSES |= {"number": (int, float), "array": list, "object": dict}


def register_tool(name: str) -> Callable[[Callable], Callable]:
    """Decorates a tool of a module of yours, a function with type hints, plain or async.

    Args:
      name: by which the policy calls it: new in TOOLS, or this very function's.

    Raises (when it decorates):
      ValueError: the name is taken, or other processes cannot import the function.
    """
    return functools.partial(register, "tool", name, TOOLS)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    function: Callable
    schema: Mapping[str, Any]  # {"type": "function", "function": {name, description, parameters}}

    def problem(self, arguments: Any) -> str:
        """What is wrong with the arguments of a call; "" for nothing."""
        if not isinstance(arguments, dict):
            return f"arguments must be an object, got {arguments!r:.80}"
        parameters = self.schema["function"]["parameters"]
        known = parameters["properties"]
        if unknown := sorted(arguments.keys() - known.keys()):
            return f"unknown argument {unknown[0]!r}; it takes {', '.join(known) or 'none'}"
        if missing := [name for name in parameters["required"] if name not in arguments]:
            return f"argument {missing[0]!r} is missing"
        for name, value in arguments.items():
            if not _fits(value, known[name]):
                return f"argument {name!r} must be {_words(known[name])}, got {value!r:.80}"
        return ""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as the policy wrote it."""

    name: str
    arguments: Any
    problem: str = ""  # why it is none; "" for a call


def tool_of(name: str) -> Tool:
    """A tool by its name in TOOLS, or by "module:function", whose name is the function's.

    Raises:
      ValueError: no such tool, or one whose parameters have no types that JSON has.
    """
    function = find("tool", name, TOOLS)
    called = name.rpartition(":")[2]
    return Tool(called, function, {"type": "function", "function": _described(called, function)})


def parse_calls(text: str) -> list[Call]:
    """The calls in a turn, in order; [] where it has none. What begins as a call and is none says why."""
    calls, rest = [], text
    while OPENS in rest:
        body, closed, rest = rest.partition(OPENS)[2].partition(CLOSES)
        if not closed:
            # Another call may begin before this one was closed.
            body, again, after = body.partition(OPENS)
            rest = again + after
            calls.append(Call("", None, f"no {CLOSES} after {body.strip()!r:.80}"))
        else:
            calls.append(_parsed(body))
    return calls


class ToolUse:
    """Answers every turn that calls tools with their results; the first that calls none is the answer.

    Components: `calls`, and `call_errors` among them.

    Raises:
      ValueError: a tool or the reward cannot be found, or two tools have one name.
    """

    own_process = True  # Tools run what a model wrote.

    def __init__(self, tools: Sequence[str], reward: str = ""):
        """Finds the tools.

        Args:
          tools: names in TOOLS, or "module:function".
          reward: of the last turn's text alone: a name in rewards.REWARDS, or "module:function", that takes text and
            gold answer. "": the task's reward, which reads the text of all turns in one piece.
        """
        found = [tool_of(name) for name in tools]
        self._tools = {tool.name: tool for tool in found}
        if len(self._tools) < len(found):
            raise ValueError(f"two tools have one name: {[tool.name for tool in found]}")
        self._reward = reward_function(reward) if reward else None
        self.judges = bool(reward)
        try:
            _ = self._reward and inspect.signature(self._reward).bind("", "")
        except TypeError as error:
            raise ValueError(
                f"reward {reward!r} is given the text and the gold answer alone ({error}): leave it out here, and make "
                "it the task's"
            ) from None

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The tools as chat templates show them, before the question."""
        return [tool.schema for tool in self._tools.values()]

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        """Remembers the gold answer."""
        self._answer = prompt.answer
        return Observation()

    async def step(self, action: str) -> Observation:
        """Runs the calls of a turn, or judges the answer."""
        calls = parse_calls(action)
        if not calls:
            if not self._reward:
                return Observation(done=True)
            said = judged(self._reward(action, self._answer))
            own = said if isinstance(said, dict) else {"reward": said, "components": {}}
            if "error" in own:
                raise ValueError(f"its reward {own['error']}")
            return Observation(reward=own["reward"], components=own["components"], done=True)
        messages, errors = [], 0
        for call in calls:
            result, failed = await self._run(call)
            errors += failed
            messages.append({"role": "tool", "name": call.name, "content": result})
        counts = {"calls": float(len(calls)), "call_errors": float(errors)}
        return Observation(messages=messages, components=counts)

    async def _run(self, call: Call) -> tuple[str, bool]:
        """(text of the result, whether it is an error)."""
        if call.problem:
            return _error(call.problem), True
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(f"no tool {call.name!r:.80}; there are {', '.join(self._tools)}"), True
        if problem := tool.problem(call.arguments):
            return _error(problem), True
        try:
            result = tool.function(**call.arguments)
            if inspect.isawaitable(result):
                result = await result
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except MemoryError:
            raise  # The bound of the process; it is not whole any more.
        except Exception as error:
            return _error(f"{type(error).__name__}: {error}"), True
        return text[:MAX_RESULT_CHARS], False


def _error(text: str) -> str:
    return json.dumps({"error": text[:MAX_RESULT_CHARS]}, ensure_ascii=False)


def _parsed(body: str) -> Call:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call("", None, f"not JSON: {error}"[:200])
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call("", None, 'a call must be {"name": …, "arguments": {…}}')
    return Call(found["name"], found.get("arguments", {}))


def _described(name: str, function: Callable) -> dict[str, Any]:
    """A function's schema, from its signature, type hints and docstring."""
    try:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except (TypeError, NameError, ValueError) as error:
        raise ValueError(f"tool {name!r}: {error}") from None
    summary, described = _documented(inspect.getdoc(function) or "")
    properties = {}
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name!r} must not take *{key}")
        if key not in hints:
            raise ValueError(f"tool {name!r}: parameter {key!r} has no type hint")
        try:
            properties[key] = _schema(hints[key])
        except TypeError as error:
            raise ValueError(f"tool {name!r}: parameter {key!r}: {error}") from None
        if key in described:
            properties[key]["description"] = described[key]
    required = [key for key, p in parameters.items() if p.default is p.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": summary, "parameters": schema}


def _documented(doc: str) -> tuple[str, dict[str, str]]:
    """(first paragraph, parameter → its line) of a docstring with a section Args."""
    summary = " ".join(doc.partition("\n\n")[0].split())
    _, _, rest = doc.partition("Args:\n")
    section = rest.partition("\n\n")[0]
    return summary, dict(re.findall(r"^\s+(\w+):[ \t]*(.+?)\s*$", section, re.MULTILINE))


def _schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint; raises TypeError where JSON has no such type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is typing.Literal and all(type(a) in _TYPES for a in args):
        return {"enum": list(args)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(arg) for arg in args]}
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _schema(args[0])} if args else {})
    if hint is dict or origin is dict:
        return {"type": "object"}
    raise TypeError(
        f"{hint!r} is none of str, int, float, bool, None, list, dict, Literal and their unions"
    )


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False
    if not isinstance(value, _CLASSES[schema["type"]]):
        return False
    items = value if isinstance(value, list) and "items" in schema else ()
    return all(_fits(item, schema["items"]) for item in items)


def _words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_words(one) for one in schema["anyOf"])
    return f"one of {schema['enum']}" if "enum" in schema else f"of type {schema['type']}"
