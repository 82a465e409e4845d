"""A reward for programs of Python, judged by tests that they cannot see.

A program runs in a sandbox with the inputs of a test. What it returns or prints comes out, and is compared here with
the expected answer, which never was in the sandbox: a program that fakes its results has to know them.
"""

import ast
import atexit
import builtins
import dataclasses
import functools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxrl_async.extras.programs import sandbox
from jaxrl_async.extras.programs.inside import canonical

_FENCE = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")  # what stands behind a fence
_LIMITS = ("wall_secs", "memory_bytes", "processes", "disk_bytes", "output_bytes")


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of one example: what goes into the sandbox, and what is compared outside."""

    expressions: tuple[str, ...]  # evaluated in what the program defines
    values: tuple[str, ...]  # inside.canonical of what each must give
    streams: tuple[tuple[str, str], ...]  # (stdin, stdout): a run of the program for each


def code(completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1.0 when the completion's program passes every test within its bounds, else 0.0.

    The program is the last fenced block of Python, or of no language, in the completion, or all of it. Where the
    example's metadata has a "prefix", the beginning of the program that the prompt showed, it is the prefix and the
    completion's first lines up to one that is not indented.

    Args:
      answer: a list of tests in JSON, each `"assert f(2) == 4"`, `"assert f(2)"`, `"assert not f(2)"` or
        `{"stdin": "2\\n", "stdout": "4\\n"}`. The right side of == is a literal. White space at the ends of lines of
        stdout, and empty lines at its end, are of no account.
      metadata: "prefix", and "limits" with fields of sandbox.Limits; all tests together have wall_secs.

    Raises:
      ValueError: a test or a limit is not of this form.
      SandboxError: there is no sandbox.
    """
    tests, limits = parse_tests(answer), _limits(metadata)
    program = program_of(completion, metadata.get("prefix", ""))
    own = _own()
    try:
        return float(all(_passes(own, program, tests, limits)))
    except sandbox.SandboxError:
        own.close()
        _own.cache_clear()
        raise


def program_of(completion: str, prefix: str = "") -> str:
    """The program in a completion, as `code` reads it."""
    # Blocks of other languages are read, too: the end of one begins no block.
    blocks = [text for name, text in _FENCE.findall(completion) if name.lower() in _PYTHON]
    if blocks:
        return blocks[-1]
    if not prefix:
        return completion
    first, *rest = completion.split("\n")
    kept = [first]
    for line in rest:
        if line.strip() and not line[0].isspace():
            break
        kept.append(line)
    return prefix + "\n".join(kept)


def parse_tests(answer: str) -> Tests:
    """The tests of an answer. Raises ValueError: it holds none, or one that is not of a form that `code` names."""
    try:
        entries = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"tests must be a list in JSON, got {answer!r:.80}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"tests must be a list in JSON with at least one test, got {answer!r:.80}")
    calls, streams = [], []
    for entry in entries:
        match entry:
            case str():
                calls.append(_parse_assert(entry))
            case {"stdin": str(stdin), "stdout": str(stdout)} if len(entry) == 2:
                streams.append((stdin, stdout))
            case _:
                raise ValueError(
                    f'a test must be "assert f(…) == …" or {{"stdin": …, "stdout": …}}, got {entry!r:.200}'
                )
    expressions, values = zip(*calls, strict=True) if calls else ((), ())
    return Tests(expressions, values, tuple(streams))


def check(examples: Iterable) -> None:
    """Called before a run starts: makes a sandbox, and reads the tests of the examples.

    Raises:
      SandboxError: there is no sandbox; names what is missing.
      ValueError: names the example whose tests cannot be read.
    """
    sandbox.check()
    for i, example in enumerate(examples):
        try:
            parse_tests(example.answer)
            _limits(example.metadata)
        except ValueError as error:
            raise ValueError(f"example {i}: {error}") from None


code.check = check


@functools.cache
def _own() -> sandbox.Sandbox:
    """The sandbox of this process, made when it is needed."""
    own = sandbox.Sandbox().__enter__()
    atexit.register(own.close)
    return own


def _parse_assert(text: str) -> tuple[str, str]:
    """(expression, canonical text of its value) of an assert."""
    problem = ValueError(
        'a test must be "assert f(…) == LITERAL", "assert f(…)" or "assert not f(…)", where f is of the program; got '
        f"{text!r:.200}"
    )
    try:
        (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise problem from None
    if not isinstance(statement, ast.Assert):
        raise problem
    match statement.test:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            try:
                return ast.unparse(left), canonical(ast.literal_eval(right))
            except (ValueError, TypeError):
                raise problem from None
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call(func=ast.Name(name)) as call):
            value = False
        case ast.Call(func=ast.Name(name)) as call:
            value = True
        case _:
            raise problem
    if hasattr(builtins, name):  # Its value says nothing that the program could not have made up.
        raise problem
    return f"bool({ast.unparse(call)})", canonical(value)


def _limits(metadata: Mapping[str, Any]) -> sandbox.Limits:
    given = metadata.get("limits", {})
    if not isinstance(given, Mapping) or not set(given) <= set(_LIMITS):
        raise ValueError(
            f"limits must be an object with some of {', '.join(_LIMITS)}, got {given!r:.200}"
        )
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"limits.{name} must be a number, got {value!r:.80}")
    limits = sandbox.Limits(**given)
    whole = {name: int(value) for name, value in given.items() if name != "wall_secs"}
    return dataclasses.replace(limits, **whole)


def _passes(
    own: sandbox.Sandbox, program: str, tests: Tests, limits: sandbox.Limits
) -> Iterator[bool]:
    """Whether each run of a program passes, as long as the one before did."""
    deadline = time.monotonic() + limits.wall_secs

    def run(**inputs) -> sandbox.Outcome:
        left = max(deadline - time.monotonic(), 1e-3)
        return own.run(program, limits=dataclasses.replace(limits, wall_secs=left), **inputs)

    if tests.expressions:
        outcome = run(expressions=tests.expressions)
        yield outcome.reason == "" and outcome.results == tests.values
    for stdin, stdout in tests.streams:
        outcome = run(stdin=stdin)
        is_whole = (outcome.reason, outcome.exit_code) == ("", 0)
        yield is_whole and _lines(outcome.stdout) == _lines(stdout)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
