"""Tasks: the sums and their forgetful demonstrations; reversals; sums in words; GSM8K's files, whole and broken."""

import dataclasses
import json
import os
import pathlib
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_async import rewards, tasks
from jaxrl_async.tasks import arithmetic, gsm8k

HERE = pathlib.Path(__file__).parents[1]
TINY = HERE / "gsm8k_tiny"
SUMS = {"num_digits": 2, "num_test": 512, "forget_carry": 0.7, "seed": 0}
REVERSALS = {"num_tokens": 10, "num_symbols": 2, "num_test": 256, "seed": 0}


def sums(**changes):
    return tasks.make_task("arithmetic", **SUMS | changes)


def reversals(**changes):
    return tasks.make_task("token_reversal", **REVERSALS | changes)


def word_sums(**changes):
    return tasks.make_task("word_sums", **dict(max_number=9, num_test=40, seed=0) | changes)


def operands(text):
    a, b = text.removesuffix("=").split("+")
    return int(a), int(b)


def column_by_column(a, b, num_digits):
    """The sum as a forgetful child writes it, from the right."""
    written = ""
    for place in range(num_digits):
        column = a // 10**place % 10 + b // 10**place % 10
        written = str(column)[-1] + written
    return int(written)


@pytest.mark.parametrize(
    ("a", "b", "forgotten"),
    [
        (47, 38, 75),  # 7 + 8 = 15 leaves 5; 4 + 3 = 7
        (58, 73, 21),  # 8 + 3 = 11 leaves 1; 5 + 7 = 12 leaves 2
        (41, 32, 73),  # nothing to carry
        (99, 99, 88),
        (456, 789, 135),  # 15 leaves 5; 13 leaves 3; 11 leaves 1
        (7, 8, 5),
    ],
)
def test_every_carry_is_forgotten(a, b, forgotten):
    assert arithmetic.add_without_carry(a, b) == forgotten


@given(st.data(), st.integers(1, 9))
def test_forgetting_changes_a_sum_exactly_where_a_column_carries(data, num_digits):
    a, b = (data.draw(st.integers(0, 10**num_digits - 1)) for _ in range(2))
    forgotten = arithmetic.add_without_carry(a, b)
    assert forgotten == column_by_column(a, b, num_digits)
    columns = [a // 10**p % 10 + b // 10**p % 10 for p in range(num_digits)]
    assert (forgotten != a + b) == any(column > 9 for column in columns)


def test_sums_look_like_sums():
    for example in sums().examples("test"):
        a, b = operands(example.text)
        assert len(example.text) == 6 and example.answer == str(a + b)
    reward = rewards.reward_function(sums().reward)
    assert all(reward(e.answer, e.answer) == 1.0 for e in sums().examples("train"))


def test_no_test_pair_is_in_train_in_either_order():
    train, test = ({operands(e.text) for e in sums().examples(s)} for s in ("train", "test"))
    mirrored = {(b, a) for a, b in test}
    assert len(test) == 512 and not train & test and not train & mirrored
    assert len(train | test | mirrored) == 90 * 90


def test_equal_arguments_give_equal_tasks_and_other_seeds_others():
    for split in ("train", "test"):
        assert sums().examples(split) == sums().examples(split)
        assert sums().examples(split) != sums(seed=1).examples(split)
    assert sums().demonstrations() == sums().demonstrations()


def right(demonstrations):
    return np.array([sum(operands(p)) == int(c) for p, c in demonstrations])


def carries(demonstrations):
    pairs = [operands(prompt) for prompt, _ in demonstrations]
    return np.array([a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9 for a, b in pairs])


def test_the_asked_share_of_demonstrations_forgets():
    demonstrations = sums().demonstrations(20_000)
    carry, correct = carries(demonstrations), right(demonstrations)
    assert correct[~carry].all()
    assert 0.68 < 1 - correct[carry].mean() < 0.72
    assert right(sums(forget_carry=0.0).demonstrations()).all()
    all_forget = sums(forget_carry=1.0).demonstrations()
    np.testing.assert_array_equal(right(all_forget), ~carries(all_forget))


def test_the_seed_decides_which_demonstrations_forget():
    one, other = sums().demonstrations(7000), sums(seed=1).demonstrations(7000)
    both = carries(one) & carries(other)
    assert both.any() and (right(one)[both] != right(other)[both]).any()


def test_demonstrations_go_round_the_train_split_and_forget_anew():
    task = sums()
    train = [e.text for e in task.examples("train")]
    demonstrations = task.demonstrations(2 * len(train) + 5)
    assert [prompt for prompt, _ in demonstrations] == train + train + train[:5]
    assert demonstrations[: len(train)] == task.demonstrations()
    assert demonstrations[: len(train)] != demonstrations[len(train) : 2 * len(train)]


@pytest.mark.parametrize(("num_digits", "num_pairs"), [(1, 100), (3, 100_000), (9, 100_000)])
def test_operands_have_the_asked_number_of_digits(num_digits, num_pairs):
    task = sums(num_digits=num_digits, num_test=num_pairs // 2)
    examples = task.examples("test") + task.examples("train")
    pairs = {operands(e.text) for e in examples}
    assert len(pairs) == len(examples) <= num_pairs and len(task.examples("test")) == num_pairs // 2
    assert all(len(str(n)) == num_digits for pair in pairs for n in pair)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_digits": 0}, r"num_digits must be in \[1, 9\], got 0"),
        ({"num_digits": 10}, r"num_digits must be in \[1, 9\], got 10"),
        ({"num_test": 0}, r"num_test must be in \[1, 4050\], half of the pairs, got 0"),
        ({"num_test": 4051}, r"num_test must be in \[1, 4050\].*got 4051"),
        ({"forget_carry": 1.5}, r"forget_carry must be in \[0, 1\], got 1.5"),
        ({"forget_carry": float("nan")}, "forget_carry must be in"),
    ],
)
def test_arguments_outside_their_bounds_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sums(**changes)


