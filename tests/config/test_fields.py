"""The field of a setting: what it refuses, and what it says of every setting."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from jaxrl_async.config import settings as settings_lib
from jaxrl_async.config.fields import refusal, setting, unit
from jaxrl_async.rewards import pool


def even(value):
    if value % 2:
        raise ValueError(f"must be even, got {value}")


@dataclasses.dataclass(frozen=True)
class Block:
    rows: int = setting(8, "Rows.", at_least=1)
    share: float = setting(0.5, "Share.", above=0, at_most=1)
    decay: float = setting(0.5, "Decay.", at_least=0, below=1)
    wait_secs: float = setting(1.0, "Wait.", above=0, infinite=True)
    cap: float | None = setting(None, "Cap.", above=1)
    size_bytes: int = setting(0, "Size.", at_least=1024, or_zero=True)
    shift: float = setting(0.0, "Shift.", unit="nats")
    kind: str = setting("", "Kind.", choices=("", "first", "second"))
    names: tuple[str, ...] = setting((), "Names.", choices=("a", "b"), unique=True)
    weights: tuple[float, ...] = setting((), "Weights.", above=0)
    turns: int = setting(2, "Turns.", form=even)
    args: Mapping[str, Any] = setting({}, "Arguments.")


FIELDS = {field.name: field for field in dataclasses.fields(Block)}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("rows", 0, " must be ≥ 1, got 0"),
        ("share", 0.0, " must be in (0, 1], got 0.0"),
        ("share", 1.5, " must be in (0, 1], got 1.5"),
        ("decay", -0.5, " must be in [0, 1), got -0.5"),
        ("decay", 1.0, " must be in [0, 1), got 1.0"),
        ("decay", math.inf, " must be finite and in [0, 1), got inf"),
        ("wait_secs", 0.0, " must be > 0, got 0.0"),
        ("wait_secs", math.nan, " must be > 0, got nan"),
        ("wait_secs", -math.inf, " must be > 0, got -inf"),
        ("cap", 1.0, " must be > 1 or None, got 1.0"),
        ("size_bytes", 1, " must be 0 or ≥ 1024, got 1"),
        ("shift", math.nan, " must be finite, got nan"),
        ("kind", "frist", " must be one of first, second; got 'frist', did you mean 'first'?"),
        ("kind", None, " must be one of first, second; got None"),
        ("names", ("a", "c"), "' entries must be one of a, b; got 'c'"),
        ("names", ("a", "a"), " has an entry twice: ('a', 'a')"),
        ("weights", (1.0, 0.0), "' entries must be > 0, got 0.0"),
        ("turns", 3, " must be even, got 3"),
    ],
)
def test_a_value_that_its_field_does_not_take_is_refused(name, value, text):
    assert refusal(FIELDS[name], value) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", 1), ("share", 1.0), ("decay", 0.0), ("wait_secs", math.inf), ("cap", None), ("cap", 2.0),
        ("size_bytes", 0), ("size_bytes", 1024), ("shift", -3.0), ("kind", ""), ("names", ()), ("names", ("b", "a")),
        ("weights", (1.0, 1.0)), ("turns", 0), ("turns", 4),
    ],
)  # fmt: skip
def test_a_value_within_its_bounds_is_taken(name, value):
    assert refusal(FIELDS[name], value) == ""


def test_a_default_that_can_change_is_a_copy_for_each_block():
    first, second = Block(), Block()
    assert first.args is not second.args and first.args == {}


def test_the_unit_is_the_end_of_a_name_unless_it_is_given():
    units = {name: unit(field) for name, field in FIELDS.items()}
    assert units["wait_secs"] == "seconds" and units["size_bytes"] == "bytes"
    assert units["shift"] == "nats" and units["decay"] == units["kind"] == units["rows"] == ""


@pytest.mark.parametrize("key", settings_lib.FIELDS)
def test_what_a_field_says_of_its_setting_stands_alone(key):
    known = settings_lib.FIELDS[key].metadata
    about = known["about"]
    assert re.fullmatch(r"[A-Z].* .*\.", about), about
    assert about not in [f.metadata["about"] for k, f in settings_lib.FIELDS.items() if k != key]
    assert refusal(settings_lib.FIELDS[key], known["default"]) == "", "its own default"
    assert re.fullmatch(r"\d+\.\d+\.\d+", known.get("since", "0.1.0"))


def test_the_least_memory_is_that_of_the_pool_of_rewards():
    assert settings_lib.MIN_MEMORY_BYTES == pool.MIN_MEMORY_BYTES
