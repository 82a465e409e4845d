"""Rewards of numbers and texts: what counts as the answer, and that no text is too strange."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.rewards import REWARDS, math, reward_function


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", 72),
        ("The answer is 72.", 72),
        ("first 3, then 72", 72),
        ("3,4", 4),
        ("1,080", 1080),
        ("1,234,567.50 dollars", "1234567.5"),
        ("$1,250.00.", 1250),
        ("-$5", -5),
        ("$-5", -5),
        ("50%", 50),
        ("x = -3", -3),
        ("x = \u22123", -3),
        ("10-3", 3),
        ("(10)-3", 3),
        ("10 - 3", 3),
        ("week-3", 3),
        ("0.5", "0.5"),
        ("about .5", "0.5"),
        ("72 km", 72),
        ("007", 7),
        ("#### 72", 72),
        ("####72", 72),
        ("#### 72 apples for 3 people", 72),
        ("12 + 60 = 72\n#### 72\nQuestion 5", 72),
        ("#### 1\n#### 2", 2),
        ("72 ####", 72),
        ("#### none", None),
        ("", None),
        ("no number", None),
        ("- . , $ %", None),
    ],
)
def test_a_text_ends_on_its_number(text, number):
    assert math.final_number(text) == (None if number is None else Decimal(number))


def test_the_last_number_is_compared_by_value():
    assert math.last_number("It costs $1,080.00.", "1080") == 1.0
    assert math.last_number("It costs 1081", "1,080") == 0.0
    assert math.last_number("I do not know", "1080") == 0.0
    # Exact where floats are not: these two are the same double.
    assert math.last_number("9007199254740993", "9007199254740992") == 0.0


def test_a_gold_answer_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="gold answer 'many' holds no number"):
        math.last_number("7", "many")


def test_exact_compares_but_for_surrounding_space():
    assert math.exact(" 85\n", "85") == 1.0
    assert math.exact("085", "85") == 0.0
    assert math.exact("8 5", "85") == 0.0


@given(st.text())
def test_any_text_has_a_reward(text):
    assert math.last_number(text, "7") in (0.0, 1.0)
    assert math.exact(text, text) == 1.0


@given(st.integers(), st.text(alphabet="abc \n.,!?", max_size=20))
def test_an_integer_is_read_back_however_it_is_written(number, words):
    for written in (f"{number}", f"{number:,}", f"{number}.00", f"#### {number} {words} 3"):
        assert math.last_number(f"{words} {written}", str(number)) == 1.0
    assert math.last_number(f"{words} {number + 1}", str(number)) == 0.0


def test_rewards_are_found_by_name_or_by_path():
    assert all(reward_function(name) is function for name, function in REWARDS.items())
    assert reward_function("jaxrl_async.rewards.math:exact") is math.exact


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", "unknown reward 'exat', did you mean 'exact'.*last_number"),
        ("jaxrl_async.rewards.math:exat", "cannot be imported.*no attribute 'exat'"),
        ("no_such_module:f", "cannot be imported: No module named 'no_such_module'"),
        (":f", "cannot be imported"),
        (".a:f", "cannot be imported"),
    ],
)
def test_an_unknown_reward_names_what_is_wrong(name, message):
    with pytest.raises(ValueError, match=message):
        reward_function(name)