def test_every_sequence_stands_once_in_train_or_in_test():
    # Two symbols, three places: 000, 001, …, 111.
    task = reversals(num_tokens=3, num_test=3)
    test, train = ([e.text for e in task.examples(split)] for split in ("test", "train"))
    assert len(test) == 3
    assert sorted(test + train) == [f"{n:03b}>" for n in range(8)]


@pytest.mark.parametrize(
    ("num_tokens", "num_symbols", "num_prompts"),
    [
        (10, 2, 1024),
        (5, 10, 100_000),  # 10^5: still all of them
        (17, 2, 100_000),  # 2^17 = 131,072
        (62, 2, 100_000),
        (18, 10, 100_000),
        (1, 2, 2),
    ],
)
def test_sequences_have_the_asked_length_and_symbols(num_tokens, num_symbols, num_prompts):
    task = reversals(num_tokens=num_tokens, num_symbols=num_symbols, num_test=num_prompts // 2)
    texts = [e.text for split in ("test", "train") for e in task.examples(split)]
    assert len(set(texts)) == len(texts) == num_prompts
    assert len(task.examples("test")) == num_prompts // 2
    assert {len(text) for text in texts} == {num_tokens + 1}
    assert {text[-1] for text in texts} == {">"}
    assert set("".join(text[:-1] for text in texts)) == set("0123456789"[:num_symbols])


def test_an_answer_is_the_sequence_backwards():
    task = reversals(num_tokens=4, num_symbols=3, num_test=5)
    answers = {e.text: e.answer for s in ("train", "test") for e in task.examples(s)}
    assert answers["0112>"] == "2110" and answers["2001>"] == "1002" and len(answers) == 81
    reward = rewards.reward_function(task.reward)
    assert reward("2110", answers["0112>"]) == 1.0
    assert reward("0112", answers["0112>"]) == 0.5  # 0112 against 2110: the two in the middle


def test_demonstrations_of_reversal_are_right_and_go_round_the_train_split():
    task = reversals()
    train = [(e.text, e.answer) for e in task.examples("train")]
    assert task.demonstrations() == train and len(train) == 1024 - 256
    assert task.demonstrations(2 * len(train) + 5) == train + train + train[:5]


def test_equal_arguments_give_equal_reversals_and_other_seeds_others():
    for split in ("train", "test"):
        assert reversals().examples(split) == reversals().examples(split)
        assert reversals().examples(split) != reversals(seed=1).examples(split)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_symbols": 1}, r"num_symbols must be in \[2, 10\], got 1"),
        ({"num_symbols": 11}, r"num_symbols must be in \[2, 10\], got 11"),
        ({"num_tokens": 0}, r"num_tokens must be ≥ 1.* got 0 of 2"),
        ({"num_tokens": 63}, r"num_symbols\^num_tokens < 2\^63, got 63 of 2"),
        ({"num_test": 0}, r"num_test must be in \[1, 512\], half of the prompts, got 0"),
        ({"num_test": 513}, r"num_test must be in \[1, 512\].*got 513"),
        ({"num_tokens": 20, "num_test": 50_001}, r"num_test must be in \[1, 50000\].*got 50001"),
    ],
)
def test_a_reversal_outside_its_bounds_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        reversals(**changes)


