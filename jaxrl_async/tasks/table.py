"""Questions from the rows of files, by the names of columns: JSON lines, Parquet, data sets of the Hugging Face hub.

Each row is an example. One that cannot be is refused with its file, its row, the column and the value.
"""

import dataclasses
import functools
import glob
import importlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, ClassVar, NoReturn

import numpy as np

from jaxrl_async.names import nearest
from jaxrl_async.tasks.task import RIGHT, Example, check_split, check_text, cycled

Row = tuple[str, Mapping[str, Any]]  # its place, "FILE, line 3", and column → value
ROLES = ("system", "user", "assistant", "tool")
_COLUMN = re.compile(r"\{([^{}]+)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of train and test files; without test files, `num_test` rows of train, at random.

    A column within a column is "outer.inner". Rows of equal prompts are cut into one split.

    Raises:
      ValueError: the arguments contradict one another.
    """

    train: str | Sequence[str] = ()  # paths; one with a * stands for all files that it matches
    test: str | Sequence[str] = ()
    validation: str | Sequence[str] = ()  # those that evaluate.num_validation takes questions from
    num_test: int = 0  # questions cut from train, where there are no test files
    seed: int = 0  # of that cut
    prompt: str = "prompt"  # column of a text, or of messages for the chat template
    answer: str = "answer"  # column of the gold answer, a text or a number; "" for none
    metadata: str | Sequence[str] = ()  # columns that rewards and agents get as metadata
    completion: str = ""  # column of what a warm start imitates; "" for the answer
    template: str = ""  # of a prompt that is a text; "{COLUMN}" is replaced
    reward: str = "exact"  # its name, or "module:function"
    right: float = RIGHT  # its least value of a right answer

    has_files: ClassVar[bool] = True

    def __post_init__(self):
        if bool(self.test) == bool(self.num_test) or (self.num_test and not self.train):
            raise ValueError(
                "give test files, or num_test questions that are cut from train: got "
                f"test = {self.test!r} and num_test = {self.num_test}"
            )
        if self.template and f"{{{self.prompt}}}" not in self.template:
            raise ValueError(
                f"template must contain '{{{self.prompt}}}', the prompt's column, got {self.template!r}"
            )

    @property
    def validation_from(self) -> str:
        """The split that gives validation questions."""
        return "validation" if self.validation else "train"

    @property
    def files(self) -> list[str]:
        """The paths of all files; none of a library's own."""
        given = (self.train, self.validation, self.test) if self.has_files else ()
        return [path for paths in given for path in _paths(paths)]

    def examples(self, split: str) -> list[Example]:
        """The rows of a split, in the order of the files.

        Raises:
          OSError: a file is missing.
          ValueError: a row that cannot be an example, or no row.
        """
        if split not in self._splits:
            raise ValueError(f"there are no files of the {check_split(split)} split")
        return [example for example, _ in self._splits[split]]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Train prompts with the column `completion`, or `answer`; none where both are "".

        Raises:
          ValueError: a prompt of several messages.
        """
        if not (self.completion or self.answer):
            return []
        chosen = cycled(self._splits["train"], num)
        if several := next((e for e, _ in chosen if e.messages), None):
            raise ValueError(
                f"a warm start takes prompts of one text, got {several.messages!r:.200}"
            )
        return [(example.text, completion) for example, completion in chosen]

    def rows(self, path: str) -> Iterator[Row]:
        """The rows of a file."""
        raise NotImplementedError

    @functools.cached_property
    def _splits(self) -> dict[str, list[tuple[Example, str]]]:
        """Split → examples, each with what a warm start imitates."""
        names = ("train", "validation", "test")
        found = {name: self._read(name) for name in names if getattr(self, name)}
        return found if self.test else found | self._cut(found["train"])

    def _cut(self, rows: list[tuple[Example, str]]) -> dict[str, list[tuple[Example, str]]]:
        texts = list(dict.fromkeys(example.text for example, _ in rows))
        if not 1 <= self.num_test <= len(texts) // 2:
            raise ValueError(
                f"num_test must be in [1, {len(texts) // 2}], half of the {len(texts)} prompts of {self.train!r}, got "
                f"{self.num_test}"
            )
        order = np.random.default_rng(self.seed).permutation(len(texts))
        held_out = {texts[i] for i in order[: self.num_test]}
        return {
            "train": [row for row in rows if row[0].text not in held_out],
            "test": [row for row in rows if row[0].text in held_out],
        }

    def _read(self, split: str) -> list[tuple[Example, str]]:
        found, has, lacks = [], {}, {}  # name in the template's braces → place of the first row
        for path in _paths(getattr(self, split)):
            for where, row in self.rows(path):
                try:
                    found.append(self._example(row))
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
                for name in self._names:
                    (has if _is_column(name, row) else lacks).setdefault(name, where)
        if not found:
            raise ValueError(f"{getattr(self, split)!r} has no rows")
        if some := [name for name in lacks if name in has]:
            name = some[0]
            raise ValueError(
                f"{lacks[name]}: no column {name!r}, which the template takes; {has[name]} has it"
            )
        return found

    @functools.cached_property
    def _names(self) -> list[str]:
        """What stands in braces in the template."""
        return _COLUMN.findall(self.template)

    def _example(self, row: Mapping[str, Any]) -> tuple[Example, str]:
        text, messages = self._asked(row)
        answer = _text(row, self.answer) if self.answer else ""
        names = [self.metadata] if isinstance(self.metadata, str) else self.metadata
        metadata = {name: _json(row, name) for name in names}
        completion = _text(row, self.completion) if self.completion else answer
        return Example(text, answer, metadata, messages), completion

    def _asked(self, row: Mapping[str, Any]) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """The prompt as a text, and its messages where it has another than one of the user."""
        if not isinstance(_value(row, self.prompt), list):
            text = _text(row, self.prompt)
            return _filled(self.template, row) if self.template else text, ()
        if self.template:
            raise ValueError(f"column {self.prompt!r} has messages, which take no template")
        messages = _messages(row, self.prompt)
        text = "\n\n".join(message["content"] for message in messages)
        return text, messages if len(messages) > 1 else ()


class Jsonl(Table):
    """Files of JSON lines: an object a line."""

    def rows(self, path: str) -> Iterator[Row]:
        """The lines of a file that are not blank."""
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", _object(f"{path}, line {number}", line)


class Parquet(Table):
    """Parquet files, read by pyarrow."""

    def rows(self, path: str) -> Iterator[Row]:
        """The rows of a file, numbered from 1."""
        library, number = library_of("pyarrow.parquet", "parquet"), 0
        try:
            with library.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{path}, row {number}", row
        except (OSError, ValueError) as error:  # ArrowInvalid is one.
            raise ValueError(f"{path}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Dataset(Table):
    """A data set of the Hugging Face hub, or a directory of one: train, test and validation name its own splits."""

    dataset: str  # id or directory
    _: dataclasses.KW_ONLY
    train: str | Sequence[str] = "train"
    config: str = ""  # its configuration, where it has several

    has_files: ClassVar[bool] = False

    def rows(self, path: str) -> Iterator[Row]:
        """The rows of one of its splits, numbered from 1."""
        library = library_of("datasets", "datasets")
        try:
            if pathlib.Path(self.dataset, "dataset_dict.json").is_file():
                rows = library.load_from_disk(self.dataset)[path]
            else:
                rows = library.load_dataset(self.dataset, self.config or None, split=path)
        except Exception as error:  # Of many kinds, and of its HTTP library.
            raise ValueError(f"data set {self.dataset!r}, split {path!r}: {error}") from error
        for number, row in enumerate(rows, start=1):
            yield f"{self.dataset}, split {path!r}, row {number}", row


def _paths(given: str | Sequence[str]) -> list[str]:
    """The paths, with those that a * stands for, in order."""
    found = []
    for path in [given] if isinstance(given, str) else given:
        matches = sorted(glob.glob(path, recursive=True)) if "*" in path else [path]
        if not matches:
            raise FileNotFoundError(f"no file matches {path!r}")
        found += matches
    return found


def library_of(module: str, extra: str) -> Any:
    """A library of an extra of this package; raises ValueError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"it needs the library {module.partition('.')[0]}: pip install 'jaxrl_async[{extra}]' ({error})"
        ) from error


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        place = f"character {error.pos + 1}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(
            f"{where}: {place}{getattr(error, 'msg', error)}: {line[:80]!r}"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}: {row!r:.80}")
    return row


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _value(row: Mapping[str, Any], name: str) -> Any:
    """A value by its column, or "outer.inner"."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"no column {name!r}{nearest(name, row)} (it has {', '.join(row)})")
        value = value[part]
    return value


def _text(row: Mapping[str, Any], name: str) -> str:
    """A text, or a number as JSON writes it, a whole one without a point."""
    value = _value(row, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return json.dumps(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {name!r} must be a text or a number, got {value!r:.200}")
    check_text(f"column {name!r}", value)
    return value


def _json(row: Mapping[str, Any], name: str) -> Any:
    value = _value(row, name)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r} is no JSON, got {value!r:.200}: {error}") from None
    return value


def _is_column(name: str, row: Mapping[str, Any]) -> bool:
    return name in row or name.partition(".")[0] in row


def _filled(template: str, row: Mapping[str, Any]) -> str:
    """A template with its columns' values; other braces stand for themselves."""

    def shown(match: re.Match) -> str:
        return _text(row, match[1]) if _is_column(match[1], row) else match[0]

    return _COLUMN.sub(shown, template)


def _messages(row: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], ...]:
    """Messages that end with the user's, each a role and a text."""
    messages = _value(row, name)
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        if fields.get("role") not in ROLES or not isinstance(fields.get("content"), str):
            raise ValueError(
                f"column {name!r} must be messages with a role of {', '.join(ROLES)} and a content that is a text, got "
                f"{message!r:.200}"
            )
        check_text(f"column {name!r}", fields["content"])
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"column {name!r} must end with the user's message, got {messages!r:.200}")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)
