"""The text that `train` prints while it runs: a line a stage before the first step, then a bar, and scores at its end.

Formats rows of metrics and the queue's status. Opens no file and no socket.
"""

import collections
import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

import tqdm

from jaxrl_async.metrics import coverage_of, failed_of, score_names
from jaxrl_async.records import READS, QueueStatus, Wait
from jaxrl_async.security import message_of

LINES = 20  # of steps that a run without a terminal prints, about
STAGE_SECS = 10.0  # between two lines of one stage
# Over which the rates of tokens are: a step whose groups lay in the queue samples none.
RATE_STEPS = 10
SCORE_STEPS = 5  # at either end, whose mean reward is the score of a run without evaluations
_LEAST_COLUMNS = 20
_LINE_COLUMNS = 120  # of a line without a terminal
_BAR_COLUMNS = 12


@dataclasses.dataclass(eq=False, repr=False)
class Progress:
    """The progress of one run. Its ETA counts from the first step on: warm-up and compilation are not in it."""

    num_steps: int  # of the run
    _: dataclasses.KW_ONLY
    # The last one of metrics.jsonl before the start, of a run that resumes.
    row: Mapping[str, float] | None
    stream: TextIO  # takes the text
    is_terminal: bool  # whether the bar may overwrite its line
    columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns  # of the terminal, now
    clock: Callable[[], float] = time.monotonic  # seconds

    def __post_init__(self):
        self.step = int(self.row["step"]) if self.row else 0
        self._began = self.clock()
        self.stage = ""  # of the run before its first step, in words; "" from then on
        self._printed, self._printed_at = "", -math.inf  # the stage without its figures; seconds
        self._first: tuple[float, int] | None = None  # time and number of the first step seen
        self._rest = 0.0  # seconds to the end, as of the last step
        self._next_line = 0
        self._rows: collections.deque[Mapping[str, float]] = collections.deque(maxlen=RATE_STEPS)
        # It clears its line where others print, and `_line` says all that stands in it.
        self._bar = tqdm.tqdm(
            total=self.num_steps,
            file=self.stream,
            disable=not self.is_terminal,
            bar_format="{desc}",
            leave=True,
        )

    @property
    def is_warm(self) -> bool:
        """Whether a step has ended since the start."""
        return self._first is not None

    def close(self) -> None:
        self._bar.close()

    def show(self, row: Mapping[str, float] | None, status: QueueStatus | None, said: str) -> None:
        """Prints what is new."""
        if row is None or row == self.row:
            return self._show_stage(stage_of(status, said))
        now, step, self.stage = self.clock(), int(row["step"]), ""
        is_new = self._first is None or step != self.step
        self.step = step
        if self._first is None:
            self._first = now, step
            self._print(f"the first step ended after {_time(now - self._began)}")
        elif is_new:
            since, first = self._first
            # Steps that a restart repeats are counted anew.
            per_step = (now - since) / max(step - first, 1)
            self._rest = (self.num_steps - step) * per_step
        if is_new:
            self._rows.append(row)
        eta = _time(self._rest) if step > self._first[1] else ""
        parts = row, self.num_steps, _rates(self._rows), eta, waits_of(status)
        if self.is_terminal:
            self._draw(_line(*parts, self.columns() - 1))
        elif is_new and (step >= self._next_line or step == self.num_steps):
            self._next_line = step + max(1, round(self.num_steps / LINES))
            self._print(_line(*parts, _LINE_COLUMNS))

    def _show_stage(self, text: str) -> None:
        now, self.stage = self.clock(), text
        if self.is_terminal:
            self._draw(f"{_time(now - self._began)}  {text}")
        stage = text.partition(":")[0]
        is_new = stage != self._printed
        if is_new or (not self.is_terminal and now - self._printed_at >= STAGE_SECS):
            self._printed, self._printed_at = stage, now
            self._print(f"{_time(now - self._began)}  {text}")

    def _draw(self, text: str) -> None:
        self._bar.set_description_str(_cut(text, self.columns() - 1))

    def _print(self, text: str) -> None:
        tqdm.tqdm.write(text, file=self.stream)


def stage_of(status: QueueStatus | None, said: str) -> str:
    """The stage of a run before its first step; after a colon, its figures."""
    wait = _wait_of_learner(status)
    what = wait.what if wait else ""
    message = message_of(said)
    if message.startswith("warm start: ") and not what:
        return message
    is_starting = not what or "start" in what
    if is_starting or "wait_data" in what:
        waits = [wait for role in status.roles for wait in role.waits] if status else []
        reading = next((w for w in waits if w.on.startswith(READS)), None)
        if reading:
            return f"rollout: {reading.what} waits for {reading.on}, {reading.secs:.0f} s"
    if is_starting:
        return "start: the roles load, and compile"
    if "wait_push" in what or "publish" in what:
        return "servers: they start, compile and load the first version"
    if "wait_data" in what:
        return "rollout: the first groups are generated"
    return "first step: the learner compiles, and takes it"


