"""The stream of prompts: each epoch a permutation, the same in every process; what does not fit is left out first."""

import dataclasses
import logging
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.tasks import Example, make_task, prompts
from jaxrl_async.tasks.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer("0123456789+=ab")
SUMS = {"num_digits": 2, "num_test": 512, "forget_carry": 0.7, "seed": 0}


@dataclasses.dataclass(frozen=True)
class Letters:
    """Example i is `lengths[i]` letters, with answer i."""

    lengths: tuple[int, ...]
    reward: str = "exact"

    def examples(self, split):
        letter = "a" if split == "train" else "b"
        return [Example(letter * length, str(i)) for i, length in enumerate(self.lengths)]

    def demonstrations(self, num=None):
        examples = self.examples("train")
        return [(e.text, e.answer) for e in examples[:num]]


def make_stream(task, seed=0, max_prompt_tokens=8, split="train"):
    return prompts.prompt_stream(
        task, TOKENIZER, split=split, seed=seed, max_prompt_tokens=max_prompt_tokens
    )


def answers(stream, start, num):
    return [stream[i].answer for i in range(start, start + num)]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.integers(0, 2**40),
    st.integers(0, 10**12),
)
def test_each_epoch_holds_every_prompt_that_fits_once(lengths, seed, epoch):
    fitting = [str(i) for i, length in enumerate(lengths) if 1 <= length <= 5]
    if not fitting:
        return
    stream = make_stream(Letters(tuple(lengths)), seed=seed, max_prompt_tokens=5)
    epoch_answers = answers(stream, epoch * len(fitting), len(fitting))
    assert sorted(epoch_answers, key=int) == fitting


def test_a_prompt_is_its_example_under_its_index():
    stream = make_stream(Letters((3, 3, 3)))
    for index in (0, 1, 7, 10**9):
        prompt = stream[index]
        assert prompt.index == index
        assert prompt.text == "aaa" and prompt.answer in "012"
        assert prompt.tokens.dtype == np.int32
        np.testing.assert_array_equal(prompt.tokens, TOKENIZER.encode("aaa"))


def test_epochs_are_shuffled_anew():
    stream = make_stream(Letters((1,) * 50))
    epochs = [tuple(answers(stream, 50 * epoch, 50)) for epoch in range(4)]
    assert len(set(epochs)) == 4
    assert tuple(str(i) for i in range(50)) not in epochs


def test_neighbouring_seeds_share_no_epoch():
    epochs = {
        tuple(answers(make_stream(Letters((1,) * 50), seed=seed), 50 * epoch, 50))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(epochs) == 9


def test_the_split_is_the_asked_one():
    assert make_stream(Letters((1,)), split="test")[5].text == "b"


def test_what_does_not_fit_is_left_out_before_indexes_are_given(caplog):
    with caplog.at_level(logging.WARNING):
        stream = make_stream(Letters((1, 9, 2, 9, 0, 8)))
    assert sorted(answers(stream, 0, 3)) == sorted(answers(stream, 3, 3)) == ["0", "2", "5"]
    assert "3 of 6 train prompts left out: not 1 to 8 tokens long" in caplog.text


def test_nothing_is_said_when_everything_fits(caplog):
    make_stream(Letters((1, 8)))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((9, 12), "2 train prompts .*1 to 8 tokens.*9 to 12"),
        ((0,), "1 train prompts .*1 to 8 tokens.*0 to 0"),
        ((), "0 train prompts"),
    ],
)
def test_a_stream_of_nothing_is_refused_with_counts(lengths, message):
    with pytest.raises(ValueError, match=message):
        make_stream(Letters(lengths))


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="non-negative"):
        make_stream(Letters((1,)), seed=-1)


def test_held_out_prompts_keep_the_tasks_order():
    held_out = prompts.held_out_prompts(Letters((1, 9, 2)), TOKENIZER, max_prompt_tokens=8)
    assert [(p.index, p.text, p.answer) for p in held_out] == [(0, "b", "0"), (1, "bb", "2")]
    with pytest.raises(ValueError, match="1 test prompts"):
        prompts.held_out_prompts(Letters((9,)), TOKENIZER, max_prompt_tokens=8)


def test_demonstrations_end_in_the_end_of_sequence():
    # "aaa" and answer "0", then the stop token.
    ((prompt, completion, own),) = prompts.demonstration_tokens(
        Letters((3,)), TOKENIZER, num=1, max_tokens=8
    )
    assert prompt.dtype == completion.dtype == np.int32
    assert prompt.tolist() == TOKENIZER.encode("aaa")
    assert completion.tolist() == [*TOKENIZER.encode("0"), TOKENIZER.eos_id]
    assert own.dtype == bool and own.tolist() == [True, True]


def test_demonstrations_that_are_too_long_are_left_out(caplog):
    # Prompt, one digit and the stop token: 6 letters fill 8 tokens.
    rows = prompts.demonstration_tokens(Letters((6, 7, 1)), TOKENIZER, num=3, max_tokens=8)
    assert [len(prompt) for prompt, *_ in rows] == [6, 1]
    assert "1 of 3 demonstrations left out" in caplog.text
    with pytest.raises(ValueError, match="1 demonstrations .*1 to 2 tokens.*8 to 8"):
        prompts.demonstration_tokens(Letters((6,)), TOKENIZER, num=1, max_tokens=2)


def test_sums_fit_a_short_row():
    task, tokenizer = make_task("arithmetic", **SUMS), CharTokenizer("0123456789+=")
    rows = prompts.demonstration_tokens(task, tokenizer, num=20_000, max_tokens=10)
    assert len(rows) == 20_000
    assert {len(prompt) for prompt, *_ in rows} == {6}
    # One to three digits and the stop token: 50+50 without its carries is 0.
    assert {len(completion) for _, completion, _ in rows} == {2, 3, 4}


def run_python(script):
    completed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=120, text=True
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def test_another_process_sees_the_same_stream_and_starts_no_device():
    script = f"""
        from jaxrl_async.tasks import make_task, prompts
        from jaxrl_async.tasks.tokenizer import CharTokenizer
        stream = prompts.prompt_stream(
            make_task("arithmetic", **{SUMS!r}), CharTokenizer("0123456789+=ab"),
            split="train", seed=3, max_prompt_tokens=8,
        )
        print(*(stream[i].text for i in range(0, 10**6, 10**5)))
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
    """
    stream = make_stream(make_task("arithmetic", **SUMS), seed=3)
    assert run_python(script).split() == [stream[i].text for i in range(0, 10**6, 10**5)]


def test_the_rooms_are_imported_without_jax():
    script = """
        import sys
        import jaxrl_async.rewards.pool
        import jaxrl_async.tasks.prompts
        import jaxrl_async.tasks.tokenizer
        print(sorted({"jax", "flax", "torch", "orbax", "grain"} & set(sys.modules)))
    """
    assert run_python(script) == "[]"


def test_the_metadata_of_an_example_is_its_prompts():
    class Task:
        def __init__(self, metadata):
            self.metadata = metadata

        def examples(self, split):
            return [Example("12", "3", metadata=self.metadata), Example("1", "2")]

    def made(metadata):
        return prompts.held_out_prompts(Task(metadata), CharTokenizer("123"), max_prompt_tokens=8)

    assert [p.metadata for p in made({"level": 2, "topics": ["sums"]})] == [
        {"level": 2, "topics": ["sums"]},
        {},
    ]
    with pytest.raises(ValueError, match="metadata of the example '12' is no JSON: .* set"):
        made({"level": {1}})
