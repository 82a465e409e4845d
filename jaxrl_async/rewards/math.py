"""Rewards for answers that are numbers or short texts: pure functions of two strings."""

import decimal
import re

# Thousands groups or plain digits, or a bare fraction; a sign only where it cannot be an operator.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-\u2212])?\$?(?P<inner_sign>(?<=\$)[-\u2212])?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)
_MARKER = "####"  # stands before the final answer in GSM8K


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
        raise ValueError(f"gold answer {answer!r} holds no number")
    return float(final_number(completion) == gold)


def final_number(text: str) -> decimal.Decimal | None:
    """The final number of a text: the first one after the last "####", or else the last one.

    Thousands commas, a dollar sign, a percent sign, units and a trailing period are ignored: "$1,250.00." is 1250.
    The final number of "5-3" is 3, and of "x = -3" it is -3.

    Returns:
      The number, exactly; None when there is none.
    """
    before, marker, after = text.rpartition(_MARKER)
    if marker and (match := _NUMBER.search(after)):
        return _value(match)
    matches = list(_NUMBER.finditer(before or after))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> decimal.Decimal:
    number = decimal.Decimal(match["digits"].replace(",", ""))
    negative = match["sign"] or match["inner_sign"]
    return number.copy_negate() if negative else number
