"""The completions of a report: some of each step, and the first, last, best, worst and longest of the journal."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_async.metrics import last_metrics
from jaxrl_async.queue.journal import DeletedError, JournalError, JournalReader
from jaxrl_async.samples import FILE, CompletionText, choose, read_samples, text_of
from jaxrl_async.tasks import hub
from jaxrl_async.tasks.tokenizer import load_tokenizer
from jaxrl_async.types import Group, Trajectory

MAX_GROUPS = 4096  # read at most, evenly spaced over the run
MAX_STEPS = 200  # to browse, evenly spaced over the run
PER_STEP = 2  # of a step that is read from the journal


class NoSamplesError(ValueError):
    """No completion can be shown; the message says why."""


@dataclasses.dataclass(frozen=True)
class _Found:
    step: int
    group: Group
    trajectory: Trajectory


def samples(
    workdir: pathlib.Path, config: Mapping[str, Any], say: Callable[[str], None]
) -> list[tuple[str, CompletionText]]:
    """(what it was chosen as, completion) of a run; of equals, the latest.

    Args:
      workdir: of a run that has ended.
      say: gets a sentence where the journal lacks the end of the run.

    Raises:
      NoSamplesError: no journal, no group in it, no tokenizer, or a queue that has the journal open.
    """
    try:
        with _reader(workdir, config) as reader:
            _say_lost(workdir, "The journal", reader.steps(), say)
            chosen = _choose(_trained(reader))
        decode = _decode_of(workdir, config)
        return [
            (what, text_of(found.step, found.group, found.trajectory, decode))
            for what, found in _merged(chosen)
        ]
    except (JournalError, OSError, ValueError) as error:
        raise NoSamplesError(str(error)) from error


def by_step(
    workdir: pathlib.Path, config: Mapping[str, Any], say: Callable[[str], None]
) -> dict[int, list[CompletionText]]:
    """Step → completions from the highest reward to the lowest, of at most MAX_STEPS steps and of the last; {} without
    any. From samples.jsonl, whose damages `say` gets; where a run wrote none, from its journal."""
    steps = read_samples(workdir, say)
    if config.get("journal", {}).get("samples_per_step"):
        _say_lost(workdir, FILE, list(steps), say)
    if steps:
        return {step: steps[step] for step in _evenly(list(steps))}
    try:
        with _reader(workdir, config) as reader:
            decode, found = _decode_of(workdir, config), {}
            for step in _evenly(reader.steps()):
                if groups := [group for _, group in _groups(reader, [(step, 0)])]:
                    found[step] = choose(step, groups, PER_STEP, decode)
            return found
    except (JournalError, OSError, ValueError):  # `samples` has said it.
        return {}


def _say_lost(
    workdir: pathlib.Path, name: str, steps: Sequence[int], say: Callable[[str], None]
) -> None:
    last, end = last_metrics(workdir), max(steps, default=0)
    if last and end < last["step"]:
        say(f"{name} ends at step {end}, metrics.jsonl at {last['step']}: its end is lost.")


def _evenly(steps: Sequence[int]) -> Sequence[int]:
    every = max(1, -(-len(steps) // MAX_STEPS))
    return sorted({*steps[::every], *steps[-1:]})


def _reader(workdir: pathlib.Path, config: Mapping[str, Any]):
    """The run's journal, open within a block."""
    journal = config.get("journal", {})
    if journal.get("keep") == "none":
        raise NoSamplesError("the run kept no journal (journal.keep is 'none')")
    return contextlib.closing(JournalReader(journal.get("path") or workdir / "journal.sqlite"))


def _decode_of(workdir: pathlib.Path, config: Mapping[str, Any]):
    wanted, path = config.get("tokenizer", {}), workdir / "tokenizer"
    if wanted.get("kind") == "huggingface":
        path = hub.directory_of("tokenizer.path", wanted["path"], needed=hub.TOKENIZER_FILES)
    return functools.partial(load_tokenizer(path).decode, special=True)


def _trained(reader: JournalReader) -> Iterator[_Found]:
    """The trajectories of the groups in the journal, in the order of training."""
    chunks = [(step, chunk) for step in reader.steps() for chunk in range(reader.num_chunks(step))]
    if len(reader) > MAX_GROUPS:
        every = -(-len(reader) // MAX_GROUPS)
        chunks = sorted({*chunks[::every], chunks[-1]})
    for step, group in _groups(reader, chunks):
        for trajectory in group.trajectories:
            yield _Found(step, group, trajectory)


def _groups(
    reader: JournalReader, chunks: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Group]]:
    """(step, group) of the chunks that are still there."""
    for step, chunk in chunks:
        try:
            groups, _ = reader.chunk(step, chunk)
        except DeletedError:  # journal.keep = "checkpointed"
            continue
        for group in groups:
            yield step, group


def _choose(found: Iterator[_Found]) -> dict[str, _Found]:
    first = next(found, None)
    if first is None:
        raise NoSamplesError("the journal holds no trained group")
    chosen = dict.fromkeys(("first", "last", "best", "worst", "longest"), first)
    for candidate in found:
        new, kept = candidate.trajectory, {what: f.trajectory for what, f in chosen.items()}
        chosen["last"] = candidate
        if new.reward >= kept["best"].reward:
            chosen["best"] = candidate
        if new.reward <= kept["worst"].reward:
            chosen["worst"] = candidate
        if len(new.completion) >= len(kept["longest"].completion):
            chosen["longest"] = candidate
    return chosen


def _merged(chosen: Mapping[str, _Found]) -> Iterator[tuple[str, _Found]]:
    """(joined names, found) of each choice, once."""
    for what, found in chosen.items():
        names = [name for name, other in chosen.items() if other is found]
        if names[0] == what:
            yield ", ".join(names), found
