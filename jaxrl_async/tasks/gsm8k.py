"""GSM8K: grade-school math in words (Cobbe et al., arXiv 2110.14168), from its published JSONL files."""

import json
import pathlib
import re

from jaxrl_async.tasks.task import Example, Task, TaskError

FILES = {"train": "train.jsonl", "test": "test.jsonl"}
_CALCULATION = re.compile(r"<<[^>]*>>")
_GOLD = "#### "


def make_task(*, directory: str) -> Task:
    """Reads train.jsonl and test.jsonl.

    A demonstration is the published solution without its calculator annotations.

    Args:
      directory: holds both files, as published (fields "question" and "answer", which ends in "#### N").

    Raises:
      TaskError: a file is missing, or a line is broken (file, line number and why).
    """
    rows = {split: _read(pathlib.Path(directory) / name) for split, name in FILES.items()}
    return Task(
        train=[_example(row) for row in rows["train"]],
        test=[_example(row) for row in rows["test"]],
        demonstrations=[
            (_question(row), _CALCULATION.sub("", row["answer"])) for row in rows["train"]
        ],
    )


def _read(path: pathlib.Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise TaskError(
            f"no GSM8K file at {path}: set task.args.directory to where it was downloaded"
        )
    rows = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise TaskError(f"{path}:{number}: not JSON: {error}") from None
            rows.append(_checked(row, f"{path}:{number}"))
    if not rows:
        raise TaskError(f"{path} is empty")
    return rows


def _checked(row, where: str) -> dict[str, str]:
    for field in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise TaskError(f"{where}: no text field {field!r}")
    if _GOLD not in row["answer"]:
        raise TaskError(f"{where}: the answer has no {_GOLD!r} before its number")
    return row


def _question(row: dict[str, str]) -> str:
    return f"Question: {row['question']}\nAnswer: "


def _example(row: dict[str, str]) -> Example:
    return Example(_question(row), row["answer"].rpartition(_GOLD)[2].strip())
