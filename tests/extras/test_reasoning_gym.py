"""Data sets of the real library reasoning_gym: their questions, splits and scores."""

import sys

import pytest

from jaxrl_async.extras import reasoning_gym
from jaxrl_async.rewards import names_seen, reward_function
from jaxrl_async.tasks import make_task


@pytest.fixture
def chain_sum():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning_gym")
    return lambda **changes: make_task(
        "reasoning_gym:chain_sum", **{"size": 40, "num_test": 10, **changes}
    )


def test_a_data_set_gives_questions_and_judges_their_answers(chain_sum):
    task = chain_sum()
    reward = reward_function(task.reward)
    assert names_seen(reward) == ["metadata"]
    for example in (*task.examples("train"), *task.examples("test")):
        answer = f"so <answer>{example.answer}</answer>"
        assert reward(answer, example.answer, metadata=example.metadata) == 1.0
        for wrong in (example.answer, "<answer>nothing</answer>", "<answer></answer>"):
            assert reward(wrong, example.answer, metadata=example.metadata) < 1.0
    with pytest.raises(ValueError, match="needs task.name = 'reasoning_gym:DATASET'"):
        reward("1", "1", metadata={})


def test_equal_arguments_give_equal_splits_that_share_no_question(chain_sum):
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task, again = (chain_sum(config=few, size=210) for _ in range(2))
    train, test = ({e.text for e in task.examples(split)} for split in ("train", "test"))
    assert not train & test and len(test) == 10
    assert task.examples("train") == again.examples("train")
    one, other = (
        {e.text for split in ("train", "test") for e in chain_sum(seed=seed).examples(split)}
        for seed in (0, 1)
    )
    assert one != other  # The seed is the data set's too.


def test_a_warm_start_imitates_answers_that_score(monkeypatch):
    entries = [{"question": f"{i} + 1", "answer": i + 1} for i in range(4)]
    monkeypatch.setattr(reasoning_gym, "_load", lambda arguments: entries)
    task = make_task("reasoning_gym:sums", size=4, num_test=1)
    shown = dict(task.demonstrations())
    assert shown == {e.text: f"<answer>{e.answer}</answer>" for e in task.examples("train")}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_test": 0}, "give test files, or num_test questions"),
        ({"template": "x"}, "template must contain '{question}', the prompt's column, got 'x'"),
        ({"config": {"min_terms": 9, "max_terms": 3}}, "reasoning_gym:chain_sum': "),
        ({"config": {"terms": 9}}, "reasoning_gym:chain_sum': .*terms"),
    ],
)
def test_arguments_outside_their_bounds_are_refused(chain_sum, changes, message):
    with pytest.raises(ValueError, match=message):
        chain_sum(**changes).examples("train")


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl_async\[reasoning_gym\]'"):
        make_task("reasoning_gym:leg_counting", size=4, num_test=1).examples("train")
