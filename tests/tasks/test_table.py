"""Tasks of files: rows become examples by the names of columns, and what cannot be one is named."""

import json

import pytest
from fixtures import chat

from jaxrl_async.tasks import make_task, prompts
from jaxrl_async.tasks.tokenizer import CharTokenizer, InstructedTokenizer
from jaxrl_async.tasks.validation import WithValidation

ROWS = [{"q": f"{i}+{i}=", "a": 2 * i, "level": {"of": i % 3}} for i in range(40)]
COLUMNS = {"prompt": "q", "answer": "a"}


def written(path, rows):
    """A file of JSON lines, its path as a text."""
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return str(path)


@pytest.fixture
def train(tmp_path):
    return written(tmp_path / "train.jsonl", ROWS)


def texts(task, split):
    return [example.text for example in task.examples(split)]


def test_rows_become_examples_by_their_columns(train, tmp_path):
    test = written(tmp_path / "test.jsonl", ["", {"q": "7", "a": "seven", "level": {"of": 9}}, " "])
    of = {
        **COLUMNS,
        "metadata": "level.of",
        "template": "{level.of}: {q}{x} {{q}}",
        "reward": "last_number",
    }
    task = make_task("jsonl", train=train, test=test, **of)
    (example,) = task.examples("test")
    assert (example.text, example.answer) == ("9: 7{x} {7}", "seven")
    assert example.metadata == {"level.of": 9} and task.reward == "last_number"
    assert [e.answer for e in task.examples("train")] == [str(2 * i) for i in range(40)]
    assert task.demonstrations(41)[40] == ("0: 0+0={x} {0+0=}", "0")
    assert task.files == [train, test]


def test_without_answers_there_is_nothing_to_imitate(train):
    of = {"train": train, "num_test": 10, "prompt": "q", "answer": ""}
    assert make_task("jsonl", **of).demonstrations(3) == []
    assert len(make_task("jsonl", **of, completion="a").demonstrations(3)) == 3


@pytest.mark.parametrize("column", ["my question", "question-text", "a.b", "問題 1"])
def test_a_template_is_filled_whatever_the_column_is_called(tmp_path, column):
    path = written(tmp_path / "a.jsonl", [{column: "1+1", "sum": 2}])
    of = {"prompt": column, "answer": "sum", "template": f"{{'x': 1}} {{{column}}}="}
    task = make_task("jsonl", train=path, test=path, **of)
    assert texts(task, "test") == ["{'x': 1} 1+1="]


@pytest.mark.parametrize("order", [1, -1])
def test_a_column_of_the_template_that_some_rows_lack_is_named(tmp_path, order):
    rows = [{"q": "1", "a": 1, "hint": "one"}, {"q": "2", "a": 2}][::order]
    path = written(tmp_path / "a.jsonl", rows)
    task = make_task("jsonl", train=path, test=path, **COLUMNS, template="{hint} {q} {x}")
    lines = [f"{path}, line {rows.index(row) + 1}" for row in sorted(rows, key=len)]
    with pytest.raises(ValueError, match="line .: no column 'hint', which the template") as error:
        task.examples("test")
    assert str(error.value).startswith(lines[0]) and f"{lines[1]} has it" in str(error.value)


@pytest.mark.parametrize(
    "value, text", [(5.0, "5"), (0.25, "0.25"), (-3, "-3"), (10**30, "1" + "0" * 30)]
)
def test_a_number_is_the_text_that_json_has_for_it(tmp_path, value, text):
    path = written(tmp_path / "a.jsonl", [{"q": "x", "a": value}])
    assert make_task("jsonl", train=path, test=path, **COLUMNS).examples("test")[0].answer == text


def test_a_split_is_cut_from_train_by_a_seed_and_equal_prompts_stay_together(tmp_path):
    path = written(tmp_path / "a.jsonl", [*ROWS, *ROWS[:20] * 4])
    cut = [make_task("jsonl", train=path, num_test=10, seed=seed, **COLUMNS) for seed in (0, 0, 1)]
    first, again, other = ([texts(task, split) for split in ("train", "test")] for task in cut)
    assert first == again != other
    assert not set(first[0]) & set(first[1]) and len(first[0] + first[1]) == 120
    assert len(set(first[1])) == 10
    assert {prompt for prompt, _ in cut[0].demonstrations()} == set(first[0])


