"""Errors of the user's code: a rollout function or a reward that raises, or that returns what it must not.

One such error costs its group. Where the first failures of a run are all the same one, no group will ever come: the
worker then ends the run with the error. Independent of servers and of the queue.
"""

import dataclasses
import pathlib
import traceback

from jaxrl_async import security
from jaxrl_async.types import Prompt

NUM_FIRST_FAILURES = 8  # groups
NUM_PROMPTS = 2  # distinct ones among them: one bad prompt ends no run
MAX_TRACEBACK_CHARS = 800
MAX_PROMPT_CHARS = 300
_PACKAGE = str(pathlib.Path(__file__).parents[1])


@dataclasses.dataclass(frozen=True)
class CodeError:
    """An error of the user's code."""

    place: str  # exception type and line: two errors are the same where it is
    text: str  # its traceback, or else what was wrong


class UserCodeError(RuntimeError):
    """The first failures of a run are all the same error of the user's code; the message has its traceback."""


def code_error(error: BaseException) -> CodeError:
    """The type, line and traceback of an exception that the user's code raised, without the frames of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [i for i, frame in enumerate(frames) if not frame.filename.startswith(_PACKAGE)]
    shown = frames[own[0] : own[-1] + 1] if own else frames
    last = shown[-1] if shown else None
    place = type(error).__name__ + (f" at {last.filename}:{last.lineno}" if last else "")
    lines = traceback.format_list(shown) + traceback.format_exception_only(error)
    return CodeError(place, "".join(lines).strip())


def flattened(error: BaseException) -> list[BaseException]:
    """The exceptions of a group, and of the groups in it; the exception itself where it is no group."""
    if isinstance(error, BaseExceptionGroup):
        return [one for inner in error.exceptions for one in flattened(inner)]
    return [error]


class FirstFailures:
    """Whether the first failures of a worker are all the same error of the user's code.

    They are when NUM_FIRST_FAILURES groups, of at least NUM_PROMPTS prompts, failed with one error and no sample was
    judged before. Failures of servers do not count, neither for nor against.
    """

    def __init__(self):
        self._over = False  # whether a sample was judged, or two errors differ
        self._place = ""
        self._prompts: list[int] = []  # of the failed groups

    def judged(self) -> None:
        """A sample has a reward: the user's code works at all."""
        self._over = True

    def failed(self, error: CodeError, prompt: Prompt) -> str | None:
        """Counts a failed group; returns the message that ends the run, or None."""
        self._over |= bool(self._place) and error.place != self._place
        if self._over:
            return None
        self._place = error.place
        self._prompts.append(prompt.index)
        if len(self._prompts) < NUM_FIRST_FAILURES or len(set(self._prompts)) < NUM_PROMPTS:
            return None
        self._over = True  # Said once.
        text = error.text
        if len(text) > MAX_TRACEBACK_CHARS:
            text = f"… {text[-MAX_TRACEBACK_CHARS:]}"
        lines = [security.escaped(line) for line in text.splitlines()]
        shown = security.escaped(prompt.text[:MAX_PROMPT_CHARS])
        cut = "…" if len(prompt.text) > MAX_PROMPT_CHARS else ""
        return "\n".join(
            [
                f"the first {len(self._prompts)} groups all failed with the same error of the run's own code "
                f"({security.escaped(error.place)}), and no sample was judged:",
                *(f"  {line}" for line in lines),
                f"prompt {prompt.index}: {shown}{cut}",
            ]
        )