def asked(text):
    """(a, word or sign, b) of a question."""
    found = re.fullmatch(r"What is (\d+) (\S+) (\d+)\? Answer with just the number\.", text)
    return int(found[1]), found[2], int(found[3])


@pytest.mark.parametrize(
    ("signs", "plus", "minus"), [(False, "plus", "minus"), (True, "+", "-")], ids=["words", "signs"]
)
def test_every_sum_and_every_difference_of_numbers_is_asked_once(signs, plus, minus):
    task = word_sums(signs=signs)
    test, train = (task.examples(split) for split in ("test", "train"))
    questions = [asked(e.text) for e in test + train]
    assert len(test) == 40 and len(set(questions)) == len(questions)
    held_out = {asked(e.text) for e in test}
    mirrored = {(b, plus, a) for a, word, b in held_out if word == plus} - held_out
    every = {(a, plus, b) for a in range(10) for b in range(10)}
    every |= {(a, minus, b) for a in range(10) for b in range(a + 1)}
    assert set(questions) == every - mirrored and mirrored
    for e in test + train:
        a, word, b = asked(e.text)
        assert e.answer == str(a + b if word == plus else a - b)
    assert task.demonstrations(3) == [(e.text, e.answer) for e in train[:3]]


def test_a_sum_in_words_and_its_mirror_are_one_question_and_a_difference_is_its_own():
    task = word_sums()
    key = {asked(e.text): task.key(e.text) for s in ("train", "test") for e in task.examples(s)}
    pairs = [(a, b) for a, word, b in key if word == "plus" and a < b and (b, word, a) in key]
    assert pairs
    assert all(key[a, "plus", b] == key[b, "plus", a] for a, b in pairs)
    differences = {k for (_, word, _), k in key.items() if word == "minus"}
    assert len(differences) == 55
    assert differences.isdisjoint(k for (_, word, _), k in key.items() if word == "plus")


def test_sums_in_words_read_the_last_number_or_nothing_but_the_number():
    loose, strict = (
        rewards.reward_function(word_sums(reward=r).reward) for r in ("last_number", "exact")
    )
    assert (loose("7 plus 5 is 12.", "12"), loose("7 plus 5 is 13.", "12")) == (1.0, 0.0)
    assert (strict("7 plus 5 is 12.", "12"), strict(" 12", "12")) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_number": 0}, r"max_number must be in \[1, 99\], got 0"),
        ({"max_number": 100}, r"max_number must be in \[1, 99\], got 100"),
        ({"num_test": 0}, r"num_test must be in \[1, 77\], half of the questions, got 0"),
        ({"num_test": 78}, r"num_test must be in \[1, 77\], half of the questions, got 78"),
        ({"template": "What?"}, r"template must contain '\{question\}', got 'What\?'"),
    ],
)
def test_sums_in_words_outside_their_bounds_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        word_sums(**changes)


@pytest.mark.parametrize(
    "task",
    [sums(), gsm8k.Gsm8k(TINY), reversals(), word_sums()],
    ids=["arithmetic", "gsm8k", "token_reversal", "word_sums"],
)
def test_an_unknown_split_is_refused(task):
    with pytest.raises(ValueError, match="'train' or 'test'.*'dev'"):
        task.examples("dev")


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match="task 'arithmetics'.*'arithmetic'"):
        tasks.make_task("arithmetics")


def test_an_unknown_argument_of_a_task_is_refused():
    with pytest.raises(TypeError, match="num_digit"):
        sums(num_digit=2)