def test_validation_files_give_the_validation_split(train, tmp_path):
    other = written(tmp_path / "v.jsonl", [{"q": f"v{i}", "a": "1"} for i in range(5)])
    task = make_task("jsonl", train=train, validation=other, num_test=10, **COLUMNS)
    assert texts(WithValidation(task, num=5, seed=0), "validation") == [f"v{i}" for i in range(5)]
    assert texts(WithValidation(task, num=5, seed=0), "train") == texts(task, "train")
    with pytest.raises(
        ValueError, match="num_validation = 6 is more than the 5 questions of the validation"
    ):
        WithValidation(task, num=6, seed=0).examples("validation")


def test_files_are_matched_in_order(tmp_path):
    for i in (1, 0):
        written(tmp_path / f"part-{i}.jsonl", [{"q": f"part {i}", "a": "1"}])
    task = make_task(
        "jsonl",
        train=str(tmp_path / "part-*.jsonl"),
        test=str(tmp_path / "part-0.jsonl"),
        **COLUMNS,
    )
    assert texts(task, "train") == ["part 0", "part 1"]
    with pytest.raises(FileNotFoundError, match="no file matches .*none-"):
        make_task("jsonl", train=str(tmp_path / "none-*"), num_test=1).examples("train")


def test_messages_are_written_by_the_chat_template(tmp_path):
    system, user = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}
    path = written(tmp_path / "a.jsonl", [{"q": [system, user], "a": 2}, {"q": [user], "a": 2}])
    task = make_task("jsonl", train=path, test=path, **COLUMNS)
    tokenizer = chat.tokenizer_of(tmp_path / "qwen", "qwen")
    several, one = prompts.held_out_prompts(task, tokenizer, max_prompt_tokens=500)
    assert several.tokens.tolist() == tokenizer.encode_chat([system, user])
    assert (several.text, list(several.messages)) == ("Add.\n\n1+1?", [system, user])
    assert one.tokens.tolist() == tokenizer.encode_prompt("1+1?") and (one.text, one.messages) == (
        "1+1?",
        (),
    )
    asked = InstructedTokenizer(tokenizer, instruction="Q: ", system_prompt="")
    told = asked.encode_prompt([system, user])
    assert told == tokenizer.encode_chat([system, {**user, "content": "Q: 1+1?"}])
    with pytest.raises(ValueError, match="'Be.', and a prompt has one of its own: 'Add.'"):
        InstructedTokenizer(tokenizer, instruction="", system_prompt="Be.").encode_prompt(
            [system, user]
        )
    with pytest.raises(ValueError, match="without a chat template takes one message, got 2"):
        CharTokenizer("ab").encode_prompt([system, user])
    with pytest.raises(ValueError, match="a warm start takes prompts of one text"):
        task.demonstrations(2)


