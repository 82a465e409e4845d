r"""The reward math_verify: what is the same mathematics. And every reward by any text, in the bounds of a pool."""

import asyncio
import math
import sys

import pytest
from fixtures.pools import ScoringPool
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.rewards import REWARDS, reward_function
from jaxrl_async.rewards.pool import RewardError

TOWER = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def math_verify():
    return reward_function("math_verify")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        # Numbers and fractions.
        ("It is 7.", "7", 1.0),
        ("It costs $1,080.00.", "1080", 1.0),
        ("12 x 90 = 1,080 people.\n#### 1,080", "1,080", 1.0),
        (r"The answer is $\boxed{\frac{1}{2}}$.", "1/2", 1.0),
        ("so x = 0.5", r"\frac{1}{2}", 1.0),
        ("0.333333", r"\frac13", 1.0),  # rounded to six places
        ("0.3333", r"\frac13", 0.0),
        (r"$1.5 \times 10^{3}$", "1500", 1.0),
        ("9007199254740993", "9007199254740992", 0.0),  # the same double
        # Percentages: of a hundred, or of one.
        (r"\boxed{50\%}", r"50\%", 1.0),
        ("0.5", r"50\%", 1.0),
        ("50", r"50\%", 1.0),
        (r"\boxed{5\%}", r"50\%", 0.0),
        # Formulas.
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1.0),
        ("$(x+1)^2$", "x^2 + 2x + 1", 1.0),
        ("$(x-1)^2$", "x^2 + 2x + 1", 0.0),
        (r"$\sin^2 x + \cos^2 x$", "1", 1.0),
        ("$x = 3$", "3", 1.0),
        ("$y = 3$", "x = 3", 0.0),
        # Sets, intervals, matrices.
        (r"$\boxed{\{3, 1, 2\}}$", r"\{1, 2, 3\}", 1.0),
        (r"$\{1, 2\}$", r"\{1, 2, 3\}", 0.0),
        ("$[0, 1)$", "$[0,1)$", 1.0),
        ("$(0, 1)$", "[0, 1)", 0.0),
        (r"$(-\infty, 2) \cup (3, \infty)$", r"\boxed{(-\infty,2)\cup(3,\infty)}", 1.0),
        (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"\begin{pmatrix}1\\2\end{pmatrix}", 1.0),
        # What is boxed is the answer, the last one; what is no mathematics is none.
        (r"$\boxed{4}$ since 5 is odd", "4", 1.0),
        (r"\boxed{4}, no, \boxed{5}", "4", 0.0),
        (r"\boxed{3} is a guess, \boxed{5}", "5", 1.0),
        (r"\boxed{3} is a guess, \boxed{5}", r"\{3,5\}", 0.0),
        (r"$\boxed{3}$, $\boxed{5}$", r"\{3,5\}", 0.0),
        (r"\boxed{\{3,5\}}", r"\{3,5\}", 1.0),
        (r"\boxed{x = \fbox{5}}", "5", 1.0),  # the outer one
        (r"\boxed{4}, no, \boxed{5", "4", 1.0),  # the last one that is closed
        (r"$\frac{1}{2", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_an_answer_is_right_when_it_is_the_same_mathematics(
    math_verify, completion, answer, reward
):
    assert math_verify(completion, answer) == reward


@pytest.mark.parametrize("answer", ["", "?", "x^2+", r"\frac{1}{"])
def test_a_gold_answer_that_is_no_mathematics_is_an_error(math_verify, answer):
    with pytest.raises(ValueError, match="gold answer '.*'"):
        math_verify("4", answer)


def test_without_math_verify_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "jaxrl_async.rewards.math_verifier", raising=False)
    message = r"'math_verify' cannot be imported: it needs .* pip install 'jaxrl_async\[math\]'"
    with pytest.raises(ValueError, match=message):
        reward_function("math_verify")


def make_pool(reward, timeout_secs, memory_bytes=1 << 30):
    return ScoringPool(
        reward,
        num_processes=1,
        timeout_secs=timeout_secs,
        memory_bytes=memory_bytes,
        calls_per_process=0,
    )


