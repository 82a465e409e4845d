"""What a task may give, and what it may not: any iterable of Examples, with or without demonstrations."""

import types

import pytest
from fixtures.lines_task import settings_of

from jaxrl_async import parts, tasks
from jaxrl_async.config.build import base_config, make_settings
from jaxrl_async.config.fields import StartError
from jaxrl_async.preflight import machine
from jaxrl_async.tasks import Example
from jaxrl_async.tasks.checked import CheckedTask
from jaxrl_async.tasks.validation import WithValidation

PAIRS = [(f"{i}+1=", str(i + 1)) for i in range(10)]


class Given:
    """A task of whatever a function of the split gives, without demonstrations."""

    reward = "exact"
    right = 0.5

    def __init__(self, give):
        self.examples = give


def test_a_generator_is_read_once_and_its_questions_stay():
    task = CheckedTask(Given(lambda split: (Example(*pair) for pair in PAIRS)))
    assert task.examples("train") == [Example(*pair) for pair in PAIRS]
    assert task.examples("train") is task.examples("train")
    assert task.reward == "exact" and task.right == 0.5 and not hasattr(task, "key")


def test_questions_in_another_order_at_every_call_are_read_once():
    calls = []

    def give(split):
        calls.append(split)
        return [Example(f"{len(calls)}", "")]

    task = CheckedTask(Given(give))
    assert task.examples("test") == task.examples("test") and calls == ["test"]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], ValueError, "split 'train' is empty"),
        (PAIRS, TypeError, r"example 0 of split 'train' must be an Example .*got \('0\+1='"),
        ([Example("a", "b"), "c"], TypeError, "example 1 of split 'train'"),
        ([Example("a", 3)], TypeError, "answer of type str"),  # type: ignore[arg-type]
        ([Example("a", "b", [1])], TypeError, "metadata that is a mapping"),  # type: ignore[arg-type]
        ([Example("a", "b"), Example("a", "\ud83d")], ValueError, "the answer of example 1 of split 'train' holds"),
        ([Example("\ud83d", "b")], ValueError, "the text of example 0 of split 'train' holds half"),
        (None, TypeError, r"examples\('train'\) must give Examples, got None"),
    ],
)  # fmt: skip
def test_what_is_no_example_is_named_with_its_place(given, error, words):
    with pytest.raises(error, match=words):
        CheckedTask(Given(lambda split: given)).examples("train")


def test_an_own_class_with_the_three_members_is_taken():
    own = types.SimpleNamespace(text="a", answer="b", metadata={})
    assert CheckedTask(Given(lambda split: [own])).examples("test") == [own]


@pytest.mark.parametrize("given", [[], [("0", "1")]], ids=["none", "fixed"])
def test_a_validation_split_asks_no_task_for_ever(given):
    """Of a task that gives the same demonstrations, or none, whatever number is asked for."""
    examples = [Example(*pair) for pair in PAIRS]
    inner = types.SimpleNamespace(
        reward="exact", examples=lambda split: examples, demonstrations=lambda num: given
    )
    assert WithValidation(inner, num=2, seed=0).demonstrations(5) == given


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(" ".join(pair) for pair in PAIRS))
    return path


def test_a_task_without_demonstrations_trains_a_byte_pair_tokenizer_on_its_questions(
    lines, tmp_path
):
    settings = settings_of(lines, tokenizer={"kind": "bpe", "vocab_size": 300})
    tokenizer = parts.tokenizer_of(settings, tmp_path / "run")
    assert tokenizer.decode(tokenizer.encode("3+1=")) == "3+1="


def test_a_warm_start_without_demonstrations_is_refused(lines, tmp_path):
    settings = settings_of(lines, warm_start={"num_steps": 7})
    with pytest.raises(StartError, match=r"no demonstrations for warm_start\.num_steps = 7"):
        machine.prepare(settings, tmp_path / "run")


def named(name: str):
    """A task with an argument of this name."""
    return CheckedTask(Given(lambda split: [Example(name, name)]))


def test_an_argument_of_a_task_may_be_called_name():
    task = tasks.make_task("tasks.test_checked:named", name="x")
    assert task.examples("train")[0].text == "x"
    config = base_config()
    with config.unlocked():
        config.task.update(name="tasks.test_checked:named", args={"name": "y"})
    assert parts.task_of(make_settings(config.to_dict())).examples("test")[0].text == "y"
