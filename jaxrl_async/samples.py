"""Some completions of each step as text, in WORKDIR/samples.jsonl: they stay when the journal forgets its groups."""

import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxrl_async import sealed
from jaxrl_async.types import NOT_SAMPLED, Group, Trajectory

FILE = "samples.jsonl"
MAX_CHARS = 2000  # of a prompt and of a completion; of a longer one the middle is left out
LEFT_OUT = " … "

Decode = Callable[[Sequence[int]], str]

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CompletionText:
    """A trained completion as text."""

    step: int
    prompt_index: int
    prompt: str
    # (text, version that sampled it; None if not sampled)
    spans: tuple[tuple[str, int | None], ...]
    num_tokens: int
    reward: float
    group_reward: float  # mean of its group
    finish_reason: str  # one of FINISH_REASONS
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the reward
    row: int = 1  # of num_rows that its sample has
    num_rows: int = 1

    @property
    def completion(self) -> str:
        """Its whole text."""
        return "".join(text for text, _ in self.spans)

    def length(self) -> str:
        """In words: its tokens, and which row of its sample it is."""
        which = f"row {self.row} of {self.num_rows}, " if self.num_rows > 1 else ""
        return f"{which}{self.num_tokens} tokens"


def text_of(step: int, group: Group, trajectory: Trajectory, decode: Decode) -> CompletionText:
    """One trajectory of a group as text; `decode` shows special tokens."""
    row, num_rows = next(
        (row, len(rows))
        for rows in group.samples
        for row, other in enumerate(rows, 1)
        if other is trajectory
    )
    return CompletionText(
        step=step,
        prompt_index=group.prompt_index,
        prompt=decode(trajectory.tokens[: trajectory.prompt_length].tolist()),
        spans=tuple(_spans(trajectory, decode)),
        num_tokens=len(trajectory.completion),
        reward=_reward(trajectory),
        group_reward=float(group.rewards.mean()),
        finish_reason=trajectory.finish_reason,
        components=dict(trajectory.components),
        row=row,
        num_rows=num_rows,
    )


def choose(
    step: int, groups: Sequence[Group], count: int, decode: Decode, max_chars: int = MAX_CHARS
) -> list[CompletionText]:
    """`count` trajectories of a step, evenly spaced by reward from the highest to the lowest; of equals, the first.

    Of the groups of other learner processes there are no tokens, so that none of them is chosen.
    """
    ranked = [(g, row) for g in groups for row in g.trajectories if row.mask.any()]
    ranked.sort(key=lambda pair: -_reward(pair[1]))
    places = np.linspace(0, len(ranked) - 1, min(count, len(ranked))).round().astype(int)
    chosen = [ranked[int(place)] for place in places]
    return [_bounded(text_of(step, *pair, decode), max_chars) for pair in chosen]


@dataclasses.dataclass(eq=False, repr=False)
class SampleWriter:
    """Appends samples of each step; opens nothing where per_step is 0."""

    workdir: str | pathlib.Path
    decode: Decode  # special tokens included
    _: dataclasses.KW_ONLY
    per_step: int
    # (step, name, text) → shows a sample elsewhere too, as TensorBoard
    show: Callable[[int, str, str], None] = lambda step, name, text: None

    def __post_init__(self):
        path = pathlib.Path(self.workdir) / FILE
        self._file = sealed.open_lines(path) if self.per_step else None

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Writes samples of a step's groups, in one line."""
        if self._file is None:
            return
        if not (found := choose(step, groups, self.per_step, self.decode)):
            return
        rows = [sealed.sealed(dataclasses.asdict(sample)) for sample in found]
        self._file.write(json.dumps(rows) + "\n")
        self._file.flush()
        for place, sample in enumerate(found, start=1):
            self.show(step, f"samples/{place}", _as_markdown(sample))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_samples(
    workdir: str | pathlib.Path, say: Callable[[str], None] = log.warning
) -> dict[int, list[CompletionText]]:
    """Step → its samples, by step; of a step run twice (after a resume), the later ones. {} where none were written.
    Omits an incomplete last line, and damaged ones, each with a sentence to `say`."""
    steps = {}
    for found in sealed.lines(path := pathlib.Path(workdir) / FILE, say):
        try:
            texts = [CompletionText(**f | {"spans": tuple(map(tuple, f["spans"]))}) for f in found]
            steps[texts[0].step] = texts
        except (TypeError, KeyError, IndexError):
            say(f"{path}: a line that is no samples of a step is left out")
    return dict(sorted(steps.items()))


def _reward(trajectory: Trajectory) -> float:
    return math.nan if trajectory.reward is None else float(trajectory.reward)


def _spans(trajectory: Trajectory, decode: Decode) -> Iterator[tuple[str, int | None]]:
    """The completion, split where the version changes."""
    versions = trajectory.versions[trajectory.prompt_length :]
    cuts = np.flatnonzero(np.diff(versions)) + 1
    parts = (np.split(trajectory.completion, cuts), np.split(versions, cuts))
    for tokens, same in zip(*parts, strict=True):
        if len(same):
            version = int(same[0])
            yield decode(tokens.tolist()), None if version == NOT_SAMPLED else version


def _bounded(sample: CompletionText, max_chars: int) -> CompletionText:
    prompt, spans = sample.prompt, sample.spans
    if len(prompt) > max_chars:
        half = max_chars // 2
        prompt = prompt[:half] + LEFT_OUT + prompt[-half:]
    return dataclasses.replace(sample, prompt=prompt, spans=tuple(_cut(spans, max_chars)))


def _cut(
    spans: Sequence[tuple[str, int | None]], max_chars: int
) -> Iterator[tuple[str, int | None]]:
    """The spans without what lies between the first and the last half of max_chars."""
    total, half, start = sum(len(text) for text, _ in spans), max_chars // 2, 0
    for text, version in spans:
        kept = text
        if total > max_chars:
            left_out = LEFT_OUT if start <= half < start + len(text) else ""
            head, tail = text[: max(0, half - start)], text[max(0, total - half - start) :]
            kept = head + left_out + tail
        start += len(text)
        if kept:
            yield kept, version


def _as_markdown(sample: CompletionText) -> str:
    """TensorBoard reads markdown; what is indented is shown as it is."""
    parts = "".join(f", {name} {value:.3g}" for name, value in sample.components.items())
    head = f"reward {sample.reward:.3g}{parts}, {sample.length()}, {sample.finish_reason}"
    lines = [*sample.prompt.split("\n"), "→", *sample.completion.split("\n")]
    return "\n".join([head, "", *(f"    {line}" for line in lines)])
