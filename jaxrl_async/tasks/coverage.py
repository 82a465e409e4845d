"""How many questions of each split make prompts that fit, and how many stand in two splits.

Counted before a run starts and kept in its workdir, for the banner and the report. Knows texts and bounds, no scores.
"""

import dataclasses
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence

from jaxrl_async import sealed
from jaxrl_async.tasks.digest import Splits
from jaxrl_async.tasks.task import Example, messages_of
from jaxrl_async.tasks.tokenizer import Asked

FILE = "prompts.json"  # in the workdir

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Split:
    """The prompts of one split, or of one of evaluate.sets."""

    name: str
    num_questions: int
    num_fit: int  # of 1 to max_tokens tokens
    num_empty: int  # of no token
    shortest: int  # tokens, as `longest`
    longest: int
    max_tokens: int  # rollout.max_prompt_tokens
    max_scored: int | None  # evaluate.num_prompts; None of the train split

    def __str__(self):
        text = f"{self.name}: {self.num_fit} of {self.num_questions} prompts fit"
        if long := self.num_questions - self.num_fit - self.num_empty:
            text += f"; {long} longer than rollout.max_prompt_tokens = {self.max_tokens} left out"
            text += f" (the longest has {self.longest} tokens)"
        text += f"; {self.num_empty} without a token left out" if self.num_empty else ""
        if self.max_scored is not None and self.max_scored < self.num_fit:
            text += f"; evaluate.num_prompts = {self.max_scored} of them are scored"
        return text


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Questions of a split that stand in an earlier one too: equal texts, but for white space at their ends."""

    name: str
    earlier: str
    num_questions: int
    of: int  # questions of the split
    example: str  # text of the first

    def __str__(self):
        return (
            f"{self.num_questions} of {self.of} questions of {self.name} stand in {self.earlier} too, so its scores "
            f"are not of new questions: {self.example!r:.80}"
        )


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The splits of a run."""

    splits: tuple[Split, ...]
    overlaps: tuple[Overlap, ...]

    def warnings(self) -> list[str]:
        """A sentence for each split that is not whole, and for each overlap."""
        left_out = (str(s) for s in self.splits if s.num_fit < s.num_questions)
        return [*map(str, self.overlaps), *left_out]

    def lines(self) -> list[str]:
        """A sentence for each split and each overlap."""
        return [*map(str, self.splits), *(f"WARNING: {overlap}" for overlap in self.overlaps)]

    def write(self, workdir: pathlib.Path) -> None:
        """Writes FILE."""
        sealed.write(workdir / FILE, dataclasses.asdict(self))


def read(workdir: pathlib.Path, say: Callable[[str], None] = log.warning) -> Coverage | None:
    """The content of FILE; None in a workdir without it, or where it is damaged, of which `say` gets a sentence."""
    path, remedy = workdir / FILE, "delete it: the next start of the run counts its prompts again"
    if not path.exists():
        return None
    try:
        found = sealed.read(path, remedy=remedy, keys=("splits", "overlaps"))
        return Coverage(
            tuple(Split(**split) for split in found["splits"]),
            tuple(Overlap(**overlap) for overlap in found["overlaps"]),
        )
    except sealed.DamagedError as error:
        say(str(error))
    except TypeError as error:  # a file without a seal
        say(f"{path} is damaged: {error}; {remedy}")
    return None


def coverage(
    splits: Splits,
    encode: Callable[[Asked], Sequence[int]],
    *,
    max_tokens: int,
    max_scored: int,
) -> Coverage:
    """Counts.

    Args:
      splits: name → its questions, in order: "train" and "validation", where there is one, before those that score.
      encode: a question → tokens of its prompt.
      max_tokens: of a prompt, rollout.max_prompt_tokens.
      max_scored: prompts of a split that are scored, evaluate.num_prompts.
    """
    found = []
    for name, examples in splits.items():
        lengths = [len(encode(messages_of(e) or e.text)) for e in examples]
        found.append(
            Split(
                name,
                num_questions=len(lengths),
                num_fit=sum(1 <= length <= max_tokens for length in lengths),
                num_empty=lengths.count(0),
                shortest=min(lengths, default=0),
                longest=max(lengths, default=0),
                max_tokens=max_tokens,
                max_scored=None if name == "train" else max_scored,
            )
        )
    return Coverage(tuple(found), tuple(_overlaps(splits)))


def _overlaps(splits: Splits) -> Iterator[Overlap]:
    texts = {name: {_text(e) for e in examples} for name, examples in splits.items()}
    for earlier, name in itertools.combinations(splits, 2):
        both = [e.text for e in splits[name] if _text(e) in texts[earlier]]
        if both and earlier in ("train", "validation"):
            yield Overlap(name, earlier, len(both), len(splits[name]), both[0])


def _text(example: Example) -> str:
    """The whole of a question, as one text."""
    messages = [(m.get("role"), str(m.get("content")).strip()) for m in messages_of(example)]
    return repr(messages) if messages else example.text.strip()
