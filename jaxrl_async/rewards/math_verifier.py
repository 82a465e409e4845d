r"""A reward for answers that are mathematics, by math-verify: fractions, sets, intervals, matrices, LaTeX.

It needs the extra `math`. math-verify's own timeouts are alarm signals, and are off. What an answer may cost is bounded
here: in the depth of its brackets, in the size of its numbers, which C computes beyond the reach of any signal, and in
processor time.
"""

import logging
import math
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

try:
    import sympy
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError(f"it needs math-verify, pip install 'jaxrl_async[math]' ({error})") from error

MAX_DEPTH = 20  # brackets within brackets
MAX_DIGITS = 1e5  # of a number that is written out; terms of a sum or product
MAX_CPU_SECS = 2.0  # to parse an answer and compare it; and to parse a gold answer

_BRACE = re.compile(r"\\[fb](?:oxed|box)\s*\{|\\.|[{}]", re.DOTALL)
_BRACKET = re.compile(r"[({\[]|[)}\]]")
# These are written out while they are parsed: a float, and n over k, whose digits are at most k times those of n.
_HUGE = re.compile(r"[0-9]E[-+]?[0-9]{5}", re.IGNORECASE)
_BINOMIAL = re.compile(
    r"(?:binom\s*\{(?P<n>(?:[^{}]|\{[^{}]*\}){1,200})\}\s*\{|(?P<over>[0-9]+)\s*\\choose\s*\{?)\s*(?P<k>[0-9]+)"
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns that its timeouts are off.


def math_verify(completion: str, answer: str) -> float:
    r"""1.0 when the completion's final answer is mathematically the gold one, else 0.0.

    The final answer is the last \boxed{} alone; without one, the last LaTeX formula or plain number. A completion
    without one that math-verify can parse and compare within MAX_DEPTH, MAX_DIGITS and MAX_CPU_SECS scores 0.0, also
    where memory runs out.

    Args:
      answer: the gold answer alone, as in "\frac{1}{2}", "$[0, 1)$" or "\boxed{50\%}".

    Raises:
      ValueError: the answer cannot be parsed.
    """
    gold = _in_time(_parsed, answer if r"\boxed" in answer else rf"\boxed{{{answer}}}")
    if not gold:
        raise ValueError(f"gold answer {answer!r:.200} cannot be parsed")
    agrees = _in_time(lambda: verify(gold, _parsed(completion), timeout_seconds=None))
    return float(bool(agrees))


math_verify.times_out_as = 0.0  # pyright: ignore[reportFunctionMemberAccess]


def _parsed(text: str) -> list:
    """The candidates as SymPy expressions; none when nothing can be parsed within the bounds."""
    text = _last_box(text) or text
    depth = deepest = 0
    for bracket in _BRACKET.findall(text):
        depth = depth + 1 if bracket in "({[" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    binomials = (len(m["n"] or m["over"]) * float(m["k"]) for m in _BINOMIAL.finditer(text))
    if deepest > MAX_DEPTH or _HUGE.search(text) or max(binomials, default=0.0) > MAX_DIGITS:
        return []
    # None turns its timer off.
    found = parse(text, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return [] if any(_digits(candidate) > MAX_DIGITS for candidate in found) else found


def _last_box(text: str) -> str:
    r"""The last \boxed{…} or \fbox{…} that is closed, in whole; "" without one."""
    opened: list[tuple[int, bool]] = []  # where, and whether it is a box
    found = ""
    for brace in _BRACE.finditer(text):
        if brace[0][-1] == "{" and brace[0] != r"\{":
            opened.append((brace.start(), brace[0] != "{"))
        elif brace[0] == "}" and opened:
            start, is_box = opened.pop()
            found = text[start : brace.end()] if is_box else found
    return found


def _digits(value: Any) -> float:
    """A bound on the digits that the evaluation of an expression writes out; infinite beyond any."""
    if isinstance(value, sympy.Rational):
        return math.log10(max(abs(value.p), value.q))
    if isinstance(value, sympy.Float):
        return sum(map(abs, value._mpf_[2:])) / 3
    if isinstance(value, sympy.MatrixBase):
        return sum(map(_digits, value.flat())) if len(value) < MAX_DIGITS else math.inf
    sizes = [_digits(arg) for arg in getattr(value, "args", ())]
    if isinstance(value, sympy.Pow):
        return max(sizes[0], 1.0) * _power_of_ten(sizes[1])
    if isinstance(value, sympy.binomial):
        return max(sizes[0], 1.0) * _power_of_ten(sizes[1])
    if isinstance(value, sympy.factorial):
        return _power_of_ten(sizes[0]) * sizes[0]
    if isinstance(value, sympy.Sum | sympy.Product):
        return max(sizes[0], _power_of_ten(max(sizes[1:])))
    return sum(sizes)


def _power_of_ten(digits: float) -> float:
    return 10.0 ** min(digits, 300.0)


class _TimeUpError(BaseException):
    """The processor time is up; no `except Exception` of a library is to catch it."""


def _in_time(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function; None after MAX_CPU_SECS, in the main thread, and where memory or the stack runs out."""
    if threading.current_thread() is not threading.main_thread():
        return function(*args)

    def stop(*_: object) -> None:
        raise _TimeUpError

    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECS, MAX_CPU_SECS)
    try:
        return function(*args)
    except (_TimeUpError, MemoryError, RecursionError):
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


_parsed(r"\boxed{1}")  # Compiles the expressions and loads the grammar before the first call.
