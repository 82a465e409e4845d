"""Rewards of numbers, texts and lengths: what counts as the answer, and that no text is too strange."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.rewards import REWARDS, check_reward, math, reward_function, times_out_as
from jaxrl_async.rewards.overlong import overlong_penalty
from jaxrl_async.rewards.positions import positions
from jaxrl_async.tasks import Example


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
        # Thousands.
        ("1{,}000", 1000),
        (r"1\,000", 1000),
        ("1\u202f000 \u2009", 1000),
        (r"\$1{,}234{,}567", 1234567),
        ("1,2345", 2345),  # no group of thousands
        # Signs, and currencies.
        (r"-\$5", -5),
        ("-£5", -5),
        ("Rs.72", 72),
        ("x = - 3", -3),
        ("-1 1/2", "-3/2"),
        (r"-\frac{1}{2}", "-1/2"),
        # Fractions are one number, and so are mixed numbers; a ratio is none.
        ("3/4", "3/4"),
        ("a total of 3/4", "3/4"),
        ("a total of 3 / 4.", "3/4"),
        ("#### 3/4", "3/4"),
        ("12/4 = 3", 3),
        ("1 1/2 cups", "3/2"),
        ("#### 5\n10/2 apples", 5),  # Of one line alone.
        (r"2\dfrac{1}{2}", "5/2"),
        (r"\tfrac34", "3/4"),
        (r"\frac{-3}{4}", "-3/4"),
        (r"x = -\dfrac{ 1,000 }{0.5}", -2000),
        ("a total of ¾", "3/4"),
        ("-1½ cups", "-3/2"),
        ("a total of 3⁄4", "3/4"),
        ("3/0", None),
        ("3:4", None),
        ("at 10:45", None),
        # Percent signs and units, with their powers; indexes; powers of ten.
        (r"50\%", 50),
        ("25 m^2", 25),
        ("25 m2.", 25),
        (r"25 \text{km}^{3}", 25),
        ("72_{10}", 72),
        ("72 of CO2", 72),
        ("1.5e3", 1500),
        (r"1.5 \times 10^{3} km", 1500),
        ("10^3", 1000),
        ("x = -10^{-2}", "-1/100"),
        ("110^3", 110),
        ("1/-2", "-1/2"),
        (r"-\frac{1}{-2}", "1/2"),
        ("6e-2", "3/50"),
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
    assert math.final_number(text) == (None if number is None else Fraction(number))


def test_the_last_number_is_compared_by_value():
    assert math.last_number("It costs $1,080.00.", "1080") == 1.0
    assert math.last_number("It costs 1081", "1,080") == 0.0
    assert math.last_number("I do not know", "1080") == 0.0
    # Exact where floats are not: these two are the same double.
    assert math.last_number("9007199254740993", "9007199254740992") == 0.0


def test_a_fraction_is_compared_as_one_number():
    assert math.last_number("#### 3/4", "3/4") == math.last_number("so 0.75", "3/4") == 1.0
    assert math.last_number("a total of 3/4", "4") == 0.0
    assert math.last_number(r"it is \frac{3}{4}", "4") == 0.0


@pytest.mark.parametrize("answer", ["many", "3/0", "3:4"])
def test_a_gold_answer_without_a_number_is_an_error_before_the_run(answer):
    with pytest.raises(ValueError, match=f"gold answer '{answer}'"):
        math.last_number("7", answer)
    with pytest.raises(ValueError, match=f"gold answer '{answer}'"):
        check_reward(math.last_number, [Example("?", "7"), Example("?", answer)])


@pytest.mark.parametrize(
    "text", ["1" + ",111" * 50_000, "9" * 200_000, "1 " * 100_000, "1/" * 100_000, "^{" * 100_000]
)
def test_no_text_takes_long(text):
    start = time.process_time()
    math.last_number(text, "7")
    assert time.process_time() - start < 0.5


def test_an_answer_ends_where_a_stop_token_ended_it():
    assert REWARDS["ends"]("any", "", finish_reason="stop") == 1.0
    assert REWARDS["ends"]("any", "", finish_reason="length") == 0.0
    assert times_out_as(REWARDS["ends"]) == 0.0


def test_a_reward_says_what_an_answer_is_worth_that_is_not_judged_in_time():
    def reward(completion, answer):
        return 0.0

    assert times_out_as(reward) is None
    reward.times_out_as = -1
    assert times_out_as(reward) == -1
    for value in (float("nan"), "0"):
        reward.times_out_as = value
        with pytest.raises(
            ValueError, match=f"times_out_as must be a finite number, got {value!r}"
        ):
            times_out_as(reward)


def test_exact_compares_but_for_surrounding_space():
    assert math.exact(" 85\n", "85") == 1.0
    assert math.exact("085", "85") == 0.0
    assert math.exact("8 5", "85") == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("1110", "1110", 1.0),
        (" 1110\n", "1110", 1.0),
        ("1111", "1110", 0.75),
        ("0001", "1110", 0.0),
        ("11", "1110", 0.5),  # what is missing is wrong
        ("", "1110", 0.0),
        ("11101", "1110", 0.8),  # 4 right of 5 written
        ("11101110", "1110", 0.5),
        ("0111", "1110", 0.5),  # by position, not by kind: the two in the middle
    ],
)
def test_positions_counts_the_places_that_are_right(completion, answer, reward):
    assert positions(completion, answer) == reward


def test_an_empty_gold_answer_is_an_error():
    with pytest.raises(ValueError, match="gold answer .*empty"):
        positions("1", " ")


@given(st.text("01", max_size=6), st.text("01", min_size=1, max_size=6))
def test_only_the_whole_answer_has_all_positions_right(completion, answer):
    assert 0 <= positions(completion, answer) <= 1
    assert (positions(completion, answer) == 1) == (completion == answer)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    # At most 10 tokens, of which the last 4 cost: (6 − n)/4 between 6 and 10.
    [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (11, -1.0), (99, -1.0)],
)
def test_the_last_tokens_before_the_bound_cost_more_and_more(num_tokens, penalty):
    found = overlong_penalty(num_tokens, max_tokens=10, buffer_tokens=4)
    assert repr(found) == repr(penalty)  # not −0.0


def test_without_a_buffer_no_length_costs():
    lengths = (0, 9, 10, 11, 99)
    assert [overlong_penalty(n, max_tokens=10, buffer_tokens=0) for n in lengths] == [0.0] * 5


def test_a_buffer_of_all_tokens_costs_from_the_first():
    assert overlong_penalty(1, max_tokens=4, buffer_tokens=4) == -0.25


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
    for name, function in REWARDS.items():
        path = f"{function.__module__}:{name}" if callable(function) else function
        assert reward_function(name) is reward_function(path)
        assert reward_function(name).__name__ == name
    assert reward_function("jaxrl_async.rewards.math:exact") is math.exact


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", "reward 'exat'.*'exact'.*last_number"),
        ("jaxrl_async.rewards.math:exat", "no attribute 'exat'"),
        ("no_such_module:f", "'no_such_module'; .*PYTHONPATH"),
        (":f", "reward ':f' .*import"),
        (".a:f", r"reward '\.a:f' .*import"),
    ],
)
def test_an_unknown_reward_names_what_is_wrong(name, message):
    with pytest.raises(ValueError, match=message):
        reward_function(name)


def test_a_module_that_is_there_is_not_looked_for(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="'no_such_module'$"):
        reward_function("needs_more:f")