# Each would take hours, or all memory.
AT_ONCE = [
    TOWER,
    rf"\max({TOWER}, 1)",
    rf"\begin{{pmatrix}}1\\{TOWER}\end{{pmatrix}}",
    r"\sum_{k=1}^{1000000000} \sin(k)",
    r"\prod_{k=1}^{1000000000} k",
    "1000000000!",
    "10!!!!",
    "1E1000000000",
    r"\operatorname{eye}(100000)",
    "(" * 500 + "5" + ")" * 500,
    r"\frac{1}{1+" * 200 + "1" + "}" * 200,
    r"\boxed{" * 5000,
    r"\binom{1000000000}{500000000}",
    r"\binom{\frac{1}{2}}{100000}",
    r"\dbinom{10^9}{10^5}",
    r"{1000000000 \choose 500000}",
]
IN_TIME = [r"\sum_{k=1}^{1000} \sin(k)"]


# The end of the time may come in a callback of the collector, which cannot pass it on; it comes again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("answer", AT_ONCE + IN_TIME)
def test_an_answer_that_costs_too_much_is_wrong(math_verify, answer, monkeypatch):
    ended = []

    class TimeUpError(BaseException):
        def __init__(self):
            ended.append(answer)

    module = "jaxrl_async.rewards.math_verifier"
    monkeypatch.setattr(f"{module}._TimeUpError", TimeUpError)
    if answer in IN_TIME:
        monkeypatch.setattr(f"{module}.MAX_CPU_SECS", 0.3)
    assert math_verify(rf"\boxed{{{answer}}}", "5") == math_verify(f"${answer}$", "5") == 0.0
    assert bool(ended) == (answer in IN_TIME)


def test_large_numbers_within_the_bounds_are_compared(math_verify):
    assert math_verify(r"\boxed{2^{100000}}", "2^{100000}") == 1.0
    assert math_verify(r"\boxed{\frac{100!}{99!}}", "100") == 1.0
    assert math_verify(r"\boxed{\sum_{k=1}^{100} k}", "5050") == 1.0
    assert math_verify(r"\boxed{\binom{10000}{9998}}", r"\binom{10^{4}}{2}") == 1.0


async def test_many_towers_of_powers_cost_a_pool_nothing():
    async with make_pool("math_verify", timeout_secs=60.0) as pool:
        calls = [
            ("$1/2$", "0.5"),
            *[(rf"\boxed{{{TOWER}}}", "7")] * 65,
            ("$1/2$", "0.25"),
            ("7", TOWER),
        ]
        *outcomes, gold = await asyncio.gather(
            *(pool.judge(*call) for call in calls), return_exceptions=True
        )
    assert [outcome.reward for outcome in outcomes] == [1.0] + [0.0] * 66
    assert all(outcome.components == {"timed_out": 0.0} for outcome in outcomes)
    assert str(gold) == f"reward 'math_verify': ValueError: gold answer {TOWER!r} cannot be parsed"


PIECES = (
    r"\boxed{ { } $ \frac{1} {2} \sqrt 2 ^ _ ( ) [ ] \{ \} , x y = < \% % + - / 9 0 1,080 0.5 "
    r"\infty \cup \text{ \begin{pmatrix} \end{pmatrix} \\ & ! \sum \int #### is answer"
).split()
TEXTS = st.text(max_size=50) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize(
    "name", sorted(REWARDS.keys() - {"code"})
)  # It runs programs: test_code_reward.
def test_any_two_texts_have_a_finite_reward_or_a_named_error(name):
    with asyncio.Runner() as runner:
        pool = make_pool(name, timeout_secs=2.0)
        runner.run(pool.start())

        @settings(max_examples=100, deadline=None)
        @given(TEXTS, TEXTS)
        def check(completion, answer):
            try:
                assert math.isfinite(runner.run(pool.score(completion, answer)))
            except RewardError as error:
                assert str(error).startswith(f"reward {name!r}: ValueError: gold answer ")

        try:
            check()
        finally:
            runner.run(pool.close())
