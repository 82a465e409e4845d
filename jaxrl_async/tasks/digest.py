"""The digest of a task: of the texts, answers and metadata of its questions, in their order and their splits.

The first process of a run that reads the task stores it in the workdir, and the others compare theirs with it. It holds
a mark of each question, which finds the first that differs, and the beginnings of some texts, which show it.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import uuid
from collections.abc import Mapping, Sequence

from jaxrl_async import sealed
from jaxrl_async.tasks.task import Example, messages_of, metadata_of

FILES = "task_digest*.json"  # of a workdir; for *, "" or the name of one of evaluate.sets
_MARK_CHARS = 12  # of a question's hash
_TEXT_CHARS, _NUM_TEXTS = 60, 10_000  # 1 MB of a split, about
_ENCODE = json.JSONEncoder(sort_keys=True).encode

Splits = Mapping[str, Sequence[Example]]


@dataclasses.dataclass(frozen=True)
class Digest:
    """The digest of a task's splits."""

    digest: str  # SHA-256 over all questions; equal for equal tasks alone
    marks: Mapping[str, list[str]]  # split → the beginning of each question's hash, in order
    files: Mapping[str, str]  # path → SHA-256 of each file that the task was read from
    # split → beginnings of its first questions; none in files of earlier versions
    texts: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)


def digest_of(splits: Splits, files: Sequence[str | os.PathLike] = ()) -> Digest:
    """The digest of splits in this order, beside those of the files that they were read from.

    Raises:
      OSError: a file cannot be read.
      ValueError: metadata is no JSON.
    """
    hashes = {split: [_hash(example) for example in splits[split]] for split in splits}
    marks = {split: [one[:_MARK_CHARS] for one in found] for split, found in hashes.items()}
    digest = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    of_files = {str(path): _sha256(path) for path in files}
    firsts = {split: splits[split][:_NUM_TEXTS] for split in splits}
    texts = {split: [e.text[:_TEXT_CHARS] for e in found] for split, found in firsts.items()}
    return Digest(digest, marks, of_files, texts)


def file_of(workdir: pathlib.Path, name: str = "") -> pathlib.Path:
    """The file of a run's digest, or of that of one of evaluate.sets."""
    return workdir / FILES.replace("*", name and f".{name}")


def read(workdir: pathlib.Path, name: str = "") -> Digest | None:
    """The digest of the run in a workdir, or of a set; None where it has none, as those of earlier versions.

    Raises:
      DamagedError: the file is not as it was written.
    """
    path = file_of(workdir, name)
    if not path.exists():
        return None
    remedy, keys = "delete it to take the task as it is now", ("digest", "marks", "files")
    found = sealed.read(path, remedy=remedy, keys=keys)
    return Digest(**{key: found[key] for key in (*keys, "texts") if key in found})


def write(workdir: pathlib.Path, digest: Digest, name: str = "", *, replace: bool = False) -> None:
    """Stores a digest, whole or not at all; without `replace`, an existing one stays."""
    workdir.mkdir(parents=True, exist_ok=True)
    path = file_of(workdir, name)
    # A pid is no name of one's own: it repeats on other hosts, and a process has several roles.
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    partial.write_text(json.dumps(sealed.sealed(vars(digest))))
    try:
        os.link(partial, path)  # Of roles that begin together, one succeeds.
    except OSError as error:
        if replace or not isinstance(error, FileExistsError):  # The file system has no links.
            partial.replace(path)
    partial.unlink(missing_ok=True)


def difference(run: Digest, now: Digest, splits: Splits) -> str:
    """The first question in which a task differs from the run's, a sentence; "" where it does not."""
    if run.digest == now.digest:
        return ""
    if list(run.marks) != list(now.marks):
        return f"it has the splits {', '.join(now.marks)}; the run's are {', '.join(run.marks)}"
    split = next((name for name in splits if run.marks[name] != now.marks[name]), None)
    if split is None:
        return "its digest is another"
    before, marks = run.marks[split], now.marks[split]
    pairs = enumerate(zip(before, marks, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(before), len(marks)))
    notes = [f"example {place} of split {split!r} is missing"]
    if place < len(marks):
        text, was = splits[split][place].text, _place(run, marks[place])
        notes = [f"example {place} of split {split!r} is {text!r:.100}, which was {was}"]
    if place < len(texts := run.texts.get(split, ())):
        notes.append(f"the run's begins {texts[place]!r}")
    if len(before) != len(marks):
        notes.append(f"the {split} split has {len(marks)} questions, and had {len(before)}")
    changed = (path for path, found in now.files.items() if run.files.get(path, found) != found)
    return "; ".join([*notes, *(f"{path} is another file" for path in changed)])


def _place(run: Digest, mark: str) -> str:
    found = ((split, marks.index(mark)) for split, marks in run.marks.items() if mark in marks)
    split, place = next(found, ("", 0))
    return (
        f"example {place} of split {split!r}"
        if split
        else "in no split with this answer and metadata"
    )


def _hash(example: Example) -> str:
    text, answer = example.text, example.answer
    try:
        metadata = _ENCODE(dict(example.metadata))
    except (TypeError, ValueError):  # no JSON, or keys of several types, which have no order
        metadata = _ENCODE(metadata_of(example))
    if messages := messages_of(example):
        metadata += _ENCODE(messages)
    content = f"{len(text)} {len(answer)} {text}{answer}{metadata}".encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _sha256(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
