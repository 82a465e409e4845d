"""GSM8K: grade-school word problems, read from the published files.

Training Verifiers to Solve Math Word Problems (Cobbe et al., arXiv 2110.14168); the files are in
https://github.com/openai/grade-school-math, grade_school_math/data. A line is a JSON object with the fields question
and answer; the answer is a worked solution that ends in "#### N".
"""

import dataclasses
import json
import os
import pathlib
import re

from jaxrl_async.rewards.math import final_number
from jaxrl_async.tasks.task import SPLITS, Example, check_split, check_text, cycled

SOURCE = "https://github.com/openai/grade-school-math"
TEMPLATE = (
    "{question}\nReason step by step; end with a line that is #### and the answer as a number.\n"
)

_CALCULATION = re.compile(r"<<.*?>>")  # calculator annotations: 48/2 = <<48/2=24>>24


@dataclasses.dataclass(frozen=True)
class Problem:
    """One line of a file."""

    question: str
    solution: str  # without calculator annotations, with "#### N"
    answer: str  # N as it is written, such as "1,080"


@dataclasses.dataclass(frozen=True)
class Gsm8k:
    """The problems in DIRECTORY/train.jsonl and DIRECTORY/test.jsonl.

    Raises:
      FileNotFoundError: one of the files is missing.
      ValueError: the template does not contain "{question}".
    """

    directory: str | os.PathLike
    template: str = TEMPLATE  # of a prompt; "{question}" is replaced
    reward: str = "last_number"  # or another reward that reads N, such as "math_verify"

    def __post_init__(self):
        if "{question}" not in self.template:
            raise ValueError(f"template must contain '{{question}}', got {self.template!r}")
        for split in SPLITS:
            if not self._path(split).is_file():
                raise FileNotFoundError(
                    f"GSM8K file {self._path(split)} is missing: download it from {SOURCE}, or set the directory "
                    "that holds train.jsonl and test.jsonl"
                )

    @property
    def files(self) -> list[pathlib.Path]:
        """What it is read from."""
        return [self._path(split) for split in SPLITS]

    def examples(self, split: str) -> list[Example]:
        """The problems of a split, in the file's order.

        Raises:
          ValueError: a broken line; names file, line and what is wrong.
        """
        problems = read_problems(self._path(check_split(split)))
        return [Example(self._prompt(p), p.answer) for p in problems]

    def demonstrations(self, num: int | None = None) -> list[tuple[str, str]]:
        """Train problems with their published solutions, in the file's order."""
        chosen = cycled(read_problems(self._path("train")), num)
        return [(self._prompt(p), p.solution) for p in chosen]

    def _path(self, split: str) -> pathlib.Path:
        return pathlib.Path(self.directory) / f"{split}.jsonl"

    def _prompt(self, problem: Problem) -> str:
        # Not str.format: a template may hold other braces.
        return self.template.replace("{question}", problem.question)


def read_problems(path: str | os.PathLike) -> list[Problem]:
    """Reads a file of problems.

    Raises:
      ValueError: a broken line, or no line; names the file, the line and what is wrong.
    """
    problems = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                problems.append(_problem(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not problems:
        raise ValueError(f"{path} is empty")
    return problems


def _problem(line: bytes) -> Problem:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {type(fields).__name__}")
    for name in ("question", "answer"):
        if not isinstance(fields.get(name), str):
            raise ValueError(f"field {name!r} must be a string, got {fields.get(name)!r}")
        check_text(f"field {name!r}", fields[name])
    _, marker, answer = fields["answer"].rpartition("####")
    if not marker or final_number(answer) is None:
        raise ValueError(f"field 'answer' must end in '#### N', got {fields['answer'][-40:]!r}")
    solution = _CALCULATION.sub("", fields["answer"])
    return Problem(fields["question"].strip(), solution.strip(), answer.strip())
