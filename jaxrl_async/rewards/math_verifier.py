r"""A reward for answers that are mathematics, by math-verify: fractions, sets, intervals, matrices, LaTeX.

It needs the extra `math`. math-verify's own timeouts are alarm signals, and are off: a call that hangs, such as one
with 9^{9^{9^{9}}}, is ended by the caller.
"""

import logging

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError(f"it needs math-verify, pip install 'jaxrl_async[math]' ({error})") from error

logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns that its timeouts are off.


def math_verify(completion: str, answer: str) -> float:
    r"""1.0 when the completion's final answer is mathematically the gold one, else 0.0.

    The final answer is the last one in \boxed{}, or else the last LaTeX formula or plain number; math-verify decides.
    A completion without one that it can parse and compare scores 0.0, also where memory runs out.

    Args:
      completion: a text.
      answer: the gold answer alone, as in "\frac{1}{2}", "$[0, 1)$" or "\boxed{50\%}".

    Raises:
      ValueError: the answer cannot be parsed.
    """
    gold = _parsed(answer if r"\boxed" in answer else rf"\boxed{{{answer}}}")
    if not gold:
        raise ValueError(f"gold answer {answer!r} cannot be parsed")
    return float(verify(gold, _parsed(completion), timeout_seconds=None))


def _parsed(text: str) -> list:
    """The candidates as SymPy expressions; none when nothing can be parsed."""
    # None turns its timer off.
    return parse(text, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


_parsed(r"\boxed{1}")  # Compiles the expressions and loads the grammar before the first call.