def waits_of(status: QueueStatus | None) -> str:
    """Who waits for whom, in a few words; "" where that is not known."""
    wait = _wait_of_learner(status)
    if wait is None:
        return ""
    for name, on in {"wait_data": "groups", "wait_push": "a push", "publish": "a push"}.items():
        if name in wait.what:
            return f"learner for {on} {wait.secs:.0f} s"
    is_full = not status.running_groups and not status.capacity
    return "rollout for the learner" if is_full else "nobody"


def _wait_of_learner(status: QueueStatus | None) -> Wait | None:
    learners = [r for r in status.roles if r.role.startswith("learner")] if status else []
    return learners[0].waits[0] if learners and learners[0].waits else None


def score_of(rows: Sequence[Mapping[str, float]]) -> str:
    """The score before and after a run, and the prompts that it is of, in words; "" of a run without rows.

    That of the first and last evaluation, where there are two; else the mean reward of the first and last steps.
    """
    scored = [row for row in rows if row.get("eval/greedy") is not None]
    if len(scored) > 1:
        ends = scored[0], scored[-1]
        return "; ".join(_greedy(*ends, prefix) for prefix in score_names(scored[-1]))
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    if not rewards:
        return ""
    count = max(1, min(SCORE_STEPS, len(rewards) // 2))
    before, after = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    steps = "step" if count == 1 else f"{count} steps"
    return f"mean reward in training {before:.3f} → {after:.3f} (first and last {steps})"


def _greedy(
    first: Mapping[str, float | None], last: Mapping[str, float | None], prefix: str
) -> str:
    """The greedy accuracy of an evaluation set, "eval/" or "eval/SET/", before and after."""
    split = "validation split" if last.get("eval/validation") else "test split"
    name = prefix.removeprefix("eval/").removesuffix("/") or split
    before, after = (_of(row, f"{prefix}greedy") for row in (first, last))
    versions = f"version {_of(first, 'eval/version'):.0f} and {_of(last, 'eval/version'):.0f}"
    of = "; ".join(filter(None, (versions, coverage_of(last, prefix), failed_of(last, prefix))))
    return f"{name}: greedy accuracy {before:.3f} → {after:.3f} ({of})"


def _rates(rows: Sequence[Mapping[str, float | None]]) -> tuple[float, float]:
    """Tokens a second, sampled and trained, over the time of some steps; NaN where no row has them."""
    found = []
    for name in ("rollout/tokens_per_sec", "learner/tokens_per_sec"):
        pairs = [(row.get(name), row.get("time/step_secs")) for row in rows]
        known = [(rate, secs) for rate, secs in pairs if rate is not None and secs]
        total = sum(secs for _, secs in known)
        found.append(sum(rate * secs for rate, secs in known) / total if total else math.nan)
    return found[0], found[1]


def _line(
    row: Mapping[str, float | None],
    num_steps: int,
    rates: tuple[float, float],
    eta: str,
    waits: str,
    columns: int,
) -> str:
    """Steps, a bar where there is room, and figures, of which those of least use give way; `waits` comes last."""
    step = int(row["step"])
    head = f"step {step}/{num_steps}"
    figures = {
        "reward": f"reward {_of(row, 'reward/mean'):.3f}",
        "stale": f"stale {_of(row, 'staleness/mean'):.1f}",
        "rates": f"tok/s {_short(rates[0])} out {_short(rates[1])} in",
        "eta": f"ETA {eta}" if eta else "",
        "waits": f"waits: {waits}" if waits else "",
    }
    for name in ("", "rates", "stale"):
        figures.pop(name, None)
        text = ", ".join([head, *filter(None, figures.values())])
        if len(text) <= columns:
            break
    width = min(columns - len(text) - len(" []"), _BAR_COLUMNS)
    if width < _BAR_COLUMNS // 2:
        return _cut(text, columns)
    filled = min(width, width * step // num_steps)
    return text.replace(head, f"{head} [{'#' * filled}{' ' * (width - filled)}]", 1)


def _of(row: Mapping[str, float | None], name: str) -> float:
    value = row.get(name)
    return math.nan if value is None else value


def _cut(text: str, columns: int) -> str:
    columns = max(columns, _LEAST_COLUMNS)
    return text if len(text) <= columns else text[: columns - 1] + "…"


def _short(number: float) -> str:
    """12345 → 12k: four characters at most below a billion."""
    if math.isnan(number):
        return "?"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= 9.995 * size:
            return f"{number / size:.0f}{unit}"
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _time(secs: float) -> str:
    minutes, secs = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
