"""Rewards for answers that are numbers or short texts: pure functions of two strings."""

import decimal
import re
import unicodedata
from collections.abc import Iterable
from fractions import Fraction

# Thousands groups or plain digits, and a power of ten.
_DIGITS = (
    r"(?:[0-9]{1,3}(?:[,\u00a0\u2009\u202f][0-9]{3}){1,30}(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
# A number, a fraction, or a mixed number; a sign only where it cannot be an operator.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-\u2212]|(?<==)\s{0,9}[-\u2212]\s?)?[$£€¥₹]?(?P<inner_sign>(?<=[$£€¥₹])[-\u2212])?"
    rf"(?:(?P<whole>[0-9]{{1,9}})[^\S\n](?=[0-9]+\s?/))?(?P<digits>{_DIGITS})(?:\s?/\s?(?P<under>[-\u2212])?(?P<divisor>{_DIGITS})|(?P<ratio>(?::[0-9]+)+))?"
)
_PART = r"\{\s?([-\u2212]?[0-9][0-9.,]*)\s?\}"  # of a fraction of LaTeX
_FRACTION = re.compile(r"([0-9]?)([¼-¾⅐-⅞])")  # one character, behind a number or not
_SLASHES = str.maketrans("\u2044\u2215", "//")
# How LaTeX and units write numbers → how _NUMBER reads them.
_SPELLINGS = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\{,\}|\\,", ","),
        (r"\\([$%])", r"\1"),
        (r"\\(?=[dtc]?frac)(?<=[0-9]\\)", r" \\"),
        (rf"\\[dtc]?frac\s?(?:{_PART}|([0-9]))\s?(?:{_PART}|([0-9]))", r"\1\2/\3\4"),
        (r"(?<=[0-9])\s?(?:×|\\times|\\cdot|\*)\s?10\^\{?(-?[0-9]{1,3})\}?(?![0-9])", r"e\1"),
        (r"(?<![0-9.,])10\^\{?(-?[0-9]{1,3})\}?(?![0-9])", r"1e\1"),
        # Powers and indexes: m^2, m2, x_1.
        (r"[\^_](?:\{[^{}]*\}|-?[0-9]+)|(?<=[A-Za-z])(?<![0-9][eE])[23](?![0-9]|\.[0-9])", " "),
    )
)
_MARKER = "####"  # stands before the final answer in GSM8K
_TAIL_CHARS = 400  # up to the last digit, in which the last number is looked for


def exact(completion: str, answer: str) -> float:
    """1.0 when completion and answer are equal up to surrounding white space, else 0.0."""
    return float(completion.strip() == answer.strip())


def last_number(completion: str, answer: str) -> float:
    """1.0 when the completion's final number equals the answer's, else 0.0.

    Raises:
      ValueError: the answer holds no number.
    """
    gold = final_number(answer)
    if gold is None:
        raise ValueError(f"gold answer {answer!r:.200} holds no number")
    return float(final_number(completion) == gold)


def _check(examples: Iterable) -> None:
    """Raises ValueError for an answer without a number, before a run."""
    for example in examples:
        last_number("", example.answer)


last_number.check = _check  # pyright: ignore[reportFunctionMemberAccess]


def final_number(text: str) -> Fraction | None:
    """The final number of a text: the first one after the last "####", or else the last one.

    Thousands separators, currencies, a percent sign, units with their powers and a trailing period are ignored:
    "$1,250.00." is 1250, and so is "1{,}250 m^2". A fraction is one number: "3/4", "1 1/2", "\\frac{3}{4}". The final
    number of "5-3" is 3, and of "x = -3" it is -3. Fractions of one character are read, too.

    Returns:
      The number, exactly; None when there is none, or when it is divided by 0.
    """
    if not text.isascii():
        text = _FRACTION.sub(_spelled, text).translate(_SLASHES)
    before, marker, after = text.rpartition(_MARKER)
    if marker and (match := _NUMBER.search(_plain(after))):
        return _value(match)
    text = before or after
    end = max(map(text.rfind, "0123456789")) + 1
    tail = text[max(end - _TAIL_CHARS, 0) : end + 1]  # m^{2} is closed in it.
    matches = list(_NUMBER.finditer(_plain(tail)))
    return _value(matches[-1]) if matches else None


def _spelled(match: re.Match[str]) -> str:
    number, fraction = match.groups()
    return f"{number}{' ' * len(number)}{unicodedata.normalize('NFKC', fraction)}"


def _plain(text: str) -> str:
    for spelling, plain in _SPELLINGS:
        text = spelling.sub(plain, text)
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    divisor = _exact(match["divisor"] or "1")
    if not divisor or match["ratio"]:
        return None
    number = int(match["whole"] or 0) + _exact(match["digits"]) / divisor
    return -number if bool(match["sign"] or match["inner_sign"]) != bool(match["under"]) else number


def _exact(digits: str) -> Fraction:
    # Not Fraction(digits): Python bounds the digits of int(text).
    return Fraction(decimal.Decimal(re.sub(r"[^0-9.eE+-]", "", digits)))