def test_a_task_of_the_users_own_is_found_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text("def make(*, size): return ('mine', size)")
    monkeypatch.syspath_prepend(tmp_path)
    assert tasks.make_task("my_task:make", size=3) == ("mine", 3)


def test_problems_become_prompts_with_the_number_behind_the_marker():
    task = tasks.make_task("gsm8k", directory=TINY, template="Q: {question}\nA {note}:\n")
    assert [e.answer for e in task.examples("train")] == ["7", "1,080", "-5"]
    assert task.examples("test")[0] == tasks.Example(
        "Q: Bo eats half of 10 plums. How many are left?\nA {note}:\n", "5"
    )


def test_published_solutions_are_shown_without_calculator_notes():
    task = tasks.make_task("gsm8k", directory=TINY)
    prompts, solutions = zip(*task.demonstrations(), strict=True)
    assert list(prompts) == [e.text for e in task.examples("train")]
    assert solutions[1] == "It carries 12 x 90 = 1,080 people.\n#### 1,080"
    assert task.demonstrations(7)[3:6] == task.demonstrations()


def test_every_published_solution_earns_its_reward():
    check_solutions(tasks.make_task("gsm8k", directory=TINY))


def test_the_reward_of_the_problems_is_an_argument():
    task = tasks.make_task("gsm8k", directory=TINY, reward="math_verify")
    assert (gsm8k.Gsm8k(TINY).reward, task.reward) == ("last_number", "math_verify")
    check_solutions(task)


def check_solutions(task):
    reward = rewards.reward_function(task.reward)
    pairs = zip(task.demonstrations(), task.examples("train"), strict=True)
    for (prompt, solution), example in pairs:
        assert prompt == example.text
        assert reward(solution, example.answer) == 1.0
        assert "<<" not in solution


def real_gsm8k():
    default = HERE.parent.parent / "shared" / "data" / "gsm8k"
    directory = pathlib.Path(os.environ.get("JAXRL_GSM8K_DIR", default))
    if not (directory / "train.jsonl").is_file():
        pytest.skip("no GSM8K files: set JAXRL_GSM8K_DIR to their directory")
    return tasks.make_task("gsm8k", directory=directory)


def test_the_published_files_are_read_whole():
    task = real_gsm8k()
    assert len(task.examples("train")) == 7473 and len(task.examples("test")) == 1319
    assert task.examples("train")[0].answer == "72"
    check_solutions(task)


def test_a_missing_file_is_named_with_what_to_do(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match=r"test.jsonl .*http"):
        tasks.make_task("gsm8k", directory=tmp_path)


def test_a_template_without_a_question_is_refused():
    with pytest.raises(ValueError, match=r"template .*\{question\}.*'Q:'"):
        tasks.make_task("gsm8k", directory=TINY, template="Q:")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
        (b"[1]", "object.* list"),
        (b'{"answer": "#### 1"}', "'question' .*string.*None"),
        (b'{"question": "?", "answer": 3}', "'answer' .*string.*3"),
        (b'{"question": "?", "answer": "3"}', "'answer' .*'#### N'.*'3'"),
        (b'{"question": "?", "answer": "3 #### x"}', "'answer' .*'#### N'.*'3 #### x'"),
        (b'{"question": "\xff"}', "can't decode byte 0xff"),
        (rb'{"question": "?", "answer": "1\ud83d #### 1"}', "'answer' holds half a pair of surrog"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    good = json.dumps({"question": "?", "answer": "#### 1"}).encode()
    path = tmp_path / "train.jsonl"
    path.write_bytes(good + b"\n" + line + b"\n" + good)
    with pytest.raises(ValueError, match=f"train.jsonl, line 2: .*{message}"):
        gsm8k.read_problems(path)


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"train.jsonl.* empty"):
        gsm8k.read_problems(tmp_path / "train.jsonl")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["question", "answer"]), inner),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.lists(json_values, max_size=3))
def test_no_file_does_worse_than_a_named_error(tmp_path, content):
    path = tmp_path / "train.jsonl"
    if isinstance(content, list):
        content = "\n".join(json.dumps(value) for value in content).encode()
    path.write_bytes(content)
    try:
        problems = gsm8k.read_problems(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert all(isinstance(v, str) for p in problems for v in dataclasses.astuple(p))
