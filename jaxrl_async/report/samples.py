"""Sample completions from a run's journal: the first, the last, the best, the worst and the longest."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.queue.journal import JournalError, JournalReader
from jaxrl_async.tasks import hub
from jaxrl_async.tasks.tokenizer import load_tokenizer
from jaxrl_async.types import NOT_SAMPLED, Trajectory

MAX_GROUPS = 4096  # read at most, evenly spaced over the run


class NoSamplesError(ValueError):
    """No completion can be shown; the message says why."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A trained completion."""

    chosen_as: str  # "first", "last", "best", "worst", "longest", or several of them
    step: int
    prompt_index: int
    prompt: str
    spans: tuple[
        tuple[str, int | None], ...
    ]  # (text, version that sampled it; None if not sampled)
    num_tokens: int
    reward: float
    group_reward: float  # mean of its group
    truncated: bool


@dataclasses.dataclass(frozen=True)
class _Found:
    step: int
    prompt_index: int
    group_reward: float
    trajectory: Trajectory


def samples(workdir: pathlib.Path, config: Mapping[str, Any]) -> list[Sample]:
    """Completions of a run; of equals, the latest.

    Args:
      workdir: of a run that has ended.
      config: the content of its config.json.

    Raises:
      NoSamplesError: no journal, no group in it, no tokenizer, or a queue that has the journal open.
    """
    journal = config.get("journal", {})
    if journal.get("keep") == "none":
        raise NoSamplesError("the run kept no journal (journal.keep is 'none')")
    try:
        reader = JournalReader(journal.get("path") or workdir / "journal.sqlite")
        try:
            chosen = _choose(_trained(reader))
        finally:
            reader.close()
        tokenizer = load_tokenizer(_tokenizer_path(workdir, config))
        decode = functools.partial(tokenizer.decode, special=True)
        return [_sample(what, found, decode) for what, found in _merged(chosen)]
    except (JournalError, OSError, ValueError) as error:
        raise NoSamplesError(str(error)) from error


def _tokenizer_path(workdir: pathlib.Path, config: Mapping[str, Any]) -> pathlib.Path:
    wanted = config.get("tokenizer", {})
    if wanted.get("kind") == "huggingface":
        return hub.directory_of("tokenizer.path", wanted["path"], needed=hub.TOKENIZER_FILES)
    return workdir / "tokenizer"


def _trained(reader: JournalReader) -> Iterator[_Found]:
    """The trajectories of the groups in the journal, in the order of training."""
    chunks = [(step, chunk) for step in reader.steps() for chunk in range(reader.num_chunks(step))]
    if len(reader) > MAX_GROUPS:
        every = -(-len(reader) // MAX_GROUPS)
        chunks = sorted({*chunks[::every], chunks[-1]})
    for step, chunk in chunks:
        try:
            groups, _ = reader.chunk(step, chunk)
        except JournalError:  # deleted: journal.keep = "checkpointed"
            continue
        for group in groups:
            mean = float(group.rewards.mean())
            for trajectory in group.trajectories:
                yield _Found(step, group.prompt_index, mean, trajectory)


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


def _sample(what: str, found: _Found, decode: Callable[[Sequence[int]], str]) -> Sample:
    trajectory = found.trajectory
    return Sample(
        chosen_as=what,
        step=found.step,
        prompt_index=found.prompt_index,
        prompt=decode(trajectory.tokens[: trajectory.prompt_length].tolist()),
        spans=tuple(_spans(trajectory, decode)),
        num_tokens=len(trajectory.completion),
        reward=float(trajectory.reward),
        group_reward=found.group_reward,
        truncated=trajectory.finish_reason == "length",
    )


def _spans(
    trajectory: Trajectory, decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[str, int | None]]:
    """The completion, split where the version changes."""
    versions = trajectory.versions[trajectory.prompt_length :]
    cuts = np.flatnonzero(np.diff(versions)) + 1
    parts = (np.split(trajectory.completion, cuts), np.split(versions, cuts))
    for tokens, same in zip(*parts, strict=True):
        if len(same):
            version = int(same[0])
            yield decode(tokens.tolist()), None if version == NOT_SAMPLED else version