USER = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"q": "x", "a": 1', r"line 2: character 18: Expecting.*a\": 1"),
        ('{"q": "x", "a": NaN}', "line 2: NaN is no number of JSON"),
        ("[1]", r"line 2: expected a JSON object, got list: \[1\]"),
        ('{"q": "x"}', r"line 2: no column 'a' \(it has q\)"),
        ('{"q": "x", "A": 1}', "line 2: no column 'a' .it has q, A"),
        ('{"q": "x", "a": null}', "line 2: column 'a' must be a text or a number, got None"),
        ('{"q": "x", "a": true}', "line 2: column 'a' must be .* got True"),
        ('{"q": " ", "a": 1}', "line 2: column 'q' must be .* got ' '"),
        ('{"q": {}, "a": 1}', r"line 2: column 'q' must be .* got \{\}"),
        ('{"q": "x", "a": 1e999}', "line 2: column 'a' must be .* got inf"),
        ('{"q": "\\ud800", "a": 1}', "line 2: column 'q' holds half a pair of surrogates"),
        ('{"q": "x", "a": "gold \\ud83d"}', r"line 2: column 'a' holds .*'gold \\ud83d'"),
        (
            {"q": [{"role": "user", "content": "? \ud83d"}], "a": 1},
            "line 2: column 'q' holds half a pair",
        ),
        ('{"q": [], "a": 1}', r"line 2: column 'q' must end with the user's message, got \[\]"),
        ('{"q": ["hi"], "a": 1}', "line 2: column 'q' must be messages .* got 'hi'"),
        (
            {"q": [USER, {"role": "assistant", "content": "!"}], "a": 1},
            "line 2: column 'q' must end with the user's message",
        ),
        (
            {"q": [USER | {"content": [{"type": "image"}]}], "a": 1},
            "line 2: .*a content that is a text, got",
        ),
        ("[" * 100_000, "line 2: .*recursion"),
        ("\xff\xfe", "line 2: character 1: Expecting value"),
    ],
)
def test_a_row_that_cannot_be_an_example_is_named_with_its_line_column_and_value(
    tmp_path, line, message
):
    path = written(tmp_path / "bad.jsonl", [ROWS[0], line])
    with pytest.raises(ValueError, match=f"bad.jsonl, {message}"):
        make_task("jsonl", train=path, test=path, **COLUMNS).examples("train")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "give test files, or num_test questions .* got test = .. and num_test = 0"),
        ({"test": "a", "num_test": 3}, "give test files, or num_test"),
        ({"train": (), "num_test": 3}, "give test files, or num_test"),
        (
            {"num_test": 21},
            r"num_test must be in \[1, 20\], half of the 40 prompts of '.*', got 21",
        ),
        (
            {"num_test": 2, "template": "{a}"},
            "template must contain '{q}', the prompt's column, got '{a}'",
        ),
        ({"num_test": 2, "metadata": ("lvl",)}, "line 1: no column 'lvl', did you mean 'level'"),
    ],
)
def test_arguments_that_fit_no_file_are_refused(train, changes, message):
    with pytest.raises(ValueError, match=message):
        make_task("jsonl", **{"train": train, **COLUMNS, **changes}).examples("train")


def test_an_evaluation_set_needs_no_train_file(train):
    task = make_task("jsonl", test=train, **COLUMNS)
    assert len(task.examples("test")) == 40
    with pytest.raises(ValueError, match="there are no files of the train split"):
        task.examples("train")
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'dev'"):
        task.examples("dev")


def test_a_file_without_rows_is_named(tmp_path):
    path = written(tmp_path / "empty.jsonl", [""])
    with pytest.raises(ValueError, match="empty.jsonl' has no rows"):
        make_task("jsonl", train=path, num_test=1).examples("train")


def test_parquet_has_the_rows_of_json(train, tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "train.parquet")
    # Beside a missing value pandas and NumPy make 2.0 of 2, and "2.0" is another answer than "2".
    parquet.write_table(arrow.Table.from_pylist([*ROWS, {"q": "none", "a": None}]), path)
    with pytest.raises(ValueError, match="train.parquet, row 41: column 'a' must be .* got None"):
        make_task("parquet", train=path, num_test=4, **COLUMNS).examples("train")
    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    of = {**COLUMNS, "num_test": 4, "metadata": ("level",)}
    lines, found = make_task("jsonl", train=train, **of), make_task("parquet", train=path, **of)
    assert all(lines.examples(s) == found.examples(s) for s in ("train", "test"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="broken.parquet: "):
        make_task("parquet", train=str(tmp_path / "broken.parquet"), num_test=1).examples("test")


def test_a_data_set_of_hugging_face_has_the_rows_of_its_files(train, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = make_task("jsonl", train=train, num_test=4, **COLUMNS)
    made = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "plain").mkdir()
    written(tmp_path / "plain" / "train.jsonl", ROWS)
    for name in ("saved", "plain"):
        found = make_task(f"datasets:{tmp_path / name}", num_test=4, **COLUMNS)
        assert all(lines.examples(s) == found.examples(s) for s in ("train", "test"))
    with pytest.raises(ValueError, match="data set '.*plain', split 'dev': "):
        make_task(f"datasets:{tmp_path / 'plain'}", train="dev", num_test=4).examples("train")


@pytest.mark.parametrize("name, extra", [("parquet", "parquet"), ("datasets:a/b", "datasets")])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, name, extra):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=rf"pip install 'jaxrl_async\[{extra}\]'"):
        make_task(name, train="x", num_test=1).examples("train")
