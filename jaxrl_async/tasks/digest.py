"""The digest of a task: of the texts, answers and metadata of its questions, in their order and their splits.

The first process of a run that reads the task stores it in the workdir, and the others compare theirs with it. It holds
a mark of each question, which finds the first that differs, and no text.
"""

import base64
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

from jaxrl_async.tasks.task import Example, messages_of, metadata_of

FILE = "task_digest.json"  # of a workdir
_MARK_BYTES = 6  # of a question
_ENCODE = json.JSONEncoder(sort_keys=True).encode

Splits = Mapping[str, Sequence[Example]]


@dataclasses.dataclass(frozen=True)
class Digest:
    """The digest of a task's splits."""

    digest: str  # SHA-256 over all questions; equal for equal tasks alone
    marks: Mapping[str, bytes]  # split → _MARK_BYTES of each question, in order
    files: Mapping[str, str]  # path → SHA-256 of each file that the task was read from


def digest_of(splits: Splits, files: Sequence[str | os.PathLike] = ()) -> Digest:
    """The digest of splits in this order, beside those of the files that they were read from.

    Raises:
      OSError: a file cannot be read.
      ValueError: metadata is no JSON.
    """
    total, marks = hashlib.sha256(), {}
    for split, examples in splits.items():
        found = [_hash(example) for example in examples]
        total.update(f"{split} {len(found)} ".encode() + b"".join(found))
        marks[split] = b"".join(one[:_MARK_BYTES] for one in found)
    return Digest(total.hexdigest(), marks, {str(path): _sha256(path) for path in files})


def read(workdir: pathlib.Path) -> Digest | None:
    """The digest of the run in a workdir; None where it has none, as those of earlier versions.

    Raises:
      ValueError: the file is damaged.
    """
    path = workdir / FILE
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        marks = {split: base64.b64decode(text) for split, text in found["marks"].items()}
        return Digest(found["digest"], marks, found["files"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}): delete it to take the task as it is now"
        ) from None


def write(workdir: pathlib.Path, digest: Digest, *, replace: bool = False) -> None:
    """Stores a run's digest, whole or not at all; without `replace`, one that is there stays."""
    marks = {split: base64.b64encode(found).decode() for split, found in digest.marks.items()}
    workdir.mkdir(parents=True, exist_ok=True)
    partial, path = workdir / f".{FILE}-{os.getpid()}", workdir / FILE
    partial.write_text(json.dumps(dataclasses.asdict(digest) | {"marks": marks}, indent=1))
    try:
        os.link(partial, path)  # Of processes that begin together, one succeeds.
    except OSError as error:
        if replace or not isinstance(error, FileExistsError):  # The file system has no links.
            partial.replace(path)
    partial.unlink(missing_ok=True)


def difference(run: Digest, now: Digest, splits: Splits) -> str:
    """The first question in which a task differs from the run's, a sentence; "" where it does not.

    Args:
      run: the digest that the run began with.
      now: of `splits`.
      splits: the task's questions now.
    """
    if run.digest == now.digest:
        return ""
    if list(run.marks) != list(now.marks):
        return f"it has the splits {', '.join(now.marks)}; the run's are {', '.join(run.marks)}"
    changed = [path for path, found in now.files.items() if run.files.get(path, found) != found]
    notes = [f"{path} is another file" for path in changed]
    for split, examples in splits.items():
        before, marks = _marks(run.marks[split]), _marks(now.marks[split])
        if before == marks:
            continue
        if len(before) != len(marks):
            notes.append(f"the {split} split has {len(marks)} questions, and had {len(before)}")
        pairs = enumerate(zip(before, marks, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(before), len(marks)))
        first = f"example {place} of split {split!r} "
        if place == len(marks):
            return "; ".join([f"{first}is missing", *notes])
        first += f"is {examples[place].text!r:.100}, which was {_place(run, marks[place])}"
        return "; ".join([first, *notes])
    return "its digest is another"


def _place(run: Digest, mark: bytes) -> str:
    for split, marks in run.marks.items():
        if mark in (found := _marks(marks)):
            return f"example {found.index(mark)} of split {split!r}"
    return "in no split with this answer and metadata"


def _marks(marks: bytes) -> list[bytes]:
    return [marks[i : i + _MARK_BYTES] for i in range(0, len(marks), _MARK_BYTES)]


def _hash(example: Example) -> bytes:
    text, answer = example.text, example.answer
    try:
        metadata = _ENCODE(dict(example.metadata))
    except (TypeError, ValueError):  # no JSON, or keys of several types, which have no order
        metadata = _ENCODE(metadata_of(example))
    if messages := messages_of(example):
        metadata += _ENCODE(messages)
    content = f"{len(text)} {len(answer)} {text}{answer}{metadata}".encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=16).digest()


def _sha256(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
