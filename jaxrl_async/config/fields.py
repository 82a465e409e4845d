"""The field of a setting: its default and, beside it, a sentence, its bounds, its choices, its unit and its age.

    row_tokens: int = setting(4096, "Tokens of one packed row.", at_least=1, since="0.2.0")

One pass over the fields refuses values (`refusal`), reads older workdirs (`since`, `was`) and writes docs/settings.md.
Imports the standard library alone.
"""

import copy
import dataclasses
import math
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypedDict, TypeVar, Unpack

from jaxrl_async.names import nearest

T = TypeVar("T")
_BOUNDS = {"at_least": ("≥", operator.ge), "above": (">", operator.gt)}
_BOUNDS |= {"at_most": ("≤", operator.le), "below": ("<", operator.lt)}


class SettingsError(ValueError):
    """A config that cannot be run; the message names the key, the value and the bound."""


class StartError(ValueError):
    """A run that cannot start: a taken workdir, a change that a resumed run refuses, or an unreadable task."""


class Known(TypedDict, total=False):
    """The keywords of `setting`. Bounds, choices and form are of each entry of a tuple."""

    at_least: float
    above: float
    at_most: float
    below: float
    or_zero: bool  # 0 is taken beside its bounds
    infinite: bool  # infinity is within its bounds
    choices: tuple[str, ...]
    unique: bool  # no entry of the tuple stands twice
    # raises ValueError, "must …", for a value that cannot be read; "" is not given to it
    form: Callable[[Any], Any]
    unit: str  # where the name does not end with it
    since: str  # the version that introduced it; without it, every workdir has it
    before: Any  # of workdirs that lack it, the value that the code had before `since`; by default its default
    was: str  # its old key, which configs, config.json and the command line may still have


def setting(default: T, about: str, **known: Unpack[Known]) -> T:
    """A field of a block of settings.

    Args:
      default: its value where a config has none.
      about: a sentence that stands alone, in Markdown.
    """
    metadata = {"about": about, "default": default, "before": default, **known}
    if isinstance(metadata["default"], Mapping):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def walk(cls: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(key, field) of every setting of a block, in order; those of its own blocks as "block.name"."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            yield from walk(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field


def refusal(field: dataclasses.Field[Any], value: Any) -> str:
    """The message that refuses a value, without its key, " must …"; "" for a value that is taken."""
    if not isinstance(value, tuple):
        return f" {text}" if (text := _refusal(field, value)) else ""
    if field.metadata.get("unique") and len(set(value)) < len(value):
        return f" has an entry twice: {value}"
    return next((f"' entries {text}" for item in value if (text := _refusal(field, item))), "")


def bound(field: dataclasses.Field[Any]) -> str:
    """The bounds of a setting, "≥ 1", "in [0, 1)" or "> 1 or None"; "" without any."""
    known = field.metadata
    names = [name for name in _BOUNDS if name in known]
    if len(names) == 2:
        low, high = names
        brackets = "[" if low == "at_least" else "(", "]" if high == "at_most" else ")"
        text = f"in {brackets[0]}{known[low]}, {known[high]}{brackets[1]}"
    else:
        text = "".join(f"{_BOUNDS[name][0]} {known[name]}" for name in names)
    text = f"0 or {text}" if known.get("or_zero") else text
    return f"{text} or None" if text and type(None) in typing.get_args(field.type) else text


def unit(field: dataclasses.Field[Any]) -> str:
    """The unit of a setting, which its name ends with where its field does not give one; "" without."""
    last = field.name.rpartition("_")[2]
    counted = last if field.type is int and last.endswith("s") and last != field.name else ""
    return field.metadata.get("unit", "seconds" if last == "secs" else counted)


def one_of(value: Any, choices: Iterable[str]) -> str:
    """ "must be one of …" where a value is none of the choices, else ""."""
    choices = tuple(choices)
    if value in choices:
        return ""
    near = nearest(value, choices) if isinstance(value, str) else ""
    return f"must be one of {', '.join(filter(None, choices))}; got {value!r}{near}"


def _refusal(field: dataclasses.Field[Any], value: Any) -> str:
    known = field.metadata
    if "choices" in known and (text := one_of(value, known["choices"])):
        return text
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) and not known.get("infinite"):
            return f"must be {' and '.join(filter(None, ('finite', bound(field))))}, got {value}"
        is_within = all(
            op(value, known[name]) for name, (_, op) in _BOUNDS.items() if name in known
        )
        if not is_within and not (value == 0 and known.get("or_zero")):
            return f"must be {bound(field)}, got {value}"
    if value and "form" in known:
        try:
            known["form"](value)
        except ValueError as error:
            return str(error)
    return ""
